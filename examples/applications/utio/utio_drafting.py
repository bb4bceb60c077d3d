# SPDX-License-Identifier: Apache-2.0
"""What drafting by early exits would gain, from held-out tokens.

The first E layers of a model draft, all layers verify, and nothing is lost
(`--speculative-config '{"method": "early_exit", ...}'`). How much it gains is estimated
here for one sequence at a time, where each pass reads the weights: a round of j drafts
costs 1 + j · (E layers + translator + head) / (all layers + head) passes. The states of
drafted rows are kept, so the round's last pass through the first layers is part of the 1.
A draft is accepted as often as the two distributions overlap, or the two greedy choices
agree; drafts after one that is rejected are lost.
"""

import json
import shlex
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MOST_DRAFTS = 6
LEAST = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
"""Probabilities that all drafts are accepted, below which drafting stops; 0: never."""


class Drafting(NamedTuple):
    """A way to draft, and what it comes to."""

    exit_layer: int
    num_drafts: int  # at most
    min_acceptance: float
    accepted: float  # share of the drafts
    tokens: float  # a round
    speedup: float  # over decoding without drafts, by the passes' costs


def best_drafting(
    exit_layer: int,
    cost: float,
    accepted: np.ndarray,
    predicted: np.ndarray,
    stops: bool = True,
) -> Drafting:
    """The fastest way to draft from one exit.

    Args:
        exit_layer: how many layers draft.
        cost: of a draft, in passes through all layers.
        accepted: [n], of consecutive tokens, the probability that a draft is accepted.
        predicted: [n], the same as a probe predicts it.
        stops: whether drafting may stop by what the probe predicts.
    """
    found = [
        drafting(exit_layer, cost, accepted, predicted, most, least)
        for most in range(1, MOST_DRAFTS + 1)
        for least in (LEAST if stops else LEAST[:1])
    ]
    return max(found, key=lambda way: way.speedup)


def drafting(
    exit_layer: int,
    cost: float,
    accepted: np.ndarray,
    predicted: np.ndarray,
    most: int,
    least: float,
) -> Drafting:
    """A round of at most `most` drafts from each token on; see `best_drafting`."""
    starts = len(accepted) - most + 1
    drafts, tokens = np.zeros(starts), np.ones(starts)
    reached, chance = np.ones(starts), np.ones(starts)
    for i in range(most):
        chance = chance * predicted[i : i + starts]
        goes_on = chance >= least
        chance = np.where(goes_on, chance, 0)
        if least == 0:
            goes_on[:] = True
        reached = reached * accepted[i : i + starts] * goes_on
        drafts += goes_on
        tokens += reached
    drafted = drafts.mean()
    share = (tokens.mean() - 1) / drafted if drafted else 0.0
    speedup = tokens.mean() / (1 + cost * drafted)
    return Drafting(exit_layer, most, least, share, tokens.mean(), speedup)


def draft_costs(model, cutoffs: Sequence[int], translator: int) -> list[float]:
    """Weights that a draft reads, by those that a pass through all layers reads.

    Args:
        translator: weights of one. Of a layer's experts, those of one token count.
    """
    config = model.config
    decoder = getattr(model.model, "decoder", model.model)
    layers = [
        sum(
            weight.numel() * (experts_read(config) if ".experts." in name else 1)
            for name, weight in layer.named_parameters()
        )
        for layer in decoder.layers
    ]
    head = model.get_output_embeddings().weight.numel()
    whole = sum(layers) + head
    return [(sum(layers[:cutoff]) + translator + head) / whole for cutoff in cutoffs]


def experts_read(config) -> float:
    """The share of a layer's experts that a token runs."""
    return getattr(config, "num_experts_per_tok", 1) / getattr(config, "num_experts", 1)


def serve_options(way: Drafting, calibration: str, **others) -> str:
    """What `vllm serve` takes for a way to draft."""
    options = {
        "method": "early_exit",
        "exit_layer": way.exit_layer,
        "num_speculative_tokens": way.num_drafts,
        "min_acceptance": way.min_acceptance,
        "calibration": calibration,
        **others,
    }
    return f"--speculative-config {shlex.quote(json.dumps(options))}"
