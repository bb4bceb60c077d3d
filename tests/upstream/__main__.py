# SPDX-License-Identifier: Apache-2.0
"""Run upstream's own tests on upstream's release and on this fork, and compare.

    .venv/bin/python -m tests.upstream                    # the short selection
    .venv/bin/python -m tests.upstream --all              # the whole one
    .venv/bin/python -m tests.upstream tests/v1/core ...  # of upstream's tree

A test that passes on the release has to pass on the fork: the exit status is 1 if one
does not, twice. What ran is kept in ``build/upstream/results`` and is not run again
until a wheel, a patch or a stand-in changes. ``--all`` writes ``RESULTS.md``.
"""

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

from tests.upstream import compare, results, sides
from tests.upstream.compare import Comparison
from tests.upstream.results import Result
from tests.upstream.sides import Side

HERE = Path(__file__).parent
SELECTION = HERE / "selection.txt"
LIMIT_S = 300
"""Seconds without a test that ends, after which one counts as stuck."""


def selected(text: str, short: bool) -> tuple[list[str], list[str]]:
    """The paths that a selection names, and those that it leaves out.

    Raises:
        ValueError: a line does not begin with ``short``, ``whole`` or ``not``, or
            gives no reason.

    """
    chosen, left_out = [], []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        row, _, reason = line.partition("  #")
        which, _, path = row.partition(" ")
        if which not in ("short", "whole", "not") or not reason.strip():
            raise ValueError(f"{SELECTION.name}: {line!r}")
        if which == "not":
            left_out.append(path.strip())
        elif which == "short" or not short:
            chosen.append(path.strip())
    return chosen, left_out


def test_files(
    tree: Path, chosen: list[str], left_out: list[str] | None = None
) -> list[str]:
    """The test files of a tree below the chosen paths, each once, sorted.

    Paths may hold the wildcards of ``Path.glob``.
    """

    def files(names: list[str]) -> set[Path]:
        found: set[Path] = set()
        for path in (path for name in names for path in tree.glob(name)):
            found.update(path.rglob("test_*.py") if path.is_dir() else [path])
        return found

    kept = files(chosen) - files(left_out or [])
    return sorted(str(file.relative_to(tree)) for file in kept)


def _run(
    both: tuple[Side, Side], files: list[str], standins: dict[str, str]
) -> tuple[dict[str, Comparison], list[str]]:
    """Run both sides and compare; run again what was lost, with empty caches.

    Returns:
        what each file's tests did, and the flaky tests.

    """
    runs = results.run_files(both, files, standins, LIMIT_S)
    compared = {
        file: compare.compare(*runs[file], sides.touched_by_patches(file))
        for file in files
    }
    flaky: list[str] = []
    for file, found in compared.items():
        if found.lost:
            again = [_again(side, file, found.lost, standins) for side in both]
            found.lost, passing = compare.judge(found.lost, *again)
            found.kept += passing
            flaky += passing
    return compared, flaky


def _again(
    side: Side, file: str, names: list[str], standins: dict[str, str]
) -> dict[str, Result]:
    worker = results.Worker(side, fresh=True)
    try:
        return results.run_file(worker, file, standins, LIMIT_S, only=names)
    finally:
        worker.close()


def _standins() -> dict[str, str]:
    """Make the stand-ins; what each is made by."""
    command = [str(sides.ROOT / ".venv/bin/python"), "-m", "tests.upstream.standins"]
    made = subprocess.run(command, cwd=sides.ROOT, stdout=subprocess.PIPE, check=True)
    return json.loads(made.stdout.splitlines()[-1])


def _report(
    compared: dict[str, Comparison], flaky: list[str], both: tuple[Side, Side]
) -> str:
    total = Comparison()
    for found in compared.values():
        total.add(found)
    texts = [compare.table(compared)]
    for title, names in (
        ("Lost", total.lost),
        ("Flaky", flaky),
        ("Taken out by a patch", total.removed),
        ("Of a patch, and failing here", total.broken),
        ("Gained", total.gained),
    ):
        listed = "".join(f"\n- `{name}`" for name in sorted(names)) or " none"
        texts.append(f"{title}:{listed}")
    versions = ", ".join(f"{side.name} {side.version}" for side in both)
    texts.append(
        f"{len(compared)} files; {versions}; Python {platform.python_version()}; "
        f"{datetime.date.today()}."
    )
    return "\n\n".join(texts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.upstream",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--all", action="store_true", help="the whole selection")
    parser.add_argument("paths", nargs="*", help="files and folders of upstream's tree")
    arguments = parser.parse_args()
    started = time.monotonic()
    both = (sides.unpatched(), sides.patched())
    if arguments.paths:
        chosen, left_out = arguments.paths, []
    else:
        chosen, left_out = selected(SELECTION.read_text(), short=not arguments.all)
    # Files that patches add say nothing of what was lost, and are not run.
    files = test_files(both[0].tests, chosen, left_out)
    compared, flaky = _run(both, files, _standins())
    report = _report(compared, flaky, both)
    print(report)
    if arguments.all:
        command = "Written by `.venv/bin/python -m tests.upstream --all`."
        title = "# Upstream's own tests, without and with the patches"
        (HERE / "RESULTS.md").write_text(f"{title}\n\n{command}\n\n{report}")
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
    lost = sum(len(found.lost) for found in compared.values())
    if lost:
        sys.exit(f"error: {lost} tests pass unpatched and not patched, see above")


if __name__ == "__main__":
    main()
