# SPDX-License-Identifier: Apache-2.0
"""Run upstream's own tests that the patches add or change, against our wheel.

They run in ``build/upstream-tests``, the applied tree without its ``vllm`` folder,
so that ``import vllm`` is the installed wheel. ``tests/upstream_deselect.txt`` lists
what can not run here: a pytest node id, two spaces, ``# why``. Tests of Triton
kernels run in a session of their own, in Triton's interpreter.

Two ways take a source tree instead, into which the wheel's compiled libraries are
linked, and take too long for ``build.sh test``:

- ``--each-patch``: the tests of each patch run against its stack as it is with that
  patch and those before it, as upstream gets them. A rebase can leave a mistake in
  one patch that a later one mends. 18 minutes.
- ``--stack scoring``: the tests that the fixes and that stack touch run against these
  alone.
"""

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tools import bases, lock as locks, stacks, stamp
from tools.common import HERE, PYTEST_OPTIONS, Checkout, ToolError, run_main
from tools.stacks import ALL, BRANCHES, Contents

INTERPRETED = ("tests/kernels/test_read_logits.py",)
"""Tests that need a GPU or Triton's interpreter."""

_HEADER = re.compile(rb"^\+\+\+ b/(tests/(?:.*/)?test_[^/\s]*\.py)$", re.MULTILINE)


def touched(patches: Iterable[bytes]) -> list[str]:
    """The test files that patches add or change, sorted."""
    return sorted({name.decode() for patch in patches for name in _HEADER.findall(patch)})


def touched_by(contents: Contents, branch: str) -> list[str]:
    """The test files that the stacks of a branch add or change, sorted."""
    files = [contents[stack].values() for stack in stacks.layers(branch)]
    return touched(patch for stack in files for patch in stack)


def deselected(checkout: Checkout) -> list[str]:
    """Node ids of tests that can not run here.

    Raises:
        ToolError: an entry does not say why.
    """
    file = checkout.root / "tests" / "upstream_deselect.txt"
    entries = []
    for row in file.read_text().splitlines() if file.exists() else []:
        if not row.strip() or row.startswith("#"):
            continue
        entry, _, reason = row.partition("  #")
        if not reason.strip():
            raise ToolError(f"{file.name}: {row!r} has no `  # reason`")
        entries.append(entry.strip())
    return entries


def prepare(checkout: Checkout) -> Path:
    """Make the folder in which the tests run, anew if the series changed.

    Raises:
        ToolError: the series does not apply to the locked tree.
    """
    lock = locks.read(checkout)
    target = checkout.build / "upstream-tests"
    patches = stacks.read(checkout).values()
    digests = [hashlib.sha256(p).hexdigest() for stack in patches for p in stack.values()]
    wanted = stamp.key(lock.release, *digests)
    if target.exists() and stamp.is_done(checkout, target.name, wanted):
        return target
    stamp.clear(checkout, target.name)
    with checkout.scratch() as folder:
        stacks.applied(checkout, lock, folder / "src")
        shutil.rmtree(folder / "src" / "vllm")
        shutil.rmtree(folder / "src" / ".git")
        shutil.rmtree(target, ignore_errors=True)
        (folder / "src").rename(target)
    stamp.done(checkout, target.name, wanted)
    return target


def add_compiled(folder: Path) -> None:
    """Link what the installed wheel has and a source tree has not."""
    (found,) = importlib.util.find_spec("vllm").submodule_search_locations
    installed = Path(found)
    for file in [*installed.rglob("*.so"), installed / "_version.py"]:
        link = folder / "vllm" / file.relative_to(installed)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(file)


def run_each_patch(checkout: Checkout, options: list[str]) -> list[str]:
    """Run each patch's tests against the tree that it gives.

    Returns:
        the patches whose tests failed.
    """
    failed = []
    with checkout.scratch() as folder:
        source = folder / "src"
        release = locks.read(checkout).release
        repository = bases.check_out(checkout, release, source)
        for stack, patches in stacks.read(checkout).items():
            below = stacks.below(stack, bases.in_clone(release))
            repository.checkout("--quiet", "-b", stack, below)
            for name, content in patches.items():
                stacks.apply(repository, stack, {name: content})
                print(f"--- {stack}/{name}", flush=True)
                if run_in_tree(checkout, source, touched([content]), options):
                    failed.append(f"{stack}/{name}")
    return failed


def run_stack(checkout: Checkout, branch: str, options: list[str]) -> int:
    """Run the tests that a branch touches against its tree alone; the exit status."""
    with checkout.scratch() as folder:
        stacks.applied(checkout, locks.read(checkout), folder / "src", branch)
        files = touched_by(stacks.read(checkout), branch)
        return run_in_tree(checkout, folder / "src", files, options)


def run_in_tree(
    checkout: Checkout, tree: Path, files: list[str], options: list[str]
) -> int:
    """Run tests against a source tree; the exit status."""
    if not files:
        return 0
    add_compiled(tree)
    return _run(checkout, tree, files, options, str(tree))


def _run(
    checkout: Checkout, folder: Path, files: list[str], options: list[str], path: str
) -> int:
    """Run tests in a folder; ``path`` is where modules are looked for first."""
    skipped = [f"--deselect={entry}" for entry in deselected(checkout)]
    command = [sys.executable, "-s", "-m", "pytest", *PYTEST_OPTIONS]
    command += [*skipped, "-p", "no_global_cleanup", *options]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    # Two patches can change a file within the second that bytecode is dated by.
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    environment["SPAWN_ENGINES"] = "1"  # with tests' own engines in the process
    ours = HERE.root / "tests"

    def first(*folders: Path) -> dict[str, str]:
        return {"PYTHONPATH": os.pathsep.join(map(str, filter(None, (*folders, path))))}

    faster = ours / "fewer_collections"
    paths = first(faster)
    interpreter = {"TRITON_INTERPRET": "1"} | first(faster, ours / "v2_on_cpu")
    kernels = [file for file in files if file in INTERPRETED]
    others = [file for file in files if file not in INTERPRETED]
    codes = [
        subprocess.run(
            [*command, *group], cwd=folder, env=environment | extra
        ).returncode
        for group, extra in ((kernels, interpreter), (others, paths))
        if group
    ]
    # That of a session which a signal ended is negative.
    return next((code for code in codes if code), 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.upstream_tests", description=__doc__
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument(
        "--each-patch", action="store_true", help="each patch's against its own tree"
    )
    ways.add_argument("--stack", choices=BRANCHES)
    ways.add_argument("--tree", type=Path, help="these test files in this source tree")
    parser.add_argument("pytest", nargs="*", help="further options for pytest")
    arguments = parser.parse_args()
    if arguments.each_patch:
        failed = run_each_patch(HERE, arguments.pytest)
        if failed:
            raise ToolError("tests failed of\n  " + "\n  ".join(failed))
    elif arguments.stack:
        sys.exit(run_stack(HERE, arguments.stack, arguments.pytest))
    elif arguments.tree:
        sys.exit(run_in_tree(HERE, arguments.tree, arguments.pytest, []))
    else:
        files = touched_by(stacks.read(HERE), ALL)
        folder = prepare(HERE)
        sys.exit(_run(HERE, folder, files, arguments.pytest, "") if files else 0)


if __name__ == "__main__":
    run_main(main)
