# SPDX-License-Identifier: Apache-2.0
"""Tables for the terminal."""

import statistics
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from dual_vllm.coordinator import Diagnostics

CONSOLE = Console(highlight=False)
if not CONSOLE.is_terminal:
    CONSOLE.width = 120


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table; all columns but the first are numbers."""
    result = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for number, column in enumerate(columns):
        result.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        result.add_row(*row)
    CONSOLE.print(result)


def diagnostics(steps: Sequence[Diagnostics]) -> None:
    """Mean, least and greatest of what is known of drawn tokens."""
    names = {
        "alpha": [d.alpha for d in steps],
        "KL(q||a), nats": [d.kl_a for d in steps],
        "KL(q||b), nats": [d.kl_b for d in steps],
        "|KL(q||a) - KL(q||b)|": [abs(d.kl_a - d.kl_b) for d in steps],
        "ESS of a": [d.ess_a for d in steps],
        "ESS of b": [d.ess_b for d in steps],
        "ESS ratio a / b": [d.ess_a / d.ess_b for d in steps],
        "entropy of q, nats": [d.entropy for d in steps],
        "candidates": [d.candidates for d in steps],
        "mass outside, a": [1 - d.coverage_a for d in steps],
        "mass outside, b": [1 - d.coverage_b for d in steps],
        "bound on total variation": [d.tv_bound for d in steps],
        "bound on |dKL|, nats": [d.kl_bound for d in steps],
        "guessed right": [float(d.guessed) for d in steps],
    }
    rows = [
        (name, *(f"{f(values):.4g}" for f in (statistics.fmean, min, max)))
        for name, values in names.items()
    ]
    table(f"{len(steps)} tokens", ("", "mean", "least", "greatest"), rows)
