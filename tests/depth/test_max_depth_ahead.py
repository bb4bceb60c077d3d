# SPDX-License-Identifier: Apache-2.0
"""`SamplingParams.max_depth` with asynchronous scheduling, the default on GPUs."""

from depth_routing import (
    CUTOFFS,
    NUM_LAYERS,
    Request,
    assert_logits,
    logits_options,
    serve,
)
from scheduled_ahead import ahead, nothing_waits  # noqa: F401
from scoring import random_ids
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["deep_llama"].vocab_size


def test_many_depths_in_a_batch(ahead, depth_oracle):
    """Prompts that take several chunks, requests that wait for a place."""
    options = dict(
        enable_utio=True, utio_bucket_cutoffs=CUTOFFS[:-1], utio_min_batch_size=1000
    )
    llm = ahead("deep_llama", **logits_options(**options))
    depths = [2, NUM_LAYERS, 4, 2, 2, 4, NUM_LAYERS, NUM_LAYERS, 4, 2]
    requests = [
        Request(
            random_ids(n, VOCABULARY, 3 + 11 * (n % 7)),
            max_tokens=3 + n % 5,
            arrival=n,
            options=dict(max_depth=depth),
        )
        for n, depth in enumerate(depths)
    ]
    with nothing_waits():
        serve(llm, requests)
    for request, depth in zip(requests, depths):
        assert_logits(depth_oracle("deep_llama"), [request], depth)
