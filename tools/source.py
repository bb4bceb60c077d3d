# SPDX-License-Identifier: Apache-2.0
"""``build/src``: the git tree in which people work, one branch for each stack.

``refs/series/BRANCH`` says where each branch stood when the tree last agreed with
``patches/``. Branch ``all`` is generated, for reading and building.
"""

import hashlib
import shutil
from pathlib import Path

import git

from tools import bases, lock as locks, stacks
from tools.common import Checkout, ToolError
from tools.hermetic import CHECKOUT_CONFIG, first_lines, hermetic_git
from tools.stacks import ALL, BRANCHES, FIXES, STACKS, Contents

_AGREED = "refs/series"
_PATCHES = "series.patches"


def open_source(checkout: Checkout, branch: str = ALL, discard: bool = False) -> None:
    """Make ``build/src`` with a branch checked out.

    If it is there and agrees with ``patches/``, only the branch is switched.

    Args:
        discard: replace it even if work in it was not exported.

    Raises:
        ToolError: unexported work is there, or a patch does not apply.
    """
    reason = unexported(checkout)
    if reason and not discard:
        raise ToolError(
            f"{checkout.source} is kept: {reason}. Export it, or give --discard. To "
            f"change branches: git -C build/src checkout {branch}"
        )
    contents = stacks.read(checkout)
    lock = locks.read(checkout)
    if checkout.source.exists() and not discard:
        repository = hermetic_git(checkout.source)
        if _known(repository) == _digest(contents):
            repository.checkout("--quiet", branch)
            return
    with checkout.scratch() as folder:
        made = folder / "src"
        repository = stacks.build(checkout, lock.release, contents, made, files=True)
        repository.checkout("--quiet", branch)
        _agree(repository, contents)
        for key, value in CHECKOUT_CONFIG.items():
            repository.config(key, value)
        shutil.rmtree(checkout.source, ignore_errors=True)
        made.rename(checkout.source)


def unexported(checkout: Checkout) -> str:
    """Why ``build/src`` must not be replaced; empty if it may."""
    if not checkout.source.exists():
        return ""
    repository = hermetic_git(checkout.source)
    try:
        if stacks.in_progress(checkout.source):
            return "a rebase or am is in progress there"
        if repository.status("--porcelain"):
            return "it has uncommitted changes"
        if repository.for_each_ref("refs/stash"):
            return "it has stashed changes"
        moved = [
            name for name in BRANCHES
            if repository.rev_parse(name) != repository.rev_parse(f"{_AGREED}/{name}")
        ]  # fmt: skip
        known = [f"{_AGREED}/{name}" for name in BRANCHES]
        if moved or repository.rev_list("HEAD", "--branches", "--not", *known):
            return "it has commits that were not exported"
    except git.GitCommandError:
        return "it is not a tree that `open` made"
    return ""


def ready(checkout: Checkout, tree: Path | None) -> git.Git:
    """A working tree whose three branches can be exported.

    Args:
        tree: where it is; ``build/src`` if not given.

    Raises:
        ToolError: it has work that is on none of the stacks' branches, or one of
            them does not stand on the imported release.
    """
    folder = tree or checkout.source
    if not (folder / ".git").exists():
        raise ToolError(f"no git tree at {folder}: `./build.sh series open` first")
    repository = hermetic_git(folder)
    if stacks.in_progress(folder):
        raise ToolError(f"a rebase or am is in progress in {folder}")
    if repository.status("--porcelain", "--untracked-files=no"):
        raise ToolError(f"{folder} has uncommitted changes: commit them")
    base = bases.commit(checkout, locks.read(checkout).release)
    for stack in STACKS:
        if not _commit(repository, f"refs/heads/{stack}"):
            raise ToolError(f"{folder} has no branch {stack}; wanted {', '.join(STACKS)}")
        common = repository.merge_base(base, stack, with_exceptions=False)
        if common != base:
            raise ToolError(f"branch {stack} of {folder} does not stand on {base[:12]}")
    if tree is None:
        _nothing_astray(checkout, repository)
    return repository


