# SPDX-License-Identifier: Apache-2.0
"""Perplexity of a model on real text, by scoring only the tokens that are there.

    .venv/bin/python examples/score_perplexity.py --text README.md --enforce-eager
    .venv/bin/python examples/score_perplexity.py --model facebook/opt-125m \\
        --dataset wikitext --dataset-config wikitext-2-raw-v1 --dataset-split test \\
        --num-samples 500 --context-length 2048 --stride 512

The text is cut into overlapping windows of `--context-length` tokens, each `--stride`
after the last, and a token counts once: in the first window that holds it. That is
Hugging Face's definition (https://huggingface.co/docs/transformers/perplexity). The
first token of a text has nothing before it and is not scored. Texts are read as streams,
so they can be longer than memory.

`--baseline prompt_logprobs` scores the same windows the way it is done without
`target_token_ids` and compares the perplexities and the times. Several models and what
quantization costs them: `applications/compare`.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "applications")]

from common import quiet
from common.program import any_terminal, interruptible
from compare.engine import (
    add_engine_arguments,
    check_engine,
    engine_options,
    new_engine,
)
from compare.texts import (
    ByteCounter,
    Tally,
    add_text_arguments,
    add_window_arguments,
    check_output,
    check_windows,
    open_texts,
    stream_windows,
)
from compare.windows import Window, calls, first_positions

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

BAR = partial(tqdm, leave=False)
Windows = Callable[[], Iterable[Window]]
"""What gives the windows, as often as it is called."""


class Scores(NamedTuple):
    nll: float  # summed over the scored tokens, nats
    seconds: list[float]  # one timing a repeat


def main() -> None:
    args = parse_args()
    quiet.hush(in_process=True)
    any_terminal()
    with interruptible():
        score(args)


def score(args: argparse.Namespace) -> None:
    texts = open_texts(args)
    for path in args.text or ():
        if not path.is_file():  # it is read for each timing
            sys.exit(f"--text {path}: no regular file, and so read only once")
    llm = start_engine(args)
    windows = partial(read_windows, llm, texts, args)
    tally = Tally()
    count, scored, size = read_through(llm, windows(tally=tally))
    if not scored:
        sys.exit("The text has no token with another before it: nothing to score.")

    paths = {"target_token_ids": score_named}
    if args.baseline:
        paths["prompt_logprobs=0"] = score_prompt_logprobs
    results = compare(llm, windows, paths, args.repeat)
    report = {
        "model": str(args.model),
        "texts": tally.texts,
        "windows": count,
        "context_length": args.context_length,
        "stride": args.stride,
        "scored_tokens": scored,
        "scored_bytes": size,
        "unscored_tokens": tally.tokens - scored,
        "paths": summarize(results, scored, size),
    }
    if args.baseline_full_positions:
        report["few_positions"] = compare_few(llm, windows, args)
    show(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def compare_few(llm: "LLM", windows: Windows, args: argparse.Namespace) -> dict:
    """All paths, on the first positions alone."""
    few = first_positions(windows(), args.baseline_full_positions)
    paths = {
        "target_token_ids": score_named,
        "prompt_logprobs=0": score_prompt_logprobs,
        "prompt_logprobs=-1": score_full_vocabulary,
    }
    results = compare(llm, lambda: few, paths, args.repeat)
    _, scored, size = read_through(llm, few)
    return {
        "scored_tokens": scored,
        "paths": summarize(results, scored, size),
    }


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


def start_engine(args: argparse.Namespace) -> "LLM":
    """Starts vLLM with the given options, and its own defaults for the others."""
    return new_engine(
        "--context-length",
        **engine_options(args),
        # The other ways generate a token, for which vLLM wants room.
        max_model_len=args.context_length
        + bool(args.baseline or args.baseline_full_positions),
        max_logprobs=-1 if args.baseline_full_positions else 20,
        use_tqdm_on_load=quiet.progress(),
        # The baseline is upstream's own way.
        bounded_prompt_logprobs=False,
        # No path could use it, as windows start at different tokens.
        enable_prefix_caching=False,
    )


def read_windows(
    llm: "LLM", texts: Callable, args: argparse.Namespace, tally: Tally | None = None
) -> Iterator[Window]:
    return stream_windows(
        llm.get_tokenizer(), texts(), args.context_length, args.stride,
        args.limit_tokens, tally,
    )  # fmt: skip


def read_through(llm: "LLM", windows: Iterable[Window]) -> tuple[int, int, int]:
    """Numbers of windows, of scored tokens and of their bytes: the text is not kept."""
    counter = ByteCounter(llm.get_tokenizer())
    count = scored = size = 0
    for call in calls(windows):
        count += len(call)
        scored += sum(window.scored for window in call)
        size += counter.add(call)
    return count, scored, size + counter.rest()


def score_named(llm: "LLM", windows: list[Window]) -> list[float]:
    """Names the tokens that are there: one array a window comes back."""
    from vllm import SamplingParams, TokensPrompt

    prompts = [
        TokensPrompt(prompt_token_ids=ids, target_token_ids=ids[-scored:])
        for ids, scored in windows
    ]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=0), use_tqdm=quiet.progress() and BAR)
    return [-o.target_logprobs.logprobs.sum(dtype=np.float64) for o in outputs]


def score_prompt_logprobs(
    llm: "LLM", windows: list[Window], prompt_logprobs: int = 0
) -> list[float]:
    """Asks for the log-probability of every prompt token: objects come back, one a
    position with `prompt_logprobs=0`. It always samples a token, which costs no step
    of its own."""
    from vllm import SamplingParams, TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=window.token_ids) for window in windows]
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=prompt_logprobs)

    def nll(output: "RequestOutput", window: Window) -> float:
        ids = window.token_ids[-window.scored :]
        entries = output.prompt_logprobs[-window.scored :]
        return -math.fsum(entry[i].logprob for entry, i in zip(entries, ids))

    outputs = llm.generate(prompts, sampling, use_tqdm=quiet.progress() and BAR)
    return [nll(*pair) for pair in zip(outputs, windows)]


def score_full_vocabulary(llm: "LLM", windows: list[Window]) -> list[float]:
    """`prompt_logprobs=-1`: an object for each position and word."""
    return score_prompt_logprobs(llm, windows, prompt_logprobs=-1)


def compare(
    llm: "LLM", windows: Windows, paths: dict[str, Any], repeat: int
) -> dict[str, Scores]:
    """Scores the windows by each path, warmed up, by turns if repeated."""
    for score in paths.values():
        score(llm, first_positions(windows(), 16))
    results = {name: Scores(0, []) for name in paths}
    for _ in range(repeat):
        for name, score in paths.items():
            nll, seconds = score_all(llm, windows(), score)
            results[name] = Scores(nll, [*results[name].seconds, seconds])
    return results


def score_all(
    llm: "LLM", windows: Iterable[Window], score: Callable
) -> tuple[float, float]:
    """The negative log-likelihood of all scored tokens, in nats, and the seconds."""
    nll, seconds = [], 0.0
    for call in calls(windows):
        begin = time.perf_counter()
        nll += score(llm, call)
        seconds += time.perf_counter() - begin
    return math.fsum(nll), seconds


def summarize(results: dict[str, Scores], tokens: int, size: int) -> list[dict]:
    """One row a path; the first is what the others are compared with."""
    rows = []
    for name, (nll, seconds) in results.items():
        mean = nll / tokens
        row = {
            "path": name,
            "perplexity": math.exp(mean),
            "nats_per_token": mean,
            "bits_per_byte": nll / math.log(2) / size if size else None,
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
