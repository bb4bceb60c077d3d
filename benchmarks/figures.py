# SPDX-License-Identifier: Apache-2.0
"""Writes the README's chart and the tables of both READMEs from one file of figures.

    .venv/bin/python benchmarks/figures.py           # after a change of figures.json
    .venv/bin/python benchmarks/figures.py --check   # fails where something is not up to date

`figures.json` holds what the benchmarks printed, in two parts. `tables` are as the
benchmarks show them. `jobs` are the lines of the README's table, with the figures by name:
`{clients[0][3]:.1f}` is the first number of a cell, here of the row 0 and the column 3. A
job with a `bar` is in the chart, `times` as fast, or `times` by `of`.
"""

import argparse
import io
import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FIGURES = HERE / "figures.json"
CHARTS = {
    HERE / "chart_light.svg": {"text": "#1f2328", "bar": "#0969da", "line": "#d0d7de"},
    HERE / "chart_dark.svg": {"text": "#e6edf3", "bar": "#58a6ff", "line": "#3d444d"},
}
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    old = [path for path, text in files().items() if not _holds(path, text)]
    for path in old:
        print(f"{path.relative_to(ROOT)}: {'not up to date' if args.check else 'written'}")
        if not args.check:
            path.write_text(files()[path])
    return 1 if args.check and old else 0


def files() -> dict[Path, str]:
    """What each file with figures must hold."""
    figures = json.loads(FIGURES.read_text())
    tables = figures["tables"]
    parts = {name: markdown(table["columns"], table["rows"]) for name, table in tables.items()}
    numbers = {name: numbers_of(table["rows"]) for name, table in tables.items()}
    parts["jobs"] = jobs_table(figures["jobs"], numbers)
    bars = bars_of(figures["jobs"], numbers)
    readmes = [ROOT / "README.md", HERE / "README.md"]
    texts = {path: fill(path.read_text(), parts) for path in readmes}
    return texts | {path: chart(bars, **colours) for path, colours in CHARTS.items()}


def numbers_of(rows: list[list[str]]) -> list[list[float | None]]:
    """The first number of each cell."""
    found = [[NUMBER.search(cell) for cell in row] for row in rows]
    return [[float(m[0].replace(",", "")) if m else None for m in row] for row in found]


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """A table; columns of numbers are aligned to the right."""
    numeric = [all(not row[i] or row[i][0].isdigit() for row in rows) for i in range(len(columns))]
    rule = "|" + "|".join(" ---: " if is_number else " --- " for is_number in numeric) + "|"
    lines = ["| " + " | ".join(row) + " |" for row in (columns, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]]).replace("|  |", "| |").replace("|  |", "| |")


def jobs_table(jobs: list[dict], numbers: dict) -> str:
    columns = ["job", "stock vLLM 0.32.0", "this fork", "command"]
    rows = []
    for job in jobs:
        stock, fork = (job[key].format(**numbers) for key in ("stock", "fork"))
        rows.append([job["job"], stock, fork, f"`benchmarks/{job['command']}`"])
    return markdown(columns, rows)


def bars_of(jobs: list[dict], numbers: dict) -> list[tuple[str, float]]:
    """Label and ratio of each job that is in the chart, the greatest first."""
    bars = []
    for job in jobs:
        if "bar" in job:
            times, of = (float(job.get(key, "1").format(**numbers)) for key in ("times", "of"))
            bars.append((job["bar"], times / of))
    return sorted(bars, key=lambda bar: -bar[1])


def fill(text: str, parts: dict[str, str]) -> str:
    """Puts each part between its two comments."""

    def between(found: re.Match) -> str:
        return f"{found[1]}\n{parts[found[2]]}\n<!-- /figures -->"

    return re.sub(r"(<!-- figures: (\w+) -->)\n.*?<!-- /figures -->", between, text, flags=re.S)


def chart(bars: list[tuple[str, float]], text: str, bar: str, line: str) -> str:
    """An SVG on no ground, in the colours of a light or a dark page."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    fixed = {"svg.hashsalt": "figures", "svg.fonttype": "none", "font.family": "sans-serif"}
    colours = {"text.color": text, "axes.labelcolor": text, "ytick.color": text}
    with pyplot.rc_context(fixed | colours):
        figure, axes = pyplot.subplots(figsize=(8, 3.0))
        figure.subplots_adjust(left=0.44, right=0.93, top=0.84, bottom=0.04)
        drawn = axes.barh([label for label, _ in bars], [x for _, x in bars], color=bar, height=0.6)
        axes.bar_label(drawn, [f"{x:.2g}×" for _, x in bars], padding=4, weight="bold")
        axes.axvline(1, color=text, linewidth=1)
        axes.invert_yaxis()
        axes.set_xlim(0, max(x for _, x in bars) * 1.05)
        axes.tick_params(left=False, bottom=False, labelbottom=False)
        axes.spines[:].set_visible(False)
        axes.spines["left"].set(visible=True, color=line)
        title = "Times as fast as stock vLLM 0.32.0, on a CPU (of memory: times less)"
        figure.suptitle(title, x=0.02, ha="left", y=0.97, size=11)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return re.sub(r"[ \t]+$", "", file.getvalue(), flags=re.M)


def _holds(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
