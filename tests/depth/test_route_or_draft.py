# SPDX-License-Identifier: Apache-2.0
"""An engine that drafts and routes: in each step whichever is chosen, both exactly.

What the gate chooses depends on time, so most tests choose in its place.
"""

import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from compiling import compiling
from depth_routing import (
    CACHES,
    NUM_LAYERS,
    Planted,
    Request,
    callers_id,
    counters,
    TOLERANCE,
    expected_logits,
    logits_options,
    model_runner,
    poison_cache,
    random_plan,
    routing,
    serve,
)
from early_exits import (
    VOCABULARY,
    assert_drafts,
    assert_greedy,
    calibration,  # noqa: F401
    generate,
    options,
    watched,
)
from scoring import params, random_ids

from vllm.v1.worker.depth.draft_gate import (
    DROPPED_ROUNDS,
    ROUTED,
    TRIAL_ROUNDS,
    DraftGate,
    Way,
)


def test_prompts_of_one_token(engine, oracle):
    """Beside requests that decode the scheduler fills them up with drafts that say nothing,
    also where the gate is not asked, and the policy takes scores of each step."""
    llm = engine(
        "deep_llama",
        speculative_config=options(2, 2, draft_gate=True),
        enable_utio=True,
        utio_bucket_cutoffs=(2, 4),
        utio_min_batch_size=2,
        max_num_seqs=5,
        max_num_batched_tokens=64,
        block_size=32,
    )
    rng = np.random.default_rng(0)
    prompts = [random_ids(n, VOCABULARY, 1 if n % 2 else 33) for n in range(24)]
    lengths = rng.integers(5, 14, len(prompts)).tolist()
    for _ in range(2):  # the second time all but a token of the longer ones is cached
        sampling = [params(length, max_depth=NUM_LAYERS) for length in lengths]
        completions = generate(llm, prompts, sampling)
        for ids, completion, length in zip(prompts, completions, lengths):
            assert_greedy(oracle("deep_llama"), ids, completion, length)


def start(engine, family="deep_llama", drafts=None, **others):
    """An engine whose routed tokens get planted depths, and that drafts two tokens."""
    speculative = options(2, 2, draft_gate=True, **drafts or {})
    return engine(
        family,
        speculative_config=speculative,
        disable_log_stats=False,
        **routing(utio_gate=True, **others),
    )


@contextmanager
def choosing(llm, choose) -> Iterator[list[Way]]:
    """Chooses in the gate's place (reaches into the engine's private parts)."""
    router, chosen = model_runner(llm).depth_router, []

    class Gate(DraftGate):
        def choose(self, req_ids, num_sampled, lens, ways):
            self.decided = True
            chosen.append(choose(ways))
            return chosen[-1]

    gate, router.gate = router.gate, Gate()
    try:
        yield chosen
    finally:
        router.gate = gate


@contextmanager
def depths(llm) -> Iterator[dict[str, list[int]]]:
    """By request id, the layers that each of its decode tokens ran.

    A step in which the policy was asked gave what was planted, any other one all
    layers, to all tokens that it returned; neither more than the request's max_depth.
    """
    engine = llm.llm_engine
    live = engine.engine_core.engine_core.scheduler.requests
    ran, step = defaultdict(list), engine.step

    def watching():
        before = {
            request_id: (request, request.num_tokens)
            for request_id, request in live.items()
            # Others prefill: what they sample then is no decode's.
            if request.num_computed_tokens == request.num_tokens - 1
            and request.num_output_tokens
        }
        planted = {name: len(given) for name, given in Planted.given.items()}
        outputs = step()
        for request_id, (request, num_tokens) in before.items():
            name, num_new = callers_id(request_id), request.num_tokens - num_tokens
            given = Planted.given[name][planted.get(name, 0) :]
            most = request.sampling_params.max_depth or NUM_LAYERS
            ran[name] += [min(*given, most, NUM_LAYERS)] * num_new
            assert num_new == 1 or not given
        return outputs

    engine.step = watching
    try:
        yield ran
    finally:
        del engine.step


def assert_exact(oracle, requests, ran) -> None:
    """Asserts every logit of every token, and what is reported of the depths."""
    for request in requests:
        own = ran[request.output.request_id]
        prefills = {0, *request.preempted}
        assert len(own) == len(request.tokens) - len(prefills)
        difference = abs(request.logits - expected_logits(oracle, request, own)).max()
        assert difference <= TOLERANCE
        assert request.output.outputs[0].mean_decode_depth == pytest.approx(np.mean(own))


