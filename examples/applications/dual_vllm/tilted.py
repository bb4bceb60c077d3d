# SPDX-License-Identifier: Apache-2.0
"""The distribution between two models, its bounds, and a reproducible draw from it.

    q(x) = a(x)^(1 - alpha) b(x)^alpha / Z(alpha),  with alpha such that
    KL(q || a) = KL(q || b)

With d = log b - log a, log Z is convex in alpha and its derivative E_q[d] is also
KL(q || a) - KL(q || b). So alpha is where Z is least: the Chernoff point of the two
models. Both divergences are then -log Z, their Chernoff information (Cover and Thomas,
Elements of Information Theory, section 11.9).

Exact log-probabilities are known of some tokens, the candidates; of all others only
what mass each model gives them together. Here these count as one more token, the
*rest*. Arrays are float64, `[2, n]` in nats, row 0 of model a and row 1 of model b.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq

ROUNDING = 2e-6
"""Added to the mass of the rest: by how much a sum of float32 probabilities may be off.
A log-probability of size 8 to 16 comes in steps of 1e-6."""
ALPHA_ERROR = 1e-12
"""How near the solved alpha is to the root, as far as rounding lets it."""
ALPHA_STEP = 1e-4
"""How finely the interval of the right alpha is searched; its ends are moved out by
as much."""


class Bounds(NamedTuple):
    """How far the result for candidates and rest may be from the one for the whole
    vocabulary."""

    total_variation: float
    kl: float  # nats, of either divergence


def with_rest(logprobs: np.ndarray) -> np.ndarray:
    """Log-probabilities `[2, n + 1]` of candidates `[2, n]` and of the rest."""
    rest = np.maximum(1 - np.exp(logprobs).sum(axis=1), 0) + ROUNDING
    return np.column_stack([logprobs, np.log(rest)])


def log_weights(logprobs: np.ndarray, alpha: float) -> np.ndarray:
    """log q + log Z, `[n]`."""
    return (1 - alpha) * logprobs[0] + alpha * logprobs[1]


def tilt(logprobs: np.ndarray, alpha: float) -> tuple[np.ndarray, float]:
    """q `[n]`, and log Z."""
    log_weight = log_weights(logprobs, alpha)
    largest = log_weight.max()
    weight = np.exp(log_weight - largest)
    total = weight.sum()
    return weight / total, float(largest + np.log(total))


def solve_alpha(logprobs: np.ndarray) -> float:
    """The alpha in [0, 1] where Z is least, which is where both divergences of q are
    equal. 0.5 if the models are the same.

    Newton's method from 0.5, kept between the ends: the derivative of E_q[d] is the
    variance of d. It takes about five steps; bisection comes in where it leaves them.
    """
    difference = logprobs[1] - logprobs[0]
    powers = np.stack([np.ones_like(difference), difference, difference**2])

    def moments(alpha: float) -> tuple[float, float]:
        """Mean and variance of d."""
        log_weight = logprobs[0] + alpha * difference
        total, first, second = (powers @ np.exp(log_weight - log_weight.max())).tolist()
        mean = first / total
        return mean, second / total - mean * mean

    low, high = 0.0, 1.0
    at_zero, at_one = moments(low)[0], moments(high)[0]
    if not at_zero < 0 < at_one:
        return 0.5 if at_zero >= 0 >= at_one else 0.0 if at_zero >= 0 else 1.0
    alpha = 0.5
    while True:
        mean, variance = moments(alpha)
        low, high = (alpha, high) if mean < 0 else (low, alpha)
        after = alpha - mean / variance if variance > 0 else low
        if not low < after < high:
            after = (low + high) / 2
        if abs(after - alpha) <= ALPHA_ERROR:
            return after
        alpha = after


def bounds(logprobs: np.ndarray, alpha: float) -> Bounds:
    """Bounds on the error of not knowing the rest token by token.

    `logprobs` are those of candidates and rest, `alpha` is their solution; alpha* and
    q* are those of the whole vocabulary. Z is the sum of a known part Z_c, of the
    candidates, and of Z_r, of the rest; e_a and e_b are the models' masses of the rest.
    By Hölder's inequality 0 <= Z_r <= h(alpha) = e_a^(1 - alpha) e_b^alpha, which is
    the rest's weight as one token.

    Divergences. -log Z at its least point lies between -log(Z_c + h) and -log Z_c at
    theirs; `estimate_log_z` is between the two as well.

    alpha*. There Z_c' + Z_r' = 0. Since log Z_r is convex in alpha with ends log e_a
    and log e_b, Z_r' is at most z (log e_b - log z) / (1 - alpha) for some z <= h, and
    as much below 0 with a for b and alpha for 1 - alpha. As Z_c' grows, that gives an
    interval.

    Total variation, between q* and q at `alpha`, whether the rest is drawn or left out:
    leaving it out costs h / (Z_c + h) at most. What alpha costs on the candidates grows
    with its distance, the likelihood ratio being monotone in d, so the ends of the
    interval are enough.
    """
    candidates = logprobs[:, :-1]
    log_rest = logprobs[:, -1]
    rest = np.exp(log_rest)
    difference = candidates[1] - candidates[0]
    log_ratio = log_rest[1] - log_rest[0]

    def slope(at: float) -> float:
        """That of Z_c."""
        return float(np.exp(candidates[0] + at * difference) @ difference)

    def largest(x: float) -> float:
        """The largest z (log e - log z) / e over z <= e exp(-x)."""
        return x * math.exp(-x) if x > 1 else math.exp(-1)

    def above_lowest(at: float) -> float:
        return (1 - at) * slope(at) + rest[1] * largest((1 - at) * log_ratio)

    def above_highest(at: float) -> float:
        return at * slope(at) - rest[0] * largest(-at * log_ratio)

    low, high = 0.0, 1.0
    if above_lowest(0.0) < 0:
        low = max(0.0, brentq(above_lowest, 0.0, 1.0, xtol=ALPHA_STEP) - ALPHA_STEP)
    if above_highest(1.0) > 0:
        high = min(1.0, brentq(above_highest, 0.0, 1.0, xtol=ALPHA_STEP) + ALPHA_STEP)

    log_least_z = tilt(candidates, solve_alpha(candidates))[1]
    least_z = math.exp(log_least_z)
    h = max(np.exp(log_weights(log_rest, end)) for end in (low, high))
    q, _ = tilt(candidates, alpha)
    shift = max(abs(tilt(candidates, end)[0] - q).sum() / 2 for end in (low, high))
    estimate = estimate_log_z(logprobs, alpha)
    return Bounds(
        total_variation=float(min(1.0, h / (least_z + h) + shift)),
        kl=float(max(tilt(logprobs, alpha)[1] - estimate, estimate - log_least_z)),
    )


def estimate_log_z(logprobs: np.ndarray, alpha: float) -> float:
    """log Z over the whole vocabulary, if the models differ within the rest as they do
    within the candidates, each scaled to one."""
    candidates, log_rest = logprobs[:, :-1], logprobs[:, -1]
    log_mass = np.log(np.exp(candidates).sum(axis=1))
    log_ratio = log_weights(log_rest - log_mass, alpha)
    return tilt(candidates, alpha)[1] + float(np.log1p(np.exp(log_ratio)))


def effective_sample_size(logprobs: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Share `[2]` of draws from q that count when reweighted to each model,
    (sum w)^2 / (n sum w^2) with w = model / q, in the limit of many draws."""
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.exp(2 * logprobs - np.log(q))
    # A token that neither has is no part of the sum.
    return 1 / np.where(np.exp(logprobs) > 0, terms, 0).sum(axis=1)


