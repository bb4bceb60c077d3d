# SPDX-License-Identifier: Apache-2.0
"""What a part of the demo found, and the table of all of them."""

import statistics
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table


class Row(NamedTuple):
    """One job, done upstream's own way and this fork's, in one run."""

    job: str
    upstream: str  # what it is compared with, and what that took
    ours: str
    ratios: list[float]  # upstream's over ours, one a round
    unit: str  # what the ratio is of
    result: str  # whether the answers are the same


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
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=True)
    table.add_column("job", max_width=27)
    table.add_column("vLLM's own way", max_width=22)
    table.add_column("this fork's way", max_width=22)
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("answers", max_width=28)
    for row in rows:
        table.add_row(
            row.job,
            row.upstream,
            row.ours,
            f"[bold]{ratio(row.ratios)}[/bold]\n{row.unit}",
            row.result,
        )
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, style="dim")
