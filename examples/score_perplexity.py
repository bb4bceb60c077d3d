# SPDX-License-Identifier: Apache-2.0
"""Perplexity of a model on real text, by scoring only the tokens that are there.

    .venv/bin/python examples/score_perplexity.py --text README.md
    .venv/bin/python examples/score_perplexity.py --model facebook/opt-125m \\
        --dataset wikitext --dataset-config wikitext-2-raw-v1 --dataset-split test \\
        --num-samples 500 --context-length 2048 --stride 512

The text is cut into overlapping windows of `--context-length` tokens, each `--stride`
after the last, and a token counts once: in the first window that holds it. That is
Hugging Face's definition (https://huggingface.co/docs/transformers/perplexity). The
first token of a text has nothing before it and is not scored.

`--baseline prompt_logprobs` scores the same windows the way it is done without
`target_token_ids` and compares the perplexities and the times.
"""

import argparse
import json
import math
import statistics
import sys
import tarfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase
from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm.platforms import current_platform

REFERENCE_MODEL = Path(__file__).parent / "reference_model"
TOKENS_PER_CALL = 500_000
"""Most prompt tokens in one `generate` call. It bounds what is held at once: 16 bytes
a token for named tokens, about half a kilobyte for the objects of `prompt_logprobs`."""
BAR = partial(tqdm, leave=False)


class Window(NamedTuple):
    token_ids: list[int]
    scored: int  # how many tokens, at the end, no window before this one holds


class Scores(NamedTuple):
    nll: np.ndarray  # [windows] float64, summed over the scored tokens, nats
    seconds: list[float]  # one timing a repeat