def _nothing_astray(checkout: Checkout, repository: git.Git) -> None:
    generated = f"{_AGREED}/{ALL}"
    if not _commit(repository, generated):
        raise ToolError(
            f"{checkout.source} is not a tree that `open` made: keep your commits, "
            "`open --discard`; `export --from build/src` takes its branches as they are"
        )
    if _known(repository) != _digest(stacks.read(checkout)):
        raise ToolError(
            f"patches/ is not what {checkout.source} was opened from or exported to: "
            "this would undo what has changed there. Keep your commits (`git "
            "format-patch`), `open --discard`, and apply them (`git am`)"
        )
    astray = repository.log(
        "--reverse", "--format=%h %s", "HEAD", ALL, "--not", generated, *STACKS
    ).splitlines()
    if not astray and repository.rev_parse(ALL) == repository.rev_parse(generated):
        return
    rows = []
    for commit, _, subject in (row.partition(" ") for row in astray):
        home = _home(repository, subject.partition("! ")[2]) or "STACK"
        rows += [f"  {subject}", f"    git checkout {home} && git cherry-pick {commit}"]
    raise ToolError(
        f"{checkout.source} has work on no stack's branch, which would be lost. Branch\n"
        "`all` is generated, to be read and built. Put each commit on its stack:\n"
        + "\n".join(rows or ["  (branch `all` lacks commits that it was made with)"])
        + f"\nthen `git checkout -B {ALL} {generated}`, and export again."
    )


def _home(repository: git.Git, subject: str) -> str:
    """The stack of the commit that a fixup is for; empty if none is found."""
    for stack in STACKS if subject else ():
        span = f"{stack}@{{upstream}}..{stack}"
        if subject in repository.log("--format=%s", span).splitlines():
            return stack
    return ""


def update(checkout: Checkout, built: git.Git, contents: Contents) -> None:
    """Put the branches of ``build/src`` where a rebuilt series has them.

    Raises:
        ToolError: git does not, for an untracked file that would be overwritten.
    """
    repository = hermetic_git(checkout.source)
    current = repository.branch("--show-current")
    refs = [f"+refs/heads/{name}:refs/heads/{name}" for name in BRANCHES]
    try:
        repository.checkout("--quiet", "--detach")
        repository.fetch("--quiet", "--no-tags", str(built.working_dir), *refs)
        repository.checkout("--quiet", current if current in BRANCHES else ALL)
    except git.GitCommandError as error:
        raise ToolError(
            f"patches/ is written, but {checkout.source} is not up to date:\n"
            f"  {first_lines(error)}"
        ) from None
    base = bases.in_clone(locks.read(checkout).release)
    repository.branch("--quiet", "--set-upstream-to", base, FIXES)
    _agree(repository, contents)


def _agree(repository: git.Git, contents: Contents) -> None:
    """Note that ``build/src`` and ``patches/`` are the same."""
    for name in BRANCHES:
        repository.update_ref(f"{_AGREED}/{name}", f"refs/heads/{name}")
    repository.config(_PATCHES, _digest(contents))


def _known(repository: git.Git) -> str:
    """``_digest`` when they last were the same; empty if that was not noted."""
    return repository.config("--default", "", "--get", _PATCHES)


def _digest(contents: Contents) -> str:
    total = hashlib.sha256()
    for stack, patches in contents.items():
        for name, content in patches.items():
            digest = hashlib.sha256(content).hexdigest()
            total.update(f"{stack}/{name} {digest}\n".encode())
    return total.hexdigest()


def _commit(repository: git.Git, name: str) -> str:
    """The commit of a reference; empty if there is none."""
    return repository.rev_parse("--verify", "--quiet", name, with_exceptions=False)
