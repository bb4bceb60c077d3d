# SPDX-License-Identifier: Apache-2.0
"""The patch series: open it as a git branch, export it, check it, move it.

    open     make build/src, a git working tree with one commit per patch
    export   write patches/ from the commits of build/src
    check    apply patches/, compare tree hash and bytes with what is committed
    rebase   move the series to another upstream release

Work on the series: ``open``, edit in ``build/src``, ``git commit --fixup`` and
``git rebase --autosquash``, ``export``. README's section on patches tells more.
"""

import argparse
import dataclasses
import hashlib
import re
import shutil
from pathlib import Path

import git

from tools import bases, fetch, lock as locks, patchset
from tools.common import HERE, Checkout, ToolError, run_main, write_atomically
from tools.hermetic import CHECKOUT_CONFIG, hermetic_git
from tools.lock import Lock
from tools.patchset import Patch

# Where build/src stood when it last agreed with patches/.
_AGREED = "refs/series/agreed"
_PATCHES = "series.patches"
_BRANCH = "series"
_FORMAT = [
    "--keep-subject", "--zero-commit", "--no-signature", "--full-index", "--no-stat",
    "--no-numbered", "--no-attach", "--no-thread", "--no-cover-letter", "--no-base",
    "--no-notes", "--no-to", "--no-cc", "--no-add-header", "--no-signoff",
    "--no-encode-email-headers", "--no-ext-diff", "--no-textconv", "--no-renames",
    "--no-color", "--binary", "--unified=3", "--inter-hunk-context=0",
    "--diff-algorithm=histogram", "--src-prefix=a/", "--dst-prefix=b/",
    "-O/dev/null", "--suffix=.patch", "--quiet",
]  # fmt: skip
_AM = [
    "--quiet", "--keep-non-patch", "--keep-cr", "--no-3way", "--no-scissors",
    "--no-gpg-sign", "--no-signoff", "--committer-date-is-author-date",
]  # fmt: skip


def patch_files(folder: Path) -> list[Path]:
    """The patch files of a folder in the order in which they apply.

    Raises:
        ToolError: the numbers are not 0001, 0002, ... each once.
    """
    files = sorted(folder.glob("*.patch"))
    for number, file in enumerate(files, start=1):
        if not file.name.startswith(f"{number:04d}-"):
            raise ToolError(f"patches/{file.name} stands where {number:04d}-* should")
    return files


# ---------------------------------------------------------------- apply and format


def apply(repository: git.Git, files: list[Path]) -> None:
    """Apply patch files to a working tree, one commit each.

    Raises:
        ToolError: one does not apply; names the patch and the files.
    """
    for file in files:
        try:
            repository.am(*_AM, str(file.resolve()))
        except git.GitCommandError as error:
            raise ToolError(_why_not(file, str(error.stderr))) from None


def _why_not(file: Path, output: str) -> str:
    places = re.findall(r"error: patch failed: (.+?):(\d+)", output)
    places += re.findall(
        r"error: (.+?): ((?:does not exist|already exists) in \w[\w ]*)", output
    )
    where = [f"  {name} ({'line ' * at.isdigit()}{at})" for name, at in places]
    said = re.findall(r"(?:error|fatal): (.+)", output)
    return (
        f"patches/{file.name} does not apply\n"
        + "\n".join(where or [f"  {line.rstrip(chr(39))}" for line in said[:3]])
        + "\nIf the patch was edited by hand, restore it (`git checkout patches/`) and"
        "\nedit through `.venv/bin/python -m tools.series open` and `export`. If upstream moved,"
        "\nuse `.venv/bin/python -m tools.series rebase VERSION`."
    )


def format_patches(repository: git.Git, base: str, folder: Path) -> list[Path]:
    """Write the commits after ``base`` as patch files.

    Raises:
        ToolError: the history after ``base`` has a merge.
    """
    if repository.rev_list("--merges", "--max-count=1", f"{base}..HEAD"):
        raise ToolError(
            f"{repository.working_dir} has a merge commit; a series is flat"
        )
    repository.format_patch(
        *_FORMAT, "--output-directory", str(folder), f"{base}..HEAD"
    )
    return patch_files(folder)


