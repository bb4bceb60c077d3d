# SPDX-License-Identifier: Apache-2.0
"""Short words for the scoring tests: make a request, run it, check its scores."""

from collections.abc import Sequence

import numpy as np
from oracle import NOT_SCORED, Expected, Oracle, pad_targets, ranks_of

FLOAT32_TOLERANCE = 1e-4
"""Most that a float32 log-probability, logit or entropy may be off, in nats: a
logit (see below) and the log-sum-exp, twice over."""
LOGIT_ERROR = 2e-5
"""Most that two float32 evaluations of a logit differ here by. Such a logit is a
float32 of size up to 16, so in steps of 2^-20 = 1e-6, and a sum of 128 products of
states that themselves went through some twenty such sums: 20 steps."""


def random_ids(seed: int, vocabulary: int, *shape: int) -> list:
    """Token ids in nested lists, the same for the same arguments."""
    return np.random.default_rng(seed).integers(0, vocabulary, shape).tolist()


def prompt(prompt_token_ids: list[int], target_token_ids=None):
    """A `TokensPrompt`; without targets, an ordinary one."""
    from vllm import TokensPrompt

    request = TokensPrompt(prompt_token_ids=prompt_token_ids)
    if target_token_ids is not None:
        request["target_token_ids"] = target_token_ids
    return request


def params(max_tokens: int = 0, **kwargs):
    """Greedy `SamplingParams` that generate `max_tokens` tokens whatever they are."""
    from vllm import SamplingParams

    return SamplingParams(
        **dict(max_tokens=max_tokens, temperature=0.0, ignore_eos=True) | kwargs
    )


def run(llm, requests: Sequence, sampling_params) -> list:
    """`LLM.generate` without progress bars."""
    outputs = llm.generate(list(requests), sampling_params, use_tqdm=False)
    assert len(outputs) == len(requests)
    return outputs


def score(llm, prompt_token_ids: list[int], target_token_ids, **kwargs):
    """`RequestOutput.target_logprobs` of one request that generates nothing."""
    requests = [prompt(prompt_token_ids, target_token_ids)]
    (output,) = run(llm, requests, params(**kwargs))
    return output.target_logprobs


def assert_well_formed(scores, prompt_token_ids: list[int], target_token_ids) -> None:
    """Asserts what the contract says of types, shapes and unscored ids."""
    ids = pad_targets(target_token_ids)
    assert scores is not None, "the request has no target_logprobs"
    assert type(scores.start) is int
    assert scores.start == len(prompt_token_ids) - len(ids)
    for name, shape, dtype in (
        ("logprobs", ids.shape, np.float32),
        ("ranks", ids.shape, np.int32),
        ("entropy", ids.shape[:1], np.float32),
    ):
        array = getattr(scores, name)
        assert isinstance(array, np.ndarray), name
        assert (array.shape, array.dtype) == (shape, dtype), name
    unscored = ids == NOT_SCORED
    assert np.array_equal(np.isneginf(scores.logprobs), unscored)
    assert np.array_equal(scores.ranks == 0, unscored)
    assert np.array_equal(np.isnan(scores.entropy), unscored.all(axis=1))


def assert_ranks(ranks: np.ndarray, expected: Expected) -> None:
    """Asserts exact ranks, as far as the oracle can decide them: two logits closer
    than `2 * LOGIT_ERROR` may be in either order. That is rare among a thousand
    words and about every third rank among 40,000."""
    lowest = ranks_of(expected.logits, expected.ids, 2 * LOGIT_ERROR)
    highest = ranks_of(expected.logits, expected.ids, -2 * LOGIT_ERROR)
    highest = np.maximum(highest - 1, lowest)  # the token is within its own margin
    assert np.all((lowest <= ranks) & (ranks <= highest))
    assert np.mean(lowest == highest) >= 0.3 or lowest.size < 50


def assert_scores(scores, oracle: Oracle, prompt_token_ids, target_token_ids) -> None:
    """Asserts a float32 request's complete result against the oracle."""
    assert_well_formed(scores, prompt_token_ids, target_token_ids)
    expected = oracle.scores(prompt_token_ids, target_token_ids)
    np.testing.assert_allclose(
        scores.logprobs, expected.logprobs, rtol=0, atol=FLOAT32_TOLERANCE
    )
    np.testing.assert_allclose(
        scores.entropy, expected.entropy, rtol=0, atol=FLOAT32_TOLERANCE
    )
    assert_ranks(scores.ranks, expected)


def assert_same_scores(left, right) -> None:
    """Asserts that two results hold the same numbers, to the bit."""
    assert left.start == right.start
    np.testing.assert_array_equal(left.logprobs, right.logprobs)
    np.testing.assert_array_equal(left.ranks, right.ranks)
    np.testing.assert_array_equal(left.entropy, right.entropy)
