# SPDX-License-Identifier: Apache-2.0
"""Routing with compiled segments: a trace must hold for every plan that comes later.

Most tests trace with Dynamo and run the graphs as they are, which shows what a trace
has taken for constant; one compiles them as users do.
"""

import shutil

import pytest
from compiling import compiling
from depth_routing import (
    CUTOFFS,
    NUM_LAYERS,
    Request,
    assert_logits,
    model_runner,
    poison_cache,
    random_plan,
    routing,
    serve,
)
from scoring import random_ids
from depth_cutoffs import engine_options as cutoff_options
from depth_cutoffs import requests as cutoff_requests
from depth_cutoffs import routed, save_probes  # noqa: F401
from tiny_models import CONFIGS

FAMILIES = (
    "deep_llama",
    "deep_mistral",
    "deep_qwen2",
    "deep_qwen3",
    "deep_qwen3_moe",
    "deep_gemma3",
    "deep_opt",
)
SEGMENTS = len(CUTOFFS)


@pytest.fixture(scope="module")
def compiled(engine, tmp_path_factory):
    """The compiled engine of a family."""
    folder = tmp_path_factory.mktemp("cache")

    def start(family: str, backend: str = "eager", **options):
        rows = {"eager": 64, "inductor": 66}[backend]  # engines are shared by options
        options |= dict(enforce_eager=False, max_num_batched_tokens=rows)
        with compiling(folder, backend):
            return engine(family, **routing(**options))

    return start


def traffic(seed: int, family: str = "deep_llama") -> list[Request]:
    """They join and leave, some with a ceiling; some prompts take two chunks."""
    ceilings = [None, 2, None, 4, NUM_LAYERS]
    vocabulary = CONFIGS[family].vocab_size
    requests = [
        Request(
            random_ids(seed + n, vocabulary, 1 + 23 * (n % 4)),
            max_tokens=3 + n % 7,
            arrival=n % 5,
        )
        for n in range(10)
    ]
    for n, request in enumerate(requests):
        if ceilings[n % 5] is not None:
            request.options = dict(max_depth=ceilings[n % 5])
    return requests


def assert_right(llm, oracle, requests: list[Request], seed: int) -> None:
    plan = random_plan(seed)
    serve(llm, requests, plan)
    for number, request in enumerate(requests):
        ceiling = request.options.get("max_depth", NUM_LAYERS)
        depths = [plan(number, step) for step in range(len(request.tokens))]
        request.depths = [min(depth, ceiling) for depth in depths]
        if request.options.get("max_depth") == NUM_LAYERS:
            request.depths = [NUM_LAYERS] * len(depths)  # never routed
    assert_logits(oracle, requests)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_depths(compiled, depth_oracle, runner, family):
    """The first routed step may have as many tokens that leave as that go on."""
    if runner == "v2" and family != "deep_llama":
        pytest.skip("both runners trace the same code of a model")
    llm, oracle = compiled(family), depth_oracle(family)
    halves = [
        Request(random_ids(n, CONFIGS[family].vocab_size, 9), 3) for n in range(4)
    ]
    serve(llm, halves, lambda request, step: 2 if request % 2 else NUM_LAYERS)
    assert_logits(oracle, halves)
    for seed in (1, 2):
        assert_right(llm, oracle, traffic(20 * seed, family), seed)


@pytest.mark.parametrize("depth", CUTOFFS)
def test_batches_of_one_depth(compiled, depth_oracle, depth):
    """One token, then eight; at the first cutoff, the others have no row that runs."""
    llm, oracle = compiled("deep_llama"), depth_oracle("deep_llama")
    for size in (1, 8):
        requests = [Request(random_ids(60 + n, 512, 9), 5) for n in range(size)]
        serve(llm, requests, lambda request, step: depth)
        assert_logits(oracle, requests)


def test_preemption(compiled, depth_oracle):
    requests = [Request(random_ids(90 + n, 512, 20), 8) for n in range(4)]
    serve(compiled("deep_llama"), requests, random_plan(4), interrupt_at=5)
    assert any(request.preempted for request in requests)
    assert_logits(depth_oracle("deep_llama"), requests)


def test_no_unwritten_slot_is_read(compiled, depth_oracle):
    llm = compiled("deep_llama")
    poison_cache(llm)
    for seed in (5, 6):  # the second time in the blocks of the first
        assert_right(llm, depth_oracle("deep_llama"), traffic(100 + seed), seed)


def test_audits_run_compiled_too(compiled, depth_oracle):
    llm = compiled("deep_llama", utio_audit_fraction=1.0)
    assert_right(llm, depth_oracle("deep_llama"), traffic(120), 7)


