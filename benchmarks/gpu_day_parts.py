# SPDX-License-Identifier: Apache-2.0
"""The parts of a GPU day that need the wheel; `gpu_day.py` runs each in a process, and in
a dry run all in one.

What is right comes from Hugging Face in float32 on the CPU (`tests/oracle.py`,
`tests/depth_oracle.py`). Speed and memory are measured by the benchmarks beside this
file. The reference model is part of the repository, so nothing is downloaded.
"""

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import peak_memory
import processes
from gpu_day_engine import MODEL, VOCABULARY, worker

LAYERS = 12
DEPTHS = (4, 8, LAYERS)
LIMIT = {"float32": 1e-4, "bfloat16": 0.3}
"""Nats that a log-probability may be off by. float32 as in the tests: on a GPU too, since
Triton is told not to round products to TF32. The reference model in bfloat16 is 0.13 off
in Hugging Face (`equality_table.py`)."""
AT_ONCE = {"cpu": 1, "cuda": 4}
"""Engines that check results side by side. Where time is measured, one runs."""
PLAIN = "plain"
TAKEN = ("runner", "type", "attention", "asynchronous", "graphs")
"""What an engine says that it took (`gpu_day_engine.py`)."""
GENERATED = {"cpu": 4, "cuda": 12}
"""Tokens of a request. In Triton's interpreter a step of V2 takes seconds."""


class Found:
    """What a part finds, kept in a file after each row: a part that is stopped keeps it."""

    def __init__(self, path: Path):
        self.path, self.begin = path, time.monotonic()
        self.tables: list[dict] = []
        self.problems: list[str] = []

    def table(self, title: str, columns: list[str]) -> None:
        """Begins a table, which the next rows are of."""
        self.tables.append({"title": title, "columns": columns, "rows": []})

    def row(self, *cells) -> None:
        self.tables[-1]["rows"].append([*cells])
        self.save()

    def save(self, ended: bool = False) -> None:
        seconds = round(time.monotonic() - self.begin, 1)
        found = dict(tables=self.tables, problems=self.problems, ended=ended, seconds=seconds)
        whole = self.path.with_suffix(".partial")
        whole.write_text(json.dumps(found, default=str))
        whole.replace(self.path)


def random_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, VOCABULARY, n).tolist() for n in lengths]


@cache
def oracle():
    from oracle import Oracle  # tests/oracle.py

    return Oracle(MODEL)


def not_greedy(oracle, ids: list[int], tokens: list[int], limit: float) -> int:
    """How many tokens are not the most probable after the others, up to ties."""
    if not tokens:
        return 0
    logits = oracle.logits(ids + tokens)[len(ids) - 1 : -1]
    chosen = np.take_along_axis(logits, np.array(tokens)[:, None], axis=1)[:, 0]
    return int((chosen < logits.max(axis=1) - limit).sum())


# ------------------------------------------------------------------ parts


