# SPDX-License-Identifier: Apache-2.0
"""Resolve ``requirements/*.lock`` for the locked release, with uv.

``./build.sh requirements`` resolves what the release's CPU wheel declares, with
``requirements/extra.in``, and what the other environments hold, and writes the versions
down with the hashes of all their files. Each Python and each machine that ``build.sh``
takes must come to the same versions; what one machine alone needs is marked as its own.
It keeps to the versions that are in the files already, but for what the wheel pins;
``--upgrade`` takes the newest.

uv asks PyPI, or the index that its own settings name (``UV_DEFAULT_INDEX``).
"""

import argparse
import email
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

from tools import fetch, lock as locks
from tools.common import (
    HERE, MACHINES, PYTHONS, Checkout, ToolError, clean_environment, run_main,
    write_atomically,
)  # fmt: skip
from tools.lock import Target

# Not needed for text models. The index's builds of the first three break `import
# transformers` beside a CPU torch, and triton comes from a code host there.
_LEFT_OUT = {"torchaudio", "torchcodec", "torchvision", "triton"}
FROM_TORCH = re.compile(r"torch$|cuda-|nvidia-")
"""Packages that torch.lock leaves to the index: torch, and what its CUDA builds bring."""
_SERIES = ["gitpython", "pyflakes"]
_LICENSE = "# SPDX-License-Identifier: Apache-2.0\n"
_SAYS = {
    "cpu": "What {release} for the CPU, the tools and the programs need, but for torch.",
    "torch": "torch, after cpu.lock. Without hashes: the CPU build (+cpu) and the one for\n"
    "# CUDA are both right, whichever the index has, and the latter brings 3 GiB more.\n"
    "# PIP_EXTRA_INDEX_URL can name an index with CPU builds.",
    "series": "What `./build.sh series` needs, and no more, in the versions of cpu.lock.",
    "lint": "What `./build.sh lint`, `sbom` and `requirements` need beside series.lock.",
}
"""What the first line of a lock file says of it."""


