# SPDX-License-Identifier: Apache-2.0
"""Pairs of models as log-probabilities, for tests of `examples/applications/dual_vllm`
without a model."""

import math
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, logsumexp, softmax

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path[:0] = [str(EXAMPLES / "applications"), str(EXAMPLES)]

from dual_vllm import CoordinatorConfig, DualVLLMCoordinator
from dual_vllm.coordinator import GenerationOutput, Sample
from dual_vllm.server import Answer, TopK

VOCABULARY = 300
ROUNDING = 1e-5
"""What `tilted.ROUNDING`, counted as mass, can move a probability or a divergence."""


def make_pair(seed: int) -> np.ndarray:
    """Log-probabilities `[2, VOCABULARY]` of two models, of all kinds: flat and peaked,
    alike and not."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=VOCABULARY)
    own = rng.normal(size=(2, VOCABULARY))
    likeness = rng.choice([0.0, 0.5, 0.9, 0.99])
    logits = rng.choice([0.5, 2.0, 8.0]) * (likeness * common + (1 - likeness) * own)
    return log_softmax(logits, axis=-1)


def solve(logprobs: np.ndarray) -> tuple[float, np.ndarray, float]:
    """alpha, q and the divergence over a whole vocabulary."""
    found = minimize_scalar(
        lambda a: logsumexp((1 - a) * logprobs[0] + a * logprobs[1]),
        bounds=(0, 1),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return (
        found.x,
        softmax((1 - found.x) * logprobs[0] + found.x * logprobs[1]),
        (-found.fun),
    )


def likely(logprobs: np.ndarray, k: int) -> np.ndarray:
    """The `k` most likely ids of either model."""
    return np.union1d(*np.argsort(-logprobs, axis=-1)[:, :k])


class Offline(DualVLLMCoordinator):
    """Knows the vocabulary without a tokenizer; `draw` answers from arrays."""

    vocabulary = VOCABULARY
    max_model_len = 10**6

    def draw(self, logprobs: np.ndarray, number: int) -> tuple[int, int]:
        """A token of sample `number`, and the rounds of requests it took."""
        sample = Sample(GenerationOutput(number, [5]))
        order = np.argsort(-logprobs, axis=-1)[:, : self.config.top_k]
        tops = [TopK(ids, row[ids]) for ids, row in zip(order, logprobs)]
        nothing = np.empty(0)
        pair = tuple(Answer(nothing, math.nan, top) for top in tops)
        assert self._advance(sample, pair) is None
        for rounds in range(1, 20):
            ids = sample.guess.unknown
            assert 0 < len(ids) <= self.config.max_candidates
            pair = tuple(Answer(row[ids], 0.0, top) for row, top in zip(logprobs, tops))
            step = self._advance(sample, pair)
            if step is not None:
                return step.token_id, rounds
        raise AssertionError("no token after 19 rounds")


def offline(**settings) -> Offline:
    return Offline(
        CoordinatorConfig(
            url_a="http://a",
            url_b="http://b",
            ignore_eos=True,
            max_tokens=2,
            **settings,
        )
    )


def named(logprobs: np.ndarray, top_k: int, tail_mass: float = 0, **_) -> int:
    """How many tokens one model names."""
    mass = 0.0
    for count, prob in enumerate(sorted(np.exp(logprobs), reverse=True), start=1):
        mass += prob
        if count == top_k or (tail_mass and mass >= 1 - tail_mass):
            return count
    raise AssertionError
