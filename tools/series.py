# SPDX-License-Identifier: Apache-2.0
"""The patches: three stacks, each a git branch of build/src.

    open     make build/src, with the branches fixes, scoring, depth and all
    list     name the stacks and their patches, in order
    export   write patches/ from the branches of build/src
    check    apply patches/, compare trees and bytes with what is committed
    drop     take a patch out of its stack
    pr       make build/pr/NAME: a patch and what it needs, on the upstream release
    rebase   move the stacks to another upstream release

Work on a stack: `open scoring`, edit in build/src, `git commit --fixup COMMIT`,
`git rebase -i --autosquash`, `export`, `check`.
"""

import argparse
from pathlib import Path

import git

from tools import bases, fetch, lock as locks, pull_request, rebase, source, stacks
from tools.common import HERE, Checkout, ToolError, run_main
from tools.export import check, export
from tools.hermetic import first_lines, hermetic_git
from tools.patchset import Series, summary
from tools.stacks import ALL, BRANCHES, DEPTH, FIXES, SCORING, conflict


def import_base(checkout: Checkout, origin: str, url: str = "") -> None:
    """Import the locked release from its archive or from upstream's repository.

    Raises:
        ToolError: it can not be had, or is not the one that is locked.
    """
    lock = locks.read(checkout)
    if origin == "git":
        found = bases.import_tag(checkout, lock.release, lock.commit, url)
        print(f"base {lock.release} from {url}: tree {found}")
        return
    archive = fetch.fetch(checkout)
    found = bases.import_sdist(checkout, archive, lock.release)
    if lock.base_tree and found != lock.base_tree:
        raise ToolError(
            f"{archive.name} was not imported as upstream.lock says\n"
            f"  expected tree {lock.base_tree}\n  actual   tree {found}"
        )
    print(f"base {lock.release}: tree {found}")


def drop(checkout: Checkout, name: str) -> Series:
    """Take a patch out of its stack, and export.

    Raises:
        ToolError: there is no such patch, or a later one conflicts.
    """
    contents = stacks.read(checkout)
    stack, file = stacks.find(contents, name)
    source.open_source(checkout, stack)
    repository = hermetic_git(checkout.source)
    after = len(contents[stack]) - 1 - list(contents[stack]).index(file)
    commit = repository.rev_parse(f"{stack}~{after}")
    try:
        repository.rebase("--quiet", "--onto", f"{commit}~", commit, stack)
    except git.GitCommandError as error:
        patch, files = conflict(repository)
        if not files:
            raise ToolError(f"git rebase failed:\n  {first_lines(error)}") from None
        raise ToolError(
            f"without {file} the patch {patch!r} conflicts in\n  "
            + "\n  ".join(files)
            + f"\nIn {checkout.source} resolve and `git add` them and `git rebase "
            "--continue`, then export; or give up with `git rebase --abort`."
        ) from None
    if (stack, after) == (FIXES, 0):
        _leave_behind(repository, commit, file)
    return export(checkout)


def _leave_behind(repository: git.Git, last: str, file: str) -> None:
    """Put what stands on the last fix on those that are left.

    They are its ancestors, so it does not show that the stacks stood on it.

    Raises:
        ToolError: a stack needs it; nothing has changed then.
    """
    before = {stack: repository.rev_parse(stack) for stack in (SCORING, DEPTH)}
    for stack in before:
        try:
            repository.rebase("--quiet", "--onto", FIXES, last, stack)
        except git.GitCommandError as error:
            patch, files = conflict(repository)
            repository.rebase("--abort", with_exceptions=False)
            repository.checkout("--quiet", "--force", ALL)
            for name, tip in {**before, FIXES: last}.items():
                repository.update_ref(f"refs/heads/{name}", tip)
            raise ToolError(
                f"{stack} can not do without {file}: {patch!r} conflicts in\n  "
                + ("\n  ".join(files) or first_lines(error))
            ) from None


def _list(checkout: Checkout) -> None:
    for stack in stacks.STACKS:
        print(f"{stack}, on {stacks.below(stack, locks.read(checkout).release)}")
        for name in stacks.listed(checkout, stack):
            print(f"  {name.removesuffix('.patch')}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./build.sh series",
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
    opened.add_argument("branch", nargs="?", choices=BRANCHES, default=ALL)
    opened.add_argument(
        "--discard", action="store_true", help="replace work that was not exported"
    )
    verbs.add_parser("list", help="name the patches")
    exported = verbs.add_parser("export", help="write patches/ from the branches")
    exported.add_argument(
        "--from", dest="tree", type=Path, help="another git tree than build/src"
    )
    verbs.add_parser("check", help="is patches/ what the tools would write?")
    dropped = verbs.add_parser("drop", help="take a patch out")
    dropped.add_argument("name")
    sent = verbs.add_parser("pr", help="prepare a pull request")
    sent.add_argument("name")
    sent.add_argument("--run-tests", action="store_true", help="needs ./build.sh first")
    moved = verbs.add_parser("rebase", help="move the stacks to another release")
    step = moved.add_mutually_exclusive_group(required=True)
    step.add_argument("version", nargs="?", metavar="VERSION")
    step.add_argument("--continue", dest="go_on", action="store_true")
    step.add_argument("--abort", action="store_true")
    return parser


def _run(checkout: Checkout, arguments: argparse.Namespace) -> None:
    verb = arguments.verb
    if verb in ("open", "export", "drop") and rebase.waits(checkout):
        raise ToolError("a rebase waits: `rebase --continue` exports, or --abort")
    if verb == "base":
        import_base(checkout, arguments.source, arguments.url)
        return
    if not bases.has(checkout, locks.read(checkout).release):
        import_base(checkout, "archive")
    if verb == "open":
        source.open_source(checkout, arguments.branch, arguments.discard)
        print(f"{checkout.source}: branch {arguments.branch}, one commit per patch")
    elif verb == "list":
        _list(checkout)
    elif verb == "export":
        done = export(checkout, arguments.tree)
        print(f"patches/ is written\n{summary(done)}")
    elif verb == "check":
        print(f"patches/ is sound\n{summary(check(checkout))}")
    elif verb == "drop":
        print(f"patches/ is written\n{summary(drop(checkout, arguments.name))}")
    elif verb == "pr":
        print(pull_request.prepare(checkout, arguments.name, arguments.run_tests))
    elif arguments.abort:
        rebase.abort(checkout)
    elif arguments.go_on:
        rebase.go_on(checkout)
    else:
        rebase.start(checkout, arguments.version)


def main() -> None:
    try:
        _run(HERE, _parser().parse_args())
    finally:
        HERE.sweep()


if __name__ == "__main__":
    run_main(main)
