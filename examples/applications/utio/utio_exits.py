# SPDX-License-Identifier: Apache-2.0
"""What it costs to let every token leave at one exit, from held-out tokens.

A step whose tokens all leave after E layers runs E layers and no more, whatever the batch;
a step that routes also runs the others, for fewer tokens. So one exit for all is what
calibration proposes, and routing that runs as many layers on average stands beside it.
"""

import math
import shlex
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from rich import box
from rich.table import Table

STEP = 32
"""Tokens of a decode step whose share leaves."""
MOST_RISE = 0.05
"""Of the perplexity, that a proposed exit may cost."""


class HeldOut(Protocol):
    """Held-out tokens; C cutoffs, n tokens."""

    predicted: np.ndarray  # float64 [C, n], what leaving costs, as the probes predict
    exit_nll: np.ndarray  # float64 [C, n], of the token that comes next
    agrees: np.ndarray  # bool [C, n], with full depth's greedy choice
    full_nll: np.ndarray  # float64 [n]


class Cost(NamedTuple):
    rise: float  # of the perplexity, relative
    agreement: float  # with full depth's greedy choice


class Routed(NamedTuple):
    """Routing by probe: a share of each step leaves at an exit, the others nowhere."""

    exit_layer: int
    leaving: float
    cost: Cost


class Exit(NamedTuple):
    """Every token leaves here."""

    exit_layer: int
    layers: float  # share of all layers
    cost: Cost
    routed: Routed | None  # as many layers, from the best of the earlier exits


def lowest_by_step(scores: np.ndarray, share: float) -> np.ndarray:
    """Indices of the lowest `share` in each of the steps that the tokens fall into."""
    order = np.random.default_rng(0).permutation(len(scores))
    lowest, before = [], 0
    for begin in range(0, len(order), STEP):
        step = order[begin : begin + STEP]
        # Rounded at the boundaries, so that the whole has its share too.
        upto = round(share * (begin + len(step)))
        ranked = step[np.argsort(scores[step], kind="stable")]
        lowest.append(ranked[: upto - before])
        before = upto
    return np.concatenate(lowest)


def exits_for_all(cutoffs: Sequence[int], num_layers: int, held_out: HeldOut) -> list[Exit]:
    """One for each cutoff, in ascending order."""

    def cost(index: int, leaves: np.ndarray | slice) -> Cost:
        more = held_out.exit_nll[index] - held_out.full_nll
        disagrees = ~held_out.agrees[index]
        count = len(more)
        return Cost(math.expm1(more[leaves].sum() / count), 1 - disagrees[leaves].sum() / count)

    exits: list[Exit] = []
    for index, cutoff in enumerate(cutoffs):
        routed = []
        for i, earlier in enumerate(cutoffs[:index]):
            share = (num_layers - cutoff) / (num_layers - earlier)
            leaves = lowest_by_step(held_out.predicted[i], share)
            routed.append(Routed(earlier, share, cost(i, leaves)))
        best = min(routed, key=lambda way: way.cost.rise, default=None)
        whole = cost(index, slice(None))
        exits.append(Exit(cutoff, cutoff / num_layers, whole, best))
    return exits


def proposed(exits: Sequence[Exit]) -> Exit | None:
    """The one of the fewest layers that costs little enough."""
    cheap = (way for way in exits if way.cost.rise <= MOST_RISE)
    return min(cheap, key=lambda way: way.exit_layer, default=None)


def proposal(exits: Sequence[Exit], calibration: str) -> str:
    """What to serve, in a sentence."""
    way = proposed(exits)
    if way is None:
        return (
            f"No exit costs less than {MOST_RISE:.0%} of perplexity when every token "
            "leaves there: draft, which loses nothing, or try later --cutoffs."
        )
    return (
        f"To let every token leave after {way.exit_layer} layers "
        f"({way.cost.rise:+.1%} of perplexity): {serve_options(way, calibration)}, and "
        f"max_depth={way.exit_layer} in the requests"
    )


def serve_options(way: Exit, calibration: str) -> str:
    """What `vllm serve` takes for tokens to leave at an exit."""
    return (
        f"--enable-utio --utio-bucket-cutoffs {way.exit_layer} "
        f"--utio-calibration {shlex.quote(calibration)}"
    )


def either(exits: Sequence[Exit], calibration: str, drafting: str) -> list[str]:
    """What to serve to have both; nothing if no exit costs little enough.

    Args:
        drafting: what `vllm serve` takes to draft, with a gate.
    """
    way = proposed(exits)
    if way is None:
        return []
    return [
        "To do either, or neither, whichever the server measures to be faster: "
        f"{serve_options(way, calibration)} --utio-bucket-shares 1,0 {drafting}, and no "
        "max_depth"
    ]


def exits_table(exits: Sequence[Exit]) -> Table:
    table = Table(
        title="Every token leaves at one exit; routing by probe that runs as many layers",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in ("exit after", "layers", "perplexity", "agrees"):
        table.add_column(column, justify="right")
    table.add_column("routed from", justify="right")
    for column in ("leaving", "perplexity", "agrees"):
        table.add_column(column, justify="right")
    for way in exits:
        row = [str(way.exit_layer), f"{way.layers:.0%}", *percents(way.cost)]
        if way.routed is not None:
            routed = way.routed
            row += [str(routed.exit_layer), f"{routed.leaving:.0%}", *percents(routed.cost)]
        table.add_row(*row)
    return table


def percents(cost: Cost) -> tuple[str, str]:
    return f"{cost.rise:+.2%}", f"{cost.agreement:.4f}"