def scoring(device: str, found: Found) -> None:
    """{V1, V2} × {eager, CUDA graphs} × {synchronous, asynchronous scheduling}, in
    float32; in bfloat16, the default of a GPU. All rows of prompts, then their last ones
    with the prefix read from the cache."""
    truth = oracle()
    # Longer than a block of the prefix cache, of 128 tokens on a CPU.
    prompts = random_prompts((9, 70, 30, 140) if device == "cuda" else (9, 140))
    rng = np.random.default_rng(1)
    targets = [
        np.column_stack([ids[1:], rng.integers(0, VOCABULARY, (len(ids) - 1, 3))]).tolist()
        for ids in prompts
    ]
    ends = [rows[-8:] for rows in targets]
    expected = [
        truth.scores(*both) for both in zip(2 * prompts, [*targets, *ends])
    ]
    both = (False, True) if device == "cuda" else (False,)
    cases = [*product(("v1", "v2"), ("float32",), both, both)]
    if device == "cuda":
        cases += [(runner, "bfloat16", True, True) for runner in ("v1", "v2")]

    def measure(case: tuple) -> tuple[dict, list[dict]]:
        runner, dtype, graphs, asynchronous = case
        options = dict(
            dtype=dtype, enforce_eager=not graphs, async_scheduling=asynchronous
        )
        with worker(device, runner) as engine:
            taken = engine.call("open", **options)
            common = dict(prompts=prompts, generated=GENERATED[device])
            whole = engine.call("score", top=targets, **common)
            return taken, whole + engine.call("score", top=ends, **common)

    title = f"Scores against Hugging Face in float32; at most, in nats: {LIMIT}"
    found.table(title, [*TAKEN, "tokens from the cache", "greatest error, nats", "not greedy"])
    for case, (taken, outputs) in side_by_side(device, measure, cases, found.problems):
        runner, dtype, graphs, asynchronous = case
        limit, off, wrong = LIMIT[dtype], 0.0, 0
        for ids, exact, one in zip(2 * prompts, expected, outputs):
            off = np.maximum(off, difference(one["logprobs"], one["entropy"], exact))
            wrong += not_greedy(truth, ids, one["tokens"], 2 * limit)
            if tokens := one["tokens"]:
                generated = one["generated"]
                exact = truth.scores(ids + tokens, tokens)
                off = np.maximum(off, difference(generated.logprobs, generated.entropy, exact))
                # They are read from the logits that the tokens were chosen by.
                wrong += int((generated.ranks != 1).sum())
        name = f"{runner.upper()}, {dtype}, graphs {graphs}, asynchronous {asynchronous}"
        if not off <= limit or wrong:
            found.problems.append(f"{name}: {off:.1e} nats, {wrong} tokens not greedy")
        cached = sum(one["cached"] for one in outputs)
        if not cached:
            found.problems.append(f"{name}: nothing was read from the prefix cache")
        asked = (runner.upper(), asynchronous, graphs)
        got = (taken["runner"], taken["asynchronous"], taken["graphs"] != "NONE")
        if asked != got:
            found.problems.append(f"{name}: the engine took {taken}")
        found.row(*taken.values(), cached, f"{off:.1e}", wrong)


def side_by_side(device: str, measure, cases: list, problems: list[str]):
    """Yields each case and what `measure` returns of it. What it raises is a problem,
    and the others go on."""

    def attempt(case):
        try:
            return measure(case)
        except RuntimeError as error:
            problems.append(f"{case}: {error}"[-3000:])

    with ThreadPoolExecutor(AT_ONCE[device]) as pool:
        for case, result in zip(cases, pool.map(attempt, cases)):
            if result is not None:
                yield case, result


def at_once(*calls) -> None:
    """Makes engines start side by side: a call's engine, method and arguments each."""
    with ThreadPoolExecutor() as pool:
        started = [pool.submit(engine.call, name, **given) for engine, name, given in calls]
    for one in started:
        one.result()


def difference(logprobs: np.ndarray, entropy: np.ndarray, exact) -> float:
    """Nats that log-probabilities and entropies are off by, at most; NaN if any is."""
    return np.maximum(
        np.abs(logprobs - exact.logprobs).max(), np.abs(entropy - exact.entropy).max()
    )


def exactness(device: str, found: Found) -> None:
    """Depths that requests name, and drafting by early exits: V1 and V2, eager and with
    CUDA graphs, in float32; in bfloat16, the default of a GPU."""
    from depth_oracle import DepthOracle  # tests/depth_oracle.py

    truth, by_depth = oracle(), DepthOracle(MODEL)
    prompts = random_prompts((9, 70, 30, 5))
    depths = [*DEPTHS, None]
    utio = dict(
        enable_utio=True, utio_bucket_cutoffs=DEPTHS[:-1], utio_min_batch_size=1000
    )
    draft = dict(
        speculative_config=dict(method="early_exit", exit_layer=2, num_speculative_tokens=3)
    )
    ways = {f"depths {DEPTHS} of requests": utio, "drafting after 2 layers": draft}
    both = (False, True) if device == "cuda" else (False,)
    cases = [*product(ways, ("v1", "v2"), ("float32",), both)]
    if device == "cuda":
        cases += product(ways, ("v1", "v2"), ("bfloat16",), (True,))
    else:  # each way and each runner once
        cases = cases[::3]

    def measure(case: tuple) -> tuple[dict, list[dict]]:
        way, runner, dtype, graphs = case
        mine = depths if ways[way] is utio else [None] * len(prompts)
        with worker(device, runner) as engine:
            options = ways[way] | dict(dtype=dtype, enforce_eager=not graphs)
            taken = engine.call("open", **options)
            return taken, engine.call(
                "decode", prompts=prompts, depths=mine, generated=GENERATED[device]
            )

    title = f"Exactness of depth, against Hugging Face in float32; at most, in nats: {LIMIT}"
    found.table(title, ["what", *TAKEN, "greatest error, nats", "not greedy"])
    for case, (taken, outputs) in side_by_side(device, measure, cases, found.problems):
        way, runner, dtype, graphs = case
        name, off, wrong = f"{runner.upper()}, {dtype}, graphs {graphs}, {way}", 0.0, 0
        limit = LIMIT[dtype]
        # V1 waits for the drafts that are accepted.
        ahead = device == "cuda" and (runner == "v2" or ways[way] is utio)
        got = (taken["runner"], taken["asynchronous"], taken["graphs"] != "NONE")
        if got != (runner.upper(), ahead, graphs):
            found.problems.append(f"{name}: the engine took {taken}")
        for ids, depth, one in zip(prompts, depths, outputs):
            if ways[way] is utio:
                off = np.maximum(off, depth_error(by_depth, ids, depth or LAYERS, one))
            else:
                wrong += not_greedy(truth, ids, one["tokens"], 2 * limit)
        if not off <= limit or wrong:
            found.problems.append(f"{name}: {off:.1e} nats, {wrong} tokens not greedy")
        error = f"{off:.1e}" if ways[way] is utio else ""
        found.row(way, *taken.values(), error, wrong)


