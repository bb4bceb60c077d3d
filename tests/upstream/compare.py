# SPDX-License-Identifier: Apache-2.0
"""What a patched run lost against an unpatched one, test by test, and the table."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tests.upstream.results import Result

Run = Mapping[str, Result]
"""Results by node id."""


@dataclass
class Comparison:
    """Tests of one file or one folder, by what they did on the two sides.

    Attributes:
        kept: pass on both.
        failing: fail on both, for want of a GPU or a model mostly.
        skipped: pass on neither, and at least one side skips them.
        lost: pass unpatched, and not patched.
        removed: pass unpatched, and a patch took them out of its test file.
        gained: pass patched, and fail unpatched.
        added: pass patched, and are of a patch.
        broken: fail patched, and are of a patch.
        seconds: that the tests took, by side.

    """

    kept: list[str] = field(default_factory=list)
    failing: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    gained: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    seconds: Counter = field(default_factory=Counter)

    def add(self, other: "Comparison") -> None:
        """Take in the tests of another file."""
        for name, mine in vars(self).items():
            if isinstance(mine, list):
                mine.extend(getattr(other, name))
        self.seconds.update(other.seconds)


def _passed(result: Result | None) -> bool:
    return result is not None and result.outcome == "passed"


def _skipped(result: Result | None) -> bool:
    return result is not None and result.outcome in ("skipped", "xfailed")


def compare(unpatched: Run, patched: Run, changed: bool) -> Comparison:
    """Compare the runs of one test file.

    Args:
        unpatched: what its tests did on the release.
        patched: and on the fork.
        changed: whether the patches change the file: only then may the patched side
            lack a test.

    """
    found = Comparison()
    for name in {**unpatched, **patched}:
        before, after = unpatched.get(name), patched.get(name)
        if _passed(before):
            if _passed(after):
                group = found.kept
            else:
                group = found.removed if changed and after is None else found.lost
        elif _passed(after):
            group = found.added if before is None and changed else found.gained
        elif _skipped(before) or _skipped(after):
            group = found.skipped
        else:
            group = found.broken if before is None and changed else found.failing
        group.append(name)
    for side, run in (("unpatched", unpatched), ("patched", patched)):
        found.seconds[side] = sum(result.seconds for result in run.values())
    return found


def judge(
    lost: Iterable[str], unpatched: Run, patched: Run
) -> tuple[list[str], list[str]]:
    """Tell flaky tests from broken ones by a second run of each side.

    Returns:
        those that are lost again, and those that are flaky: they pass patched now, or
        do not pass unpatched.

    """
    again, flaky = [], []
    for name in lost:
        repeats = _passed(unpatched.get(name)) and not _passed(patched.get(name))
        (again if repeats else flaky).append(name)
    return again, flaky


def by_folder(files: Mapping[str, Comparison], depth: int = 3) -> dict[str, Comparison]:
    """Put files together by the first ``depth`` parts of their folder."""
    found: dict[str, Comparison] = defaultdict(Comparison)
    for file, comparison in files.items():
        folder = PurePosixPath(file).parent
        found[str(PurePosixPath(*folder.parts[:depth]))].add(comparison)
    return dict(sorted(found.items()))


_HEADER = """\
| tests of upstream's | pass unpatched | pass patched | lost | gained | of patches | \
fail on both | skipped | s unpatched | s patched |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def table(files: Mapping[str, Comparison]) -> str:
    """A Markdown table, a row a folder; ``of patches`` are tests that patches add."""
    rows = by_folder(files)
    total = Comparison()
    for comparison in rows.values():
        total.add(comparison)
    lines = [_HEADER]
    for name, row in [*rows.items(), ("**all**", total)]:
        before = len(row.kept) + len(row.lost) + len(row.removed)
        after = len(row.kept) + len(row.gained) + len(row.added)
        cells = [name, before, after, len(row.lost), len(row.gained), len(row.added)]
        cells += [len(row.failing) + len(row.broken), len(row.skipped)]
        cells += [round(row.seconds[side]) for side in ("unpatched", "patched")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
