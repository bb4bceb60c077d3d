# SPDX-License-Identifier: Apache-2.0
"""Scoring takes any causal model that vLLM runs: nothing in it is a family's own."""

import pytest
from scoring import assert_same_scores, assert_scores, params, prompt, random_ids, run
from tiny_models import OTHERS

VOCABULARY = 600
BLOCK = 32
PREFIX = random_ids(1, VOCABULARY, 4 * BLOCK + 2)
REQUESTS = [
    (ids := PREFIX + random_ids(10, VOCABULARY, 20), ids[1:]),
    (PREFIX + random_ids(11, VOCABULARY, 21), random_ids(30, VOCABULARY, 21, 4)),
    (PREFIX + random_ids(12, VOCABULARY, 1), [[3, 4, VOCABULARY - 1]]),
]


@pytest.mark.parametrize("name", OTHERS)
def test_scores_whole_chunked_and_cached(oracle, engine, name):
    whole = engine(name, block_size=BLOCK)
    alone = [run(whole, [prompt(*r)], params())[0] for r in REQUESTS]
    for output, (ids, targets) in zip(alone, REQUESTS):
        assert_scores(output.target_logprobs, oracle(name), ids, targets)
    cached = [output.num_cached_tokens for output in alone]
    # A recurrent state is not cached by blocks.
    assert cached == ([0, 0, 0] if name == "mamba2" else [0, 4 * BLOCK, 4 * BLOCK])

    chunked = engine(name, block_size=BLOCK, max_num_batched_tokens=48)
    for output, (ids, targets) in zip(
        run(chunked, [prompt(*r) for r in REQUESTS], params()), REQUESTS
    ):
        assert_scores(output.target_logprobs, oracle(name), ids, targets)


def test_a_second_reading_of_the_cache_is_the_same(engine):
    """With windows beside whole attention, whose blocks are kept in groups."""
    llm = engine("gemma3_text", block_size=BLOCK)
    ids, targets = REQUESTS[1]
    first, second = (run(llm, [prompt(ids, targets)], params())[0] for _ in range(2))
    assert first.num_cached_tokens == second.num_cached_tokens > 0
    assert_same_scores(first.target_logprobs, second.target_logprobs)
