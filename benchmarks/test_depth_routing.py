# SPDX-License-Identifier: Apache-2.0
"""What depth routing saves, and what the cost model says it should.

Half of the decode tokens exit after 6 of 16 layers, a fifth after 10, the rest run
all: 9.8 on average. One engine takes all ways in turn, from step to step, so that all
see the same requests, contexts and weights: two engines, though the same, differ by up
to 4 % here. Full depth is the engine with its router taken out. Every ratio is one of
neighbouring steps.

    taskset -c 0 .venv/bin/python -m pytest benchmarks/test_depth_routing.py

Eager against eager; with `DEPTH_COMPILED=1` compiled against the compiled default, and
the eager staircase against it as well. The model's parts are timed eagerly in any case.

What every token pays, its exit's logits, bounds the gain. `DEPTH_VOCABULARY=4096` makes
that part small. With `DEPTH_SHARES=0.5,0.2333,0.2667` tokens run 9.6 layers on average.
"""

import functools
import os
import time
from collections import defaultdict
from contextlib import contextmanager

import numpy as np
import pytest
from processes import random_llama

NUM_LAYERS = 16
CUTOFFS = (6, 10, NUM_LAYERS)
SHARES = tuple(map(float, os.environ.get("DEPTH_SHARES", "0.5,0.2,0.3").split(",")))
UNIFORM = 10  # all tokens: as many layers as the others run on average
DTYPE = os.environ.get("DEPTH_DTYPE", "float32")
VOCABULARY = int(os.environ.get("DEPTH_VOCABULARY", "32000"))
COMPILED = os.environ.get("DEPTH_COMPILED", "0") == "1"
MODE = "compiled" if COMPILED else "eager"
ROUNDS = int(os.environ.get("DEPTH_ROUNDS", "11"))
DISTINCT = int(os.environ.get("DEPTH_DISTINCT", "32"))
"""Prompts of a long context that differ; the others read them from the prefix cache, and
decode keys and values that are in the processor's caches more often."""
NEVER = 10**6
LONGEST = 1024 + max(12 * ROUNDS, 256)

FULL, STAIRCASE, EAGER, PROBES, TRUNCATED, SCORED, FALLBACK = (
    "full depth",
    "staircase",
    "staircase, eager",
    "probes, translators",
    f"all exit at {UNIFORM}",
    "scores, but all run all layers",
    "batch too small",
)
WAYS = (STAIRCASE, PROBES, TRUNCATED, SCORED, FALLBACK)
if COMPILED:
    WAYS = (STAIRCASE, EAGER, *WAYS[1:])


@pytest.fixture(scope="module")
def llm():
    from vllm import LLM

    return LLM(
        model=str(random_llama(VOCABULARY, 1024, NUM_LAYERS, "float32")),
        skip_tokenizer_init=True,
        dtype=DTYPE,
        enforce_eager=not COMPILED,
        max_model_len=LONGEST,
        max_num_batched_tokens=1024,
        max_num_seqs=256,
        kv_cache_memory_bytes=3 * 2**30,
        seed=0,
        enable_utio=True,
        utio_bucket_cutoffs=list(CUTOFFS),
        utio_bucket_shares=list(SHARES),
        utio_min_batch_size=1,
        utio_gate=False,
    )


@contextmanager
def way(llm, name: str):
    """Makes the engine take one of the ways."""
    router, loop = runner(llm).depth_router, runner(llm).model.model.depth_loop
    config, before = router.config, vars(router.config).copy()
    policy = router.policy
    if name == FULL:
        runner(llm).depth_router = None
    elif name == EAGER:
        eager(llm, True)
    elif name == PROBES:
        router.policy, loop.translators = calibration(llm, loop)
    elif name == FALLBACK:
        config.min_batch_size = NEVER
    elif name in (TRUNCATED, SCORED):
        depth = UNIFORM if name == TRUNCATED else NUM_LAYERS
        config.bucket_shares = [float(cutoff == depth) for cutoff in CUTOFFS]
    try:
        yield
    finally:
        vars(config).update(before)
        runner(llm).depth_router = router
        router.policy = policy
        loop.translators = {}
        eager(llm, not COMPILED)


def eager(llm, on: bool) -> None:
    """Switches the graphs of the model and of its segments off, or on again."""
    model = runner(llm).model.model
    for module in (model, *model.depth_loop.segments):
        module.do_not_compile = on


