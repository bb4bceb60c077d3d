# SPDX-License-Identifier: Apache-2.0
"""What ways of decoding cost and gain, side by side: a table, a CSV file, a plot."""

import argparse
import csv
import math
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from utio_options import ORACLE_AGREEMENT, ORACLE_PERPLEXITY, ORACLES, RANDOM

UNIFORM, FULL, DRAFTING = "all tokens", "full depth", "drafting"
PERPLEXITY, DISAGREEMENT = "perplexity", "disagreement"
ORACLE_OF = {PERPLEXITY: ORACLE_PERPLEXITY, DISAGREEMENT: ORACLE_AGREEMENT}
"""The oracle that has the least of each measure."""
MIN_FILES = 8
"""Fewer give no interval."""


@dataclass
class Point:
    """One way of decoding."""

    way: str
    exits: tuple[int, ...]  # after how many layers
    leaving: tuple[float, ...]  # share of the tokens at each; of drafting, how many
    mean_depth: float  # share of all layers
    perplexity: float
    rise: float  # of the perplexity, relative
    agreement: float
    speedup: float

    @property
    def plan(self) -> tuple:
        return self.exits, self.leaving


@dataclass
class Result:
    """What was measured.

    Attributes:
        num_layers: of the model.
        base: perplexity at full depth.
        files: `[sequences]` int64, the file that each is of.
        costs: of each measure, by way and plan: float64 `[sequences]`, nats a token and
            the share of the tokens that are not full depth's.
    """

    num_layers: int
    files: np.ndarray
    base: float = math.nan
    points: list[Point] = field(default_factory=list)
    costs: dict[str, dict[tuple, np.ndarray]] = field(
        default_factory=lambda: {PERPLEXITY: {}, DISAGREEMENT: {}}
    )


def measured(measure: str, means: np.ndarray) -> np.ndarray:
    """The measure, of means of its costs."""
    return np.exp(means) if measure == PERPLEXITY else means


def closed(
    result: Result, point: Point, measure: str
) -> tuple[float, tuple[float, float] | None] | None:
    """Share of the gap between random and the measure's oracle that a way closes.

    Returns:
        the share and its 95 % interval over the choice of files. No interval where
        there are fewer than eight, or the gap is not above 0 in all but 2.5 % of the
        choices: a share of it then means nothing. None where the way has no share.
    """
    costs = result.costs[measure]
    keys = [(way, *point.plan) for way in (RANDOM, ORACLE_OF[measure], point.way)]
    if point.way in (RANDOM, ORACLE_OF[measure]) or not costs.keys() >= {*keys}:
        return None
    rows = np.stack([costs[key] for key in keys])
    random, oracle, own = measured(measure, rows.mean(1))
    if random <= oracle:
        return None
    return (random - own) / (random - oracle), _interval(measure, rows, result.files)


def _interval(
    measure: str, rows: np.ndarray, files: np.ndarray
) -> tuple[float, float] | None:
    """By drawing whole files: what is of one file is alike."""
    _, of_file = np.unique(files, return_inverse=True)
    count = of_file.max() + 1
    if count < MIN_FILES:
        return None
    sizes = np.bincount(of_file)
    sums = np.stack([np.bincount(of_file, row) for row in rows])
    drawn = np.random.default_rng(0).integers(count, size=(2000, count))
    means = sums[:, drawn].sum(2) / sizes[drawn].sum(1)
    random, oracle, own = measured(measure, means)
    if np.mean(random <= oracle) > 0.025:
        return None
    random, oracle, own = (x[random > oracle] for x in (random, oracle, own))
    low, high = np.percentile((random - own) / (random - oracle), [2.5, 97.5])
    return low, high


def dominated_by(points: list[Point], point: Point) -> Point | None:
    """A way that can be had, is at least as fast and costs no more, one of both truly;
    of several the cheapest. None for oracles, which are bounds."""
    if point.way in ORACLES:
        return None

    def better(other: Point) -> bool:
        faster = _gain(other) - _gain(point)
        cheaper = point.rise - other.rise
        return faster >= 0 and cheaper >= 0 and (faster > 0 or cheaper > 0)

    rivals = [p for p in points if p.way not in ORACLES and better(p)]
    return min(rivals, key=lambda p: p.rise, default=None)


def _gain(point: Point) -> float:
    """The speed; without one, the layers that are saved."""
    return -point.mean_depth if math.isnan(point.speedup) else point.speedup


