# SPDX-License-Identifier: Apache-2.0
"""The documentation pages that the patches bring, as files below ``docs/``.

A patch adds its page to upstream's ``docs/``. People read it here without opening the
series, so `export` writes a copy, and `check` compares it.
"""

import posixpath
import re
from collections.abc import Callable

import git

from tools.common import Checkout, write_atomically
from tools.stacks import ALL

_MARK = b"<!-- Generated from the patches by `./build.sh series export`. Do not edit. -->"


# To a page, from a page.
_LINK = re.compile(r"(?<=\]\()(?!\w+:)[^)#\s]+\.md")
_RELEASES_PAGES = "https://github.com/vllm-project/vllm/blob/v{release}/docs/"


def pages(repository: git.Git, base: str, release: str) -> dict[str, bytes]:
    """The pages that branch ``all`` adds to the base, by their path below ``docs/``.

    Links to upstream's own pages, which are not here, lead to those of the release.
    """
    added = repository.diff(
        "--name-only", "--diff-filter=A", base, ALL, "--", "docs/*.md"
    )
    names = [path.removeprefix("docs/") for path in added.splitlines()]
    return {
        name: b"%s\n\n%s\n"
        % (_MARK, _LINK.sub(_linked(name, names, release), page).encode())
        for name in names
        for page in (repository.show(f"{ALL}:docs/{name}"),)
    }


def _linked(
    page: str, names: list[str], release: str
) -> Callable[[re.Match[str]], str]:
    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), found[0]))
        return found[0] if target in names else _RELEASES_PAGES.format(release=release) + target

    return link


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
