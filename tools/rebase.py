# SPDX-License-Identifier: Apache-2.0
"""Move the stacks to another upstream release: fixes, then what stands on them.

The state of a move that is not finished is ``build/rebase.json`` plus git's own in
``build/src``, so it survives an interruption.
"""

import dataclasses
import json
import re
import sys
from pathlib import Path

import git

from tools import bases, fetch, lock as locks, source, stacks
from tools.common import Checkout, ToolError, write_atomically
from tools.export import export
from tools.hermetic import first_lines, hermetic_git
from tools.lock import Archive
from tools.patchset import summary
from tools.stacks import ALL, FIXES, STACKS

_HOW_TO_GO_ON = """\
{what} in {source}, then
  ./build.sh series rebase --continue
or give up with `./build.sh series rebase --abort`."""
_NEXT = """\
Read {comparison}, the old patches beside the new ones, then
  {python} -m tools.fetch --pin cpu-x86_64 cpu-aarch64   # the binaries of {release}
  ./build.sh requirements                                # the versions it wants
  ./build.sh test"""
_MEND = """\
Mend it in the first patch that has it (git -C {source} checkout STACK, then commit
--all --fixup PATCH, then rebase --interactive --autosquash)"""


@dataclasses.dataclass
class _Move:
    """What is being moved where.

    Attributes:
        old: the release that the stacks stood on.
        new: the one that they shall stand on.
        heads: their branches on the old release.
        archive: the new release's source archive.
        lock: content of the lock of the old release.
        stops: how many places conflicted in which files, by the patch that stopped
            the move.
    """

    old: str
    new: str
    heads: dict[str, str]
    archive: dict[str, str]
    lock: str
    stops: dict[str, dict[str, int]]

    def save(self, checkout: Checkout) -> None:
        data = json.dumps(dataclasses.asdict(self)).encode()
        write_atomically(_state(checkout), data)

    def put_back_lock(self, checkout: Checkout) -> None:
        write_atomically(checkout.lock_file, self.lock.encode())


def _state(checkout: Checkout) -> Path:
    return checkout.build / "rebase.json"


def waits(checkout: Checkout) -> bool:
    """Whether a rebase is to be continued or aborted."""
    return _state(checkout).exists()


def _how_to_go_on(checkout: Checkout, what: str) -> str:
    return _HOW_TO_GO_ON.format(what=what, source=checkout.source)


def _load(checkout: Checkout) -> _Move:
    try:
        return _Move(**json.loads(_state(checkout).read_text()))
    except FileNotFoundError:
        raise ToolError("no rebase is in progress") from None


def start(checkout: Checkout, release: str) -> None:
    """Fetch a release and move the stacks onto it.

    Raises:
        ToolError: a move is in progress, work in ``build/src`` was not exported, the
            release can not be had, or a patch conflicts; names it and the files.
    """
    if waits(checkout):
        raise ToolError("a rebase is in progress: give --continue or --abort")
    lock = locks.read(checkout)
    if release == lock.release:
        raise ToolError(f"the stacks are on {release} already")
    source.open_source(checkout)
    archive = fetch.discover(checkout, release)
    print(f"{archive.file}: sha256 {archive.sha256} (as found, not checked)")
    path = fetch.archive_path(checkout, archive)
    print(f"tree {bases.import_sdist(checkout, path, release)}")
    repository = hermetic_git(checkout.source)
    repository.fetch("--quiet", "origin")
    heads = {stack: repository.rev_parse(stack) for stack in STACKS}
    before = checkout.lock_file.read_text()
    row = dataclasses.asdict(archive)
    move = _Move(lock.release, release, heads, row, before, {})
    move.save(checkout)
    _replay(checkout, move)


def go_on(checkout: Checkout) -> None:
    """Continue after a conflict was resolved, or after an interruption.

    Raises:
        ToolError: none is in progress, or a patch conflicts.
    """
    move = _load(checkout)
    if stacks.in_progress(checkout.source):
        _run(checkout, move, ["--continue"])
    _replay(checkout, move)


