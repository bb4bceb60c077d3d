# SPDX-License-Identifier: Apache-2.0
"""Run upstream's own tests that the patches add or change, against our wheel.

They run in ``build/upstream-tests``, the applied tree without its ``vllm`` folder,
so that ``import vllm`` is the installed wheel. ``tests/upstream_deselect.txt`` lists
what can not run here: a pytest node id, two spaces, ``# why``. Tests of Triton
kernels run in a session of their own, in Triton's interpreter.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools import lock as locks, series, stamp
from tools.common import HERE, PYTEST_OPTIONS, Checkout, ToolError, run_main

INTERPRETED = ("tests/v1/worker/test_fused_target_logprobs.py",)
"""Tests that need a GPU or Triton's interpreter."""

_HEADER = re.compile(rb"^\+\+\+ b/(tests/(?:.*/)?test_[^/\s]*\.py)$", re.MULTILINE)


def touched(checkout: Checkout) -> list[str]:
    """The test files that the patches add or change, sorted."""
    found: set[str] = set()
    for patch in series.patch_files(checkout.patches):
        found.update(name.decode() for name in _HEADER.findall(patch.read_bytes()))
    return sorted(found)


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
    wanted = stamp.key(lock.tree, *series.patch_files(checkout.patches))
    if target.exists() and stamp.is_done(checkout, target.name, wanted):
        return target
    stamp.clear(checkout, target.name)
    with checkout.scratch() as folder:
        series.applied_tree(checkout, lock, folder / "src")
        shutil.rmtree(folder / "src" / "vllm")
        shutil.rmtree(folder / "src" / ".git")
        shutil.rmtree(target, ignore_errors=True)
        (folder / "src").rename(target)
    stamp.done(checkout, target.name, wanted)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.upstream_tests", description=__doc__
    )
    parser.add_argument("pytest", nargs="*", help="further options for pytest")
    options = parser.parse_args().pytest
    files = touched(HERE)
    if not files:
        print("no patch adds or changes a test of upstream's")
        return
    folder = prepare(HERE)
    skipped = [f"--deselect={entry}" for entry in deselected(HERE)]
    command = [sys.executable, "-s", "-m", "pytest", *PYTEST_OPTIONS]
    command += [*skipped, *options]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    backend = str(HERE.root / "tests" / "v2_on_cpu")
    interpreter = {"TRITON_INTERPRET": "1", "PYTHONPATH": backend}
    kernels = [file for file in files if file in INTERPRETED]
    others = [file for file in files if file not in INTERPRETED]
    codes = [
        subprocess.run([*command, *group], cwd=folder, env=env).returncode
        for group, env in ((kernels, environment | interpreter), (others, environment))
        if group
    ]
    sys.exit(max(codes))


if __name__ == "__main__":
    run_main(main)
