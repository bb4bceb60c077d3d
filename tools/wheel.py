# SPDX-License-Identifier: Apache-2.0
"""Build the fork's wheel: the applied series with upstream's compiled libraries.

``python -m tools.wheel cpu-x86_64`` leaves ``dist/vllm-*.whl``. Nothing is compiled:
the build sees git and no other program, so setup.py can not fall back to a local cargo
or C++ build, and a wheel for another machine is built as one for this machine is.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import git

from tools import bases, fetch, lock as locks, stacks
from tools.common import HERE, Checkout, ToolError, move, run_main
from tools.hermetic import hermetic_environment
from tools.lock import TARGETS, Lock, Target

# Time stamp of every file in the wheel, so that equal input gives equal bytes.
_EPOCH = 946_684_800  # 2000-01-01
_BACKEND = Path(__file__).with_name("backend.py")


def build(checkout: Checkout, target: Target) -> Path:
    """Build and verify ``dist/vllm-VERSION-*.whl``.

    Raises:
        ToolError: an archive has another hash, a patch does not apply, the build
            fails, or the wheel lacks something that upstream's has.
    """
    lock = locks.read(checkout)
    binaries = fetch.archive_path(checkout, lock.wheel(target))
    with checkout.scratch() as folder, _readable_by_all():
        source = folder / "src"
        repository = stacks.applied(checkout, lock, source)
        built = _run_backend(folder, source, binaries, lock, target)
        verify(built, binaries, repository, bases.in_clone(lock.release))
        checkout.dist.mkdir(exist_ok=True)
        older = f"vllm-*.{target.device}-*_{target.machine}.whl"  # of any version
        for wheel in checkout.dist.glob(older):
            wheel.unlink()
        return move(built, checkout.dist)


@contextlib.contextmanager
def _readable_by_all() -> Iterator[None]:
    """Files get the same permissions, which are in the wheel, whatever the umask."""
    umask = os.umask(0o022)
    try:
        yield
    finally:
        os.umask(umask)


def _run_backend(
    folder: Path, source: Path, binaries: Path, lock: Lock, target: Target
) -> Path:
    programs, output = folder / "bin", folder / "out"
    programs.mkdir()
    output.mkdir()
    (programs / "git").symlink_to(shutil.which("git") or "git")
    environment = {
        "PATH": str(programs),
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "SOURCE_DATE_EPOCH": str(_EPOCH),
        "VLLM_TARGET_DEVICE": target.device,
        "VLLM_USE_PRECOMPILED": "1",
        "VLLM_PRECOMPILED_WHEEL_LOCATION": str(binaries),
        "VLLM_VERSION_OVERRIDE": lock.version(target.device),
        **hermetic_environment(),
    }
    if "LD_LIBRARY_PATH" in os.environ:  # where this Python finds its library
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    # -P: the folder of the script holds modules of ours named as others' are.
    command = [sys.executable, "-P", "-s", str(_BACKEND), str(output), target.machine]
    command += ["--cuda", lock.wheel(target).cuda]
    result = subprocess.run(
        command,
        cwd=source,
        env=environment,
        stdout=sys.stderr,
        stderr=subprocess.STDOUT,
    )
    if result.returncode:
        raise ToolError("upstream's setup.py failed; its messages are above")
    (built,) = output.glob("*.whl")
    return built


def verify(built: Path, binaries: Path, repository: git.Git, base: str) -> None:
    """Compare a wheel with upstream's wheel and with the tree it was made from.

    Every file of upstream's wheel must be there unless a patch deletes it, every
    compiled one with the same size and CRC, and every Python file of the tree.

    Raises:
        ToolError: something is missing or differs; all of it is named.
    """
    ours, theirs = _contents(built), _contents(binaries)
    deleted = repository.diff("--name-only", "--diff-filter=D", base, "HEAD").split()
    modules = repository.ls_files("vllm/*.py").split()
    wanted = {*theirs, *modules} - set(deleted)
    missing = sorted(wanted - set(ours))
    changed = sorted(
        name for name in set(ours) & set(theirs)
        if _compiled(name) and ours[name] != theirs[name]
    )  # fmt: skip
    if missing or changed:
        rows = [f"  missing {name}" for name in missing]
        rows += [f"  changed {name}" for name in changed]
        rest = [f"  and {len(rows) - 20} more"] if len(rows) > 20 else []
        raise ToolError(
            f"{built.name} is not complete against {binaries.name}\n"
            + "\n".join(rows[:20] + rest)
        )
    count = sum(_compiled(name) for name in theirs)
    print(f"{built.name}: {len(ours)} files, {count} compiled ones as upstream's")


def _compiled(name: str) -> bool:
    return name.endswith(".so") or name == "vllm/vllm-rs"


def _contents(wheel: Path) -> dict[str, tuple[int, int]]:
    """Size in bytes and CRC of every file below ``vllm/`` in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            info.filename: (info.file_size, info.CRC)
            for info in archive.infolist()
            if info.filename.startswith("vllm/") and not info.is_dir()
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.wheel", description=__doc__)
    parser.add_argument("target", choices=[str(target) for target in TARGETS])
    device, _, machine = parser.parse_args().target.partition("-")
    print(build(HERE, Target(device, machine)))


if __name__ == "__main__":
    run_main(main)
