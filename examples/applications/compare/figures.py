# SPDX-License-Identifier: Apache-2.0
"""What is reported of a model: figures, their errors, the same by confidence.

Errors are standard errors over the text, of means over blocks of `BLOCK` consecutive
positions, as neighbouring positions are not independent (batch means: Flegal and Jones,
Ann. Statist. 38, 2010). Intervals are 1.96 of them to each side, 95 % if normal. All of
a text's sampling is in them; what is due to the draws of the KL estimate alone is given
beside it (`draw_error`), and vanishes with as many candidates as words.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from compare.divergence import all_finite

BLOCK = 64
"""Positions of a block; fewer where that would give fewer than `LEAST_BLOCKS`."""
LEAST_BLOCKS = 32
Z = 1.96  # half the width of a 95 % interval, in standard errors
PERCENTILES = (0.1, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
CONFIDENCE = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
"""Edges of the buckets of the probability of the reference's most probable token."""
HISTOGRAM = np.linspace(-1, 1, 401)
"""Edges of the bins of the change of the right token's probability."""


class Positions(NamedTuple):
    """N scored positions of a model beside its reference's, in the text's order."""

    p_next: np.ndarray  # [N] log-probability of the right token by the reference, nats
    q_next: np.ndarray  # [N] by the model
    p_top: np.ndarray  # [N] log-probability of the reference's most probable token
    q_rank: np.ndarray  # [N] rank of the right token by the model
    same_top: np.ndarray  # [N] bool, whether the two have the same most probable token
    kl: np.ndarray  # [N] lower bound, nats
    estimate: np.ndarray  # [N] unbiased estimate, nats
    variance: np.ndarray  # [N] of the estimate, by its draws
    p_tail: np.ndarray  # [N] probability of all tokens but the candidates
    q_tail: np.ndarray  # [N]

    def finite(self) -> np.ndarray:
        """Where log-probabilities and divergences are numbers, `[N]` bool."""
        return all_finite(self.p_next, self.q_next, self.kl, self.estimate)

    def where(self, keep: np.ndarray) -> "Positions":
        return Positions(*(column[keep] for column in self))

    def right(self) -> tuple[np.ndarray, np.ndarray]:
        """Whether greedy decoding finds the right token, for reference and model."""
        return self.p_next >= self.p_top, self.q_rank == 1

    def change(self) -> np.ndarray:
        """Δp: by how much the right token's probability changed, `[N]`."""
        return np.exp(self.q_next) - np.exp(self.p_next)