def applied_tree(checkout: Checkout, lock: Lock, folder: Path) -> git.Git:
    """Clone the base into ``folder``, apply ``patches/``, verify the result.

    Raises:
        ToolError: a patch does not apply, or the tree is not the locked one.
    """
    repository = bases.check_out(checkout, lock.release, folder)
    from_archive = bases.tree(checkout, lock.release) == lock.base_tree
    apply(repository, patch_files(checkout.patches))
    found = repository.rev_parse("HEAD^{tree}")
    # A base cloned with --source git also has the files that the archive leaves out.
    if from_archive and found != lock.tree:
        raise ToolError(
            "patches/ applied, but not to the tree that upstream.lock names\n"
            f"  expected {lock.tree}\n  actual   {found}\n"
            "Run `.venv/bin/python -m tools.series open` and `export` to record it."
        )
    return repository


# ---------------------------------------------------------------- open


def unexported(checkout: Checkout) -> str:
    """Why ``build/src`` must not be replaced; empty if it may."""
    if not checkout.source.exists():
        return ""
    repository = hermetic_git(checkout.source)
    try:
        if in_progress(checkout.source):
            return "a rebase or am is in progress there"
        if repository.status("--porcelain"):
            return "it has uncommitted changes"
        if repository.for_each_ref("refs/stash"):
            return "it has stashed changes"
        if repository.rev_parse("HEAD") != repository.rev_parse(_AGREED):
            return "it has commits that were not exported"
    except git.GitCommandError:
        return "it is not a tree that `open` made"
    return ""


def _agree(checkout: Checkout, repository: git.Git) -> None:
    """Note that ``build/src`` and ``patches/`` are the same."""
    repository.update_ref(_AGREED, "HEAD")
    repository.config(_PATCHES, _digest(checkout))


def _known_patches(repository: git.Git) -> str:
    """``_digest`` when they last were the same; empty if that was not noted."""
    return repository.config("--default", "", "--get", _PATCHES)


def _digest(checkout: Checkout) -> str:
    """What stands in ``patches/``."""
    files = patch_files(checkout.patches)
    contents = b"\0".join(part for f in files for part in (f.name.encode(), f.read_bytes()))
    return hashlib.sha256(contents).hexdigest()


def in_progress(source: Path) -> bool:
    """Whether a rebase or am waits in a working tree."""
    return any((source / ".git" / n).exists() for n in ("rebase-merge", "rebase-apply"))


def open_series(checkout: Checkout, discard: bool = False) -> None:
    """Make ``build/src``: the base, and one commit per patch.

    Args:
        discard: replace it even if work in it was not exported.

    Raises:
        ToolError: unexported work is there, or a patch does not apply.
    """
    reason = unexported(checkout)
    if reason and not discard:
        raise ToolError(
            f"{checkout.source} is kept: {reason}. Export it, or give --discard"
        )
    lock = locks.read(checkout)
    with checkout.scratch() as folder:
        fresh = folder / "src"
        repository = bases.check_out(checkout, lock.release, fresh)
        # `git rebase` without further words takes the base.
        base = bases.in_clone(lock.release)
        repository.checkout("--quiet", "-b", _BRANCH, "--track", base)
        apply(repository, patch_files(checkout.patches))
        _agree(checkout, repository)
        for key, value in CHECKOUT_CONFIG.items():
            repository.config(key, value)
        shutil.rmtree(checkout.source, ignore_errors=True)
        fresh.rename(checkout.source)


# ---------------------------------------------------------------- export


@dataclasses.dataclass(frozen=True)
class Export:
    """A series in its exported form: contents by file name, and what it gives."""

    contents: dict[str, bytes]
    patches: list[Patch]
    tree: str


