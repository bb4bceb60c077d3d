# SPDX-License-Identifier: Apache-2.0
"""What the patches are: their facts, the rules they keep, and the table of them."""

import ast
import re
from dataclasses import dataclass

import git
from pyflakes import messages
from pyflakes.checker import Checker

# A patch above this needs a design discussion upstream; tests and docs not counted.
CODE_LINES_LIMIT = 500

_TAGS = re.compile(r"(\[[A-Za-z0-9][\w /.+-]*\])+ \S")
_STATUS = re.compile(
    r"Pending|Submitted \[[^\]]+\]|Backport \[[^\]]+\]"
    r"|Inappropriate \[[^\]]+\]"
)
_STATUS_WORDS = (
    "Pending, Submitted [where], Backport [version] or Inappropriate [reason]"
)
_UNFINISHED = ("fixup!", "squash!", "amend!")


@dataclass(frozen=True)
class Change:
    """One file of one patch; lines are 0 for a binary file."""

    path: str
    added: int
    removed: int

    @property
    def kind(self) -> str:
        if self.path.startswith("tests/"):
            return "tests"
        if self.path.startswith(("docs/", "examples/")) or self.path.endswith(".md"):
            return "docs"
        return "code"


@dataclass(frozen=True)
class Patch:
    """One patch of the series.

    Attributes:
        file: name in ``patches/``.
        subject: first line of the message, tags included.
        statuses: values of its ``Upstream-Status`` trailers.
        changes: the files it touches.
        mistakes: what is wrong, at this patch, with Python files that it touches.
    """

    file: str
    subject: str
    statuses: tuple[str, ...]
    changes: tuple[Change, ...]
    mistakes: tuple[str, ...] = ()

    def lines(self, kind: str) -> tuple[int, int]:
        """Lines added and removed in ``code``, ``tests`` or ``docs``."""
        chosen = [change for change in self.changes if change.kind == kind]
        return sum(c.added for c in chosen), sum(c.removed for c in chosen)


def describe(repository: git.Git, base: str, files: list[str]) -> list[Patch]:
    """The facts of the commits after ``base``, one for each of ``files``."""
    commits = repository.rev_list("--reverse", f"{base}..HEAD").split()
    return [
        _describe(repository, commit, file)
        for commit, file in zip(commits, files, strict=True)
    ]


def _describe(repository: git.Git, commit: str, file: str) -> Patch:
    subject = repository.log("-1", "--format=%s", commit)
    statuses = repository.log(
        "-1", "--format=%(trailers:key=Upstream-Status,valueonly)", commit
    )
    changes = []
    for row in repository.show("--numstat", "--format=", "-z", commit).split("\0"):
        if row.strip():
            added, removed, path = row.strip().split("\t")
            counts = [0 if n == "-" else int(n) for n in (added, removed)]
            changes.append(Change(path, *counts))
    mistakes = []
    changed = repository.diff("--name-only", "--diff-filter=d", f"{commit}~", commit)
    for path in changed.split("\n"):
        if path.endswith(".py"):
            mistakes += _mistakes(repository.show(f"{commit}:{path}"), path)
    statuses = tuple(statuses.splitlines())
    return Patch(file, subject, statuses, tuple(changes), tuple(mistakes))


def _mistakes(source: str, path: str) -> list[str]:
    """What keeps a module from being imported, or its names from being found. A rebase
    can leave that in one patch and mend it in another."""
    try:
        tree = ast.parse(source, path)
    except SyntaxError as error:
        return [f"{path}:{error.lineno}: {error.msg}"]
    undefined = messages.UndefinedName, messages.UndefinedLocal, messages.UndefinedExport
    lines = source.splitlines()
    return [
        str(found)
        for found in Checker(tree, path).messages
        if isinstance(found, undefined) and "noqa" not in lines[found.lineno - 1]
    ]


def lint(patches: list[Patch]) -> list[str]:
    """Every broken rule, as a line that names the patch and says what is wanted."""
    problems = []
    for patch in patches:
        say = f"{patch.file}: ".__add__
        if patch.subject.startswith(_UNFINISHED):
            problems.append(say(f"unfinished commit {patch.subject!r}: autosquash it"))
        elif not _TAGS.match(patch.subject):
            problems.append(
                say(f"subject {patch.subject!r} must begin with tags, as in [Core] ...")
            )
        if not patch.changes:
            problems.append(say("changes nothing"))
        problems += map(say, patch.mistakes)
        if len(patch.statuses) != 1:
            problems.append(
                say(
                    f"{len(patch.statuses)} Upstream-Status trailers, wanted one: "
                    f"Upstream-Status: {_STATUS_WORDS}"
                )
            )
        for status in patch.statuses:
            if not _STATUS.fullmatch(status):
                problems.append(
                    say(f"Upstream-Status {status!r}, wanted {_STATUS_WORDS}")
                )
    return problems


def _shown(lines: tuple[int, int]) -> str:
    return f"+{lines[0]} −{lines[1]}" if any(lines) else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def readme(patches: list[Patch], release: str) -> str:
    """The text of ``patches/README.md``."""
    rows = [
        "<!-- Generated by `python -m tools.series export`. Do not edit. -->",
        "",
        f"# The series on vLLM {release}",
        "",
        "| patch | Upstream-Status | files | code | tests | docs |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    kinds = ("code", "tests", "docs")
    for patch in patches:
        counts = " | ".join(_shown(patch.lines(kind)) for kind in kinds)
        rows.append(
            f"| [{patch.file[:4]}]({patch.file}) {_cell(patch.subject)} "
            f"| {_cell(', '.join(patch.statuses))} "
            f"| {len(patch.changes)} | {counts} |"
        )
    totals = []
    for kind in kinds:
        added, removed = (sum(p.lines(kind)[side] for p in patches) for side in (0, 1))
        totals.append(_shown((added, removed)))
    files = {change.path for patch in patches for change in patch.changes}
    rows.append(f"| {len(patches)} patches | | {len(files)} | {' | '.join(totals)} |")
    return "\n".join(rows) + "\n"


def summary(patches: list[Patch]) -> str:
    """A line per patch with its size, and the total, for the terminal."""
    lines = []
    for patch in patches:
        code, tests, docs = (
            sum(patch.lines(kind)) for kind in ("code", "tests", "docs")
        )
        note = f"  (over {CODE_LINES_LIMIT})" if code > CODE_LINES_LIMIT else ""
        lines.append(
            f"  {patch.file[:4]} {patch.subject}: "
            f"{code} code, {tests} tests, {docs} docs{note}"
        )
    code = sum(sum(patch.lines("code")) for patch in patches)
    return "\n".join([*lines, f"  {len(patches)} patches, {code} changed code lines"])