@functools.cache
def calibration(llm, loop):
    """Probes, as a policy, and translators, of random weights and the widths that
    `examples/applications/utio/utio_calibrate.py` gives them."""
    import torch
    from vllm.model_executor.layers.depth.calibration import (
        ProbeWeights,
        TranslatorWeights,
    )
    from vllm.model_executor.layers.depth.translator import make_translators
    from vllm.v1.worker.depth.policy import CalibratedProbe

    policy = CalibratedProbe.__new__(CalibratedProbe)
    policy.config = runner(llm).depth_router.config
    shapes = (256, 1024), (256,), (256,), ()
    policy.probes = {
        cutoff: ProbeWeights(*map(torch.randn, shapes)) for cutoff in CUTOFFS[:-1]
    }
    shapes = (1024, 1024), (1024,), (1024, 1024), (1024,), (1024, 1024)
    weights = {
        cutoff: TranslatorWeights(*map(torch.randn, shapes)) for cutoff in CUTOFFS[:-1]
    }
    return policy, make_translators(weights, loop.vllm_config)


def runner(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def prompts(count: int, length: int) -> list[list[int]]:
    distinct = count if length < 64 else min(count, DISTINCT)
    rng = np.random.default_rng(length)
    ids = rng.integers(0, VOCABULARY, (distinct, length)).tolist()
    return [ids[n % distinct] for n in range(count)]


def params(max_tokens: int):
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False
    )


def fill(llm, batch: int, context: int) -> list[str]:
    """Prefills requests until all of them decode; their ids."""
    from vllm import TokensPrompt

    engine = llm.llm_engine
    assert not engine.has_unfinished_requests() and llm.reset_prefix_cache()
    names, started = [], set()
    for n, ids in enumerate(prompts(batch, context)):
        prompt = TokensPrompt(prompt_token_ids=ids)
        engine.add_request(f"{n}", prompt, params(LONGEST - context))
        names.append(f"{n}")
        last_distinct = n == batch - 1 or n == DISTINCT - 1
        while last_distinct and len(started) < len(names):
            started |= {output.request_id for output in engine.step()}
    return names


def seconds(llm) -> float:
    """Duration of one step, in which every request decodes one token."""
    start = time.perf_counter()
    llm.llm_engine.step()
    return time.perf_counter() - start


def decode_steps(
    llm, batch: int, context: int, ways=WAYS, rounds=ROUNDS
) -> dict[str, np.ndarray]:
    """Seconds `[rounds]` of a decode step by its way, full depth among them."""
    fill(llm, batch, context)
    times = defaultdict(list)
    for number in range(rounds + 1):
        for name in np.random.default_rng(number).permutation([FULL, *ways]):
            with way(llm, name):
                times[name].append(seconds(llm))
    return {name: np.array(values[1:]) for name, values in times.items()}


def stop(llm, batch: int) -> None:
    llm.llm_engine.abort_request([f"{n}" for n in range(batch)])
    llm.llm_engine.step()


class CostModel:
    """Seconds of a layer, and of its norm and its projection of keys and values, by the
    number of tokens, measured at full depth on the requests that decode."""

    def __init__(self, llm, batch: int, sizes: set[int]):
        engine = llm.llm_engine
        self.layer, self.projection = {}, {}
        running = batch
        for size in sorted(sizes, reverse=True):
            engine.abort_request([f"{n}" for n in range(size, running)])
            running = size
            self.layer[size], norm, total = self._measure(llm)
            self.projection[size] = norm + self._keys_values(llm, size)
            if size == batch:
                self.rest = total - NUM_LAYERS * self.layer[size]

    @staticmethod
    def _measure(llm) -> tuple[float, float, float]:
        """Medians of a layer, its norm, and the whole step."""
        spans = defaultdict(list)
        starts, hooks = {}, []

        def watch(module, name):
            def before(module, args):
                starts[name] = time.perf_counter()

            def after(module, args, output):
                spans[name].append(time.perf_counter() - starts[name])

            hooks.append(module.register_forward_pre_hook(before))
            hooks.append(module.register_forward_hook(after))

        for layer in runner(llm).model.model.layers:
            watch(layer, "layer")
            watch(layer.input_layernorm, "norm")
        with way(llm, FULL):
            eager(llm, True)
            totals = [seconds(llm) for _ in range(5)]
        for hook in hooks:
            hook.remove()
        medians = np.median(spans["layer"]), np.median(spans["norm"])
        return *medians, np.median(totals)

    @staticmethod
    def _keys_values(llm, size: int) -> float:
        """Median of the projection of keys and values."""
        import torch

        spans = []
        states = torch.randn(size, 1024, dtype=getattr(torch, DTYPE))
        for _ in range(3):
            for layer in runner(llm).model.model.layers[CUTOFFS[0] :]:
                project = layer.self_attn.qkv_proj.quant_method.keys_values
                start = time.perf_counter()
                project(states)
                spans.append(time.perf_counter() - start)
        return np.median(spans)

    def full(self, batch: int) -> float:
        return self.rest + NUM_LAYERS * self.layer[batch]

    def staircase(self, counts: list[int]) -> float:
        """Seconds of a step; `counts` tokens exit at each cutoff."""
        batch, total = sum(counts), self.rest
        for layer in range(NUM_LAYERS):
            active = sum(n for n, depth in zip(counts, CUTOFFS) if depth > layer)
            total += self.projection[batch]
            if active:
                total += self.layer[active] - self.projection[active]
        return total