def named(point: Point) -> str:
    where = ", ".join(map(str, point.exits))
    share = "" if point.way in (UNIFORM, DRAFTING, FULL) else " " + _percents(point)
    return f"{point.way} {where}{share}".strip()


def _percents(point: Point) -> str:
    if point.way == DRAFTING:
        return f"{point.leaving[0]:g} drafts"
    return ", ".join(f"{share:.0%}" for share in point.leaving)


def gap_closed(result: Result, point: Point, measure: str) -> str:
    found = closed(result, point, measure)
    if found is None:
        return ""
    share, interval = found
    if interval is None:
        return "not resolved"
    return "{:.0%} ({:.0%} to {:.0%})".format(share, *interval)


def full_depth(result: Result) -> Point:
    timed = any(not math.isnan(point.speedup) for point in result.points)
    speedup = 1.0 if timed else math.nan
    return Point(FULL, (), (), 1.0, result.base, 0.0, 1.0, speedup)


def show(result: Result, args: argparse.Namespace) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("way", no_wrap=True)
    for name in ("exit", "leaving", "mean depth", "perplexity", "rise", "agreement",
                 "speed-up", "gap closed: perplexity", "agreement"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap="gap" in name or name == "agreement")
    table.add_column("dominated by", no_wrap=True)
    base = full_depth(result)
    points = sorted(result.points, key=lambda p: (len(p.exits), p.exits, p.leaving))
    for p in (base, *points):
        rival = dominated_by([base, *points], p)
        table.add_row(
            p.way, ", ".join(map(str, p.exits)), _percents(p),
            f"{p.mean_depth:.2f}", f"{p.perplexity:.3f}", f"{p.rise:+.1%}",
            f"{p.agreement:.3f}",
            "" if math.isnan(p.speedup) else f"{p.speedup:.2f}×",
            *(gap_closed(result, p, measure) for measure in ORACLE_OF),
            named(rival) if rival else "",
        )  # fmt: skip
    tokens = len(result.files) * (args.forced_length - 1)
    Console(width=170).print(
        f"{tokens} tokens of {len(np.unique(result.files))} texts decoded at each point,",
        f"{args.sequences} at a time;",
        f"{'eager' if args.enforce_eager else 'compiled'}, {args.dtype};",
        f"random: mean of {args.random_draws} draws",
        table,
    )


def write_csv(path: Path, points: list[Point]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Point)])
        for point in points:
            columns = astuple(point)
            writer.writerow(
                "+".join(map(str, c)) if isinstance(c, tuple) else c for c in columns
            )


def draw(path: Path, result: Result, args: argparse.Namespace) -> None:
    """Perplexity and agreement against speed; without one, against depth."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    timed = bool(args.speed_rounds)
    gain = "speedup" if timed else "mean_depth"
    label = "measured speed-up" if timed else "mean depth, share of the layers"
    figure, axes = pyplot.subplots(
        1, 2, figsize=(11, 4.5), constrained_layout=True
    )  # fmt: skip
    costs = [("rise", "rise of perplexity"), ("agreement", "greedy agreement")]
    ways = dict.fromkeys(p.way for p in result.points)
    for axis, (cost, cost_label) in zip(axes, costs):
        for number, way in enumerate(ways):
            own = [p for p in result.points if p.way == way]
            own.sort(key=_gain)
            style = dict(color=f"C{number % 10}", alpha=0.5 if way in ORACLES else 1.0)
            groups = dict.fromkeys(p.exits for p in own)
            if way in (UNIFORM, DRAFTING):
                groups = {None: None}
            for nth, exits in enumerate(groups):
                line = [p for p in own if exits in (None, p.exits)]
                axis.plot(
                    [getattr(p, gain) for p in line],
                    [getattr(p, cost) for p in line],
                    marker={UNIFORM: "x", DRAFTING: "D"}.get(way, "o"),
                    linestyle="-" if not exits or len(exits) == 1 else ":",
                    label=None if nth else way,
                    **style,
                )
        axis.plot(1.0, 0.0 if cost == "rise" else 1.0, "k*", label=FULL)
        axis.set_xlabel(label)
        axis.set_ylabel(cost_label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    exits = ", ".join(map(str, args.cutoffs))
    mixed = "; dotted: several in one step" if args.mix else ""
    figure.suptitle(f"{Path(args.model).name}: exits after {exits} layers{mixed}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