def main() -> None:
    args = parse_args()
    texts = read_texts(args)
    llm = start_engine(args)
    tokens = tokenize(llm, texts, args.limit_tokens)
    windows = [w for ids in tokens for w in cut(ids, args.context_length, args.stride)]
    if not windows:
        sys.exit("The text has no token with another before it: nothing to score.")
    scored = sum(window.scored for window in windows)

    paths = {"target_token_ids": score_named}
    if args.baseline:
        paths["prompt_logprobs=0"] = score_prompt_logprobs
    results = compare(llm, windows, paths, args.repeat)
    size = scored_bytes(llm, windows)
    report = {
        "model": str(args.model),
        "texts": sum(map(bool, tokens)),
        "windows": len(windows),
        "context_length": args.context_length,
        "stride": args.stride,
        "scored_tokens": scored,
        "scored_bytes": size,
        "unscored_tokens": sum(map(len, tokens)) - scored,
        "paths": summarize(results, scored, size),
    }
    if args.baseline_full_positions:
        few = first_positions(windows, args.baseline_full_positions)
        paths = {
            "target_token_ids": score_named,
            "prompt_logprobs=0": score_prompt_logprobs,
            "prompt_logprobs=-1": score_full_vocabulary,
        }
        results = compare(llm, few, paths, args.repeat)
        positions = sum(window.scored for window in few)
        size = scored_bytes(llm, few)
        report["few_positions"] = {
            "scored_tokens": positions,
            "paths": summarize(results, positions, size),
        }
    show(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_text_arguments(parser)
    add_window_arguments(parser)
    add_engine_arguments(parser)
    result = parser.add_argument_group("comparison and result")
    result.add_argument("--baseline", choices=["prompt_logprobs"])
    result.add_argument("--baseline-full-positions", type=int, default=0, metavar="N",
                        help="also prompt_logprobs=-1, on the first N positions: it "
                        "makes an object for every word of the vocabulary")  # fmt: skip
    result.add_argument("--repeat", type=int, default=1,
                        help="time the paths so often, by turns")  # fmt: skip
    result.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    check_windows(parser, args)
    check_engine(parser, args)
    for name, least in {"repeat": 1, "baseline_full_positions": 0}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if args.json:
        check_output(parser, "--json", args.json)
    return args


def check_output(parser: argparse.ArgumentParser, name: str, path: Path) -> None:
    if not path.parent.is_dir():
        parser.error(f"{name}: there is no folder {path.parent}")
    if path.is_dir():
        parser.error(f"{name}: {path} is a folder")


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    text = parser.add_argument_group("text, one of these")
    source = text.add_mutually_exclusive_group(required=True)
    source.add_argument("--dataset", help="name or folder for datasets.load_dataset; "
                        "its samples are joined into one text")  # fmt: skip
    source.add_argument("--text", nargs="+", type=Path, metavar="FILE",
                        help="files, each a text of its own")  # fmt: skip
    source.add_argument("--held-out", type=Path, metavar="ARCHIVE",
                        help="the files of the pinned source archive that the "
                        "reference model was not trained on")  # fmt: skip
    text.add_argument("--dataset-config")
    text.add_argument("--dataset-split", default="test")
    text.add_argument("--text-column", default="text")
    text.add_argument("--num-samples", type=int, help="first samples of the dataset")
    text.add_argument("--limit-tokens", type=int, help="stop after so many tokens")


def add_window_arguments(parser: argparse.ArgumentParser) -> None:
    windows = parser.add_argument_group("windows")
    windows.add_argument("--context-length", type=int, default=512,
                         help="tokens of a window (default: 512). The other ways of "
                         "--baseline, and score_kld.py, generate a token, so they want "
                         "one fewer than the model can have")  # fmt: skip
    windows.add_argument("--stride", type=int, help="default: half the context")


def check_windows(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fills in the stride; a parser error if there can be no text or no such window."""
    for name in ("limit_tokens", "num_samples"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.stride is None:
        args.stride = max(args.context_length // 2, 1)
    if args.context_length < 2:
        parser.error("--context-length must be at least 2")
    if not 1 <= args.stride <= args.context_length:
        parser.error("--stride must be from 1 to --context-length")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine, as vLLM's own options")
    engine.add_argument("--model", default=str(REFERENCE_MODEL / "model"))
    engine.add_argument("--quantization")
    engine.add_argument("--dtype", default="auto")
    engine.add_argument("--tensor-parallel-size", type=int)
    engine.add_argument("--gpu-memory-utilization", type=float)
    engine.add_argument("--kv-cache-memory-bytes", type=int,
                        help="default: 1 GiB on a CPU, where vLLM's own is all that "
                        "92%% of the memory leaves, and has to be free")  # fmt: skip
    engine.add_argument("--max-num-batched-tokens", type=int)
    engine.add_argument("--seed", type=int)
    for flag in ("trust-remote-code", "enforce-eager", "disable-custom-all-reduce"):
        engine.add_argument(f"--{flag}", action="store_true", default=None)


def check_engine(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """A parser error where vLLM's own would not name the option."""
    for name in ("tensor_parallel_size", "kv_cache_memory_bytes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")


def read_text(path: Path) -> str:
    """Reads a text as it is: line ends of any kind are scored."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        sys.exit(f"error: {path}: {error.strerror}")
    except UnicodeDecodeError as error:
        sys.exit(f"error: {path} is not UTF-8: {error.reason} at byte {error.start}")


def read_texts(args: argparse.Namespace) -> list[str]:
    """Reads the texts that the arguments name."""
    if args.text:
        return [read_text(path) for path in args.text]
    if args.held_out:
        sys.path.insert(0, str(REFERENCE_MODEL))
        from corpus import read

        try:
            return list(read(args.held_out, held_out=True).values())
        except (OSError, EOFError, tarfile.TarError) as error:
            sys.exit(f"error: --held-out {args.held_out}: {error}")
    from datasets import load_dataset

    try:
        rows = load_dataset(args.dataset, args.dataset_config, split=args.dataset_split)
    except (OSError, ValueError) as error:
        sys.exit(
            f"error: --dataset {args.dataset}, --dataset-config {args.dataset_config}, "
            f"--dataset-split {args.dataset_split}: {error}"
        )
    if args.text_column not in rows.column_names:
        known = ", ".join(rows.column_names)
        sys.exit(f"error: --text-column {args.text_column}: there are {known}")
    count = min(args.num_samples or len(rows), len(rows))
    return ["\n\n".join(rows.select(range(count))[args.text_column])]


def start_engine(args: argparse.Namespace) -> LLM:
    """Starts vLLM with the given options, and its own defaults for the others."""
    return new_engine(
        "--context-length",
        **engine_options(args),
        # The other ways generate a token, for which vLLM wants room.
        max_model_len=args.context_length
        + bool(args.baseline or args.baseline_full_positions),
        max_logprobs=-1 if args.baseline_full_positions else 20,
        # No path could use it, as windows start at different tokens.
        enable_prefix_caching=False,
    )


def new_engine(length: str, **options: Any) -> LLM:
    """vLLM, or the program's end with what it does not accept.

    Args:
        length: the program's option that `max_model_len` comes from.
    """
    try:
        return LLM(**options)
    except ValidationError as error:  # of pydantic; what is told once is enough
        found = error.errors()[0]
        said = ": ".join(
            [*(f"--{n}".replace("_", "-") for n in found["loc"]), found["msg"]]
        )
    except (OSError, ValueError, SafetensorError) as error:
        said = str(error)
    except RuntimeError as error:
        if "initialization failed" not in str(error):  # in a process of its own
            raise
        said = str(error)
    if "for the cache blocks" in said or "To serve at least one request" in said:
        given = "kv_cache_memory_bytes" in options
        name = "--kv-cache-memory-bytes" if given else "--gpu-memory-utilization"
        said = f"{name}: {said}"
    elif "max_model_len" in said:
        said = f"{length}: {said}"
    sys.exit(f"error: vLLM does not start with {options['model']}: {said}")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those options of `add_engine_arguments` that were given, and the cache's size."""
    names = [
        "model",
        "quantization",
        "dtype",
        "tensor_parallel_size",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_num_batched_tokens",
        "seed",
        "trust_remote_code",
        "enforce_eager",
        "disable_custom_all_reduce",
    ]
    options = {name: getattr(args, name) for name in names}
    options = {name: value for name, value in options.items() if value is not None}
    given = options.keys() & {"kv_cache_memory_bytes", "gpu_memory_utilization"}
    if current_platform.is_cpu() and not given:
        options["kv_cache_memory_bytes"] = 2**30
    return options


def tokenize(llm: LLM, texts: list[str], limit: int | None) -> list[list[int]]:
    """Token ids of each text, `limit` of them in all."""
    tokenizer = llm.get_tokenizer()
    options = {}
    if isinstance(tokenizer, PreTrainedTokenizerBase):  # Mistral's is none
        options["verbose"] = False  # that a text is longer than the model's context
    left = limit or sys.maxsize
    tokens = []
    for text in texts:
        ids = tokenizer.encode(text, **options)[:left]
        tokens.append(ids)
        left -= len(ids)
    return tokens


def sliding_windows(
    length: int, context: int, stride: int
) -> Iterator[tuple[int, int, int]]:
    """Cuts a text of `length` tokens into windows.

    Yields:
        Begin, end and number of scored tokens of each window: those that no earlier
        window holds, without the window's own first, which nothing precedes.
    """
    covered = 0
    for begin in range(0, length, stride):
        end = min(begin + context, length)
        scored = min(end - covered, end - begin - 1)
        if scored > 0:
            yield begin, end, scored
        covered = end
        if end == length:
            return


def cut(token_ids: list[int], context: int, stride: int) -> list[Window]:
    return [
        Window(token_ids[begin:end], scored)
        for begin, end, scored in sliding_windows(len(token_ids), context, stride)
    ]


def first_positions(windows: list[Window], positions: int) -> list[Window]:
    """The first windows, and of the last one a part, up to `positions` scored."""
    few = []
    for ids, scored in windows:
        if positions <= 0:
            break
        excess = max(scored - positions, 0)
        few.append(Window(ids[: len(ids) - excess], scored - excess))
        positions -= scored
    return few


def score_named(llm: LLM, windows: list[Window]) -> list[float]:
    """Names the tokens that are there: one array a window comes back."""
    prompts = [
        TokensPrompt(prompt_token_ids=ids, target_token_ids=ids[-scored:])
        for ids, scored in windows
    ]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=0), use_tqdm=BAR)
    return [-o.target_logprobs.logprobs.sum(dtype=np.float64) for o in outputs]


