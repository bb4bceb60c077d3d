# SPDX-License-Identifier: Apache-2.0
"""Scores with asynchronous scheduling, the default on GPUs."""

import pytest
from scheduled_ahead import ahead  # noqa: F401
from scoring import (
    assert_generated,
    assert_options,
    assert_scores,
    params,
    prompt,
    random_ids,
    run,
)
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["llama"].vocab_size
ASKED = {"token_ids": [3, 9], "top_k": 4, "temperature": 0.7}


@pytest.fixture
def llm(ahead):
    return ahead("llama", max_num_batched_tokens=64, block_size=32)


def test_prompts_and_generated_tokens(llm, llama):
    """In chunks, beside each other; then with the prefix in the cache."""
    prompts = [random_ids(n, VOCABULARY, 30 + 21 * n) for n in range(6)]
    targets = [
        [[token, *random_ids(n, VOCABULARY, n % 3)] for token in ids[1:]]
        for n, ids in enumerate(prompts)
    ]
    for length in (0, 8):
        asked = [rows[-length:] for rows in targets]
        sampling = [
            params(9, target_generated=ASKED) if n % 2 else params(0) for n in range(6)
        ]
        outputs = run(llm, [*map(prompt, prompts, asked)], sampling)
        for n, (ids, rows, output) in enumerate(zip(prompts, asked, outputs)):
            assert_scores(output.target_logprobs, llama, ids, rows)
            if n % 2:
                assert_generated(output.outputs[0], llama, ids, ASKED)
    assert outputs[5].num_cached_tokens >= 64


def test_the_most_probable_tokens(llm, llama):
    ids = random_ids(7, VOCABULARY, 90)
    request = prompt(ids, ids[1:]) | {"target_top_k": 5}
    (output,) = run(llm, [request], params(0))
    rows = [[token] for token in ids[1:]]
    assert_options(output.target_logprobs, llama, ids, rows, top_k=5)
