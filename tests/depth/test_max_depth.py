# SPDX-License-Identifier: Apache-2.0
"""`SamplingParams.max_depth`: the layers that a request's decode tokens run at most.

Scores route nothing here: the engine's smallest batch for that is out of reach.
"""

import numpy as np
import pytest
from depth_routing import (
    CUTOFFS,
    NUM_LAYERS,
    Request,
    assert_logits,
    logits_options,
    mlp_rows,
    poison_cache,
    routing,
    no_empty_batches,
    serve,
)
from scoring import params, prompt, random_ids, run
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["deep_llama"].vocab_size
UTIO = dict(
    enable_utio=True,
    utio_bucket_cutoffs=CUTOFFS[:-1],
    utio_min_batch_size=1000,
)


@pytest.fixture
def llm(engine):
    return engine("deep_llama", **logits_options(**UTIO))


@pytest.fixture
def llama(depth_oracle):
    return depth_oracle("deep_llama")


def limited(seed: int, length: int, max_depth: int | None, **kwargs) -> Request:
    options = kwargs.pop("options", {})
    if max_depth is not None:
        options = options | dict(max_depth=max_depth)
    return Request(random_ids(seed, VOCABULARY, length), options=options, **kwargs)


@pytest.mark.parametrize("depth", [*CUTOFFS, None])
def test_a_request_alone(llm, llama, depth):
    requests = serve(llm, [limited(1, 20, depth)])
    assert_logits(llama, requests, depth or NUM_LAYERS)


def test_many_depths_in_a_batch(llm, llama):
    """Prompts that take several chunks, requests that wait for a place."""
    depths = [2, 6, None, 4, 2, 2, 4, None, 6, 2]
    lengths = [1, 70, 33, 5, 32, 90, 64, 2, 31, 40]
    requests = [
        limited(n, length, depth, max_tokens=3 + n % 5)
        for n, (length, depth) in enumerate(zip(lengths, depths))
    ]
    serve(llm, requests)
    for depth, request in zip(depths, requests):
        assert_logits(llama, [request], depth or NUM_LAYERS)


@pytest.mark.parametrize("depth", CUTOFFS)
def test_all_requests_of_one_depth(llm, llama, depth):
    """At the first cutoff, no row is left for the layers after it."""
    requests = [limited(20 + n, 8 * n + 1, depth) for n in range(8)]
    with no_empty_batches():
        serve(llm, requests)
    assert_logits(llama, requests, depth)


def test_the_skipped_layers_do_no_work(llm):
    assert llm.reset_prefix_cache()
    with mlp_rows(llm) as rows:
        serve(llm, [limited(3, 20, 2, max_tokens=5), limited(4, 10, 4, max_tokens=5)])
    # 30 prompt tokens, then four decode steps.
    assert rows == [30 + 8] * 2 + [30 + 4] * 2 + [30] * 2


def test_it_is_a_ceiling_of_routing(engine, llama):
    llm = engine("deep_llama", **routing())
    ceilings = [2, 4, 6, None] * 2
    requests = [limited(30 + n, 30 + n, c) for n, c in enumerate(ceilings)]
    plan = [2, 4, 6]
    serve(llm, requests, lambda request, step: plan[(request + step) % 3])
    for number, (ceiling, request) in enumerate(zip(ceilings, requests)):
        # All layers as the ceiling: never routed.
        own = [plan[(number + step) % 3] for step in range(len(request.tokens))]
        ceiling = ceiling or NUM_LAYERS
        request.depths = [min(depth, ceiling) for depth in own]
        if requests[number].options.get("max_depth") == NUM_LAYERS:
            request.depths = [NUM_LAYERS] * len(own)
    assert_logits(llama, requests)


def test_sampled_tokens(llm, llama):
    requests = [
        limited(40 + n, 25, depth, options=dict(temperature=1.0))
        for n, depth in enumerate([2, 4, None, 2])
    ]
    serve(llm, requests)
    for depth, request in zip([2, 4, NUM_LAYERS, 2], requests):
        assert_logits(llama, [request], depth)


def test_scores_are_those_of_the_depth(engine, llama):
    """What `target_generated` says of tokens that ran fewer layers."""
    llm = engine("deep_llama", max_num_batched_tokens=64, **UTIO)
    depths = [2, 6, 4, 2]
    prompts = [random_ids(n, VOCABULARY, 10 + 30 * n) for n in range(len(depths))]
    asked = {"token_ids": [7]}
    outputs = run(
        llm,
        [prompt(ids) for ids in prompts],
        [params(8, max_depth=depth, target_generated=asked) for depth in depths],
    )
    for ids, depth, output in zip(prompts, depths, outputs):
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        logits = llama.logits(ids, tokens, [depth] * len(tokens))
        logp = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        expected = np.stack([logp[np.arange(len(tokens)), tokens], logp[:, 7]], axis=1)
        scores = completion.target_logprobs
        np.testing.assert_allclose(scores.logprobs, expected, rtol=0, atol=1e-4)
        entropy = -(np.exp(logp) * logp).sum(axis=1)
        np.testing.assert_allclose(scores.entropy, entropy, rtol=0, atol=1e-3)


def test_no_unwritten_slot_is_read(llm, llama):
    poison_cache(llm)
    for _ in range(2):  # the second time in the blocks of the first
        requests = [limited(50 + n, 20 + n, 2 + n % 2 * 2) for n in range(8)]
        serve(llm, requests)
        for n, request in enumerate(requests):
            assert_logits(llama, [request], 2 + n % 2 * 2)


@pytest.mark.parametrize("value", [0, 1, 3, 5, 7, -1, 2**40, True, 2.0, "2", [2]])
def test_what_is_no_cutoff_is_refused(llm, llama, value):
    with pytest.raises(Exception, match="max_depth") as error:
        run(llm, [prompt([5, 6, 7])], params(4, max_depth=value))
    assert isinstance(error.value, (ValueError, TypeError)) or (
        getattr(error.value, "parameter", None) == "max_depth"
    )
    assert not llm.llm_engine.has_unfinished_requests()
    assert_logits(llama, serve(llm, [limited(1, 20, 2)]), 2)


def test_without_routing_it_is_refused(engine):
    from vllm.exceptions import VLLMValidationError

    llm = engine("deep_llama")
    with pytest.raises(VLLMValidationError, match="max_depth.*enable.utio") as error:
        run(llm, [prompt([5, 6, 7])], params(4, max_depth=2))
    assert error.value.parameter == "max_depth"
    assert len(run(llm, [prompt([5, 6, 7])], params(4))[0].outputs[0].token_ids) == 4


def test_all_layers_as_the_ceiling_changes_no_bit(llm, engine):
    plain = engine("deep_llama", **logits_options())
    requests = [
        [limited(60 + n, 9 * n + 1, depth) for n in range(6)]
        for depth in (NUM_LAYERS, None, None)
    ]
    full, none, off = (
        serve(llm, requests[0]),
        serve(llm, requests[1]),
        serve(plain, requests[2]),
    )
    for a, b, c in zip(full, none, off):
        np.testing.assert_array_equal(a.logits, b.logits)
        np.testing.assert_array_equal(a.logits, c.logits)