def exits(batch: int) -> list[int]:
    """How many of a batch exit at each cutoff."""
    ends = np.round(np.cumsum([0, *SHARES]) * batch).astype(int)
    return np.diff(ends).tolist()


def ratio(first: np.ndarray, second: np.ndarray) -> str:
    """Median of the ratios of neighbours, and half of their interquartile range."""
    low, middle, high = np.percentile(first / second, [25, 50, 75])
    return f"{middle:.2f} ±{(high - low) / 2:.2f}"


@pytest.mark.parametrize(
    ("batch", "context"),
    [(8, 32), (16, 32), (32, 32), (64, 32), (128, 32), (256, 32), (32, 1024)],
)
def test_decode_steps(llm, tables, batch, context):
    counts = exits(batch)
    rows = tables.setdefault(
        f"Decode steps, {MODE}, {DTYPE}, vocabulary {VOCABULARY}: "
        "times as fast as full depth (model's prediction)",
        [["batch", "context", "full depth, ms", *WAYS]],
    )
    times = decode_steps(llm, batch, context)
    at_least = [sum(counts[n:]) for n in range(len(counts))]
    model = CostModel(llm, batch, {batch, *counts, *at_least} - {0})
    predicted = {
        STAIRCASE: model.staircase(counts),
        EAGER: model.staircase(counts),
        PROBES: model.staircase(counts),
        TRUNCATED: model.staircase([batch * (c == UNIFORM) for c in CUTOFFS]),
        SCORED: model.full(batch),
        FALLBACK: model.full(batch),
    }
    stop(llm, batch)
    rows.append(
        [
            f"{batch}",
            f"{context}",
            f"{np.median(times[FULL]) * 1e3:.1f}",
            *(
                f"{ratio(times[FULL], times[name])} "
                f"({model.full(batch) / predicted[name]:.2f})"
                for name in WAYS
            ),
        ]
    )


@pytest.mark.parametrize("batch", [8, 64])
def test_overhead_where_nothing_is_routed(llm, tables, batch, rounds=60):
    """Steps that fall back: the same layers, and what routing does around them."""
    rows = tables.setdefault(
        f"Decode steps that fall back, {MODE}, {DTYPE}, vocabulary {VOCABULARY}: times "
        "as long as full depth (95 % interval of the median)",
        [["batch", SCORED, FALLBACK]],
    )
    times = decode_steps(llm, batch, 32, (SCORED, FALLBACK), rounds)
    stop(llm, batch)
    cells = []
    for name in (SCORED, FALLBACK):
        ratios = times[name] / times[FULL]
        low, high = bootstrap_median(ratios)
        cells.append(f"{np.median(ratios):.3f} ({low:.3f} to {high:.3f})")
    rows.append([f"{batch}", *cells])


def bootstrap_median(values: np.ndarray) -> tuple[float, float]:
    """95 % interval of the median."""
    drawn = np.random.default_rng(0).choice(values, (2000, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return low, high


@pytest.mark.parametrize(("batch", "context"), [(64, 32), (32, 256)])
def test_whole_calls(llm, tables, batch, context, max_tokens=32, rounds=3):
    """`LLM.generate`, prefill included."""
    from vllm import TokensPrompt

    rows = tables.setdefault(
        f"Whole calls of {max_tokens} tokens, {MODE}, {DTYPE}, vocabulary {VOCABULARY}: "
        "times as fast as full depth",
        [["batch", "context", "full depth, s", *WAYS]],
    )
    requests = [TokensPrompt(prompt_token_ids=ids) for ids in prompts(batch, context)]
    times = defaultdict(list)

    def call() -> float:
        assert llm.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate(requests, params(max_tokens), use_tqdm=False)
        return time.perf_counter() - start

    for _ in range(rounds):
        for name in (FULL, *WAYS):
            with way(llm, name):
                times[name].append(call())
    times = {name: np.array(values) for name, values in times.items()}
    rows.append(
        [
            f"{batch}",
            f"{context}",
            f"{np.median(times[FULL]):.1f}",
            *(ratio(times[FULL], times[name]) for name in WAYS),
        ]
    )
