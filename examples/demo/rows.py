# SPDX-License-Identifier: Apache-2.0
"""What a part of the demo found, and the table of all of them."""

import statistics
from typing import NamedTuple

from rich.console import Console


class Row(NamedTuple):
    """One job, done upstream's own way and this fork's, in one run."""

    job: str
    upstream: str  # what upstream's own way took
    ours: str
    ratio: str  # upstream's over ours
    said: list[str]  # what the ways are, and whether the answers are the same


def ratio(values: list[float]) -> str:
    """Median, and from the least to the greatest where there are several."""
    middle = digits(statistics.median(values))
    if len(values) == 1:
        return f"{middle}×"
    return f"{middle}× ({digits(min(values))} to {digits(max(values))})"


def digits(value: float) -> str:
    """Two decimals below 10, one below 100: enough to see what differs."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def show(rows: list[Row], notes: list[str], console: Console) -> None:
    """Prints the figures of each row in columns, what they are of beneath them."""
    head = line("", "vLLM's own way", "this fork", "ratio")
    console.print(f"\n{head}\n{'─' * len(head)}", highlight=False)
    for row in rows:
        figures = line(row.job, row.upstream, row.ours, row.ratio)
        console.print(figures, style="bold", highlight=False)
        for said in row.said:
            console.print(f"  {said}", highlight=False, markup=False)
    console.print()
    for note in notes:
        console.print(note, highlight=False, style="dim")


def line(job: str, upstream: str, ours: str, ratio: str) -> str:
    return f"{job:<33}{upstream:>14}{ours:>11}  {ratio:<20}"
