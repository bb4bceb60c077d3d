# SPDX-License-Identifier: Apache-2.0
"""Resolve ``requirements/cpu.lock`` for the locked release.

``python -m tools.requirements`` asks pip to resolve the dependencies that the
release's CPU wheel declares plus ``requirements/extra.in``, and writes every
version down. It keeps to the versions that are in the file already, but for those
that the wheel pins; with ``--upgrade`` it takes the newest.
"""

import argparse
import email
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

from tools import fetch, lock as locks
from tools.common import (
    HERE, Checkout, ToolError, clean_environment, run_main, write_atomically,
)  # fmt: skip

# Not needed for text models. The index's builds of the first three break `import
# transformers` beside a CPU torch, and triton comes from a code host there.
_LEFT_OUT = {"torchaudio", "torchcodec", "torchvision", "triton"}
_HEADER = """\
# SPDX-License-Identifier: Apache-2.0
# Resolved for {release} and Python {python} by pip {pip}:
#     .venv/bin/python -m tools.requirements
# No hashes here: `torch=={torch}` is meant to accept the CPU build (+cpu) and the
# plain one, whichever the index has, and pip takes hashes for all files or none.
# torch for CUDA works too and takes 3 GiB more; PIP_EXTRA_INDEX_URL can name an
# index with CPU builds.
"""


def declared(wheel: Path) -> list[str]:
    """The dependencies that a wheel's metadata asks for, extras and a few left out.

    Raises:
        ToolError: the wheel has no metadata.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        if len(names) != 1:
            raise ToolError(f"{wheel.name} has no metadata")
        metadata = email.message_from_bytes(archive.read(names[0]))
    rows = [str(row) for row in metadata.get_all("Requires-Dist", [])]
    return [
        row
        for row in rows
        if "extra ==" not in row
        and _name(row) not in _LEFT_OUT
    ]


def kept(rows: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """The rows of a lock file that what is wanted, or extra.in, does not pin itself."""
    pinned = {_name(row) for row in wanted if "==" in row.partition(";")[0]}
    return [row for row in rows if row[:1].isalnum() and _name(row) not in pinned]


def _name(row: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", row, maxsplit=1)[0]).lower()


def resolve(checkout: Checkout, wanted: list[str], upgrade: bool) -> dict[str, str]:
    """Versions of everything that ``wanted`` needs, by name, from the index.

    Raises:
        ToolError: pip finds no set of versions.
    """
    lock_file = checkout.root / "requirements" / "cpu.lock"
    with checkout.scratch() as folder:
        (folder / "all.in").write_text("\n".join(wanted) + "\n")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--report", str(folder / "report.json")]
        command += ["--requirement", str(folder / "all.in")]
        if lock_file.exists() and not upgrade:
            rows = kept(lock_file.read_text().splitlines(), wanted)
            (folder / "kept.txt").write_text("\n".join(rows) + "\n")
            command += ["--constraint", str(folder / "kept.txt")]
        environment = clean_environment(checkout)
        if subprocess.run(command, env=environment).returncode:
            raise ToolError(
                "pip found no set of versions; its messages are above. If the release "
                "wants newer ones than requirements/cpu.lock has, give --upgrade"
            )
        report = json.loads((folder / "report.json").read_text())
    found = (row["metadata"] for row in report["install"])
    return {row["name"]: row["version"].split("+")[0] for row in found}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.requirements", description=__doc__
    )
    parser.add_argument("--upgrade", action="store_true", help="newest versions")
    upgrade = parser.parse_args().upgrade
    lock = locks.read(HERE)
    wheel = fetch.archive_path(HERE, lock.wheel("cpu"))
    folder = HERE.root / "requirements"
    extra = (folder / "extra.in").read_text().splitlines()
    versions = resolve(HERE, declared(wheel) + extra, upgrade)
    import pip

    header = _HEADER.format(
        release=f"vLLM {lock.release}",
        python="{}.{}".format(*sys.version_info),
        pip=pip.__version__,
        torch=versions["torch"],
    )
    rows = [f"{name}=={versions[name]}" for name in sorted(versions, key=str.lower)]
    text = header + "\n" + "\n".join(rows) + "\n"
    write_atomically(folder / "cpu.lock", text.encode())
    print(f"requirements/cpu.lock: {len(rows)} packages")


if __name__ == "__main__":
    run_main(main)
