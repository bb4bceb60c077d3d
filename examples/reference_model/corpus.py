# SPDX-License-Identifier: Apache-2.0
"""The reference model's text: Python and Markdown of the pinned source archive, and
the Python files of packages that vLLM installs.

vLLM's files are read from the archive, never from a patched tree, so what is held out
does not change when the series does.
"""

import hashlib
import tarfile
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

SUFFIXES = (".py", ".md")
MAX_FILE_BYTES = 200_000
HELD_OUT_PER_MILLE = 20
"""Share of files, by a hash of their path, that training never sees."""
PACKAGES = (
    "torch", "transformers", "sympy", "networkx", "numpy",
    "openai", "pydantic", "fastapi", "aiohttp", "starlette",
)  # fmt: skip
"""Installed distributions whose Python files are read too; vLLM depends on all."""


ROOT = Path(__file__).resolve().parents[2]


def pinned_archive() -> Path:
    """The source archive that `upstream.lock` names and `build.sh` fetches."""
    lock = tomllib.loads((ROOT / "upstream.lock").read_text())
    return ROOT / "build" / "downloads" / lock["archive"]["sdist"]["file"]


def is_held_out(path: str) -> bool:
    """Says whether the file at `path` (relative to the archive's top folder) is
    kept for evaluation. Depends on the path alone."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_MILLE


def read(archive: Path, held_out: bool) -> dict[str, str]:
    """Reads one side of the split.

    Args:
        archive: the source archive (`.tar.gz`) that `upstream.lock` names.
        held_out: the evaluation side if true, else the training side.

    Returns:
        Path inside the archive to text, sorted by path, duplicates of the same
        text dropped. A text that occurs on both sides is dropped from the
        held-out one.
    """
    sides: tuple[dict[str, str], dict[str, str]] = ({}, {})
    with tarfile.open(archive) as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            if (
                not member.isfile()
                or not path.endswith(SUFFIXES)
                or member.size > MAX_FILE_BYTES
            ):
                continue
            file = tar.extractfile(member)
            assert file is not None
            text = file.read().decode("utf-8", errors="replace")
            if text.strip():
                sides[is_held_out(path)][path] = text
    seen: set[str] = set()
    unique: list[dict[str, str]] = []
    for side in sides:  # the training side first, so that it keeps shared texts
        unique.append({})
        for path, text in sorted(side.items()):
            if text not in seen:
                seen.add(text)
                unique[-1][path] = text
    return unique[held_out]


def read_packages(without: Iterable[str]) -> dict[str, str]:
    """Reads the Python files of `PACKAGES`, as they are installed.

    Args:
        without: texts to leave out, such as the held-out ones.

    Returns:
        Path inside site-packages to text, sorted by path, duplicates dropped.
    """
    seen, texts = set(without), {}
    for name in PACKAGES:
        for file in sorted(distribution(name).files or [], key=str):
            path = Path(file.locate())
            if path.suffix != ".py" or not path.is_file():
                continue
            if path.stat().st_size > MAX_FILE_BYTES:
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.strip() and text not in seen:
                seen.add(text)
                texts[str(file)] = text
    return texts