def score_prompt_logprobs(
    llm: LLM, windows: list[Window], prompt_logprobs: int = 0
) -> list[float]:
    """Asks for the log-probability of every prompt token: objects come back, one a
    position with `prompt_logprobs=0`. It always samples a token, which costs no step
    of its own."""
    prompts = [TokensPrompt(prompt_token_ids=window.token_ids) for window in windows]
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=prompt_logprobs)

    def nll(output: RequestOutput, window: Window) -> float:
        ids = window.token_ids[-window.scored :]
        entries = output.prompt_logprobs[-window.scored :]
        return -math.fsum(entry[i].logprob for entry, i in zip(entries, ids))

    outputs = llm.generate(prompts, sampling, use_tqdm=BAR)
    return [nll(*pair) for pair in zip(outputs, windows)]


def score_full_vocabulary(llm: LLM, windows: list[Window]) -> list[float]:
    """`prompt_logprobs=-1`: an object for each position and word."""
    return score_prompt_logprobs(llm, windows, prompt_logprobs=-1)


def compare(
    llm: LLM, windows: list[Window], paths: dict[str, Any], repeat: int
) -> dict[str, Scores]:
    """Scores the windows by each path, warmed up, by turns if repeated."""
    for score in paths.values():
        score(llm, first_positions(windows, 16))
    results = {name: Scores(np.zeros(0), []) for name in paths}
    for _ in range(repeat):
        for name, score in paths.items():
            begin = time.perf_counter()
            nll = [x for call in calls(windows) for x in score(llm, call)]
            seconds = time.perf_counter() - begin
            results[name] = Scores(np.array(nll), [*results[name].seconds, seconds])
    return results


