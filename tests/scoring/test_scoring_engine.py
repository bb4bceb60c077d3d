# SPDX-License-Identifier: Apache-2.0
"""Scoring among other requests: mixed batches, abort, preemption, step by step."""

import numpy as np
import pytest
from scoring import (
    assert_same_scores,
    assert_scores,
    params,
    prompt,
    random_ids,
    run,
    score,
)
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["llama"].vocab_size
CACHE = 700_000  # bytes, for fewer tokens than the model takes
CHUNKED = dict(max_num_batched_tokens=32, max_num_seqs=4)


@pytest.fixture
def chunked(engine):
    """Computes at most 32 tokens a step."""
    return engine("llama", **CHUNKED)


def step_until_done(llm, limit: int = 500) -> dict:
    """Steps the engine until it is idle; the last output of each request by its id.
    `limit` steps are far more than any of these tests needs."""
    last = {}
    for _ in range(limit):
        if not llm.llm_engine.has_unfinished_requests():
            return last
        for output in llm.llm_engine.step():
            last[output.request_id] = output
    raise AssertionError(f"not done after {limit} steps")


def greedy_of_oracle(llama, ids: list[int], count: int) -> list[int]:
    """The `count` most probable next tokens, one after the other."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(llama.logits(ids)[-1].argmax()))
    return ids[-count:]


KINDS = ("score", "generate", "prompt_logprobs", "score and prompt_logprobs")


@pytest.mark.parametrize("options", [{}, CHUNKED], ids=["whole", "chunked"])
def test_requests_of_every_kind_in_one_call(engine, llama, options):
    rng = np.random.default_rng(3)
    requests, sampling, cases = [], [], []
    for index in range(16):
        kind = KINDS[index % len(KINDS)]
        ids = rng.integers(0, VOCABULARY, rng.integers(2, 120)).tolist()
        targets = None
        if kind.startswith("score"):
            rows = int(rng.integers(1, len(ids)))
            targets = rng.integers(-1, VOCABULARY, (rows, 1 + index % 5)).tolist()
        generated = 1 if kind == "prompt_logprobs" else index % 3
        generated = max(generated, 0 if targets else 1)
        logprobs = 0 if kind.endswith("prompt_logprobs") else None
        requests.append(prompt(ids, targets))
        sampling.append(params(generated, prompt_logprobs=logprobs))
        cases.append((ids, targets, generated, logprobs))

    outputs = run(engine("llama", **options), requests, sampling)

    for (ids, targets, generated, logprobs), output in zip(cases, outputs):
        assert output.prompt_token_ids == ids
        expected = greedy_of_oracle(llama, ids, generated) if generated else []
        assert list(output.outputs[0].token_ids) == expected
        if targets is None:
            assert output.target_logprobs is None
        else:
            assert_scores(output.target_logprobs, llama, ids, targets)
        if logprobs is None:
            assert output.prompt_logprobs is None
        else:
            assert len(output.prompt_logprobs) == len(ids)
        if logprobs is not None and targets is None:
            forced = llama.scores(ids, ids[1:]).logprobs[:, 0]
            got = [
                entry[i].logprob
                for i, entry in zip(ids[1:], output.prompt_logprobs[1:])
            ]
            np.testing.assert_allclose(got, forced, rtol=0, atol=1e-4)


def test_more_requests_than_fit_a_batch(llm, llama):
    prompts = [random_ids(n, VOCABULARY, 5 + n) for n in range(20)]
    outputs = run(llm, [prompt(p, p[1:]) for p in prompts], params())
    for ids, output in zip(prompts, outputs):
        assert_scores(output.target_logprobs, llama, ids, ids[1:])


def test_scores_come_with_the_first_output_and_stay(chunked, llama):
    """Step by step: nothing while the prompt is computed, then complete scores in
    every output of the request."""
    ids = random_ids(7, VOCABULARY, 100)
    chunked.llm_engine.add_request("a", prompt(ids, ids[1:]), params(3))
    generated = []
    while chunked.llm_engine.has_unfinished_requests():
        for output in chunked.llm_engine.step():
            generated.append(len(output.outputs[0].token_ids))
            assert_scores(output.target_logprobs, llama, ids, ids[1:])
    assert generated == [1, 2, 3]


def test_delta_outputs_carry_the_scores_once(chunked, llama):
    from vllm.sampling_params import RequestOutputKind

    ids = random_ids(7, VOCABULARY, 50)
    sampling = params(3, output_kind=RequestOutputKind.DELTA)
    chunked.llm_engine.add_request("a", prompt(ids, ids[1:]), sampling)
    outputs = []
    while chunked.llm_engine.has_unfinished_requests():
        outputs += chunked.llm_engine.step()
    first, *others = outputs
    assert len(others) == 2
    assert_scores(first.target_logprobs, llama, ids, ids[1:])
    assert all(output.target_logprobs is None for output in others)


def test_a_context_that_is_fitted_to_the_memory(engine, llama):
    """The workers are told its length before there is a scheduler."""
    llm = engine("llama", max_model_len=-1, kv_cache_memory_bytes=CACHE, block_size=32)
    most = llm.model_config.max_model_len
    assert 128 <= most < CONFIGS["llama"].max_position_embeddings
    ids = random_ids(9, VOCABULARY, 100)
    assert_scores(score(llm, ids, ids[1:]), llama, ids, ids[1:])


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_aborted_request_leaves_the_engine_serving(chunked, llama, steps):
    """The 100 tokens need four steps, so every abort comes in the middle."""
    ids = random_ids(8, VOCABULARY, 100)
    engine = chunked.llm_engine
    engine.add_request("gone", prompt(ids, ids[1:]), params())
    engine.add_request("stays", prompt(ids[:60], ids[1:60]), params())
    for _ in range(steps):
        assert engine.step() == []
    engine.abort_request(["gone"])
    outputs = step_until_done(chunked)
    assert set(outputs) == {"stays"}
    assert_scores(outputs["stays"].target_logprobs, llama, ids[:60], ids[1:60])
    # The same name again: nothing of the aborted one is left.
    engine.add_request("gone", prompt(ids[:40], [5, 6]), params())
    outputs = step_until_done(chunked)
    assert_scores(outputs["gone"].target_logprobs, llama, ids[:40], [5, 6])


@pytest.mark.parametrize("steps", range(1, 7))
def test_preempted_after_any_step(chunked, llama, steps):
    """`reset_prefix_cache(reset_running_requests=True)` preempts whatever runs: in
    steps 1 to 3 in mid-prompt, from step 4 on among the generated tokens."""
    ids = random_ids(9, VOCABULARY, 100)
    targets = random_ids(10, VOCABULARY, 80, 2)
    engine = chunked.llm_engine
    engine.add_request("a", prompt(ids, targets), params(6))
    for _ in range(steps):
        engine.step()
    assert engine.has_unfinished_requests()
    assert engine.reset_prefix_cache(reset_running_requests=True)
    output = step_until_done(chunked)["a"]
    assert list(output.outputs[0].token_ids) == greedy_of_oracle(llama, ids, 6)
    assert_scores(output.target_logprobs, llama, ids, targets)


def test_preemption_for_want_of_memory(engine, llama):
    """Six requests that each grow to four blocks, in a cache of twelve."""
    llm = engine(
        "llama",
        max_model_len=128,
        block_size=32,
        num_gpu_blocks_override=12,
        max_num_batched_tokens=128,
        disable_log_stats=False,
    )
    before = preemptions(llm)
    prompts = [random_ids(20 + n, VOCABULARY, 60) for n in range(6)]
    requests = [prompt(p, p[1:]) for p in prompts]
    outputs = run(llm, requests, params(50))
    assert preemptions(llm) > before, "the cache was large enough after all"
    for ids, output in zip(prompts, outputs):
        assert len(output.outputs[0].token_ids) == 50
        assert_scores(output.target_logprobs, llama, ids, ids[1:])


def preemptions(llm) -> int:
    return sum(
        metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:num_preemptions"
    )


def test_the_same_scores_alone_and_in_company(llm, llama):
    """Other requests' rows in the same step do not leak into a request's own."""
    ids = random_ids(11, VOCABULARY, 64)
    targets = [[1, 2, 3], [-1, -1, -1], [4, -1, 5]]
    others = [random_ids(30 + n, VOCABULARY, 64) for n in range(5)]
    requests = [prompt(o, o[1:]) for o in others]
    requests.insert(2, prompt(ids, targets))
    together = run(llm, requests, params())[2].target_logprobs
    assert_scores(together, llama, ids, targets)
    alone = score(llm, ids, targets)
    np.testing.assert_allclose(together.logprobs, alone.logprobs, rtol=0, atol=1e-4)


def test_a_result_is_the_callers_own(llm):
    """Writing into one result changes no later one."""
    ids = random_ids(12, VOCABULARY, 30)
    first = score(llm, ids, ids[1:])
    second = score(llm, ids, ids[1:])
    first.logprobs[:] = 0
    first.ranks[:] = 0
    third = score(llm, ids, ids[1:])
    assert_same_scores(second, third)