def by_turns(seed: int):
    """Chooses at random, the same for the same seed."""
    rng = np.random.default_rng(seed)
    return lambda ways: ways[rng.integers(len(ways))]


def some_requests(seed: int, count: int = 6) -> list[Request]:
    """Requests that come at different times, with chunked prompts among them."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            random_ids(40 * seed + n, VOCABULARY, int(rng.integers(3, 100))),
            max_tokens=int(rng.integers(10, 30)),
            arrival=int(rng.integers(0, 8)),
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("family", CACHES)
def test_every_token_is_of_its_depth(engine, depth_oracle, family):
    """Steps of all kinds by turns: each leaves to the next ones what it ought to."""
    llm = start(engine, family)
    poison_cache(llm)
    requests = some_requests(1)
    with choosing(llm, by_turns(1)) as chosen, depths(llm) as ran, watched(llm) as drafted:
        serve(llm, requests, random_plan(1))
    assert_exact(depth_oracle(family), requests, ran)
    assert {*chosen} == {Way(0), ROUTED, Way(1, 2), Way(2, 2)}
    assert drafted.counts and drafted.resumed
    assert {depth for given in ran.values() for depth in given} == {2, 4, NUM_LAYERS}


def assert_right(llm, oracle, seed: int) -> None:
    """Of an engine whose only early cutoff is where it drafts."""
    requests = some_requests(seed)
    with choosing(llm, by_turns(seed)), depths(llm) as ran, watched(llm) as drafted:
        serve(llm, requests, random_plan(seed, (2, NUM_LAYERS)))
    assert_exact(oracle, requests, ran)
    assert drafted.resumed
    assert {depth for given in ran.values() for depth in given} == {2, NUM_LAYERS}


def test_compiled(engine, depth_oracle, tmp_path):
    """The same layers, from the exit on, are traced with exited rows and without."""
    with compiling(tmp_path, "eager"):
        llm = start(engine, utio_bucket_cutoffs=(2,), enforce_eager=False)
    assert_right(llm, depth_oracle("deep_llama"), 6)


@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor wants g++")
def test_after_an_engine_that_only_drafts(engine, oracle, depth_oracle, runner, tmp_path):
    """Both as users compile them. The first one's graph of the layers from the exit on,
    which is kept, takes no exited rows."""
    if runner == "v2":
        pytest.skip("both runners compile the same code")
    compiled = dict(enforce_eager=False, max_num_batched_tokens=66)
    with compiling(tmp_path, "inductor"):
        first = engine(
            "deep_llama",
            speculative_config=options(2, 2, draft_gate=True),
            disable_log_stats=False,
            **logits_options(**compiled),
        )
        llm = start(engine, utio_bucket_cutoffs=(2,), **compiled)
    with choosing(first, by_turns(5)):
        assert_drafts(first, oracle("deep_llama"), 5)
    assert_right(llm, depth_oracle("deep_llama"), 7)


def test_with_probes_and_lookup(engine, depth_oracle, calibration):
    """Some requests of a step draft, others do not, and some look drafts up."""
    window = dict(prompt_lookup_max=2, prompt_lookup_min=1)
    llm = start(engine, drafts=dict(calibration=calibration, **window))
    requests = some_requests(2)
    for request in requests[:3]:
        request.prompt = request.prompt[:5] * 4
    with choosing(llm, by_turns(2)), depths(llm) as ran, watched(llm) as drafted:
        serve(llm, requests, random_plan(2))
    assert_exact(depth_oracle("deep_llama"), requests, ran)
    assert drafted.looked_up and drafted.counts


def test_max_depth_holds_beside_drafts(engine, depth_oracle):
    """Requests of fewer layers draft nothing. Those of all layers are never routed."""
    llm = start(engine)
    requests = some_requests(3)
    for request, most in zip(requests, (2, 4, NUM_LAYERS, NUM_LAYERS)):
        request.options["max_depth"] = most
    with choosing(llm, by_turns(3)), depths(llm) as ran, watched(llm) as drafted:
        serve(llm, requests, random_plan(3))
    assert_exact(depth_oracle("deep_llama"), requests, ran)
    assert drafted.counts
    for n, most in enumerate((2, 4, NUM_LAYERS, NUM_LAYERS)):
        own = ran[requests[n].output.request_id]
        assert max(own) <= most and (most < NUM_LAYERS or min(own) == most)


def test_preempted_requests(engine, depth_oracle):
    llm = start(engine)
    requests = some_requests(4)
    with choosing(llm, by_turns(4)), depths(llm) as ran:
        serve(llm, requests, random_plan(4), interrupt_at=12)
    assert any(request.preempted - {0} for request in requests)
    assert_exact(depth_oracle("deep_llama"), requests, ran)


def test_metrics(engine):
    llm = start(engine, max_num_seqs=8)  # the newest engine is the one that counts
    requests = [Request(random_ids(70 + n, VOCABULARY, 9), 20) for n in range(4)]
    before = counters(llm)
    with choosing(llm, by_turns(5)) as chosen, depths(llm) as ran:
        serve(llm, requests, lambda request, step: 2)
    found = counters(llm)
    found.subtract(before)
    routed = sum(given.count(2) for given in ran.values())
    assert found["decode_tokens", "2"] == routed > 0
    # A step is counted as a token a request, however many drafts it has accepted.
    verified = found["decode_tokens", str(NUM_LAYERS)]
    assert 0 < verified < sum(given.count(NUM_LAYERS) for given in ran.values())
    kinds = Counter(chosen)
    assert abs(found["routed_steps", None] - kinds[ROUTED]) <= 1
    assert found["fallback_steps", "drafts"] > 0 and found["fallback_steps", "gate"] > 0


@pytest.mark.parametrize(
    "seconds, best",
    [
        ({Way(0): 9, ROUTED: 1, Way(1, 2): 9, Way(2, 2): 9}, ROUTED),
        ({Way(0): 9, ROUTED: 9, Way(1, 2): 9, Way(2, 2): 1}, Way(2, 2)),
        ({Way(0): 1, ROUTED: 0.99, Way(1, 2): 9, Way(2, 2): 9}, Way(0)),
    ],
    ids=["routing", "drafting", "neither: routing wins too little"],
)
def test_the_gate_decides_between_all(engine, runner, seconds, best):
    """By a clock of the test's, after a trial of each."""
    if runner == "v2" and best != ROUTED:
        pytest.skip("both runners ask the same gate")
    llm = start(engine, max_model_len=512)
    gate = model_runner(llm).depth_router.gate
    gate.sizes, gate.round, gate.speedup = {}, None, None
    chosen, time = [], 0.0

    def now() -> float:
        nonlocal time
        if gate.round is not None:
            way = gate.round.size.ways[gate.round.way]
            chosen.append(way)
            time += seconds[way]
        return time

    gate._now = now
    before = counters(llm)
    serve(llm, [Request([5, 6, 7], 300)], lambda request, step: 2)
    trial = 4 * (DROPPED_ROUNDS + TRIAL_ROUNDS)
    assert Counter(chosen[:trial]) == dict.fromkeys(seconds, trial // 4)
    assert {*chosen[trial : trial + 30]} == {best}
    found = counters(llm)
    found.subtract(before)
    assert abs(found["routed_steps", None] - chosen.count(ROUTED)) <= 1
    (speedup,) = [m.value for m in llm.get_metrics() if m.name == "vllm:utio_speedup"]
    assert speedup == pytest.approx(seconds[Way(0)] / seconds[ROUTED])


def test_small_batches_are_not_routed(engine):
    llm = start(engine, utio_min_batch_size=3)
    with choosing(llm, lambda ways: ways[0]):
        serve(llm, [Request([5, 6, 7], 8)] * 1)
        gate = model_runner(llm).depth_router
        assert gate.ways(2) == (Way(0), Way(1, 2), Way(2, 2))
        serve(llm, [Request([5, 6, 7 + n], 8) for n in range(3)])
        assert gate.ways(2) == (Way(0), ROUTED, Way(1, 2), Way(2, 2))


@pytest.mark.parametrize("missing", ["draft_gate", "utio_gate"])
def test_without_a_gate_it_is_refused(engine, missing):
    others = {"utio_gate": False} if missing == "utio_gate" else {"utio_gate": True}
    speculative = options(3, 2, draft_gate=missing != "draft_gate")
    with pytest.raises(ValueError, match="only with --utio-gate and draft_gate"):
        engine("deep_llama", speculative_config=speculative, **routing(**others))