def render(checkout: Checkout, lock: Lock, source: git.Git, base: str) -> Export:
    """Format the commits after ``base`` and prove that they come back the same.

    Raises:
        ToolError: a patch does not apply to the locked base, or loses something on
            the way through a file (a line ``---`` in a message cuts it off).
    """
    locked_base = bases.in_clone(lock.release)
    with checkout.scratch() as folder:
        files = format_patches(source, base, folder / "first")
        repository = bases.check_out(checkout, lock.release, folder / "src")
        apply(repository, files)
        again = format_patches(repository, locked_base, folder / "again")
        contents = {file.name: file.read_bytes() for file in files}
        for file, copy in zip(files, again, strict=True):
            if contents[file.name] != copy.read_bytes():
                raise ToolError(
                    f"{file.name} changes when it is applied and exported again: its "
                    "message holds a line that git takes for the start of the diff"
                )
        return Export(
            contents,
            patchset.describe(repository, locked_base, list(contents)),
            repository.rev_parse("HEAD^{tree}"),
        )


def _complain(problems: list[str]) -> None:
    if problems:
        raise ToolError("the series breaks its rules\n  " + "\n  ".join(problems))


def export(
    checkout: Checkout, source: Path | None = None, base: str | None = None
) -> Export:
    """Write ``patches/`` and the tree hash in ``upstream.lock`` from commits.

    With a base from upstream's repository, ``patches/`` only.

    Args:
        source: a git working tree; ``build/src`` if not given.
        base: its commit before the first patch; the locked base if not given.

    Raises:
        ToolError: the tree is not clean, a rule is broken, or the patches do not
            survive a round trip. Nothing is written then.
    """
    lock = locks.read(checkout)
    folder = source or checkout.source
    if not (folder / ".git").exists():
        raise ToolError(f"no git tree at {folder}: `.venv/bin/python -m tools.series open` first")
    repository = hermetic_git(folder)
    if in_progress(folder):
        raise ToolError(f"a rebase or am is in progress in {folder}")
    if repository.status("--porcelain", "--untracked-files=no"):
        raise ToolError(f"{folder} has uncommitted changes: commit them")
    if source is None and _known_patches(repository) not in ("", _digest(checkout)):
        raise ToolError(
            f"patches/ is not what {folder} was opened from or exported to: this would "
            "undo what has changed there. Keep your commits (`git format-patch`), "
            "`open --discard`, and apply them (`git am`)"
        )
    first = base or bases.in_clone(lock.release)
    exported = render(checkout, lock, repository, first)
    _complain(patchset.lint(exported.patches))
    checkout.patches.mkdir(exist_ok=True)
    for stale in checkout.patches.glob("*.patch"):
        if stale.name not in exported.contents:
            stale.unlink()
    for name, content in exported.contents.items():
        write_atomically(checkout.patches / name, content)
    table = patchset.readme(exported.patches, lock.release)
    write_atomically(checkout.patches / "README.md", table.encode())
    base_tree = bases.tree(checkout, lock.release)
    # The lock describes the source archive. After ./build.sh --source git the base is
    # upstream's repository, which has files that the archive leaves out.
    if lock.base_tree in ("", base_tree):
        locks.write(
            checkout, dataclasses.replace(lock, tree=exported.tree, base_tree=base_tree)
        )
    if source is None:
        _agree(checkout, repository)
    return exported


# ---------------------------------------------------------------- check


