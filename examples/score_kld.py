# SPDX-License-Identifier: Apache-2.0
"""KL divergence of a model, or of a quantization, from a reference model.

    .venv/bin/python examples/score_kld.py write --model A --text FILE --reference a.safetensors
    .venv/bin/python examples/score_kld.py compare --model B --reference a.safetensors

`write` keeps, for each position of a text, the K most probable tokens of model A with
their exact log-probabilities, and the probability that is left for all others, the
tail. `compare` has model B score just these tokens (`target_token_ids`). The two models
are never loaded together, and the file does not grow with the vocabulary.

With candidates C, and tail masses p_T and q_T of A and B,

    KL_K = sum over i in C of p_i log(p_i / q_i) + p_T log(p_T / q_T)

is the exact KL divergence of the two distributions over the K candidates and "any other
token". It is a lower bound of KL(A || B) by the log-sum inequality and grows with K.
What it lacks is exactly p_T KL(A given the tail || B given the tail), which has no
finite upper bound: B may give a tail token next to no probability. So the lack is
estimated. As A and B both sum to 1 over the vocabulary V,

    KL(A || B) = sum over i in V of d_i,   d_i = p_i log(p_i / q_i) - p_i + q_i >= 0,

and the file also holds M tokens a position, drawn uniformly from its tail, whose mean
d_i times |V| - K is an unbiased estimate of the tail's part of that sum. Its error is
in the standard error over the positions; a model that fails on few rare tokens alone
can hide from it. KL_K for smaller K, from the same file, shows how the bound converges.

A model compared with its own reference, in the same set-up, diverges by exactly 0.
"""

import argparse
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import score_perplexity as perplexity
import vllm
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from score_perplexity import BAR, Window
from tqdm import tqdm
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.v1.engine.target_token_ids import MAX_SCORES

FORMAT = "kld-reference-1"
NAMED_PER_CALL = 2**22
"""Most tokens to name in one `generate` call. Finding the most probable makes some
hundred bytes of Python objects each."""
TOKENS_PER_STEP = 1024
"""Default of `--max-num-batched-tokens`. Finding the candidates holds, in vLLM, the
logits of a whole step, several times over."""
TAIL_FLOOR = 2.0**-18
"""Added to both tail masses. They are 1 minus a sum of probabilities that come from
float32 log-probabilities, each good to about 2^-20, so a tail of 1e-6 may come out
as 0. The same addition to both keeps KL_K a lower bound (log-sum inequality), up to
twice this value in nats."""
SEED = 0  # of the draws from the tail
PERCENTILES = (50, 90, 99, 99.9)


class Refused(Exception):
    """What the caller asked for can not be done; the message says why."""


class Reference(NamedTuple):
    """What the file holds: N positions, in the order of the windows."""

    windows: list[Window]
    candidates: np.ndarray  # [N, K] integer, most probable first
    logprobs: np.ndarray  # [N, K] float32, nats
    tail_mass: np.ndarray  # [N] float64, probability of all other tokens
    tail_samples: np.ndarray  # [N, M] integer, drawn uniformly from all other tokens
    tail_logprobs: np.ndarray  # [N, M] float32, nats
    next_logprobs: np.ndarray  # [N] float32, of the token that is there
    metadata: dict[str, str]


