# SPDX-License-Identifier: Apache-2.0
"""KL divergence of a model, or of a quantization, from a reference model.

    kld=examples/applications/kld
    .venv/bin/python $kld/score_kld.py write --model A --text FILE --reference a.safetensors
    .venv/bin/python $kld/score_kld.py compare --model B --reference a.safetensors
        # --enforce-eager spares compiling, which needs g++ and a minute or two

`write` keeps, for each position of a text, the K most probable tokens of model A with
their exact log-probabilities, and the probability that is left for all others, the
tail. `compare` has model B score just these tokens (`target_token_ids`). The two models
are never loaded together, and the file does not grow with the vocabulary. Both hold a
part of the file at a time.

It prints an exact lower bound of KL(A || B) and an unbiased estimate: how they come about
is in `applications/compare/divergence.py`. KL_K for smaller K, from the same file, shows
how the bound converges. A model compared with its own reference, in the same set-up,
diverges by exactly 0.

Many models in one command, with more figures, intervals and a noise floor:
`applications/compare`.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

EXAMPLES = Path(__file__).parents[2]
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "applications")]

from common import quiet
from common.program import any_terminal, interruptible
from compare.divergence import Comparison
from compare.engine import (
    add_engine_arguments,
    check_engine,
    engine_options,
    new_engine,
)
from compare.figures import mean_and_error
from compare.files import ReferenceFile, write_reference
from compare.plan import MAX_SCORES
from compare.reference import (
    TOKENS_PER_STEP,
    Reference,
    Refused,
    check_no_nan,
    check_same_vocabulary,
    compare_with,
    describe,
    make_reference,
)
from compare.texts import (
    add_text_arguments,
    add_window_arguments,
    check_output,
    check_windows,
    open_texts,
    stream_windows,
)
from compare.windows import NAMED_PER_CALL, Window, calls

if TYPE_CHECKING:
    from vllm import LLM

PERCENTILES = (50, 90, 99, 99.9)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    # The scheduler in this process: batches, and so roundings, are the same each time.
    quiet.hush(in_process=True)
    any_terminal()
    try:
        with interruptible():
            args.run(args)
    except Refused as error:
        sys.exit(f"error: {error}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    write = commands.add_parser("write", help="write the reference of a model")
    add_text_arguments(write)
    add_window_arguments(write)
    add_engine_arguments(write)
    write.add_argument("--reference", type=Path, required=True, metavar="FILE",
                       help="safetensors file to write")  # fmt: skip
    write.add_argument("--top-k", type=int, default=64, metavar="K",
                       help="candidates a position (default: 64)")  # fmt: skip
    write.add_argument("--tail-samples", type=int, default=16, metavar="M",
                       help="tail tokens a position for the estimate (default: 16)")  # fmt: skip
    write.set_defaults(run=run_write, max_num_batched_tokens=TOKENS_PER_STEP)
    compare = commands.add_parser("compare", help="compare a model with a reference")
    add_engine_arguments(compare)
    compare.add_argument("--reference", type=Path, required=True, metavar="FILE")
    compare.add_argument("--json", type=Path, metavar="FILE")
    compare.set_defaults(run=run_compare)
    args = parser.parse_args(argv)
    if args.run is run_write:
        check_windows(write, args)
        if args.top_k < 1:
            write.error("--top-k must be at least 1")
        if args.tail_samples < 1:
            write.error("--tail-samples must be at least 1")
        check_output(write, "--reference", args.reference)
    elif args.json:
        check_output(compare, "--json", args.json)
    check_engine(parser, args)
    return args


def run_write(args: argparse.Namespace) -> None:
    texts = open_texts(args)
    named = 1 + args.top_k + args.tail_samples
    if (args.context_length - 1) * named > MAX_SCORES:
        raise Refused(
            f"--top-k {args.top_k}: a window can have {args.context_length - 1} x {named} "
            f"scores, a request has at most {MAX_SCORES}; give less, or a smaller "
            "--context-length"
        )
    llm = start_engine(args, args.context_length, named)
    vocabulary = llm.model_config.get_vocab_size()
    if args.top_k > vocabulary:
        raise Refused(f"--top-k is {args.top_k}, the vocabulary is {vocabulary}")
    windows = stream_windows(
        llm.get_tokenizer(), texts(), args.context_length, args.stride,
        args.limit_tokens,
    )  # fmt: skip
    write_reference(make_references(llm, windows, args), args.reference)
    show_reference(ReferenceFile(args.reference), args.reference)


def make_references(
    llm: "LLM", windows: Iterable[Window], args: argparse.Namespace
) -> Iterator[Reference]:
    """The reference call by call, with a progress bar."""
    limit = tokens_per_call(args.top_k + args.tail_samples)
    with tqdm(desc=f"the top {args.top_k}", unit="pos", disable=None) as bar:
        for number, call in enumerate(calls(windows, limit)):
            part = make_reference(llm, call, args.top_k, args.tail_samples, number)
            check_no_nan(part.next_logprobs, part.logprobs, part.tail_logprobs)
            yield part
            bar.update(len(part.next_logprobs))


def tokens_per_call(named: int) -> int:
    """Where calls are cut depends on the windows and on this alone, so that a model
    scores the same batches when its reference is made and when it is compared."""
    return max(NAMED_PER_CALL // (1 + named), 1)


def run_compare(args: argparse.Namespace) -> None:
    file = ReferenceFile(args.reference)
    if args.max_num_batched_tokens is None:
        args.max_num_batched_tokens = int(file.metadata["max_num_batched_tokens"])
    llm = start_engine(args, file.context, 1 + file.named)
    check_same_vocabulary(describe(llm), file.metadata)
    result, next_logprobs, tails = compare_all(llm, file)
    report = summarize(file, result, next_logprobs, tails, describe(llm))
    show(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def compare_all(
    llm: "LLM", file: ReferenceFile
) -> tuple[Comparison, np.ndarray, np.ndarray]:
    """The comparison part by part, and the reference's log-probabilities of the right
    tokens and its tail masses."""
    parts, few = [], []
    with tqdm(desc="scoring", total=file.positions, unit="pos", disable=None) as bar:
        for reference in file.parts(tokens_per_call(file.named)):
            parts.append(compare_with(llm, reference))
            few.append((reference.next_logprobs, reference.tail_mass))
            bar.update(len(reference.next_logprobs))
    next_logprobs, tails = map(np.concatenate, zip(*few))
    result = join(parts)
    check_no_nan(result.kl)
    return result, next_logprobs, tails


def join(parts: list[Comparison]) -> Comparison:
    """Consecutive comparisons as one."""
    fields = dict(zip(Comparison._fields, zip(*parts)))
    # Their means are of the finite positions; a part may have none.
    sizes = [int((np.isfinite(part.kl) & np.isfinite(part.estimate)).sum()) for part in parts]
    fewer = fields.pop("kl_of_fewer")
    means = {}
    for k in fewer[0]:
        sums = [size * part[k] for size, part in zip(sizes, fewer) if size]
        means[k] = sum(sums) / sum(sizes) if sums else math.nan
    columns = {name: np.concatenate(column) for name, column in fields.items()}
    return Comparison(kl_of_fewer=means, **columns)


def start_engine(args: argparse.Namespace, context: int, named: int) -> "LLM":
    return new_engine(
        "--context-length" if args.run is run_write else "--reference",
        **engine_options(args),
        max_model_len=context,
        max_logprobs=named,
        use_tqdm_on_load=quiet.progress(),
        enable_prefix_caching=False,  # windows start at different tokens
    )


def summarize(
    file: ReferenceFile, result: Comparison, next_logprobs: np.ndarray,
    tails: np.ndarray, model: dict,
) -> dict:  # fmt: skip
    nll = [-float(x.mean(dtype=np.float64))
           for x in (next_logprobs, result.next_logprobs)]  # fmt: skip
    return {
        "reference": file.metadata,
        "model": model,
        "positions": file.positions,
        "top_k": file.top_k,
        "tail_samples": file.named - file.top_k,
        "kl_lower_bound": mean_and_error(result.kl)
        | {f"p{p:g}": float(np.percentile(result.kl, p)) for p in PERCENTILES}
        | {"max": float(result.kl.max())},
        "kl_lower_bound_of_fewer_candidates": result.kl_of_fewer,
        "kl_estimate": mean_and_error(result.estimate),
        "tail_mass": {
            "reference": float(tails.mean()),
            "model": float(result.tail_mass.mean()),
        },
        "same_top_token": mean_and_error(result.same_top),
        "perplexity": {"reference": math.exp(nll[0]), "model": math.exp(nll[1])},
    }


# The terminal


def new_table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def name(model: dict[str, str]) -> str:
    quantized = "" if model["quantization"] == "None" else f", {model['quantization']}"
    return f"{model['model']} ({model['dtype']}{quantized})"


def show_reference(file: ReferenceFile, path: Path) -> None:
    """Prints what was written, beside what the whole vocabulary would take."""
    vocabulary = int(file.metadata["vocabulary"])
    size = path.stat().st_size
    table = new_table(f"{path}: {file.positions} positions", "file", "bytes", "ratio")
    table.add_row(f"top {file.top_k}, tail", f"{size:,}", "1×")
    for kind, width in (("float16", 2), ("float32", 4)):
        whole = file.positions * vocabulary * width
        table.add_row(
            f"{vocabulary} logits, {kind}", f"{whole:,}", f"{whole / size:.3g}×"
        )
    console = Console()
    console.print(table)
    console.print(f"in the tail: {file.tail_mass():.2%} of the probability, on average")


def show(report: dict) -> None:
    """Prints what `summarize` gives."""
    console = Console(highlight=False)
    console.print(f"reference  {name(report['reference'])}")
    console.print(f"model      {name(report['model'])}")
    console.print(f"positions  {report['positions']}")
    bound = dict(report["kl_lower_bound"])
    table = new_table("", "KL(reference || model)", "nats")
    table.add_row("mean, estimated", with_error(report["kl_estimate"]))
    table.add_row("mean, lower bound", with_error(bound))
    for percentile in PERCENTILES:
        what = "median" if percentile == 50 else f"{percentile} %"
        table.add_row(f"{what}, lower bound", f"{bound[f'p{percentile:g}']:.4g}")
    table.add_row("max, lower bound", f"{bound['max']:.4g}")
    console.print(table)
    few = report["kl_lower_bound_of_fewer_candidates"]
    table = new_table("", "candidates", *map(str, few))
    table.add_row("mean, lower bound", *(f"{value:.4g}" for value in few.values()))
    console.print(table)
    table = new_table("", "", "reference", "model")
    for what, form in (("perplexity", "{:.4f}"), ("tail_mass", "{:.4%}")):
        row = report[what]
        label = what.replace("_", " ")
        table.add_row(label, form.format(row["reference"]), form.format(row["model"]))
    console.print(table)
    same = report["same_top_token"]
    console.print(f"the same most probable token at {same['mean']:.2%} "
                  f"±{same['standard_error']:.2%} of the positions")  # fmt: skip


def with_error(row: dict[str, float]) -> str:
    return f"{row['mean']:.4g} ±{row['standard_error']:.2g}"


if __name__ == "__main__":
    main()
