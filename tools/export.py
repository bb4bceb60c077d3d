# SPDX-License-Identifier: Apache-2.0
"""Write ``patches/`` from the branches of a git tree, and check it.

With it goes ``docs/features/``, the pages that the patches bring. Either way the patch
files are applied to the base and formatted again, which must give the same trees and the
same bytes. Nothing is written unless every rule is kept.
"""

import dataclasses
from pathlib import Path

import git

from tools import bases, docs, lock as locks, source, stacks
from tools.common import Checkout, ToolError, write_atomically
from tools.lock import Lock
from tools.patchset import Series, describe, lint, tables
from tools.stacks import BRANCHES, STACKS, Contents


def export(checkout: Checkout, tree: Path | None = None) -> Series:
    """Write ``patches/`` and the tree hashes in ``upstream.lock`` from branches.

    With a base from upstream's repository, ``patches/`` only.

    Args:
        tree: a git working tree with the branches; ``build/src`` if not given, whose
            branches are then put on what was written.

    Raises:
        ToolError: the tree is not clean, a rule is broken, a patch does not survive a
            round trip, or the stacks do not apply together. Nothing is written then.
    """
    lock = locks.read(checkout)
    repository = source.ready(checkout, tree)
    base = bases.commit(checkout, lock.release)
    with checkout.scratch() as scratch:
        moved = stacks.restacked(repository, scratch / "restacked")
        contents = {
            stack: stacks.format_stack(moved, stack, stacks.below(stack, base), stack)
            for stack in STACKS
        }
        built = stacks.build(checkout, lock.release, contents, scratch / "src")
        series = describe(built, base, contents, stacks.trees(built))
        lossy = _changed(contents, _formatted(built, base)) or [
            stack
            for stack in STACKS
            if series.trees[stack] != moved.rev_parse(f"{stack}^{{tree}}")
        ]
        said = (
            "changes when it is applied and exported again: its message holds a line "
            "that git takes for the start of the diff"
        )
        _complain(lint(series) + [f"{name}: {said}" for name in lossy])
        _write(checkout, lock, series)
        docs.write(checkout, docs.pages(built, base, lock.release))
        if tree is None:
            source.update(checkout, built, contents)
    return series


def check(checkout: Checkout) -> Series:
    """Prove that ``patches/`` is exactly what its own commits export to.

    Raises:
        ToolError: a patch does not apply, a tree hash is not the locked one, bytes
            differ, a rule is broken, or a generated table is stale.
    """
    lock = locks.read(checkout)
    contents = stacks.read(checkout)
    base = bases.commit(checkout, lock.release)
    with checkout.scratch() as scratch:
        built = stacks.build(checkout, lock.release, contents, scratch / "src")
        stacks.verify(checkout, lock, stacks.trees(built))
        series = describe(built, base, contents, stacks.trees(built))
        changed = _changed(contents, _formatted(built, base))
        pages = docs.pages(built, base, lock.release)
    problems = lint(series)
    problems += [f"{name}: not the bytes that export writes" for name in changed]
    wanted = _files(checkout, lock, series)
    there = {
        str(file.relative_to(checkout.patches))
        for file in checkout.patches.rglob("*")
        if file.is_file()
    }
    stray = sorted(there - set(wanted))
    problems += [f"{name}: not part of any stack" for name in stray]
    for name, content in wanted.items():
        if name.endswith("README.md") and (
            name not in there or (checkout.patches / name).read_bytes() != content
        ):
            problems.append(f"{name}: the table is not up to date")
    problems += docs.stale(checkout, pages)
    if problems:
        problems.append("`./build.sh series open` and `export` write them anew")
    _complain(problems)
    return series


def _formatted(built: git.Git, base: str) -> Contents:
    return {
        stack: stacks.format_stack(built, stack, stacks.below(stack, base), stack)
        for stack in STACKS
    }


def _changed(contents: Contents, again: Contents) -> list[str]:
    """The patches whose name, place or bytes are not those of ``again``."""
    return [
        f"{stack}/{name}"
        for stack in STACKS
        for (name, content), other in zip(
            contents[stack].items(), again[stack].items(), strict=True
        )
        if (name, content) != other
    ]


def _complain(problems: list[str]) -> None:
    if problems:
        raise ToolError("the series breaks its rules\n  " + "\n  ".join(problems))


def _files(checkout: Checkout, lock: Lock, series: Series) -> dict[str, bytes]:
    """Everything in ``patches/``, by path."""
    files = {
        f"{stack}/{name}": content
        for stack in STACKS
        for name, content in series.contents[stack].items()
    }
    for stack in STACKS:
        path = f"{stack}/series"
        files[path] = _list(checkout.patches / path, list(series.contents[stack]))
    pages = tables(series, lock.release)
    return files | {path: text.encode() for path, text in pages.items()}


def _list(file: Path, names: list[str]) -> bytes:
    """A ``series`` file; comments stay above the patch that they stood above."""
    above: dict[str, list[str]] = {}
    comments: list[str] = []
    for row in file.read_text().splitlines() if file.exists() else []:
        name = row.partition("#")[0].strip()
        if name:
            above[name], comments = [*comments, row], []
        else:
            comments.append(row)
    rows = [row for name in names for row in above.get(name, [name])]
    return "".join(f"{row}\n" for row in [*rows, *comments]).encode()


def _write(checkout: Checkout, lock: Lock, series: Series) -> None:
    files = _files(checkout, lock, series)
    stale = [*checkout.patches.glob("*.patch"), *checkout.patches.glob("*/*.patch")]
    for file in stale:
        if str(file.relative_to(checkout.patches)) not in files:
            file.unlink()
    for name, content in files.items():
        write_atomically(checkout.patches / name, content)
    base_tree = bases.tree(checkout, lock.release)
    # The lock describes the source archive. After ./build.sh --source git the base is
    # upstream's repository, which has files that the archive leaves out.
    if lock.base_tree in ("", base_tree):
        trees = {name: series.trees[name] for name in BRANCHES}
        changed = dataclasses.replace(lock, trees=trees, base_tree=base_tree)
        locks.write(checkout, changed)
