# SPDX-License-Identifier: Apache-2.0
"""Audits: what routed tokens get is compared with what all layers would have given."""

from itertools import count

import numpy as np
import prometheus_client
import pytest
from depth_cutoffs import Recorded
from depth_cutoffs import engine_options as cutoff_options
from depth_routing import (
    CUTOFFS,
    NUM_LAYERS,
    Request,
    assert_logits,
    counters,
    random_plan,
    routing,
    serve,
)
from scoring import random_ids
from scipy.special import log_softmax
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["deep_llama"].vocab_size
_numbers = count()


@pytest.fixture
def start(engine):
    """Starts an engine of the test's own: only the newest one's counters are there."""

    def start(options=routing, fraction: float = 1.0, **more):
        more |= dict(utio_audit_fraction=fraction, disable_log_stats=False)
        rows = 64 + next(_numbers)
        return engine("deep_llama", **options(max_num_batched_tokens=rows, **more))

    return start


def traffic(seed: int, **options) -> list[Request]:
    """They join and leave; some prompts take two chunks."""
    return [
        Request(
            random_ids(seed + n, VOCABULARY, 1 + 23 * (n % 4)),
            max_tokens=3 + n % 7,
            arrival=n % 3,
            options=options,
        )
        for n in range(10)
    ]


def audited() -> np.ndarray:
    """Tokens, agreeing ones and the sum of divergences of all of its audits."""
    # LLM.get_metrics has integers only.
    names = ("audited_tokens", "audit_agreeing_tokens", "audit_kl_divergence")
    return np.array([sample(f"vllm:utio_{name}_total") for name in names])


def sample(name: str) -> float:
    return sum(
        found.value
        for family in prometheus_client.REGISTRY.collect()
        for found in family.samples
        if found.name == name
    )


def expected(oracle, requests: list[Request], depths: list[list[int]]) -> list[float]:
    """The same by the oracle. The history of a token stays as it was decoded."""
    tokens, agreeing, divergence = 0, 0, 0.0
    for request, own in zip(requests, depths, strict=True):
        for step, depth in enumerate(own):
            if depth == NUM_LAYERS:
                continue
            generated = request.tokens[: step + 2]
            full = [*own[:step], NUM_LAYERS]
            p = log_softmax(oracle.logits(request.prompt, generated, full)[-1])
            q = log_softmax(request.logits[step + 1])
            tokens += 1
            agreeing += p.argmax() == q.argmax()
            divergence += np.sum(np.exp(p) * (p - q))
    return [tokens, agreeing, divergence]


def test_it_finds_what_the_oracle_finds(start, depth_oracle):
    """And leaves what it audits as it is."""
    llm = start()
    oracle = depth_oracle("deep_llama")
    before = audited()
    requests = serve(llm, traffic(700), random_plan(7))
    found = audited() - before
    assert_logits(oracle, requests)
    wanted = expected(oracle, requests, [request.depths for request in requests])
    assert found == pytest.approx(wanted, rel=1e-4)
    assert 0 < found[1] < found[0]


def test_tokens_that_leave_for_a_ceiling_are_not_audited(start):
    llm = start()
    before = audited()
    requests = traffic(720)
    for request in requests[::2]:
        request.options = dict(max_depth=2)
    serve(llm, requests, lambda number, step: 4)
    free = [request for request in requests if not request.options]
    assert (audited() - before)[0] == sum(len(r.tokens) - 1 for r in free)


def test_tokens_chosen_at_a_cutoff(start, depth_oracle):
    """Their order is known on the device only. All of them run in one batch."""
    llm = start(cutoff_options)
    Recorded.calls = []
    before = audited()
    requests = [Request(random_ids(740 + n, VOCABULARY, 7), 2) for n in range(8)]
    serve(llm, requests)
    means = [request.output.outputs[0].mean_decode_depth for request in requests]
    depths = [[int(mean)] for mean in means]
    assert {depth for (depth,) in depths} == set(CUTOFFS)
    found = audited() - before
    wanted = expected(depth_oracle("deep_llama"), requests, depths)
    assert found == pytest.approx(wanted, rel=1e-4)


def test_a_fraction_of_the_tokens(start):
    llm = start(fraction=0.25)
    before = audited()
    requests = [Request(random_ids(760 + n, VOCABULARY, 7), 201) for n in range(4)]
    serve(llm, requests, lambda number, step: 2)
    # 200 steps; four standard deviations are 12 %.
    assert 0.13 < (audited() - before)[0] / 800 < 0.37


def test_routing_stops_when_too_few_agree(start, depth_oracle):
    """What requests ask for themselves still holds, and the engine goes on."""
    llm = start(utio_audit_min_agreement=0.999)
    requests = [Request(random_ids(780 + n, VOCABULARY, 7), 41) for n in range(8)]
    before = counters(llm)
    serve(llm, requests, lambda number, step: 2)
    stopped = counters(llm) - before
    # 256 tokens in steps of eight, and the step in which what they say is read.
    assert stopped["routed_steps", None] == 256 // 8 + 1
    assert stopped["fallback_steps", "audit"] == 40 - 256 // 8 - 1
    after = [Request([5, 6, 7], 5), Request([5, 6, 7], 5, options=dict(max_depth=2))]
    serve(llm, after, lambda number, step: 4)
    means = [request.output.outputs[0].mean_decode_depth for request in after]
    assert means == [NUM_LAYERS, 2]
    oracle = depth_oracle("deep_llama")
    assert_logits(oracle, after[:1], NUM_LAYERS)
    assert_logits(oracle, after[1:], 2)


def test_it_goes_on_when_enough_agree(start):
    llm = start(utio_audit_min_agreement=0.001)
    before = counters(llm)
    requests = [Request(random_ids(800 + n, VOCABULARY, 7), 81) for n in range(8)]
    serve(llm, requests, lambda number, step: 4)
    assert (counters(llm) - before)["routed_steps", None] == 80


def test_it_looks_at_raw_logits(start):
    """Sampling parameters change what is drawn, not what is audited."""
    llm = start()
    found = []
    for more in ({}, dict(logit_bias={7: 50.0})):
        before = audited()
        request = Request([5, 6, 7], 2, options=dict(allowed_token_ids=[9]) | more)
        serve(llm, [request], lambda number, step: 2)
        found.append(list(audited() - before))
    assert found[0] == found[1]
    assert found[0][0] == 1
