# SPDX-License-Identifier: Apache-2.0
"""The gate: routing happens where it was measured to be faster."""

import time
from itertools import count

import numpy as np
import pytest
from depth_routing import (
    NUM_LAYERS,
    Request,
    counters,
    logits_options,
    model_runner,
    serve,
)
from scoring import random_ids
from tiny_models import CONFIGS
from vllm.v1.worker.depth.gate import Decision

VOCABULARY = CONFIGS["deep_llama"].vocab_size
TRIAL = 14  # steps of which every other one is routed
PAUSE = 0.15
"""Seconds; long beside a step of the tiny model, also on a busy machine."""
_numbers = count()


class AllLeave:
    """All tokens leave at the first cutoff, after a pause."""

    pause = 0.0

    def __init__(self, config):
        self.cutoffs = config.cutoffs

    def assign(self, scores, req_ids):
        time.sleep(self.pause)
        counts = [len(req_ids)] + [0] * (len(self.cutoffs) - 1)
        return scores.argsort(), counts


@pytest.fixture
def llm(engine):
    """An engine of the test's own, for what a gate knows stays with it."""
    return engine(
        "deep_llama",
        enable_utio=True,
        utio_bucket_cutoffs=(2, 4),
        utio_min_batch_size=1,
        utio_policy=f"{__name__}.AllLeave",
        disable_log_stats=False,
        **logits_options(max_num_batched_tokens=64 + next(_numbers)),
    )


@pytest.fixture
def slow_last_layer(llm):
    """Makes steps that run all layers slower."""

    def pause(module, args):
        if args[0].shape[0]:
            time.sleep(PAUSE)

    layer = model_runner(llm).model.model.layers[-1]
    hook = layer.mlp.register_forward_pre_hook(pause)
    yield
    hook.remove()


def decode(llm, steps: int, size: int = 4):
    """Counts what so many steps of one batch are counted as."""
    before = counters(llm)
    requests = [
        Request(random_ids(900 + n, VOCABULARY, 5), steps + 1) for n in range(size)
    ]
    serve(llm, requests)
    found = counters(llm)
    found.subtract(before)
    return requests, {key: value for key, value in found.items() if value}


def speedups(llm) -> dict[str, float]:
    return {
        metric.labels["batch_size"]: metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:utio_speedup"
    }


def test_it_routes_where_that_is_faster(llm, slow_last_layer):
    requests, found = decode(llm, 40)
    assert found["fallback_steps", "gate_trial"] == TRIAL // 2
    assert found["routed_steps", None] == 40 - TRIAL // 2
    assert ("fallback_steps", "gate") not in found
    assert list(speedups(llm)) == ["4"]
    assert speedups(llm)["4"] > 1.2
    depths = [request.output.outputs[0].mean_decode_depth for request in requests]
    mean = (2 * (40 - TRIAL // 2) + NUM_LAYERS * TRIAL // 2) / 40
    assert depths == pytest.approx([mean] * 4)


def test_it_does_not_where_that_is_slower(llm, monkeypatch):
    monkeypatch.setattr(AllLeave, "pause", PAUSE)
    _, found = decode(llm, 40)
    assert found["routed_steps", None] == TRIAL // 2
    assert found["fallback_steps", "gate_trial"] == TRIAL // 2
    assert found["fallback_steps", "gate"] == 40 - TRIAL
    assert speedups(llm)["4"] < 0.8


def test_each_range_of_batch_sizes_has_its_trial(llm, slow_last_layer):
    decode(llm, TRIAL, size=4)
    _, found = decode(llm, TRIAL, size=2)
    assert found["fallback_steps", "gate_trial"] == TRIAL // 2
    _, found = decode(llm, TRIAL, size=3)
    assert found["routed_steps", None] == TRIAL
    assert set(speedups(llm)) == {"2", "4"}


def test_steps_with_ceilings_are_measured_apart(llm):
    """They hide part of what it is for."""
    for ceiling in (None, 4):
        request = Request([5, 6, 7], 1 + TRIAL, options=dict(max_depth=ceiling))
        serve(llm, [request])
        mean = (2 + (ceiling or NUM_LAYERS)) / 2  # a trial: every other step
        assert request.output.outputs[0].mean_decode_depth == pytest.approx(mean)


def test_a_server_that_is_always_full(llm, monkeypatch):
    """Prefills in every step do not keep it from measuring."""
    monkeypatch.setattr(AllLeave, "pause", PAUSE)
    steps = 30
    budget = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    before = counters(llm)
    decodes = [Request(random_ids(n, VOCABULARY, 5), steps) for n in range(4)]
    prompts = [Request(random_ids(90 + n, VOCABULARY, budget), 1) for n in range(steps)]
    serve(llm, [*decodes, *prompts])
    found = counters(llm) - before
    assert found["fallback_steps", "gate_trial"] == TRIAL // 2
    assert found["fallback_steps", "gate"] > 5
    assert speedups(llm)["4"] < 0.9


def test_exempt_requests_do_not_count(llm):
    """Trials are of the tokens that may be routed."""
    exempt = [
        Request(
            random_ids(n, VOCABULARY, 5), 1 + TRIAL, options=dict(max_depth=NUM_LAYERS)
        )
        for n in range(7)
    ]
    serve(llm, [*exempt, Request([5, 6, 7], 1 + TRIAL)])
    assert list(speedups(llm)) == ["1"]


def test_ceilings_hold_where_it_does_not_route(llm):
    gate = model_runner(llm).depth_router.gate
    gate.decide = lambda *args: Decision("gate")
    requests = [Request([5, 6, 7], 6, options=dict(max_depth=n)) for n in (2, 4, None)]
    serve(llm, requests)
    depths = [request.output.outputs[0].mean_decode_depth for request in requests]
    assert depths == [2, 4, NUM_LAYERS]


def test_steps_are_right_whatever_it_does(llm, depth_oracle):
    """A trial's full steps and routed ones alternate as the gate says."""
    (request,) = [Request(random_ids(950, VOCABULARY, 20), 1 + TRIAL)]
    serve(llm, [request])
    depths = [2 if step % 4 in (0, 3) else NUM_LAYERS for step in range(TRIAL)]
    logits = depth_oracle("deep_llama").logits(request.prompt, request.tokens, depths)
    np.testing.assert_allclose(request.logits, logits, atol=1e-4)
