# SPDX-License-Identifier: Apache-2.0
"""Short words for the scoring tests: make a request, run it, check its scores."""

from collections.abc import Sequence

import numpy as np
from oracle import NOT_SCORED, Expected, Oracle, log_softmax, pad_targets, ranks_of

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


def assert_options(
    scores, oracle: Oracle, ids: list[int], targets=None, *, temperature=1.0, top_k=0
) -> None:
    """Asserts the float32 result of `target_temperature` and `target_top_k` against the
    oracle; all rows are scored."""
    rows = [[]] * (len(ids) - 1) if targets is None else targets
    width = max(map(len, map(np.atleast_1d, rows)))
    expected = oracle.scores(ids, rows if width else ids[-len(rows) :])
    logits = expected.logits / temperature
    logp = log_softmax(logits)
    # What a logit is off by, divided too, and the rounding of so great a number.
    atol = FLOAT32_TOLERANCE * max(1, 1 / temperature)
    assert scores.start == expected.start
    assert scores.logprobs.shape == scores.ranks.shape == (len(rows), width)
    if width:
        named = np.take_along_axis(logp, np.maximum(expected.ids, 0), axis=1)
        named = np.where(expected.ids < 0, -np.inf, named)
        np.testing.assert_allclose(scores.logprobs, named, rtol=0, atol=atol)
        low = ranks_of(expected.logits, expected.ids, 2 * LOGIT_ERROR)
        high = ranks_of(expected.logits, expected.ids, -2 * LOGIT_ERROR)
        assert np.all((low <= scores.ranks) & (scores.ranks <= np.maximum(high, 1)))
    entropy = -(np.exp(logp) * logp).sum(axis=1)
    np.testing.assert_allclose(scores.entropy, entropy, rtol=0, atol=10 * atol)
    if not top_k:
        assert scores.top_token_ids is scores.top_logprobs is scores.tail_logprob is None
        return
    top = scores.top_token_ids
    assert (top.shape, top.dtype) == ((len(rows), top_k), np.int32)
    assert scores.top_logprobs.dtype == scores.tail_logprob.dtype == np.float32
    assert all(len(set(row)) == top_k for row in top.tolist())
    found = np.take_along_axis(logp, top.astype(np.int64), axis=1)
    ordered = -np.sort(-logp, axis=1)
    np.testing.assert_allclose(scores.top_logprobs, found, rtol=0, atol=atol)
    # Two that are as good as equal may be in either order.
    np.testing.assert_allclose(found, ordered[:, :top_k], rtol=0, atol=atol)
    tail = np.exp(ordered[:, top_k:]).sum(axis=1)
    # p (1 - p) is at most 1/4, and of two groups of logits each may be off.
    error = 1e-6 + LOGIT_ERROR / 2 * max(1, 1 / temperature)
    np.testing.assert_allclose(np.exp(scores.tail_logprob), tail, rtol=0, atol=error)
    np.testing.assert_allclose(scores.tail_logprob, np.log(tail), rtol=0, atol=2 * atol)


def assert_generated(completion, oracle, ids: list[int], asked: dict) -> None:
    """Asserts what `target_generated` says of a sequence, whatever chose its tokens."""
    tokens = list(completion.token_ids)
    rows = [[token, *asked.get("token_ids", ())] for token in tokens]
    options = {name: asked[name] for name in ("temperature", "top_k") if name in asked}
    assert_options(completion.target_logprobs, oracle, ids + tokens, rows, **options)


def assert_same_scores(left, right) -> None:
    """Asserts that two results hold the same numbers, to the bit."""
    assert left.start == right.start
    np.testing.assert_array_equal(left.logprobs, right.logprobs)
    np.testing.assert_array_equal(left.ranks, right.ranks)
    np.testing.assert_array_equal(left.entropy, right.entropy)