def depth_error(oracle, ids: list[int], depth: int, found: dict) -> float:
    """Nats that a request's log-probabilities are off by, of all tokens at one depth."""
    logits = oracle.logits(ids, found["tokens"], [depth] * len(found["tokens"]))
    logp = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    named = logp[np.arange(len(logp)), found["tokens"]]
    return np.abs(named - found["logprobs"]).max()


def routing(device: str, found: Found) -> None:
    """Decode steps with depth routing, which have no CUDA graphs, against full depth, which
    has (`test_depth_routing.py`), and full depth in an engine without routing."""
    cuda = device == "cuda"
    batches, rounds, dtype = ((32, 128, 256), 11, "bfloat16") if cuda else ((8,), 2, "float32")
    model = str(empty_llama(16) if cuda else processes.random_llama(32_000, 128, 16, dtype))
    with worker(device, "v1") as engine, worker(device, "v1") as other:
        wide = dict(folder=model, longest=1280, step=1024)
        at_once(
            (engine, "open_routing", dict(folder=model, dtype=dtype)),
            (other, "open_wide", wide),
        )
        for batch in batches:
            times = engine.call("decode_steps", batch=batch, rounds=rounds)
            default = statistics.median(other.call("plain_steps", batch=batch, rounds=rounds))
            full = times.pop("full depth")
            names = sorted(times)
            if not found.tables:
                title = f"Decode steps, 16 layers, {dtype}: times as fast as full depth"
                title += ", with CUDA graphs" * cuda
                found.table(title, ["batch", "without routing, ms", "full depth, ms", *names])
            ratios = [[a / b for a, b in zip(full, times[name])] for name in names]
            milliseconds = [f"{x * 1e3:.1f}" for x in (default, statistics.median(full))]
            found.row(batch, *milliseconds, *map(processes.ratio, ratios))