class Noise:
    """Standard Gumbel noise of the token ids at one position of one sample.

    It is SplitMix64 (Steele, Lea and Flood, 2014) addressed by token id: a token's
    noise is the same whatever the candidates are and however requests went. The token
    with the largest log-weight + noise is a draw from q (Gumbel-max).
    """

    def __init__(self, seed: int, sample: int, position: int):
        stream = np.random.SeedSequence([seed, sample, position])
        self._key = stream.generate_state(1, np.uint64)
        self._whole = np.empty(0, np.uint64)  # bits of the ids 0, 1, 2, ...

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Noise `[n]` of token ids."""
        uniform = (self._bits(_spread(ids)) + 0.5) * 2.0**-52
        return -np.log(-np.log(uniform))

    def loudest(self, vocabulary: int, least: float) -> np.ndarray:
        """The ids below `vocabulary` whose noise is at least `least`, most first."""
        if len(self._whole) != vocabulary:
            self._whole = self._bits(_spread_all(vocabulary))
        bits = np.exp(-np.exp(-least)) * 2.0**52 - 0.5
        ids = np.flatnonzero(self._whole >= np.uint64(max(bits, 0)))
        return ids[np.argsort(self._whole[ids], kind="stable")[::-1]]

    def _bits(self, spread: np.ndarray) -> np.ndarray:
        """52 random bits for each id."""
        z = spread + self._key
        shifted = z >> np.uint64(30)
        z ^= shifted
        z *= np.uint64(0xBF58476D1CE4E5B9)
        z ^= np.right_shift(z, np.uint64(27), out=shifted)
        z *= np.uint64(0x94D049BB133111EB)
        z ^= np.right_shift(z, np.uint64(31), out=shifted)
        z >>= np.uint64(12)
        return z


def _spread(ids: np.ndarray) -> np.ndarray:
    """What SplitMix64 adds to its key for each id, `[n]` uint64."""
    return (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)


@cache
def _spread_all(vocabulary: int) -> np.ndarray:
    """That of the ids 0, 1, 2, ..."""
    return _spread(np.arange(vocabulary))