def check(checkout: Checkout) -> Export:
    """Prove that ``patches/`` is exactly what its own commits export to.

    Raises:
        ToolError: a patch does not apply, the tree hash is not the locked one, bytes
            differ, a rule is broken, or the generated table is stale.
    """
    lock = locks.read(checkout)
    files = patch_files(checkout.patches)
    with checkout.scratch() as folder:
        repository = applied_tree(checkout, lock, folder / "src")
        base = bases.in_clone(lock.release)
        again = format_patches(repository, base, folder / "again")
        contents = {file.name: file.read_bytes() for file in again}
        names = [file.name for file in files]
        patches = patchset.describe(repository, base, names)
        tree = repository.rev_parse("HEAD^{tree}")
    problems = patchset.lint(patches)
    for file in files:
        if contents.get(file.name) != file.read_bytes():
            problems.append(f"{file.name}: not the bytes that export writes")
    stray = {p.name for p in checkout.patches.iterdir()} - {*names, "README.md"}
    problems += [f"{name}: not part of the series" for name in sorted(stray)]
    table = checkout.patches / "README.md"
    if not table.exists() or table.read_text() != patchset.readme(
        patches, lock.release
    ):
        problems.append("README.md: the table is not up to date")
    if problems:
        problems.append("`.venv/bin/python -m tools.series open` and `export` write them anew")
    _complain(problems)
    return Export(contents, patches, tree)


# ---------------------------------------------------------------- command line


def _import_base(checkout: Checkout, origin: str, url: str) -> None:
    """Import the locked release from its archive or from upstream's repository."""
    lock = locks.read(checkout)
    if origin == "git":
        found = bases.import_tag(checkout, lock.release, lock.commit, url)
        print(f"base {lock.release} from {url}: tree {found}")
        return
    archive = fetch.fetch(checkout, "sdist")
    found = bases.import_sdist(checkout, archive, lock.release)
    if lock.base_tree and found != lock.base_tree:
        raise ToolError(
            f"{archive.name} was not imported as upstream.lock says\n"
            f"  expected tree {lock.base_tree}\n  actual   tree {found}"
        )
    print(f"base {lock.release}: tree {found}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.series",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    base = verbs.add_parser("base", help="import the locked release as a git commit")
    base.add_argument(
        "--source",
        choices=["archive", "git"],
        default="archive",
        help="the package index's source archive, or a clone of upstream's tag",
    )
    base.add_argument("--url", default=bases.UPSTREAM_URL, help="for --source git")
    opened = verbs.add_parser("open", help="make build/src")
    opened.add_argument(
        "--discard", action="store_true", help="replace work that was not exported"
    )
    exported = verbs.add_parser("export", help="write patches/ from commits")
    exported.add_argument(
        "--from", dest="tree", type=Path, help="another git tree than build/src"
    )
    exported.add_argument("--base", help="commit before the first patch, with --from")
    verbs.add_parser("check", help="is patches/ what the tools would write?")
    moved = verbs.add_parser("rebase", help="move the series to another release")
    step = moved.add_mutually_exclusive_group(required=True)
    step.add_argument("version", nargs="?", metavar="VERSION")
    step.add_argument("--continue", dest="go_on", action="store_true")
    step.add_argument("--abort", action="store_true")
    return parser


def main() -> None:
    from tools import rebase

    arguments = _parser().parse_args()
    if arguments.verb == "base":
        _import_base(HERE, arguments.source, arguments.url)
    elif arguments.verb == "open":
        open_series(HERE, arguments.discard)
        print(f"{HERE.source}: branch {_BRANCH}, one commit per patch")
    elif arguments.verb == "export":
        if bool(arguments.tree) != bool(arguments.base):
            raise ToolError("--from and --base go together")
        if not arguments.tree and rebase.waits(HERE):
            raise ToolError("a rebase waits: `rebase --continue` exports")
        done = export(HERE, arguments.tree, arguments.base)
        print(f"patches/ written, tree {done.tree}\n{patchset.summary(done.patches)}")
    elif arguments.verb == "check":
        done = check(HERE)
        print(f"patches/ is sound, tree {done.tree}\n{patchset.summary(done.patches)}")
    elif arguments.abort:
        rebase.abort(HERE)
    elif arguments.go_on:
        rebase.go_on(HERE)
    else:
        rebase.start(HERE, arguments.version)


if __name__ == "__main__":
    run_main(main)