def test_probes_and_translators(
    engine, depth_oracle, routed, tmp_path_factory, tmp_path
):
    """What users of a calibration run: tokens are chosen between graphs."""
    file = save_probes(tmp_path, CONFIGS["deep_llama"].hidden_size, translators=True)
    options = cutoff_options(
        utio_calibration=file, enforce_eager=False, max_num_batched_tokens=64
    )
    del options["utio_policy"]
    with compiling(tmp_path_factory.mktemp("cache"), "eager"):
        llm = engine("deep_llama", **options)
    oracle = depth_oracle("deep_llama", calibration=file)
    for _ in range(2):
        served = routed(llm, cutoff_requests())
        assert_logits(oracle, served)
        assert {depth for r in served for depth in r.depths} == set(CUTOFFS)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8])
def test_every_batch_size(compiled, depth_oracle, batch):
    llm, oracle = compiled("deep_llama"), depth_oracle("deep_llama")
    requests = [Request(random_ids(200 + n, 512, 3), 3) for n in range(batch)]
    serve(llm, requests, random_plan(batch))
    assert_logits(oracle, requests)


def test_full_depth_afterwards(compiled):
    """Routed steps leave nothing behind: not a bit of what comes later changes."""
    llm = compiled("deep_llama")

    def alone() -> list:
        assert llm.reset_prefix_cache()
        asked = [Request(random_ids(300 + n, 512, 20), 5) for n in range(4)]
        for request in asked:
            request.options = dict(max_depth=NUM_LAYERS)
        return [request.logits for request in serve(llm, asked)]

    before = alone()
    serve(llm, traffic(180), random_plan(11))
    for one, other in zip(before, alone(), strict=True):
        assert (one == other).all()


def test_routed_and_full_steps_run_graphs(compiled):
    """Nothing runs a layer's own forward while rows run it. Where none does, it ends
    with the keys."""
    llm = compiled("deep_llama")
    serve(llm, [Request([5, 6, 7], 4)], lambda request, step: 2)  # traces, if need be
    layers = model_runner(llm).model.model.layers
    called = []
    hooks = [
        hook
        for n, layer in enumerate(layers)
        for hook in (
            layer.register_forward_pre_hook(lambda *_, n=n: called.append(n)),
            layer.mlp.register_forward_pre_hook(lambda *_: called.append("MLP")),
        )
    ]
    try:
        for depth in CUTOFFS:
            called.clear()
            serve(llm, [Request([5, 6, 7], 4)], lambda request, step: depth)
            # Three decode steps of one token.
            assert called == [*range(depth, NUM_LAYERS)] * 3
            called.clear()
            requests = [Request([5, 6, 7], 4) for _ in range(2)]
            serve(llm, requests, lambda request, step: depth if request else NUM_LAYERS)
            assert not called
    finally:
        for hook in hooks:
            hook.remove()


def test_a_plan_that_the_model_ignores_is_an_error(engine, monkeypatch):
    """As a graph that was traced without it would."""
    llm = engine("deep_llama", **routing(max_num_batched_tokens=63))
    model = model_runner(llm).model.model
    monkeypatch.setattr(model, "depth_loop", None)
    with pytest.raises(RuntimeError, match="without its depth plan"):
        serve(llm, [Request([5, 6, 7], 4)], lambda request, step: 2)


@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor wants g++")
def test_as_users_compile_it(compiled, depth_oracle, runner):
    """And again from what the first engine has stored, a trace for each segment."""
    if runner == "v2":
        pytest.skip("both runners compile the same code of a model")
    from vllm.compilation.counter import compilation_counter as counter

    oracle = depth_oracle("deep_llama")
    compiles, loads = counter.num_aot_compiles, counter.num_aot_artifacts_loaded
    first = compiled("deep_llama", backend="inductor")
    assert counter.num_aot_compiles - compiles == 1 + SEGMENTS
    assert_right(first, oracle, traffic(140), 8)
    second = compiled("deep_llama", backend="inductor", seed=1)
    assert counter.num_aot_artifacts_loaded - loads == 1 + SEGMENTS
    assert counter.num_aot_compiles - compiles == 1 + SEGMENTS
    assert_right(second, oracle, traffic(160), 9)
    # Nothing was compiled after the start.
    assert counter.num_aot_compiles - compiles == 1 + SEGMENTS


@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor wants g++")
def test_norms_that_are_last_in_a_segment(compiled, depth_oracle, runner):
    """Their weights ask for gradients, which a trace must not know."""
    if runner == "v2":
        pytest.skip("both runners trace the same code of a model")
    llm = compiled("deep_opt_post", backend="inductor")
    assert_right(llm, depth_oracle("deep_opt_post"), traffic(220, "deep_opt_post"), 12)
