# SPDX-License-Identifier: Apache-2.0
"""Read and write ``upstream.lock``: what the fork is built from, and what results.

``tools.fetch`` pins archives, ``tools.series`` records tree hashes.
"""

import dataclasses
import platform
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tools.common import MACHINES, Checkout, ToolError, write_atomically

_HEADER = """\
# SPDX-License-Identifier: Apache-2.0
# What this fork is built from, and the git trees that the stacks of patches must
# give. `./build.sh series export` writes the tree hashes, `./build.sh series rebase
# VERSION` moves to another release, and `python -m tools.fetch --pin cpu-x86_64 ...`
# records its binaries. `revision` is edited by hand: it is the N of {release}+{label}.N.cpu.
"""


DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Target:
    """What a wheel is for. Its text, as ``cpu-x86_64``, is its name in the lock.

    Attributes:
        device: one of ``DEVICES``.
        machine: one of ``MACHINES``; this one if it is left out.
    """

    device: str
    machine: str = platform.machine()

    def __str__(self) -> str:
        return f"{self.device}-{self.machine}"


TARGETS = [Target(device, machine) for device in DEVICES for machine in MACHINES]


@dataclass(frozen=True)
class Archive:
    """One file of the package index.

    Attributes:
        requirement: what it is, ``name==version``.
        file: the name of the file.
        sha256: its digest, 64 hexadecimal digits.
        cuda: the CUDA version the binaries are for, empty if none.
    """

    requirement: str
    file: str
    sha256: str
    cuda: str = ""


@dataclass(frozen=True)
class Lock:
    """The contents of ``upstream.lock``.

    Attributes:
        release: upstream version without the ``v``.
        commit: upstream commit of the tag; the release's own files give nine digits.
        label: the fork's name in the local version label.
        revision: counts the fork's releases on this upstream release.
        base_tree: git tree hash of the source archive as imported.
        trees: git tree hashes that the applied stacks must give, by branch:
            ``fixes``, ``scoring`` and ``depth`` (each on the fixes), and ``all``.
        sdist: the source archive.
        wheels: the precompiled binaries by the text of their target.
    """

    release: str
    commit: str
    label: str
    revision: int
    base_tree: str
    trees: dict[str, str]
    sdist: Archive
    wheels: dict[str, Archive]

    def wheel(self, target: Target) -> Archive:
        """The binaries for ``target``.

        Raises:
            ToolError: none are recorded.
        """
        name = str(target)
        if name not in self.wheels:
            raise ToolError(
                f"upstream.lock has no binaries of {self.release} for {name}; "
                f"record them with `.venv/bin/python -m tools.fetch --pin {name}`"
            )
        return self.wheels[name]

    def version(self, device: str) -> str:
        """Version of the wheel; upstream looks for ``cpu`` in it on a CPU."""
        return f"{self.release}+{self.label}.{self.revision}.{device}"

    def built(self, checkout: Checkout, target: Target) -> list[Path]:
        """The wheels of this version in ``dist/``; one, unless a build was broken off."""
        name = f"vllm-{self.version(target.device)}-*_{target.machine}.whl"
        return sorted(checkout.dist.glob(name))


def read(checkout: Checkout) -> Lock:
    """Read the lock of a checkout.

    Raises:
        ToolError: the file is missing or something in it is.
    """
    try:
        table = tomllib.loads(checkout.lock_file.read_text())
        trees = dict(table["series"])
        archives = {name: Archive(**row) for name, row in table["archive"].items()}
        return Lock(
            release=table["upstream"]["release"],
            commit=table["upstream"]["commit"],
            label=table["fork"]["label"],
            revision=table["fork"]["revision"],
            base_tree=trees.pop("base_tree"),
            trees=trees,
            sdist=archives.pop("sdist"),
            wheels=archives,
        )
    except FileNotFoundError:
        raise ToolError(f"no {checkout.lock_file.name} in {checkout.root}") from None
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ToolError(f"upstream.lock can not be read: {error!r}") from None


def write(checkout: Checkout, lock: Lock) -> None:
    """Write the lock; the bytes depend on its contents alone."""
    tables: dict[str, dict[str, object]] = {
        "upstream": {
            "release": lock.release,
            "tag": f"v{lock.release}",
            "commit": lock.commit,
        },
        "fork": {"label": lock.label, "revision": lock.revision},
        "series": {"base_tree": lock.base_tree, **lock.trees},
    }
    for name, archive in [("sdist", lock.sdist), *sorted(lock.wheels.items())]:
        row = dataclasses.asdict(archive)
        tables[f"archive.{name}"] = {key: row[key] for key in row if row[key]}
    lines = [_HEADER.format(release=lock.release, label=lock.label)]
    for name, row in tables.items():
        lines.append(f"[{name}]")
        for key, value in row.items():
            shown = value if isinstance(value, int) else f'"{value}"'
            lines.append(f"{key} = {shown}")
        lines.append("")
    write_atomically(checkout.lock_file, "\n".join(lines).rstrip().encode() + b"\n")