def drafting(device: str, found: Found, calibration: Path | None) -> None:
    """Plain decoding, n-gram lookup and early exits, by turns (`drafting.py`).

    On a GPU the reference model is inflated to the width of a model of 8 billion weights,
    with 12 layers: 2.3 billion.
    """
    import drafting as benchmark

    cuda = device == "cuda"
    batches, tokens, rounds = ((1, 4, 16, 32), 96, 3) if cuda else ((1,), 16, 1)
    dtype, times = ("bfloat16", 16) if cuda else ("float32", None)
    exits = dict(method="early_exit", exit_layer=3, num_speculative_tokens=2)
    if calibration:
        wide = benchmark.inflated_calibration(calibration, times) if times else calibration
        exits |= dict(calibration=str(wide), min_acceptance=0)
    lookup = dict(
        method="ngram", num_speculative_tokens=3, prompt_lookup_max=4, prompt_lookup_min=2
    )
    ways = {
        ("v1", PLAIN): None,
        ("v1", "n-gram, k = 3"): lookup,
        ("v1", "exit after 3, k = 2"): exits,
        ("v1", "exit after 3, k ≤ 2, gate"): exits | dict(draft_gate=True),
        ("v2", PLAIN): None,
        ("v2", "exit after 3, k = 2"): exits,
        ("v2", "exit after 3, k ≤ 2, gate"): exits | dict(draft_gate=True),
    }
    if not cuda:
        ways = dict([*ways.items()][:3:2])
    model = str(benchmark.inflated(times) if times else MODEL)
    prompts = programs(max(batches))
    title = f"Drafting, {dtype}, {'calibrated' if calibration else 'not calibrated'}"
    found.table(title, ["batch", "runner", "way", "accepted", "tokens a step",
                        "a step, ms", "times plain"])  # fmt: skip
    with ExitStack() as stack:
        workers = {way: stack.enter_context(worker(device, way[0])) for way in ways}
        common = dict(model=model, dtype=dtype, eager=not cuda)
        at_once(*(
            (workers[way], "open_drafting", common | dict(speculative=options))
            for way, options in ways.items()
        ))  # fmt: skip
        for batch, temperature in product(batches, (1.0, 0.0)):
            turns: dict[tuple, list] = {way: [] for way in ways}
            job = dict(prompts=prompts[:batch], tokens=tokens, temperature=temperature)
            for (runner, name), engine in workers.items():
                for n in range(benchmark.TRIAL if "gate" in name else 1):
                    engine.call("generate", **job, seed=n)
            for n in range(rounds):
                for way, engine in workers.items():
                    turns[way].append(engine.call("generate", **job, seed=1000 * n))
            for (runner, name), results in turns.items():
                rates = [one["tokens"] / one["seconds"] for one in results]
                plain = [one["tokens"] / one["seconds"] for one in turns[runner, PLAIN]]
                drafted, accepted = sum(one["counts"] for one in results)[1:3]
                steps = sum(one["steps"] for one in results)
                made = sum(one["tokens"] for one in results)
                step = sum(one["seconds"] for one in results) / steps
                found.row(
                    f"{batch}, {'sampled' if temperature else 'greedy'}", runner.upper(), name,
                    f"{accepted / drafted:.2f}" if drafted else "",
                    f"{made / steps / batch:.2f}", f"{step * 1e3:.2f}",
                    processes.ratio([b / a for a, b in zip(plain, rates)]),
                )  # fmt: skip


def programs(count: int) -> list[list[int]]:
    """Tokens 64 to 128 of programs of this repository."""
    from drafting import PROMPT
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompts = []
    for folder in ("tests", "tools", "examples", "benchmarks"):
        for path in sorted((processes.ROOT / folder).rglob("*.py")):
            ids = tokenizer(path.read_text()[:2000])["input_ids"]
            if len(ids) >= 2 * PROMPT:
                prompts.append(ids[PROMPT : 2 * PROMPT])
    assert len(prompts) >= count
    return prompts[:: len(prompts) // count][:count]


def speed(device: str, found: Found) -> None:
    """Scoring against the unpatched release, by turns, each with the same options.

    The weights of a dummy model make all tokens about as probable: what the difference
    of the results would not tell is told by `scoring`.
    """
    cuda = device == "cuda"
    folder = empty_llama() if cuda else MODEL
    count, length, rounds = (8, 2048, 3) if cuda else (2, 64, 1)
    ends, end = (32, 64) if cuda else (4, 8)
    runner = "v2" if cuda else "v1"  # V2 is slow in Triton's interpreter
    rng = np.random.default_rng(0)
    whole = rng.integers(2, VOCABULARY, (count, length)).tolist()
    prefix = rng.integers(2, VOCABULARY, length - end).tolist()
    shared = [prefix + one for one in rng.integers(2, VOCABULARY, (ends, end)).tolist()]
    named, theirs = ("named", 1), [("prompt_logprob_token_ids", 1), ("prompt_logprobs", 0)]
    if not cuda:
        theirs.pop(0)  # V1 has none
    cases = [
        ("prefill alone", whole, ("prefill", ""), [("prefill", "")]),
        ("every next token", whole, named, theirs),
        ("8 ids a row", whole, ("named", 8), [("prompt_logprob_token_ids", 8)]),
        ("64 ids a row", whole, ("named", 64), [("prompt_logprob_token_ids", 64)]),
        ("the 20 most probable", whole, ("top", 20), [("prompt_logprobs", 20)]),
        ("prompt_logprobs=1", whole, ("prompt_logprobs", 1), [("prompt_logprobs", 1)]),
        (f"{ends} ends of {end} tokens", shared, named, theirs),
    ]
    if not cuda:
        cases = [cases[1], cases[-1]]
    title = f"{count} prompts of {length} tokens, {folder.name}, {runner.upper()}"
    found.table(title, [
        "what", "the release's way", "fork, ms", "release, ms", "times as fast",
        "fork, peak MiB", "release, peak MiB", "difference, nats",
    ])  # fmt: skip
    with (
        worker(device, runner) as fork,
        worker(device, runner, upstream=True) as release,
    ):
        start = dict(folder=str(folder), longest=length + 2, step=8192 if cuda else 256)
        at_once((fork, "open_wide", start), (release, "open_wide", start))
        for name, prompts, ours, upstreams in cases:
            for other in upstreams:
                rows = end if prompts is shared else length - 1
                turns = {"fork": [], "release": []}
                for _ in range(rounds + 1):
                    for engine, way, results in (
                        (fork, ours, turns["fork"]), (release, other, turns["release"])
                    ):  # fmt: skip
                        results.append(
                            engine.call(
                                "time", prompts=prompts, rows=rows, way=way[0], count=way[1] or 0
                            )
                        )
                last = [results[-1] for results in turns.values()]
                seconds = [
                    [one["seconds"] for one in results[1:]] for results in turns.values()
                ]
                peaks = [f"{one['peak'] / 2**20:,.0f}" for one in last]
                off = np.abs(last[0]["logprobs"] - last[1]["logprobs"]).max()
                found.row(
                    name, f"{other[0]} {other[1]}".strip(),
                    *(f"{statistics.median(times) * 1e3:.0f}" for times in seconds),
                    processes.ratio([b / a for a, b in zip(*seconds)]), *peaks, f"{off:.1e}",
                )  # fmt: skip


def empty_llama(layers: int = 32) -> Path:
    """A folder with the configuration of a Llama 3 of 8 billion weights, if it has all
    layers, and no weights."""
    from transformers import LlamaConfig

    folder = processes.BUILD / "models" / f"llama-3-8b-{layers}-layers-no-weights"
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    ).save_pretrained(folder)
    return folder


