# SPDX-License-Identifier: Apache-2.0
"""Scoring requests read the prefix cache, and not one row is missing."""

import pytest
from scoring import assert_same_scores, assert_scores, params, prompt, random_ids, run
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["llama"].vocab_size
BLOCK = 32  # the smallest that attention on a CPU takes
SHARED = 5 * BLOCK + 5


@pytest.fixture(params=[1024, 40], ids=["whole", "chunked"])
def llm(request, engine):
    # What is read where scores are kept is tested in `test_score_cache.py`.
    return engine(
        "llama",
        block_size=BLOCK,
        max_num_batched_tokens=request.param,
        enable_score_cache=False,
    )


def run_cold_and_warm(llm, requests, sampling):
    """The outputs without and with reading the cache."""
    assert llm.reset_prefix_cache()
    cold = sampling.clone()
    cold.skip_reading_prefix_cache = True
    cold_outputs = run(llm, requests, cold)
    assert all(output.num_cached_tokens == 0 for output in cold_outputs)
    return cold_outputs, run(llm, requests, sampling)


def test_prompts_with_a_shared_prefix(llm, oracle):
    shared = random_ids(0, VOCABULARY, SHARED)
    prompts = [shared + random_ids(i, VOCABULARY, 40) for i in range(1, 7)]
    requests = [prompt(ids, ids[-40:]) for ids in prompts]

    cold, warm = run_cold_and_warm(llm, requests, params())

    for ids, uncached, cached in zip(prompts, cold, warm):
        # The first scored row needs the hidden state of the last shared token.
        assert cached.num_cached_tokens == (SHARED - 1) // BLOCK * BLOCK
        assert_scores(cached.target_logprobs, oracle("llama"), ids, ids[-40:])
        assert_scores(uncached.target_logprobs, oracle("llama"), ids, ids[-40:])


@pytest.mark.parametrize("rows", [1, BLOCK - 1, BLOCK, BLOCK + 1, 6 * BLOCK - 1])
def test_the_boundary_row_is_there_at_every_alignment(llm, oracle, rows):
    ids = random_ids(7, VOCABULARY, 6 * BLOCK)
    _, (output,) = run_cold_and_warm(llm, [prompt(ids, ids[-rows:])], params())
    assert output.num_cached_tokens == (len(ids) - rows - 1) // BLOCK * BLOCK
    assert_scores(output.target_logprobs, oracle("llama"), ids, ids[-rows:])


def test_leading_rows_that_are_not_scored_are_read_from_the_cache(llm, oracle):
    ids = random_ids(8, VOCABULARY, 6 * BLOCK)
    targets = [-1] * (4 * BLOCK) + ids[5 * BLOCK :]
    _, (output,) = run_cold_and_warm(llm, [prompt(ids, targets)], params())
    assert output.num_cached_tokens == (5 * BLOCK - 1) // BLOCK * BLOCK
    assert_scores(output.target_logprobs, oracle("llama"), ids, targets)


def test_a_prompt_of_which_nothing_is_scored_is_read_from_the_cache(llm, oracle):
    ids = random_ids(13, VOCABULARY, 6 * BLOCK)
    targets = [-1] * (len(ids) - 1)
    _, (output,) = run_cold_and_warm(llm, [prompt(ids, targets)], params())
    assert output.num_cached_tokens == 5 * BLOCK
    assert_scores(output.target_logprobs, oracle("llama"), ids, targets)


def test_what_scoring_leaves_in_the_cache_serves_generation_and_back(llm, oracle):
    llama = oracle("llama")
    ids = random_ids(14, VOCABULARY, SHARED)
    run(llm, [prompt(ids, ids[1:])], params())
    (generated,) = run(llm, [prompt(ids)], params(BLOCK))
    assert generated.num_cached_tokens == SHARED // BLOCK * BLOCK
    answer = list(generated.outputs[0].token_ids)
    best = llama.logits(ids + answer)[SHARED - 1 : -1].argmax(axis=1)
    assert answer == best.tolist()
    (scored,) = run(llm, [prompt(ids + answer, answer)], params())
    assert scored.num_cached_tokens == (SHARED - 1) // BLOCK * BLOCK
    assert_scores(scored.target_logprobs, llama, ids + answer, answer)
    assert (scored.target_logprobs.ranks == 1).all()


def test_prompt_logprobs_asked_with_targets_are_complete_after_a_hit(llm, oracle):
    ids = random_ids(15, VOCABULARY, SHARED)
    run(llm, [prompt(ids, ids[-20:])], params())
    (output,) = run(llm, [prompt(ids, ids[-20:])], params(prompt_logprobs=0))
    assert_scores(output.target_logprobs, oracle("llama"), ids, ids[-20:])
    assert output.prompt_logprobs[:-20] == [None] * (SHARED - 20)
    assert [set(entry) for entry in output.prompt_logprobs[-20:]] == [
        {i} for i in ids[-20:]
    ]


def test_generation_after_a_hit_is_the_same(llm):
    ids = random_ids(9, VOCABULARY, 5 * BLOCK + 3)
    requests = [prompt(ids, ids[-20:])]
    (cold,), (warm,) = run_cold_and_warm(llm, requests, params(8))
    assert warm.num_cached_tokens > 0
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


def test_scoring_the_whole_prompt_reads_nothing(llm, oracle):
    ids = random_ids(10, VOCABULARY, 5 * BLOCK)
    _, (output,) = run_cold_and_warm(llm, [prompt(ids, ids[1:])], params())
    assert output.num_cached_tokens == 0
    assert_scores(output.target_logprobs, oracle("llama"), ids, ids[1:])


def test_upstreams_named_ids_read_the_cache_too(llm):
    ids = random_ids(11, VOCABULARY, 6 * BLOCK)
    _, (ours,) = run_cold_and_warm(llm, [prompt(ids, ids[-20:])], params())
    theirs = params(
        1,
        prompt_logprob_token_ids=[[token] for token in ids[-20:]],
        prompt_logprob_start=len(ids) - 21,
    )
    (output,) = run(llm, [prompt(ids)], theirs)
    assert output.num_cached_tokens == ours.num_cached_tokens > 0
    assert_same_scores(output.target_logprobs, ours.target_logprobs)


def test_the_metrics_count_the_hits(engine):
    llm = engine("llama", block_size=BLOCK, disable_log_stats=False)
    ids = random_ids(12, VOCABULARY, 6 * BLOCK)

    def hits() -> int:
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        return metrics["vllm:prefix_cache_hits"].value

    before = hits()
    run(llm, [prompt(ids, ids[-20:])], params())
    (output,) = run(llm, [prompt(ids, ids[-20:])], params())
    assert hits() - before == output.num_cached_tokens > 0
