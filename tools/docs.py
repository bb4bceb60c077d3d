# SPDX-License-Identifier: Apache-2.0
"""The documentation pages that the patches bring, as files below ``docs/``.

A patch adds its page to upstream's ``docs/``. People read it here without opening the
series, so `export` writes a copy, and `check` compares it.
"""

import git

from tools.common import Checkout, write_atomically
from tools.stacks import ALL

_MARK = b"<!-- Generated from the patches by `./build.sh series export`. Do not edit. -->"


def pages(repository: git.Git, base: str) -> dict[str, bytes]:
    """The pages that branch ``all`` adds to the base, by their path below ``docs/``."""
    added = repository.diff(
        "--name-only", "--diff-filter=A", base, ALL, "--", "docs/*.md"
    )
    return {
        path.removeprefix("docs/"): b"%s\n\n%s\n"
        % (_MARK, repository.show(f"{ALL}:{path}").encode())
        for path in added.splitlines()
    }


def _there(checkout: Checkout) -> dict[str, bytes]:
    """The generated pages that are there."""
    found = {}
    for file in checkout.docs.rglob("*.md"):
        content = file.read_bytes()
        if content.startswith(_MARK):
            found[str(file.relative_to(checkout.docs))] = content
    return found


def write(checkout: Checkout, wanted: dict[str, bytes]) -> None:
    """Write the pages; remove generated ones that no patch brings any more."""
    for name in _there(checkout).keys() - wanted.keys():
        (checkout.docs / name).unlink()
    for name, content in wanted.items():
        write_atomically(checkout.docs / name, content)


def stale(checkout: Checkout, wanted: dict[str, bytes]) -> list[str]:
    """What is wrong with the pages, a line each."""
    found = _there(checkout)
    names = sorted(found.keys() | wanted.keys())
    return [
        f"docs/{name}: not what the patches bring"
        for name in names
        if found.get(name) != wanted.get(name)
    ]
