# SPDX-License-Identifier: Apache-2.0
"""What an engine with depth routing says of it: outputs and counters."""

import numpy as np
import pytest
from depth_routing import (
    CUTOFFS,
    NUM_LAYERS,
    Request,
    counters,
    random_plan,
    routing,
    serve,
)
from scoring import params, prompt, random_ids, run
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["deep_llama"].vocab_size


def traffic() -> list[Request]:
    """Some generate one token only, which is no decode token's."""
    return [
        Request(random_ids(n, VOCABULARY, 3 + 20 * (n % 4)), 1 + n % 7, arrival=n % 5)
        for n in range(12)
    ]


def test_the_mean_depth_of_each_request(engine):
    llm = engine("deep_llama", **routing())
    for request in serve(llm, traffic(), random_plan(1)):
        assert len(request.depths) == request.max_tokens - 1
        mean = request.output.outputs[0].mean_decode_depth
        if request.depths:
            assert mean == pytest.approx(np.mean(request.depths))
        else:
            assert mean is None


def test_ceilings_and_full_depth_count(engine):
    llm = engine("deep_llama", **routing())
    requests = [
        Request([5, 6, 7], 4, options={} if d is None else dict(max_depth=d))
        for d in (2, 4, 6, None)
    ]
    serve(llm, requests)
    means = [request.output.outputs[0].mean_decode_depth for request in requests]
    assert means == [2, 4, 6, 6]


def test_without_routing_there_is_none(engine):
    (output,) = run(engine("deep_llama"), [prompt([5, 6, 7])], params(4))
    assert output.outputs[0].mean_decode_depth is None


def test_the_counters(engine):
    llm = engine(
        "deep_llama", **routing(disable_log_stats=False, utio_min_batch_size=3)
    )
    before = counters(llm)
    requests = [Request(random_ids(n, VOCABULARY, 9), 6) for n in range(4)]
    serve(llm, requests, lambda number, step: CUTOFFS[min(number, 2)])
    # Five steps of four decode tokens.
    counted = counters(llm) - before
    assert counted == {
        ("decode_tokens", "2"): 5,
        ("decode_tokens", "4"): 5,
        ("decode_tokens", "6"): 10,
        ("layers", None): 5 * (2 + 4 + 6 + 6),
        ("routed_steps", None): 5,
    }
    before = counters(llm)
    serve(llm, requests[:2], lambda number, step: 2)
    serve(llm, requests[:3], lambda number, step: NUM_LAYERS)
    counted = counters(llm) - before
    assert counted == {
        ("decode_tokens", "6"): 5 * 2 + 5 * 3,
        ("layers", None): 6 * (5 * 2 + 5 * 3),
        ("fallback_steps", "small_batch"): 5,
        ("fallback_steps", "one_bucket"): 5,
    }
