# SPDX-License-Identifier: Apache-2.0
"""Read patch files, and count the lines of one patch that a later one removes.

A patch is to be in its final form: what it adds stays as it is. No git here: a patch
names the lines it adds and removes, and those of no patch are upstream's.
"""

import re
from collections import Counter
from dataclasses import dataclass

_FILE = re.compile(rb'diff --git "?a/(.*?)"? "?b/\1"?')
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


@dataclass(frozen=True)
class Hunk:
    """One hunk.

    Attributes:
        start: lines of the old file before the hunk.
        signs: ``" "``, ``"-"`` or ``"+"`` for each of its lines.
    """

    start: int
    signs: str


@dataclass(frozen=True)
class FileDiff:
    """What a patch does to one file; a binary file has no hunks."""

    path: str
    created: bool
    deleted: bool
    hunks: tuple[Hunk, ...]


def parse(patch: bytes) -> list[FileDiff]:
    """The files of a patch as ``git format-patch --no-renames`` writes it."""
    lines = iter(patch.split(b"\n"))
    found: list[FileDiff] = []
    path, created, deleted = "", False, False
    hunks: list[Hunk] = []

    def end() -> None:
        if path:
            found.append(FileDiff(path, created, deleted, tuple(hunks)))

    for line in lines:
        if match := _FILE.fullmatch(line):
            end()
            path, created, deleted = match[1].decode(errors="replace"), False, False
            hunks = []
        elif path and (match := _HUNK.match(line)):
            start, old, new = (1 if n is None else int(n) for n in match.groups())
            signs = ""
            while signs.count(" ") + signs.count("-") < old or (
                signs.count(" ") + signs.count("+") < new
            ):
                sign = next(lines)[:1].decode()
                signs += sign if sign != "\\" else ""  # no newline at the end
            hunks.append(Hunk(start - 1 if old else start, signs))
        elif path:
            created |= line.startswith(b"new file mode ")
            deleted |= line.startswith(b"deleted file mode ")
    end()
    return found


def rewritten(
    patches: list[tuple[str, list[FileDiff]]],
) -> Counter[tuple[str, str]]:
    """Lines that one patch adds and a later one removes.

    Args:
        patches: name and contents, in the order in which they apply.

    Returns:
        their number by the names of the earlier and of the later patch.
    """
    counts: Counter[tuple[str, str]] = Counter()
    # Who added each line of a file; lines after the last known one are upstream's.
    authors: dict[str, list[str | None]] = {}
    for name, files in patches:
        for file in files:
            old = authors.pop(file.path, [])
            new: list[str | None] = []
            at = 0
            for hunk in file.hunks:
                old += [None] * (hunk.start + len(hunk.signs) - len(old))
                new += old[at : hunk.start]
                at = hunk.start
                for sign in hunk.signs:
                    if sign == "+":
                        new.append(name)
                        continue
                    author = old[at]
                    at += 1
                    if sign == " ":
                        new.append(author)
                    elif author:
                        counts[author, name] += 1
            if not file.deleted:
                authors[file.path] = new + old[at:]
    return counts