def block_length(count: int) -> int:
    return max(min(BLOCK, count // LEAST_BLOCKS), 1)


def standard_error(values: np.ndarray) -> float:
    """Of the mean of consecutive values, by the means of blocks; NaN of one value."""
    length = block_length(len(values))
    starts = np.arange(0, len(values), length)
    if len(starts) < 2:
        return math.nan
    sums = np.add.reduceat(values - values.mean(), starts)
    blocks = len(starts)
    return math.sqrt((sums**2).sum() * blocks / (blocks - 1)) / len(values)


def mean_and_error(values: np.ndarray) -> dict[str, float]:
    values = values.astype(np.float64)
    return {"mean": float(values.mean()), "standard_error": standard_error(values)}


def interval(log: np.ndarray) -> dict[str, float]:
    """exp of the mean of `log`, with its 95 % interval."""
    mean, error = mean_and_error(log).values()
    low, high = (exp(mean + sign * Z * error) for sign in (-1, 1))
    return {"value": exp(mean), "low": low, "high": high}


def exp(value: float) -> float:
    """Infinity where it is too large, as a broken model's perplexity may be."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def percentiles(values: np.ndarray) -> dict[str, float]:
    found = np.percentile(values, PERCENTILES)
    return {f"p{p:g}": float(x) for p, x in zip(PERCENTILES, found)} | {
        "min": float(values.min()),
        "max": float(values.max()),
    }


def correlation(left: np.ndarray, right: np.ndarray) -> float:
    """Pearson's, of two columns that may be constant: 1 if they are the same."""
    if np.array_equal(left, right):
        return 1.0
    deviations = [x - x.mean() for x in (left, right)]
    scale = math.sqrt(math.prod((d**2).sum() for d in deviations))
    return float((deviations[0] * deviations[1]).sum() / scale) if scale else math.nan


def root_mean_square(values: np.ndarray) -> dict[str, float]:
    """With its standard error, by the delta method."""
    square, error = mean_and_error(values**2).values()
    root = math.sqrt(square)
    return {"value": root, "standard_error": error / (2 * root) if root else 0.0}


def divergences(positions: Positions) -> dict[str, Any]:
    draws = positions.variance.sum()
    return {
        "estimate": mean_and_error(positions.estimate)
        | {"draw_error": math.sqrt(draws) / len(positions.kl)},
        "lower_bound": mean_and_error(positions.kl),
        "lower_bound_percentiles": percentiles(positions.kl),
    }


def agreement(positions: Positions) -> dict[str, Any]:
    """Of greedy choices with each other, and with the text (*flips*: Dutta et al.,
    arXiv:2407.09141, count those answers that turn from right to wrong or back)."""
    before, after = positions.right()
    return {
        "top_1_agreement": mean_and_error(positions.same_top),
        "flips": mean_and_error(before != after)
        | {
            "right_to_wrong": float((before & ~after).mean()),
            "wrong_to_right": float((~before & after).mean()),
        },
        "top_1_right": {"reference": float(before.mean()), "model": float(after.mean())},
    }


def probability_change(positions: Positions) -> dict[str, Any]:
    change = positions.change()
    return {
        **mean_and_error(change),
        "rms": root_mean_square(change),
        "percentiles": percentiles(change),
    }


def by_confidence(positions: Positions) -> list[dict[str, Any]]:
    """The figures of each bucket of `CONFIDENCE` that has positions."""
    confidence = np.exp(positions.p_top)
    bucket = np.digitize(confidence, CONFIDENCE[1:-1])
    rows = []
    for number, (low, high) in enumerate(zip(CONFIDENCE, CONFIDENCE[1:])):
        few = positions.where(bucket == number)
        if not (count := len(few.kl)):
            continue
        share = {"share": count / len(bucket)}
        rows.append({"from": low, "to": high, "positions": count} | share | loss(few))
    return rows


def loss(positions: Positions) -> dict[str, Any]:
    """The figures that say what was lost: of all positions, and of each bucket."""
    p, q = positions.p_next, positions.q_next
    return {
        "perplexity": interval(-q),
        "reference_perplexity": interval(-p),
        "log_perplexity_ratio": mean_and_error(p - q),
        "perplexity_ratio": interval(p - q),
        "correlation": correlation(p, q),
        "kl": divergences(positions),
        **agreement(positions),
        "delta_p": probability_change(positions),
    }


def summarize(positions: Positions, scored_bytes: int) -> dict[str, Any]:
    """All figures of a model. Positions that are not finite are counted and left out.

    Args:
        scored_bytes: UTF-8 bytes of the scored tokens' text.
    """
    finite = positions.finite()
    report: dict[str, Any] = {
        "positions": len(finite),
        "non_finite": int((~finite).sum()),
    }
    few = positions.where(finite)
    if not len(few.kl):
        return report
    few = Positions(*(x.astype(np.float64) if x.dtype == np.float32 else x for x in few))
    bits = -few.q_next.sum() / math.log(2)
    size = scored_bytes * finite.mean()
    of_all = loss(few)
    of_all["delta_p"]["histogram"] = np.histogram(few.change(), HISTOGRAM)[0].tolist()
    return report | of_all | {
        "bits_per_byte": float(bits / size) if size else None,
        "reference_bits_per_byte": (
            float(-few.p_next.sum() / math.log(2) / size) if size else None
        ),
        "tail_mass": {
            "reference": float(few.p_tail.mean()), "model": float(few.q_tail.mean())
        },
        "by_confidence": by_confidence(few),
    }  # fmt: skip
