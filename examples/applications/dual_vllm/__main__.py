# SPDX-License-Identifier: Apache-2.0
"""Sample from between two models; `sample --help` shows what can be set.

Without addresses, a vLLM server is started for each of the two models and ended
afterwards; by default for the reference model and its first eight layers.
"""

import argparse
import asyncio
import json
import logging
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

if not __package__:  # run as a folder
    sys.path[0:1] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]

import pydantic
from common import ClientError, Journal, JournalError
from common.program import any_terminal, interruptible
from tqdm import tqdm

from dual_vllm import drawn, report
from dual_vllm.config import CoordinatorConfig
from dual_vllm.coordinator import DualVLLMCoordinator, GenerationOutput
from dual_vllm.launch import REFERENCE_MODEL, LaunchError, first_layers, servers

WORK = Path(__file__).resolve().parents[3] / "build" / "dual_vllm"
SERVE_ARGS = (
    "--dtype float32 --enforce-eager --block-size 32 --kv-cache-memory-bytes 268435456"
)
"""For small models on a CPU, compared in float32. A small block, since what is in the
last, incomplete one is computed again for each token."""
ADVICE = "Name another --out, or remove this one to start again."
PROMPTS = [
    "import numpy as np\nimport torch\n\n\ndef test_",
    "## Installation\n\nTo install ",
    "class Scheduler:\n    def __init__(self",
    "    # The number of tokens ",
]
SETTINGS = {  # of a CoordinatorConfig, as options
    "seed": int,
    "max_tokens": int,
    "top_k": int,
    "tail_mass": float,
    "tail": str,
    "max_candidates": int,
    "batch_size": int,
    "patience": float,
    "timeout": float,
    "tokenizer": str,
}


def main() -> None:
    any_terminal()
    args = parse_args()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        check(args)
        keeps = args.run is run_sample and not args.stream
        goes_on = "Nothing is lost: the same command goes on." if keeps else ""
        with interruptible(goes_on), addresses(args) as (url_a, url_b):
            args.run(args, settings(args, url_a=url_a, url_b=url_b))
    except (ClientError, LaunchError, JournalError, ValueError, OSError) as error:
        if isinstance(error, pydantic.ValidationError):
            error = "; ".join(
                ": ".join([*map(str, e["loc"]), e["msg"]]) for e in error.errors()
            )
        sys.exit(f"error: {error}")


def check(args: argparse.Namespace) -> None:
    """Raises what is wrong before two servers are started for it."""
    config = settings(args, url_a="http://a", url_b="http://b")
    if bool(args.url_a) != bool(args.url_b):
        raise ValueError("give both --url-a and --url-b, or none of them")
    if args.run is not run_bench:
        args.texts = read_prompts(args)
    if args.run is run_compare:
        for size in args.sizes:
            try:
                config.with_top_k(size)
            except pydantic.ValidationError as error:
                said = error.errors()[0]["msg"]
                raise ValueError(f"--sizes {size}: {said}") from None
    elif args.run is run_sample and args.out and args.out.is_dir():
        raise ValueError(f"--out {args.out}: is a folder")