class Comparison(NamedTuple):
    """N positions, in the order of the reference."""

    kl: np.ndarray  # [N] float64, KL_K in nats
    kl_of_fewer: dict[int, float]  # K' -> mean KL_K'
    estimate: np.ndarray  # [N] float64, unbiased estimate of the KL divergence, nats
    tail_mass: np.ndarray  # [N] float64, of the compared model
    same_top: np.ndarray  # [N] bool, whether the reference's top token is the model's
    next_logprobs: np.ndarray  # [N] float32


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    # The scheduler in this process: batches, and so roundings, are the same each time.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        args.run(args)
    except Refused as error:
        sys.exit(f"error: {error}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    write = commands.add_parser("write", help="write the reference of a model")
    perplexity.add_text_arguments(write)
    perplexity.add_window_arguments(write)
    perplexity.add_engine_arguments(write)
    write.add_argument("--reference", type=Path, required=True, metavar="FILE",
                       help="safetensors file to write")  # fmt: skip
    write.add_argument("--top-k", type=int, default=64, metavar="K",
                       help="candidates a position (default: 64)")  # fmt: skip
    write.add_argument("--tail-samples", type=int, default=16, metavar="M",
                       help="tail tokens a position for the estimate (default: 16)")  # fmt: skip
    write.set_defaults(run=run_write, max_num_batched_tokens=TOKENS_PER_STEP)
    compare = commands.add_parser("compare", help="compare a model with a reference")
    perplexity.add_engine_arguments(compare)
    compare.add_argument("--reference", type=Path, required=True, metavar="FILE")
    compare.add_argument("--json", type=Path, metavar="FILE")
    compare.set_defaults(run=run_compare)
    args = parser.parse_args(argv)
    if args.run is run_write:
        perplexity.check_windows(write, args)
        if args.top_k < 1:
            write.error("--top-k must be at least 1")
        if args.tail_samples < 1:
            write.error("--tail-samples must be at least 1")
        perplexity.check_output(write, "--reference", args.reference)
    elif args.json:
        perplexity.check_output(compare, "--json", args.json)
    perplexity.check_engine(parser, args)
    return args


def run_write(args: argparse.Namespace) -> None:
    texts = perplexity.read_texts(args)
    # To find the candidates is to generate a token, for which vLLM wants room.
    llm = start_engine(args, args.context_length + 1, args.top_k + args.tail_samples)
    vocabulary = llm.model_config.get_vocab_size()
    if args.top_k > vocabulary:
        raise Refused(f"--top-k is {args.top_k}, the vocabulary is {vocabulary}")
    windows = [
        window
        for ids in perplexity.tokenize(llm, texts, args.limit_tokens)
        for window in perplexity.cut(ids, args.context_length, args.stride)
    ]
    if not windows:
        raise Refused("the text has no token with another before it")
    named = max(window.scored for window in windows) * (1 + args.top_k + args.tail_samples)
    if named > MAX_SCORES:
        raise Refused(
            f"--top-k {args.top_k}: a window would have {named} scores, a request has "
            f"at most {MAX_SCORES}; give less, or a smaller --stride"
        )
    reference = make_reference(llm, windows, args.top_k, args.tail_samples)
    write_reference(reference, args.reference)
    show_reference(reference, args.reference)


def run_compare(args: argparse.Namespace) -> None:
    reference = read_reference(args.reference)
    if args.max_num_batched_tokens is None:
        args.max_num_batched_tokens = int(reference.metadata["max_num_batched_tokens"])
    context = max(len(window.token_ids) for window in reference.windows)
    ids = named(reference)
    llm = start_engine(args, context, ids.shape[1])
    check_same_vocabulary(llm, reference)
    result = compare_with(llm, reference)
    report = summarize(reference, result, describe(llm))
    show(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def start_engine(args: argparse.Namespace, context: int, named: int) -> LLM:
    return perplexity.new_engine(
        "--context-length" if args.run is run_write else "--reference",
        **perplexity.engine_options(args),
        max_model_len=context,
        max_logprobs=named + 1,  # and the token that is there
        enable_prefix_caching=False,  # windows start at different tokens
    )


def describe(llm: LLM) -> dict[str, str]:
    """What the engine runs, and what its token ids mean."""
    config = llm.model_config
    vocabulary = sorted(llm.get_tokenizer().get_vocab().items())
    scheduler = llm.llm_engine.vllm_config.scheduler_config
    return {
        "model": str(config.model),
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": str(config.quantization),
        "vocabulary": str(config.get_vocab_size()),
        "tokenizer_sha256": sha256(json.dumps(vocabulary).encode()),
        "max_num_batched_tokens": str(scheduler.max_num_batched_tokens),
        "vllm": vllm.__version__,
    }


def sha256(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


# The reference


def make_reference(
    llm: LLM, windows: list[Window], top_k: int, samples: int
) -> Reference:
    """Finds each position's `top_k` most probable tokens, draws `samples` others, and
    scores all by name, as `compare_with` will: the same computation, the same bits."""
    vocabulary = llm.model_config.get_vocab_size()
    generator = np.random.default_rng(SEED)
    parts = []
    for call in in_calls(windows, top_k + samples, f"the top {top_k} of"):
        top = find_candidates(llm, call, top_k)
        tail = draw_from_tail(generator, top, vocabulary, samples)
        logprobs, _ = score(llm, call, np.concatenate([top, tail], axis=1))
        of_top = logprobs[:, 1 : 1 + top_k]
        order = np.argsort(-of_top, axis=1, kind="stable")
        parts.append((
            np.take_along_axis(top, order, axis=1),
            np.take_along_axis(of_top, order, axis=1),
            tail,
            logprobs[:, 1 + top_k :],
            logprobs[:, 0],
        ))  # fmt: skip
    top, of_top, tail, of_tail, of_next = map(np.concatenate, zip(*parts))
    metadata = {"format": FORMAT, "text_sha256": hash_windows(windows)} | describe(llm)
    return Reference(
        windows, top, of_top, tail_mass(of_top), tail, of_tail, of_next, metadata
    )


def draw_from_tail(
    generator: np.random.Generator, top: np.ndarray, vocabulary: int, samples: int
) -> np.ndarray:
    """Ids `[N, samples]`, independent and uniform among those not in `top` `[N, K]`;
    `[N, 0]` if there are none."""
    count, top_k = top.shape
    if top_k == vocabulary:
        return np.zeros((count, 0), top.dtype)
    drawn = generator.integers(0, vocabulary - top_k, (count, samples))
    # The r-th id outside a sorted set is r plus the members before it, of which the
    # i-th is one if it is at most r + i.
    before = np.sort(top, axis=1) - np.arange(top_k)
    shifts = [np.searchsorted(row, r, side="right") for row, r in zip(before, drawn)]
    return drawn + np.array(shifts)


def find_candidates(llm: LLM, windows: list[Window], top_k: int) -> np.ndarray:
    """Ids `[N, top_k]` of the most probable tokens at the scored positions."""
    sampling = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=top_k,
        flat_logprobs=True,  # lists of numbers, no object a token
        detokenize=False,
    )
    prompts = [TokensPrompt(prompt_token_ids=window.token_ids) for window in windows]
    outputs = llm.generate(prompts, sampling, use_tqdm=BAR)
    ids = []
    for output, window in zip(outputs, windows):
        # Each position has the token that is there, then the top_k; the first, none.
        rows = np.array(output.prompt_logprobs.token_ids).reshape(-1, 1 + top_k)
        ids.append(rows[-window.scored :, 1:])
    return np.concatenate(ids)


def score(
    llm: LLM, windows: list[Window], named: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Scores, at each position, the token that is there and those in `named` `[N, K]`.

    Returns:
        Log-probabilities, float32 in nats, and ranks, both `[N, 1 + K]`.
    """
    prompts, begin = [], 0
    for ids, scored in windows:
        rows = named[begin : begin + scored].astype(np.int32)
        targets = np.column_stack([np.array(ids[-scored:], np.int32), rows])
        prompts.append(TokensPrompt(prompt_token_ids=ids, target_token_ids=targets))
        begin += scored
    outputs = llm.generate(prompts, SamplingParams(max_tokens=0), use_tqdm=BAR)
    logprobs = np.concatenate([o.target_logprobs.logprobs for o in outputs])
    if broken := int(np.isnan(logprobs).any(axis=1).sum()):
        raise Refused(f"the model's log-probabilities are NaN at {broken} positions")
    return logprobs, np.concatenate([o.target_logprobs.ranks for o in outputs])


def in_calls(windows: list[Window], named: int, what: str) -> Iterator[list[Window]]:
    """The windows, in calls of bounded size, with a progress bar over all positions.
    Where the calls are cut depends on the windows and on `named`, the number of tokens
    named a position, alone."""
    total = sum(window.scored for window in windows)
    with tqdm(total=total, desc=f"{what} {total} positions", unit="pos") as bar:
        for call in perplexity.calls(windows, NAMED_PER_CALL // (1 + named)):
            yield call
            bar.update(sum(window.scored for window in call))


def hash_windows(windows: list[Window]) -> str:
    shapes = [[len(ids), scored] for ids, scored in windows]
    ids = np.concatenate([window.token_ids for window in windows])
    return sha256(np.array(shapes, "<i8").tobytes(), ids.astype("<i8").tobytes())


def write_reference(reference: Reference, path: Path) -> None:
    """Writes a safetensors file; ids take two bytes where the vocabulary lets them."""
    small = int(reference.metadata["vocabulary"]) <= 2**16
    id_type = np.uint16 if small else np.int32
    windows = reference.windows
    tensors = {
        "windows": np.array([[len(w.token_ids), w.scored] for w in windows], np.int32),
        "token_ids": np.concatenate([w.token_ids for w in windows]).astype(id_type),
        "candidates": reference.candidates.astype(id_type),
        "logprobs": reference.logprobs,
        "tail_mass": reference.tail_mass,
        "tail_samples": reference.tail_samples.astype(id_type),
        "tail_logprobs": reference.tail_logprobs,
        "next_logprobs": reference.next_logprobs,
    }
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    try:
        save_file(tensors, path, metadata=reference.metadata)
    except (OSError, SafetensorError) as error:
        raise Refused(f"--reference {path}: {error}") from error


def read_reference(path: Path) -> Reference:
    """Reads what `write_reference` wrote.

    Raises:
        Refused: the file is missing, damaged or something else.
    """
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise Refused(f"{path} is no reference file ({FORMAT})")
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise Refused(f"can not read {path}: {error}") from None
    lengths, scored = tensors["windows"].T
    parts = np.split(tensors["token_ids"], np.cumsum(lengths)[:-1])
    windows = [Window(ids.tolist(), int(n)) for ids, n in zip(parts, scored)]
    if hash_windows(windows) != metadata["text_sha256"]:
        raise Refused(f"{path} is damaged: its tokens are not those of its fingerprint")
    arrays = [tensors[field] for field in Reference._fields[1:-1]]
    return Reference(windows, *arrays, metadata)


def check_same_vocabulary(llm: LLM, reference: Reference) -> None:
    """Raises `Refused` unless an id means the same token to both models."""
    ours, theirs = describe(llm), reference.metadata
    for key, what in (("vocabulary", "vocabulary"), ("tokenizer_sha256", "tokenizer")):
        if ours[key] != theirs[key]:
            raise Refused(
                f"--model {ours['model']} and --reference, of {theirs['model']}, do "
                f"not have the same {what}: {ours[key]}, {theirs[key]}"
            )


# The comparison


def tail_mass(logprobs: np.ndarray) -> np.ndarray:
    """Probability of all tokens but the candidates: float64 `[N]` of `[N, K]`."""
    return np.maximum(1 - np.exp(logprobs.astype(np.float64)).sum(axis=1), 0)


def terms(p_logprobs: np.ndarray, q_logprobs: np.ndarray) -> np.ndarray:
    """p log(p/q) - p + q for each token, float64 in nats: no rounding makes it
    negative, and where p and q sum to the same it sums to p log(p/q)."""
    p_log, q_log = p_logprobs.astype(np.float64), q_logprobs.astype(np.float64)
    p, q = np.exp(p_log), np.exp(q_log)
    ratio = np.subtract(p_log, q_log, out=np.zeros_like(p), where=p > 0)
    return p * ratio - p + q


def divergence(
    p_logprobs: np.ndarray, p_tail: np.ndarray, q_logprobs: np.ndarray,
    q_tail: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """KL_K of the module's docstring: float64 `[N]` in nats.

    Args:
        p_logprobs, q_logprobs: `[N, K]`, nats.
        p_tail, q_tail: `[N]`, see `tail_mass`.
    """
    of_tail = terms(np.log(p_tail + TAIL_FLOOR), np.log(q_tail + TAIL_FLOOR))
    return terms(p_logprobs, q_logprobs).sum(axis=1) + of_tail


def named(reference: Reference) -> np.ndarray:
    """Ids `[N, K + M]` to score, besides the token that is there."""
    return np.concatenate([reference.candidates, reference.tail_samples], axis=1)


def compare_with(llm: LLM, reference: Reference) -> Comparison:
    """Has the model score what the reference names, and takes the divergences."""
    ids = named(reference)
    parts, begin = [], 0
    for call in in_calls(reference.windows, ids.shape[1], "scoring"):
        end = begin + sum(window.scored for window in call)
        parts.append(score(llm, call, ids[begin:end]))
        begin = end
    logprobs, ranks = map(np.concatenate, zip(*parts))
    return compare(reference, logprobs, ranks)


def compare(
    reference: Reference, logprobs: np.ndarray, ranks: np.ndarray
) -> Comparison:
    """Takes the divergences.

    Args:
        logprobs, ranks: `[N, 1 + K + M]`, what `score` gives for `named(reference)`.
    """
    p, p_tail = reference.logprobs, reference.tail_mass
    top_k, samples = p.shape[1], reference.tail_samples.shape[1]
    q = logprobs[:, 1 : 1 + top_k]
    q_tail = tail_mass(q)
    kl = divergence(p, p_tail, q, q_tail)
    of_fewer = {}
    for few in (k for k in (1, 4, 16, 64, 256, 1024) if k < top_k):
        p_rest, q_rest = (np.exp(x[:, few:].astype(np.float64)).sum(1) for x in (p, q))
        of_few = divergence(p[:, :few], p_tail + p_rest, q[:, :few], q_tail + q_rest)
        of_fewer[few] = float(of_few.mean())
    of_fewer[top_k] = float(kl.mean())
    estimate = terms(p, q).sum(axis=1)
    if samples:
        outside = int(reference.metadata["vocabulary"]) - top_k
        of_tail = terms(reference.tail_logprobs, logprobs[:, 1 + top_k :])
        estimate += outside * of_tail.mean(axis=1)
    same_top = ranks[:, 1] == 1
    return Comparison(kl, of_fewer, estimate, q_tail, same_top, logprobs[:, 0])


def summarize(reference: Reference, result: Comparison, model: dict) -> dict:
    count, top_k = reference.candidates.shape
    nll = [-float(x.mean(dtype=np.float64))
           for x in (reference.next_logprobs, result.next_logprobs)]  # fmt: skip
    return {
        "reference": reference.metadata,
        "model": model,
        "positions": count,
        "top_k": top_k,
        "tail_samples": reference.tail_samples.shape[1],
        "kl_lower_bound": mean_and_error(result.kl)
        | {f"p{p:g}": float(np.percentile(result.kl, p)) for p in PERCENTILES}
        | {"max": float(result.kl.max())},
        "kl_lower_bound_of_fewer_candidates": result.kl_of_fewer,
        "kl_estimate": mean_and_error(result.estimate),
        "tail_mass": {
            "reference": float(reference.tail_mass.mean()),
            "model": float(result.tail_mass.mean()),
        },
        "same_top_token": mean_and_error(result.same_top),
        "perplexity": {"reference": math.exp(nll[0]), "model": math.exp(nll[1])},
    }


def mean_and_error(values: np.ndarray) -> dict[str, float]:
    """Mean and its standard error, as if positions were independent."""
    return {
        "mean": float(values.mean()),
        "standard_error": float(values.std() / math.sqrt(len(values))),
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


def show_reference(reference: Reference, path: Path) -> None:
    """Prints what was written, beside what the whole vocabulary would take."""
    count, top_k = reference.candidates.shape
    vocabulary = int(reference.metadata["vocabulary"])
    size = path.stat().st_size
    table = new_table(f"{path}: {count} positions", "file", "bytes", "ratio")
    table.add_row(f"top {top_k}, tail", f"{size:,}", "1×")
    for kind, width in (("float16", 2), ("float32", 4)):
        whole = count * vocabulary * width
        table.add_row(
            f"{vocabulary} logits, {kind}", f"{whole:,}", f"{whole / size:.3g}×"
        )
    console = Console()
    console.print(table)
    tail = reference.tail_mass
    console.print(f"in the tail: {tail.mean():.2%} of the probability, on average")


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
