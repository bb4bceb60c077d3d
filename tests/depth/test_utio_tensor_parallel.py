# SPDX-License-Identifier: Apache-2.0
"""Routing by depth with the model in two processes, which must take the same plan."""

import pytest
from depth_routing import CUTOFFS, Request, assert_logits, logits_options, serve
from early_exits import options
from scoring import random_ids
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["deep_llama"].vocab_size


OPTIONS = dict(
    enable_utio=True,
    utio_bucket_cutoffs=CUTOFFS[:-1],
    utio_bucket_shares=(0.375, 0.25, 0.375),
    utio_min_batch_size=8,
)


@pytest.fixture
def llm(tensor_parallel_engine):
    """Routes three of eight at 2, two at 4, and audits; ceilings apply as well."""
    options = OPTIONS | dict(utio_gate=False, utio_audit_fraction=1.0)
    return tensor_parallel_engine("deep_llama", **options, **logits_options())


@pytest.fixture
def oracle(depth_oracle):
    return depth_oracle("deep_llama")


def test_ceilings(llm, oracle):
    """Fewer requests than are routed by their scores."""
    depths = [2, 6, None, 4, 2, 4]
    lengths = [1, 70, 33, 5, 32, 64]  # in chunks of 64
    requests = [
        Request(
            random_ids(n, VOCABULARY, length),
            options={} if depth is None else dict(max_depth=depth),
        )
        for n, (length, depth) in enumerate(zip(lengths, depths))
    ]
    serve(llm, requests)
    for depth, request in zip(depths, requests):
        assert_logits(oracle, [request], depth or CUTOFFS[-1])


def test_scores(llm, oracle):
    """The one decode token of each request tells where it left."""
    requests = [
        Request(random_ids(20 + n, VOCABULARY, 5 + n % 3), max_tokens=2)
        for n in range(8)  # which prefill in one step
    ]
    serve(llm, requests)
    depths = [served.output.outputs[0].mean_decode_depth for served in requests]
    for depth, request in zip(depths, requests):
        assert_logits(oracle, [request], int(depth))
    assert sorted(depths) == [2, 2, 2, 4, 4, 6, 6, 6]


def test_both_processes_conclude_the_same_of_a_trial(runner, tensor_parallel_engine):
    """Their times differ; processes that plan differently wait for each other."""
    if runner == "v2":
        pytest.skip("both runners ask the same gate")
    llm = tensor_parallel_engine("deep_llama", **OPTIONS, **logits_options())
    requests = [Request(random_ids(40 + n, VOCABULARY, 7), 60) for n in range(8)]
    serve(llm, requests)
    layers = 59 * sum(r.output.outputs[0].mean_decode_depth for r in requests)
    # Of 59 steps 14 are the trial's, half of them routed; then all are or none.
    routed, full = 3 * 2 + 2 * 4 + 3 * 6, 8 * 6
    wanted = [7 * routed + 52 * full, 52 * routed + 7 * full]
    assert round(layers) in wanted


def test_both_draft_and_route_alike(tensor_parallel_engine, oracle, runner):
    """On V1 for as many steps as a trial of all ways has, and some more. Requests that
    are exempt from routing draft, and get what the whole model says."""
    llm = tensor_parallel_engine(
        "deep_llama",
        speculative_config=options(2, 2, draft_gate=True),
        **OPTIONS,
        **logits_options(),
    )
    tokens = 200 if runner == "v1" else 40  # Triton's interpreter takes its time
    requests = [
        Request(random_ids(60 + n, VOCABULARY, 7), tokens, options=exempt)
        for n, exempt in enumerate([{}, dict(max_depth=6)] * 4)
    ]
    serve(llm, requests)
    assert_logits(oracle, requests[1::2], CUTOFFS[-1])
    assert all(r.output.outputs[0].mean_decode_depth < 6 for r in requests[::2])