def abort(checkout: Checkout) -> None:
    """Put ``build/src`` back on the old release.

    Raises:
        ToolError: no rebase is in progress.
    """
    move = _load(checkout)
    repository = hermetic_git(checkout.source)
    if stacks.in_progress(checkout.source):
        repository.rebase("--abort")
    repository.checkout("--quiet", "--force", ALL)
    for stack, head in move.heads.items():
        repository.update_ref(f"refs/heads/{stack}", head)
    move.put_back_lock(checkout)
    _state(checkout).unlink()
    print(f"{checkout.source} is on {move.old} again")


def _replay(checkout: Checkout, move: _Move) -> None:
    repository = hermetic_git(checkout.source)
    for stack in STACKS:
        onto = stacks.below(stack, bases.in_clone(move.new))
        old = bases.in_clone(move.old) if stack == FIXES else move.heads[FIXES]
        # A person may have moved the stack with git.
        if not repository.merge_base(
            "--all", bases.in_clone(move.new), stack, with_exceptions=False
        ):
            _run(checkout, move, ["--onto", onto, old, stack])
    _finish(checkout, move)


def _run(checkout: Checkout, move: _Move, options: list[str]) -> None:
    repository = hermetic_git(checkout.source)
    try:
        repository.rebase(*options)
    except git.GitCommandError as error:
        patch, files = stacks.conflict(repository)
        if not stacks.in_progress(checkout.source) or not files:
            raise ToolError(f"git rebase failed:\n  {first_lines(error)}") from None
        places = {file: _places(checkout.source / file) for file in files}
        move.stops.setdefault(patch, places)
        move.save(checkout)
        changes = f"{bases.in_clone(move.old)} {bases.in_clone(move.new)}"
        raise ToolError(
            f"the patch {patch!r} conflicts in\n  "
            + "\n  ".join(f"{file}, places: {n}" for file, n in places.items())
            + f"\nUpstream's own changes: git diff {changes} -- FILE\n"
            + _how_to_go_on(checkout, "Resolve and `git add` them")
        ) from None


def _places(path: Path) -> int:
    """How many conflicts git left in a file; 1 if it is gone."""
    if not path.exists():
        return 1
    text = path.read_text(errors="replace")
    return len(re.findall("^<<<<<<< ", text, re.MULTILINE)) or 1


def _finish(checkout: Checkout, move: _Move) -> None:
    repository = hermetic_git(checkout.source)
    new, old = bases.in_clone(move.new), bases.in_clone(move.old)
    comparison = checkout.build / "rebase.diff"
    with comparison.open("w") as file:
        for stack, head in move.heads.items():
            before = old if stack == FIXES else move.heads[FIXES]
            spans = f"{before}..{head}", f"{stacks.below(stack, new)}..{stack}"
            file.write(f"{stack}:\n{repository.range_diff('--no-color', *spans)}\n")
    lock = locks.read(checkout)
    moved = dataclasses.replace(
        lock,
        release=move.new,
        commit=_commit(checkout, move.new),
        revision=1,
        base_tree="",
        trees={},
        sdist=Archive(**move.archive),
        wheels={},
    )
    locks.write(checkout, moved)
    try:
        done = export(checkout)
    except ToolError as error:
        move.put_back_lock(checkout)
        how = _how_to_go_on(checkout, _MEND.format(source=checkout.source))
        raise ToolError(f"{error}\n{how}") from None
    _state(checkout).unlink()
    print(f"the stacks are on {move.new}")
    print(summary(done))
    places = sum(sum(files.values()) for files in move.stops.values())
    print(f"the move stopped at {len(move.stops)} patches, in {places} places")
    for patch, files in move.stops.items():
        print(f"  {patch}: {', '.join(f'{file} ({n})' for file, n in files.items())}")
    print(
        _NEXT.format(release=move.new, comparison=comparison, python=sys.executable)
    )


def _commit(checkout: Checkout, release: str) -> str:
    """The commit, shortened, that a source archive says it was made from."""
    text = fetch.member(checkout, release, "vllm/_version.py")
    found = re.search(r"commit_id = 'g([0-9a-f]+)'", text)
    return found.group(1) if found else "unknown"
