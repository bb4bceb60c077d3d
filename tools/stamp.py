# SPDX-License-Identifier: Apache-2.0
"""Stamps: the hash of what a step depended on, written when the step was done."""

import hashlib
from pathlib import Path

from tools.common import Checkout, write_atomically


def key(*inputs: str | Path) -> str:
    """Digest of strings and of the contents of files, in the order given.

    A file counts with its name; one that does not exist counts as such.
    """
    total = hashlib.sha256()
    for item in inputs:
        if isinstance(item, Path):
            data = item.read_bytes() if item.is_file() else b"(none)"
            item = f"{item.name} {hashlib.sha256(data).hexdigest()}"
        total.update(f"{len(item)}:{item}".encode())
    return total.hexdigest()


def _file(checkout: Checkout, step: str) -> Path:
    return checkout.build / "stamps" / step


def is_done(checkout: Checkout, step: str, wanted: str) -> bool:
    """Whether a step ended with exactly these inputs."""
    file = _file(checkout, step)
    return file.is_file() and file.read_text().strip() == wanted


def done(checkout: Checkout, step: str, reached: str) -> None:
    """Record that a step ended well."""
    write_atomically(_file(checkout, step), reached.encode() + b"\n")


def clear(checkout: Checkout, step: str) -> None:
    """Forget a step, before it starts to change what it makes."""
    _file(checkout, step).unlink(missing_ok=True)
