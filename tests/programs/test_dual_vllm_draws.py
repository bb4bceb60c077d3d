# SPDX-License-Identifier: Apache-2.0
"""The mathematics and the draw of `examples/applications/dual_vllm`, without a model.

The oracle knows the whole vocabulary, and finds alpha with a minimizer.
"""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from dual_offline import ROUNDING, VOCABULARY, likely, make_pair, named, offline, solve
from scipy import stats
from scipy.special import log_softmax
from tokenizers import Tokenizer, decoders, models

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "applications"), str(EXAMPLES)]

from dual_vllm import CoordinatorConfig, DualVLLMCoordinator, tilted
from dual_vllm.coordinator import LOG_ZERO, GenerationOutput
from dual_vllm.server import TopK


@pytest.mark.parametrize("seed", range(20))
def test_alpha_balances_the_divergences(seed):
    logprobs = make_pair(seed)
    alpha = tilted.solve_alpha(logprobs)
    expected, q, kl = solve(logprobs)
    assert alpha == pytest.approx(expected, abs=1e-5)
    found, log_z = tilted.tilt(logprobs, alpha)
    np.testing.assert_allclose(found, q, atol=1e-6)
    kl_a, kl_b = (found * (np.log(found) - logprobs)).sum(axis=1)
    assert abs(kl_a - kl_b) < 1e-9
    assert kl_a == pytest.approx(-log_z, abs=1e-9) == pytest.approx(kl, abs=1e-9)


def test_alpha_of_equal_models():
    logprobs = np.repeat(make_pair(0)[:1], 2, axis=0)
    assert tilted.solve_alpha(logprobs) == 0.5


@pytest.mark.parametrize(
    "logprobs",
    [
        [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.9, 0.1]],  # nothing in common
        [[1 - 1e-6, 1e-6, 0.0, 0.0], [0.0, 1e-6, 1 - 1e-6, 0.0]],
        [[0.97, 0.01, 0.01, 0.01], [0.97, 0.01, 0.01 + 1e-9, 0.01 - 1e-9]],
    ],
    ids=["apart", "nearly apart", "nearly the same"],
)
def test_alpha_of_extremes(logprobs):
    with np.errstate(divide="ignore"):
        known = tilted.with_rest(np.maximum(np.log(logprobs), LOG_ZERO))
    alpha = tilted.solve_alpha(known)
    q = tilted.tilt(known, alpha)[0]
    assert 0 <= alpha <= 1
    assert abs(q @ (known[1] - known[0])) < 1e-6
    bound = tilted.bounds(known, alpha)
    assert 0 <= bound.total_variation <= 1 and 0 <= bound.kl < math.inf


@pytest.mark.parametrize("k", [1, 5, 20, 100])
def test_bounds_hold(k):
    """Against the whole vocabulary, the rest left out or drawn."""
    tight = 0
    for seed in range(200):
        logprobs = make_pair(seed)
        _, q, kl = solve(logprobs)
        ids = likely(logprobs, k)
        known = tilted.with_rest(logprobs[:, ids])
        alpha = tilted.solve_alpha(known)
        bound = tilted.bounds(known, alpha)
        left_out = np.zeros(VOCABULARY)
        left_out[ids] = tilted.tilt(known[:, :-1], alpha)[0]
        of_all = tilted.tilt(logprobs, alpha)[0]
        for found in (left_out, of_all):
            assert abs(found - q).sum() / 2 <= bound.total_variation + ROUNDING
        estimate = -tilted.estimate_log_z(known, alpha)
        assert abs(estimate - kl) <= bound.kl + ROUNDING
        tight += abs(left_out - q).sum() / 2 > bound.total_variation / 10
    assert tight > 20, "a bound that is never near says little"


def test_bounds_close_when_all_is_known():
    logprobs = make_pair(3)
    known = tilted.with_rest(logprobs)
    bound = tilted.bounds(known, tilted.solve_alpha(known))
    assert bound.total_variation < 1e-3 and bound.kl < 1e-5


def test_effective_sample_size():
    """Against importance weights of a large sample from q, of models alike enough
    that the sample settles."""
    rng = np.random.default_rng(1)
    logprobs = log_softmax(rng.normal(size=(2, VOCABULARY)), axis=-1)
    q = solve(logprobs)[1]
    drawn = np.random.default_rng(0).choice(VOCABULARY, size=200_000, p=q)
    weights = np.exp(logprobs[:, drawn]) / q[drawn]
    expected = weights.sum(axis=1) ** 2 / (weights**2).sum(axis=1) / len(drawn)
    found = tilted.effective_sample_size(logprobs, q)
    np.testing.assert_allclose(found, expected, rtol=0.02)


