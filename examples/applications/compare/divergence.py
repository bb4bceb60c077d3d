# SPDX-License-Identifier: Apache-2.0
"""The divergence of two models from the log-probabilities of named tokens.

With candidates C, and tail masses p_T and q_T of reference P and model Q,

    KL_K = sum over i in C of p_i log(p_i / q_i) + p_T log(p_T / q_T)

is the exact KL divergence of the two distributions over the K candidates and "any other
token". It is a lower bound of KL(P || Q) by the log-sum inequality (Cover and Thomas,
Elements of Information Theory, theorem 2.7.1) and grows with K. What it lacks is exactly
p_T KL(P given the tail || Q given the tail), which has no finite upper bound: Q may give
a tail token next to no probability. So the lack is estimated. As P and Q both sum to 1
over the vocabulary V,

    KL(P || Q) = sum over i in V of d_i,   d_i = p_i log(p_i / q_i) - p_i + q_i >= 0,

and for M tokens a position, drawn uniformly from its tail, the mean d_i times |V| - K is
an unbiased estimate of the tail's part of that sum (Horvitz and Thompson 1952; the same
d_i, drawn from P, is "k3" of Schulman, http://joschu.net/blog/kl-approx.html). Its
variance is that of the M draws, (|V| - K)^2 / M times their sample variance. A model
that fails on few rare tokens alone can hide from it.
"""

import math
from typing import NamedTuple

import numpy as np

TAIL_FLOOR = 2.0**-18
"""Added to both tail masses. They are 1 minus a sum of probabilities that come from
float32 log-probabilities, each good to about 2^-20, so a tail of 1e-6 may come out
as 0. The same addition to both keeps KL_K a lower bound (log-sum inequality), up to
twice this value in nats."""
FEWER = (1, 4, 16, 64, 256, 1024)


class Comparison(NamedTuple):
    """N positions, in the order of the reference."""

    kl: np.ndarray  # [N] float64, KL_K in nats
    kl_of_fewer: dict[int, float]  # K' -> mean KL_K' where all is finite; NaN if nowhere
    estimate: np.ndarray  # [N] float64, unbiased estimate of the KL divergence, nats
    variance: np.ndarray  # [N] float64, of the estimate, by its draws; NaN if M < 2
    tail_mass: np.ndarray  # [N] float64, of the compared model
    same_top: np.ndarray  # [N] bool, whether the reference's top token is the model's
    next_logprobs: np.ndarray  # [N] float32, of the token that is there
    next_ranks: np.ndarray  # [N] int32, of it


def tail_mass(logprobs: np.ndarray) -> np.ndarray:
    """Probability of all tokens but the candidates: float64 `[N]` of `[N, K]`."""
    return np.maximum(1 - np.exp(logprobs.astype(np.float64)).sum(axis=1), 0)


def terms(p_logprobs: np.ndarray, q_logprobs: np.ndarray) -> np.ndarray:
    """p log(p/q) - p + q for each token, float64 in nats: no rounding makes it
    negative, and where p and q sum to the same it sums to p log(p/q)."""
    p_log, q_log = p_logprobs.astype(np.float64), q_logprobs.astype(np.float64)
    p, q = np.exp(p_log), np.exp(q_log)
    ratio = np.subtract(p_log, q_log, out=np.zeros_like(p), where=p > 0)
    return p * ratio - p + q


def divergence(
    p_logprobs: np.ndarray, p_tail: np.ndarray, q_logprobs: np.ndarray,
    q_tail: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """KL_K of the module's docstring: float64 `[N]` in nats.

    Args:
        p_logprobs, q_logprobs: `[N, K]`, nats.
        p_tail, q_tail: `[N]`, see `tail_mass`.
    """
    of_tail = terms(np.log(p_tail + TAIL_FLOOR), np.log(q_tail + TAIL_FLOOR))
    return terms(p_logprobs, q_logprobs).sum(axis=1) + of_tail


def divergence_of_fewer(
    p: np.ndarray, p_tail: np.ndarray, q: np.ndarray, q_tail: np.ndarray
) -> dict[int, float]:
    """Mean KL_K' for the K' of `FEWER` that are below K."""
    means = {}
    for few in (k for k in FEWER if k < p.shape[1]):
        p_rest, q_rest = (np.exp(x[:, few:].astype(np.float64)).sum(1) for x in (p, q))
        of_few = divergence(p[:, :few], p_tail + p_rest, q[:, :few], q_tail + q_rest)
        means[few] = mean(of_few)
    return means


def mean(values: np.ndarray) -> float:
    """NaN, without a warning, of none."""
    return float(values.mean()) if len(values) else math.nan


def all_finite(*columns: np.ndarray) -> np.ndarray:
    """Where each column `[N]` has a number, `[N]` bool."""
    return np.isfinite(columns).all(axis=0)


def estimate_tail(
    p_logprobs: np.ndarray, q_logprobs: np.ndarray, outside: int
) -> tuple[np.ndarray, np.ndarray]:
    """The tail's part of the divergence, estimated.

    Args:
        p_logprobs, q_logprobs: of the drawn tokens, `[N, M]`, nats.
        outside: size of the tail, |V| - K.

    Returns:
        Estimate and its variance, float64 `[N]`; 0 and 0 where there is no tail.
    """
    count, samples = p_logprobs.shape
    if not samples:
        return np.zeros(count), np.zeros(count)
    drawn = terms(p_logprobs, q_logprobs)
    variance = np.full(count, np.nan)
    if samples > 1:
        variance = outside**2 * drawn.var(axis=1, ddof=1) / samples
    return outside * drawn.mean(axis=1), variance