def calls(windows: list[Window], limit: int | None = None) -> Iterator[list[Window]]:
    """Splits the windows into `generate` calls of up to `limit` tokens, by default
    `TOKENS_PER_CALL`."""
    limit = limit or TOKENS_PER_CALL
    call: list[Window] = []
    tokens = 0
    for window in windows:
        if call and tokens + len(window.token_ids) > limit:
            yield call
            call, tokens = [], 0
        call.append(window)
        tokens += len(window.token_ids)
    yield call


def scored_bytes(llm: LLM, windows: list[Window]) -> int:
    """UTF-8 bytes of the text of the scored tokens."""
    ids = [i for window in windows for i in window.token_ids[-window.scored :]]
    text = llm.get_tokenizer().decode(ids, skip_special_tokens=True)
    return len(text.encode())


def summarize(results: dict[str, Scores], tokens: int, size: int) -> list[dict]:
    """One row a path; the first is what the others are compared with."""
    rows = []
    for name, (nll, seconds) in results.items():
        mean = nll.sum() / tokens
        row = {
            "path": name,
            "perplexity": math.exp(mean),
            "nats_per_token": mean,
            "bits_per_byte": nll.sum() / math.log(2) / size if size else None,
            "seconds": statistics.median(seconds),
            "all_seconds": seconds,
            "tokens_per_second": tokens / statistics.median(seconds),
        }
        first = rows[0] if rows else row
        row["relative_difference"] = row["perplexity"] / first["perplexity"] - 1
        row["times_the_first"] = row["seconds"] / first["seconds"]
        rows.append(row)
    return rows


def show(report: dict) -> None:
    """Prints what was scored and a row a path."""
    console = Console()
    console.print(
        f"{report['model']}\n"
        f"{report['texts']} text(s) in {report['windows']} windows of "
        f"{report['context_length']} tokens, stride {report['stride']}\n"
        f"{report['scored_tokens']} tokens scored; {report['unscored_tokens']} not, "
        "being the first of their text or window",
        highlight=False,
    )
    console.print(table("Perplexity", report["paths"]))
    if "few_positions" in report:
        few = report["few_positions"]
        title = f"The first {few['scored_tokens']} positions alone"
        console.print(table(title, few["paths"]))


def table(title: str, rows: list[dict]) -> Table:
    result = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    result.add_column("path")
    for column in ("perplexity", "diff.", "bits/byte", "seconds", "ratio"):
        result.add_column(column, justify="right")
    for row in rows:
        half = (max(row["all_seconds"]) - min(row["all_seconds"])) / 2
        spread = f" ±{half:.2f}" if len(row["all_seconds"]) > 1 else ""
        bits = row["bits_per_byte"]
        result.add_row(
            row["path"],
            f"{row['perplexity']:.4f}",
            f"{row['relative_difference']:+.0e}" if row is not rows[0] else "",
            f"{bits:.4f}" if bits is not None else "",
            f"{row['seconds']:.2f}{spread}",
            f"{row['times_the_first']:.2f}×",
        )
    return result


if __name__ == "__main__":
    main()
