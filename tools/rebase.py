# SPDX-License-Identifier: Apache-2.0
"""Move the series to another upstream release.

The state of a move that is not finished is ``build/rebase.json`` plus git's own in
``build/src``, so it survives an interruption.
"""

import dataclasses
import json
import re
import tarfile
from pathlib import Path

import git

from tools import bases, fetch, lock as locks, patchset, series
from tools.common import Checkout, ToolError, write_atomically
from tools.hermetic import first_lines, hermetic_git
from tools.lock import Archive

_HOW_TO_GO_ON = """\
{what} in {source}, then
  .venv/bin/python -m tools.series rebase --continue
or give up with `.venv/bin/python -m tools.series rebase --abort`."""
_NEXT = """\
Read the comparison above, then
  .venv/bin/python -m tools.lock pin cpu cuda     # the binaries of {release}
  .venv/bin/python -m tools.requirements          # the versions it wants
  ./build.sh test"""


@dataclasses.dataclass(frozen=True)
class _Move:
    """What is being moved where; ``head`` is the series on the old release."""

    old: str
    new: str
    head: str
    archive: dict[str, str]


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
    """Fetch a release and move the series onto it.

    Raises:
        ToolError: a move is in progress, work in ``build/src`` was not exported, the
            release can not be had, or a patch conflicts; names it and the files.
    """
    if waits(checkout):
        raise ToolError("a rebase is in progress: give --continue or --abort")
    lock = locks.read(checkout)
    if release == lock.release:
        raise ToolError(f"the series is on {release} already")
    series.open_series(checkout)
    archive = fetch.discover_sdist(checkout, release)
    print(f"{archive.file}: sha256 {archive.sha256} (as found, not checked)")
    path = fetch.archive_path(checkout, archive)
    print(f"tree {bases.import_sdist(checkout, path, release)}")
    repository = hermetic_git(checkout.source)
    repository.fetch("--quiet", "origin")
    head = repository.rev_parse("HEAD")
    move = _Move(lock.release, release, head, dataclasses.asdict(archive))
    write_atomically(_state(checkout), json.dumps(dataclasses.asdict(move)).encode())
    _replay(checkout, move)


def go_on(checkout: Checkout) -> None:
    """Continue after a conflict was resolved, or after an interruption.

    Raises:
        ToolError: none is in progress, or a patch conflicts.
    """
    move = _load(checkout)
    repository = hermetic_git(checkout.source)
    if series.in_progress(checkout.source):
        _run(checkout, repository, ["--continue"])
        _finish(checkout, move)
    else:
        _replay(checkout, move)


def abort(checkout: Checkout) -> None:
    """Put ``build/src`` back on the old release.

    Raises:
        ToolError: no rebase is in progress.
    """
    move = _load(checkout)
    repository = hermetic_git(checkout.source)
    if series.in_progress(checkout.source):
        repository.rebase("--abort")
    repository.reset("--quiet", "--hard", move.head)
    _state(checkout).unlink()
    print(f"{checkout.source} is on {move.old} again")


def _replay(checkout: Checkout, move: _Move) -> None:
    repository = hermetic_git(checkout.source)
    new, old = bases.in_clone(move.new), bases.in_clone(move.old)
    if repository.merge_base("--all", new, "HEAD", with_exceptions=False):
        _finish(checkout, move)
        return
    _run(checkout, repository, ["--onto", new, old])
    _finish(checkout, move)


def _run(checkout: Checkout, repository: git.Git, options: list[str]) -> None:
    try:
        repository.rebase(*options)
    except git.GitCommandError as error:
        files = repository.diff("--name-only", "--diff-filter=U").split("\n")
        if not series.in_progress(checkout.source) or files == [""]:
            raise ToolError(f"git rebase failed:\n  {first_lines(error)}") from None
        subject = repository.log("-1", "--format=%s", "REBASE_HEAD")
        raise ToolError(
            f"the patch {subject!r} conflicts in\n  "
            + "\n  ".join(files)
            + "\n"
            + _how_to_go_on(checkout, "Resolve and `git add` them")
        ) from None


def _finish(checkout: Checkout, move: _Move) -> None:
    repository = hermetic_git(checkout.source)
    new, old = bases.in_clone(move.new), bases.in_clone(move.old)
    print(repository.range_diff("--no-color", f"{old}..{move.head}", f"{new}..HEAD"))
    archive = Archive(**move.archive)
    lock = locks.read(checkout)
    locks.write(
        checkout,
        dataclasses.replace(
            lock,
            release=move.new,
            commit=_commit(checkout, archive, move.new),
            revision=1,
            base_tree="",
            sdist=archive,
            wheels={},
        ),
    )
    try:
        done = series.export(checkout)
    except ToolError as error:
        locks.write(checkout, lock)
        how = _how_to_go_on(checkout, "Mend and commit that")
        raise ToolError(f"{error}\n{how}") from None
    _state(checkout).unlink()
    print(f"the series is on {move.new}, tree {done.tree}")
    print(patchset.summary(done.patches))
    print(_NEXT.format(release=move.new))


def _commit(checkout: Checkout, archive: Archive, release: str) -> str:
    """The commit, shortened, that a source archive says it was made from."""
    with tarfile.open(checkout.downloads / archive.file) as source:
        member = source.extractfile(f"vllm-{release}/vllm/_version.py")
        text = member.read().decode() if member else ""
    found = re.search(r"commit_id = 'g([0-9a-f]+)'", text)
    return found.group(1) if found else "unknown"