def settings(args: argparse.Namespace, **addresses: str) -> CoordinatorConfig:
    names = [*SETTINGS, "stop_token_ids", "api_key"]
    given = {name: getattr(args, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    return CoordinatorConfig(
        **given, **addresses, model_a=args.served_a, model_b=args.served_b
    )


@contextmanager
def addresses(args: argparse.Namespace) -> Iterator[list[str]]:
    """Those given, or those of servers that run for as long as the context."""
    if args.url_a:
        yield [args.url_a, args.url_b]
        return
    # Names that mean the same in the next run too: samples.jsonl holds them.
    args.model_a = whole_path(args.model_a)
    if args.model_b is None:
        folder = WORK / "first-8-layers" / args.model_a.strip("/").replace("/", "--")
        args.model_b = str(first_layers(args.model_a, 8, folder))
    args.model_b = whole_path(args.model_b)
    logs = WORK / f"logs-{os.getpid()}"
    default = CoordinatorConfig.model_fields["max_candidates"].default
    limit = f"--max-logprobs={args.max_candidates or default}"
    print(f"Starting two servers, logs in {logs}", file=sys.stderr)
    begin = time.monotonic()
    models = [args.model_a, args.model_b]
    with servers(models, logs, [*args.serve_args, limit]) as started:
        seconds = time.monotonic() - begin
        print(f"Both answer after {seconds:.0f} s", file=sys.stderr)
        yield [server.url for server in started]


def whole_path(model: str) -> str:
    """Of a folder; a hub name stays as it is."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def run_sample(args: argparse.Namespace, config: CoordinatorConfig) -> None:
    prompts = [p for p in args.texts for _ in range(args.samples)]
    if args.stream:
        asyncio.run(stream(config, prompts[0]))
        return
    out = args.out or WORK / "samples.jsonl"
    outputs = asyncio.run(sample(config, prompts, out, args.coordinators))
    for output in outputs:
        report.CONSOLE.print(
            f"[bold]{output.sample}[/] {output.finish_reason}, "
            f"{len(output.token_ids)} tokens: ",
            end="",
        )
        report.CONSOLE.print(repr(output.text), markup=False)
    report.diagnostics([d for output in outputs for d in output.diagnostics])
    print(f"Token by token in {out}")


async def sample(
    config: CoordinatorConfig, prompts: list, out: Path, coordinators: int
) -> list[GenerationOutput]:
    """Draws all samples; `out` has what was drawn whenever this ends."""
    async with AsyncExitStack() as stack:
        journal = stack.enter_context(Journal(out, ADVICE))
        duals = [
            await stack.enter_async_context(DualVLLMCoordinator(config))
            for _ in range(coordinators)
        ]
        samples = [duals[0].sample(*pair) for pair in enumerate(prompts)]
        models = [server.model for server in duals[0].servers]
        stops = {"stop_token_ids": sorted(duals[0].stop_ids)}
        queue = drawn.resume(journal, config.model_dump() | stops, models, samples)
        share = math.ceil(len(queue) / coordinators)
        before = sum(len(s.output.token_ids) for s in samples)
        bar = stack.enter_context(
            tqdm(
                total=len(samples) * config.max_tokens,
                initial=before,
                unit="token",
                disable=None,  # shown on a terminal
                # A sample that ended early counts as whole.
                postfix={"samples": f"{len(samples) - len(queue)}/{len(samples)}"},
            )
        )

        async def work(dual: DualVLLMCoordinator) -> None:
            async for steps in dual.steps(queue, share):
                drawn.append(journal, steps)
                bar.update(len(steps))
                done = sum(s.output.finish_reason is not None for s in samples)
                bar.set_postfix(samples=f"{done}/{len(samples)}", refresh=False)

        def tell() -> None:
            count = sum(len(s.output.token_ids) for s in samples)
            seconds = time.perf_counter() - begin
            retries = sum(s.retries for dual in duals for s in dual.servers)
            print(
                f"{count - before} tokens drawn in {seconds:.1f} s, "
                f"{sum(dual.rounds for dual in duals)} rounds of requests, "
                f"{retries} repeated"
                + (f"; {before} tokens were in {out}" if before else ""),
                file=sys.stderr,
            )

        begin = time.perf_counter()
        failure = None
        try:
            async with asyncio.TaskGroup() as group:
                for dual in duals:
                    group.create_task(work(dual))
        except* (ClientError, OSError) as errors:
            # Raised here, it would be in a group again before Python 3.11.4.
            failure = errors.exceptions[0]
        bar.close()
        tell()
        if failure is not None:
            print("The same command goes on from there.", file=sys.stderr)
            raise failure from None
        for s in samples:
            duals[0].set_text(s.output)
    return [s.output for s in samples]


async def stream(config: CoordinatorConfig, prompt: str | list[int]) -> None:
    async with DualVLLMCoordinator(config) as dual:
        steps = []
        async for text, step in dual.stream(prompt):
            print(text, end="", flush=True)
            steps.append(step.diagnostics)
    print()
    report.diagnostics(steps)


def run_compare(args: argparse.Namespace, config: CoordinatorConfig) -> None:
    from dual_vllm import compare  # takes seconds

    if args.url_a and not args.model_b:
        raise ValueError("--model-b: with addresses, name the folders of both models")
    models = [args.model_a, args.model_b]
    compare.show(asyncio.run(compare.compare(config, models, args.texts, args.sizes)))


def run_bench(args: argparse.Namespace, config: CoordinatorConfig) -> None:
    from dual_vllm import bench

    text = (Path(__file__).parent / "coordinator.py").read_text()
    bench.show(asyncio.run(bench.bench(config, text, args.counts, args.repeat)))


def read_prompts(args: argparse.Namespace) -> list[str | list[int]]:
    """Texts, or lists of token ids."""
    if args.prompts is None:
        return args.prompt or PROMPTS
    prompts = []
    try:
        text = args.prompts.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts: {args.prompts} is no UTF-8: {error}") from None
    except OSError as error:
        raise ValueError(f"--prompts {args.prompts}: {error.strerror}") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(read_prompt(json.loads(line)))
        except (ValueError, RecursionError):
            raise ValueError(
                f"--prompts: line {number} of {args.prompts} is no JSON object with "
                "prompt (a text) or prompt_token_ids (integers)"
            ) from None
    if not prompts:
        raise ValueError(f"--prompts: {args.prompts} is empty")
    return prompts


def read_prompt(row: object) -> str | list[int]:
    """Of an object with prompt_token_ids or, without any, with prompt."""
    if not isinstance(row, dict):
        raise ValueError(row)
    ids, text = row.get("prompt_token_ids") or [], row.get("prompt")
    if isinstance(ids, list) and all(type(i) is int for i in ids):
        if ids:
            return ids
        if isinstance(text, str):
            return text
    raise ValueError(row)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python examples/applications/dual_vllm", description=__doc__
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in (
        ("sample", run_sample, "draw samples, and go on with them after a stop"),
        ("compare", run_compare, "errors against Hugging Face over all tokens"),
        ("bench", run_bench, "tokens a second beside one plain server"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        add_options(command)
        if name != "bench":
            prompts = command.add_argument_group("prompts")
            group = prompts.add_mutually_exclusive_group()
            group.add_argument("--prompt", action="append", help="a text; repeatable")
            group.add_argument(
                "--prompts",
                type=Path,
                help="JSON lines with prompt (text) or prompt_token_ids",
            )
        if name == "sample":
            prompts.add_argument(
                "--samples", type=positive, default=1, help="of each prompt"
            )
            command.add_argument(
                "--out", type=Path, help="where the tokens go, as they are drawn"
            )
            command.add_argument(
                "--coordinators", type=positive, default=1, help="side by side"
            )
            command.add_argument(
                "--stream",
                action="store_true",
                help="only show the first prompt's text; it is kept nowhere",
            )
        elif name == "compare":
            command.add_argument(
                "--sizes",
                type=positive,
                nargs="+",
                default=[20, 50, 100, 200],
                metavar="K",
            )
        else:
            command.add_argument(
                "--counts", type=positive, nargs="+", default=[1, 8, 32], metavar="N"
            )
            command.add_argument("--repeat", type=positive, default=3)
    args = parser.parse_args()
    if args.run is run_sample and args.stream and (args.out or args.samples > 1):
        parser.error("--stream shows one sample and keeps none: no --out, no --samples")
    return args


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("servers")
    group.add_argument("--url-a", help="address of a running server")
    group.add_argument("--url-b", help="address of the other one")
    group.add_argument("--served-a", help="name of the model at --url-a")
    group.add_argument("--served-b", help="name of the model at --url-b")
    group.add_argument(
        "--api-key",
        # What vLLM's own servers ask for where it is set.
        default=os.environ.get("VLLM_API_KEY"),
        help="sent to both (default: VLLM_API_KEY of the environment)",
    )
    group.add_argument(
        "--model-a", default=str(REFERENCE_MODEL), help="folder or hub name to serve"
    )
    group.add_argument(
        "--model-b", help="the other one; by default the first 8 layers of model a"
    )
    group.add_argument(
        "--serve-args",
        type=words,
        default=SERVE_ARGS,
        help=f"of `vllm serve` (default: {SERVE_ARGS})",
    )
    group = command.add_argument_group("sampling")
    for name, kind in SETTINGS.items():
        default = CoordinatorConfig.model_fields[name].default
        group.add_argument(
            f"--{name.replace('_', '-')}", type=kind, help=f"(default: {default})"
        )
    group.add_argument(
        "--stop-token-ids",
        type=int,
        nargs="+",
        action="extend",
        metavar="ID",
        help="end a sample, beside the end-of-sequence tokens of both models",
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended too
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # the terminal is gone
        signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    main()