def test_effective_sample_size_without_a_token_that_neither_has():
    logprobs = np.log([[0.5, 0.5, 1e-300], [0.4, 0.6, 1e-300]])
    q = np.array([0.45, 0.55, 0.0])
    expected = tilted.effective_sample_size(logprobs[:, :2], q[:2])
    logprobs[:, 2] = LOG_ZERO
    with np.errstate(all="raise", under="ignore"):
        found = tilted.effective_sample_size(logprobs, q)
    np.testing.assert_allclose(found, expected)


def test_a_text_begins_as_it_does_after_the_prompt():
    """With decoders that leave out the first space of what they are given."""
    words = {"▁a": 0, "▁b": 1, "c": 2}
    tokenizer = Tokenizer(models.WordLevel(words))
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([1]) == "b"
    dual = SimpleNamespace(tokenizer=tokenizer)
    for prompt, ids, text in (([0], [1], " b"), ([0] * 9, [2, 1], "c b"), ([0], [], "")):
        output = GenerationOutput(0, prompt, ids)
        DualVLLMCoordinator.set_text(dual, output)
        assert output.text == text


def test_noise_is_gumbel_and_belongs_to_the_token():
    noise = tilted.Noise(1, 2, 3)
    ids = np.arange(100_000)
    values = noise.of(ids)
    assert stats.kstest(values, stats.gumbel_r.cdf).pvalue > 1e-3
    np.testing.assert_array_equal(noise.of(ids[::-7]), values[::-7])
    for other in ((0, 2, 3), (1, 0, 3), (1, 2, 0)):
        correlation = np.corrcoef(values, tilted.Noise(*other).of(ids))[0, 1]
        assert abs(correlation) < 0.02, other
    loud = noise.loudest(len(ids), 3.0)
    assert set(loud) == set(ids[values >= 3.0])
    assert (np.diff(values[loud]) <= 0).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 4, "max_candidates": 40},
        {"top_k": 20},
        {"top_k": 60, "tail_mass": 0.3},
    ],
    ids=str,
)
def test_the_rest_is_drawn_as_if_all_were_known(settings):
    """The token is that of the whole vocabulary, though few tokens are scored."""
    dual = offline(**settings)
    tail = rounds = 0
    for seed in range(150):
        logprobs = make_pair(seed)
        sizes = [named(row, **settings) for row in logprobs]
        ids = np.union1d(*(np.argsort(-r)[:n] for r, n in zip(logprobs, sizes)))
        alpha = tilted.solve_alpha(tilted.with_rest(logprobs[:, ids]))
        value = (1 - alpha) * logprobs[0] + alpha * logprobs[1]
        value += tilted.Noise(0, seed, 0).of(np.arange(VOCABULARY))
        token, used = dual.draw(logprobs, seed)
        assert token == value.argmax()
        tail += token not in ids
        rounds += used
    assert tail > 5, "the rest was never drawn"
    assert rounds < 3 * 150


def test_draws_follow_q():
    """Chi-square of 3,000 draws from one pair of models, with few candidates."""
    logprobs = make_pair(2)
    dual = offline(top_k=10)
    ids = likely(logprobs, 10)
    alpha = tilted.solve_alpha(tilted.with_rest(logprobs[:, ids]))
    q = tilted.tilt(logprobs, alpha)[0]
    drawn = [dual.draw(logprobs, number)[0] for number in range(3000)]
    found = np.bincount(drawn, minlength=VOCABULARY)
    often = q * len(drawn) >= 5
    found = [*found[often], found[~often].sum()]
    expected = [*q[often], q[~often].sum()] * np.array(len(drawn))
    assert stats.chisquare(found, expected).pvalue > 1e-3


def test_rest_left_out():
    dual = offline(top_k=5, tail="drop")
    for seed in range(100):
        logprobs = make_pair(seed)
        token, rounds = dual.draw(logprobs, seed)
        assert token in likely(logprobs, 5) and rounds == 1


def test_fewer_candidates_where_the_models_are_sure():
    flat, peaked = np.zeros((2, VOCABULARY)), np.zeros((2, VOCABULARY))
    peaked[:, 7] = 12
    dual = offline(top_k=100, tail_mass=0.01)
    sizes = []
    for logits in (flat, peaked):
        order = np.argsort(-logits[0], kind="stable")[:100]
        sizes.append(dual._size(TopK(order, log_softmax(logits[0])[order])))
    assert sizes == [100, 1]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"top_k": 0}, "top_k"),
        ({"top_k": 300}, "top_k"),
        ({"tail": "cut"}, "tail"),
        ({"tail_mass": 1.0}, "tail_mass"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_token": 5}, "max_token"),
        ({"patience": 0}, "patience"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids"),
    ],
)
def test_wrong_settings_are_named(settings, name):
    with pytest.raises(ValueError, match=name):
        CoordinatorConfig(url_a="http://a", url_b="http://b", **settings)