def declared(wheel: Path) -> list[str]:
    """The dependencies that a wheel's metadata asks for, extras and a few left out.

    A local version, as torch's ``+cpu``, is left out too: PyPI has none.

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
        re.sub(r"(==[\w.]+)\+\w+", r"\1", row)
        for row in rows
        if "extra ==" not in row and _name(row) not in _LEFT_OUT
    ]


def packages(lock: str) -> dict[str, str]:
    """The rows of a lock file by package, each with the lines of its hashes."""
    rows = re.findall(r"^\w.*(?:\n +--hash=.*)*", lock, re.MULTILINE)
    return {_name(row): row for row in rows}


def merged(by_machine: dict[str, dict[str, str]]) -> dict[str, str]:
    """The rows of all machines' locks, those that one lacks with a marker.

    Args:
        by_machine: what each machine needs, as ``packages`` gives it.

    Raises:
        ToolError: machines need different versions of a package.
    """
    rows: dict[str, str] = {}
    for name in sorted({name for found in by_machine.values() for name in found}):
        having = {m: found[name] for m, found in by_machine.items() if name in found}
        if len({_plain(row) for row in having.values()}) > 1:
            raise ToolError(
                f"{name} differs between the machines {', '.join(having)}: pin it in "
                "requirements/extra.in"
            )
        row = _plain(next(iter(having.values())))
        if len(having) < len(by_machine):
            marker = " or ".join(f"platform_machine == '{m}'" for m in having)
            version, space, hashes = row.partition(" ")
            row = f"{version} ; {marker}{space}{hashes}"
        rows[name] = row
    return rows


def _plain(row: str) -> str:
    """A row without its marker, which uv repeats if the file that it reads has one."""
    return re.sub(r"^(\S+) *;[^\\\n]*?(?= \\|$)", r"\1", row, flags=re.MULTILINE)


def _name(row: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", row, maxsplit=1)[0]).lower()


class Resolver:
    """uv, for one folder of lock files."""

    def __init__(self, checkout: Checkout, upgrade: bool) -> None:
        self.checkout = checkout
        self.folder = checkout.root / "requirements"
        self.upgrade = upgrade

    def resolve(
        self, name: str, wanted: Iterable[str], python: str, machine: str
    ) -> str:
        """What is needed on a Python of a machine, as a lock file without comments.

        Raises:
            ToolError: uv finds no set of versions.
        """
        old = self.folder / f"{name}.lock"
        with self.checkout.scratch() as scratch:
            (scratch / "all.in").write_text("\n".join(wanted) + "\n")
            new = scratch / "new.lock"
            if old.exists():  # uv keeps to the versions that are there
                new.write_bytes(old.read_bytes())
            command = [str(Path(sys.executable).with_name("uv")), "pip", "compile"]
            command += ["--quiet", "--generate-hashes", "--no-header", "--no-annotate"]
            command += ["--python-platform", f"{machine}-manylinux_2_28"]
            command += ["--python-version", python, "--no-config"]
            command += ["--upgrade"] * self.upgrade
            command += [str(scratch / "all.in"), "--output-file", str(new)]
            environment = clean_environment(self.checkout)
            if subprocess.run(command, env=environment).returncode:
                raise ToolError(
                    f"uv found no versions for {name}.lock on Python {python}, "
                    f"{machine}; its messages are above. If the release wants newer "
                    "ones than the file has, give --upgrade"
                )
            return new.read_text()

    def resolve_for_all(self, name: str, wanted: list[str]) -> dict[str, str]:
        """What is needed, as ``packages`` gives it, the same on each Python.

        Raises:
            ToolError: uv finds no set of versions, or not the same.
        """
        by_machine = {}
        for machine in MACHINES:
            found = {self.resolve(name, wanted, each, machine) for each in PYTHONS}
            if len(found) > 1:
                raise ToolError(
                    f"{name}.lock differs between the Pythons {', '.join(PYTHONS)} on "
                    f"{machine}: pin in requirements/extra.in what differs"
                )
            by_machine[machine] = packages(found.pop())
        return merged(by_machine)

    def write(self, name: str, rows: Iterable[str], says: str) -> None:
        text = f"{_LICENSE}# {says}\n# Written by `./build.sh requirements`.\n\n"
        write_atomically(
            self.folder / f"{name}.lock", (text + "\n".join(rows) + "\n").encode()
        )


def lock_all(checkout: Checkout, upgrade: bool) -> dict[str, int]:
    """Write all lock files but TRL's. Returns their numbers of packages.

    Raises:
        ToolError: uv finds no set of versions.
    """
    lock = locks.read(checkout)
    wheel = fetch.archive_path(checkout, lock.wheel(Target("cpu")))
    resolver = Resolver(checkout, upgrade)
    extra = (resolver.folder / "extra.in").read_text().splitlines()
    found = resolver.resolve_for_all("cpu", declared(wheel) + extra)
    torch = found["torch"].split()[0]
    cpu = {name: row for name, row in found.items() if not FROM_TORCH.match(name)}
    pins = [row.split()[0] for row in cpu.values()]
    series = [pin for pin in pins if _name(pin) in _SERIES]
    lint = (resolver.folder / "lint.in").read_text().splitlines()
    locked = {
        "cpu": cpu,
        "torch": {"torch": torch},
        "series": {name: cpu[name] for name in resolver.resolve_for_all("series", series)},
        "lint": resolver.resolve_for_all("lint", lint),
    }
    for name, rows in locked.items():
        says = _SAYS[name].format(release=f"vLLM {lock.release}")
        resolver.write(name, rows.values(), says)
    return {name: len(rows) for name, rows in locked.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="./build.sh requirements", description=__doc__
    )
    parser.add_argument("--upgrade", action="store_true", help="newest versions")
    for name, count in lock_all(HERE, parser.parse_args().upgrade).items():
        print(f"requirements/{name}.lock: {count} packages")


if __name__ == "__main__":
    run_main(main)