def memory(device: str, found: Found) -> None:
    """Peak memory of scoring a long prompt above prefill (`peak_memory.py`)."""
    rows = 8192 if device == "cuda" else 64
    vocabulary = peak_memory.VOCABULARY if device == "cuda" else 2048
    model = str(processes.random_llama(vocabulary, 128, 1, "float32"))
    options = dict(model=model, vocabulary=vocabulary, rows=rows, step=2048)
    title = f"Peak memory, {rows:,} rows × {vocabulary:,} words; at most {peak_memory.BOUND}"
    found.table(title, ["runner", "prefill, MiB", "scoring above it, MiB"])
    for runner in ("v1", "v2"):
        peaks = {}
        with worker(device, runner) as engine:
            engine.call("open_long", **options)
            for way in ("prefill", "target_token_ids"):
                engine.call("run", way=way, rows=32)
                peaks[way] = engine.call("run", way=way, rows=rows)["peak"]
        above = peaks["target_token_ids"] - peaks["prefill"]
        if above > peak_memory.BOUND * 2**20:
            message = f"{runner.upper()}: {above / 2**20:.0f} MiB above prefill"
            found.problems.append(message)
        mebibytes = [f"{n / 2**20:,.0f}" for n in (peaks["prefill"], above)]
        found.row(runner.upper(), *mebibytes)


def lm_eval(device: str, found: Found) -> None:
    """lm-eval with model `utio` against its own `vllm` model (`lm_eval_speed.py`)."""
    questions, repeat, block = (16, 5, 16) if device == "cuda" else (1, 1, 32)
    options = dict(device=device, questions=questions, repeat=repeat, block=block)
    with worker(device, "v1") as engine:
        measured = engine.call("lm_eval", **options)
    title = f"lm-eval, 16 shots, {measured['requests']} requests, the same answers"
    found.table(title, ["path", "seconds", "times as fast as lm-eval's"])
    for path, times in measured["seconds"].items():
        ratio = processes.ratio(measured["speedup"][path])
        found.row(path, f"{statistics.median(times):.2f}", ratio)


PARTS = dict(
    scoring=scoring, exactness=exactness, speed=speed, routing=routing, drafting=drafting,
    memory=memory, lm_eval=lm_eval,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="+", choices=[*PARTS], metavar="part")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="a folder for PART.json")
    parser.add_argument("--calibration", type=Path)
    args = parser.parse_args()
    for part in args.parts:
        found = Found(args.out / f"{part}.json")
        options = {"calibration": args.calibration} if part == "drafting" else {}
        PARTS[part](args.device, found, **options)
        found.save(ended=True)


if __name__ == "__main__":
    main()
