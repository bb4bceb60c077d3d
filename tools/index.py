# SPDX-License-Identifier: Apache-2.0
"""The package index that pip is set up for: its list of files, and their bytes.

pip's own files and variables say where it is. It is asked as PEP 503 says, since
pip runs the code of a source archive to learn its version, and vLLM's needs torch.
"""

import ast
import base64
import contextlib
import http.client
import netrc
import re
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urljoin, urlsplit

from tools.common import Checkout, ToolError, clean_environment

_ATTEMPTS = 3
_SECTIONS = ("global", "install", "download", ":env:")  # the last one wins


class Unreachable(ToolError):
    """No answer; the text names no address, which may hold a password."""

    def __init__(self, wanted: str) -> None:
        super().__init__(
            f"no package index could be reached for {wanted}. Check the network, or "
            "PIP_INDEX_URL and the proxy settings, and run again"
        )


class Index:
    """What pip would look at, by the settings of the user."""

    def __init__(self, checkout: Checkout) -> None:
        self.settings = _pip_settings(checkout)
        self.opener = urllib.request.build_opener(
            urllib.request.HTTPSHandler(context=self._trust()), *self._proxies()
        )

    def files(self, project: str) -> dict[str, str]:
        """The addresses of a project's files, by file name.

        Raises:
            Unreachable: an index does not answer.
        """
        found: dict[str, str] = {}
        for address in self._pages(project):
            for name, link in self._links(address, project).items():
                found.setdefault(name, link)
        return found

    def download(self, address: str, path: Path) -> None:
        """Write the bytes at an address to a file.

        Raises:
            Unreachable: it can not be read to its end.
        """
        for left in reversed(range(_ATTEMPTS)):
            try:
                with self._open(address) as answer, path.open("wb") as stream:
                    shutil.copyfileobj(answer, stream, 2**20)
                return
            except (OSError, http.client.HTTPException):
                path.unlink(missing_ok=True)
                if not left:
                    raise Unreachable(path.name) from None

    def _pages(self, project: str) -> list[str]:
        """Addresses of the pages that list files; a folder's ends in a slash."""
        folders = self.settings.get("find-links", "").split()
        pages = [p if "://" in p else Path(p).resolve().as_uri() + "/" for p in folders]
        if self.settings.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
            bases = self.settings.get("index-url", "").split() or [_default_index()]
            bases += self.settings.get("extra-index-url", "").split()
            pages += [f"{base.rstrip('/')}/{project}/" for base in bases]
        return pages

    def _links(self, address: str, project: str) -> dict[str, str]:
        if address.startswith("file:"):
            folder = Path(unquote(urlsplit(address).path))
            if folder.is_dir() and not (folder / "index.html").exists():
                return {p.name: p.as_uri() for p in folder.iterdir()}
            address = (folder / "index.html" if folder.is_dir() else folder).as_uri()
        for left in reversed(range(_ATTEMPTS)):
            try:
                with self._open(address) as answer:
                    page = _Page()
                    page.feed(answer.read().decode("utf-8", "replace"))
                links = [urljoin(address, link) for link in page.links]
                return {unquote(urlsplit(a).path).rpartition("/")[2]: a for a in links}
            except urllib.error.HTTPError as error:
                if error.code in (404, 410):
                    return {}
                if not left:
                    raise Unreachable(project) from None
            except (OSError, http.client.HTTPException):
                if address.startswith("file:"):
                    return {}
                if not left:
                    raise Unreachable(project) from None
        raise AssertionError

    def _open(self, address: str) -> IO[bytes]:
        parts = urlsplit(address)
        host = parts.netloc.rpartition("@")[2]
        request = urllib.request.Request(parts._replace(netloc=host).geturl())
        accepted = "application/vnd.pypi.simple.v1+html, text/html;q=0.2, */*;q=0.1"
        request.add_header("Accept", accepted)
        user, password = parts.username, parts.password
        if user is None and parts.hostname:
            with contextlib.suppress(OSError, netrc.NetrcParseError):
                known = netrc.netrc().authenticators(parts.hostname)
                user, _, password = known or (None, None, None)
        if user is not None:
            pair = f"{unquote(user)}:{unquote(password or '')}".encode()
            basic = f"Basic {base64.b64encode(pair).decode()}"
            request.add_unredirected_header("Authorization", basic)
        timeout = float(self.settings.get("timeout") or 60)
        return self.opener.open(request, timeout=timeout)

    def _trust(self) -> ssl.SSLContext:
        own = self.settings.get("cert", "")
        context = ssl.create_default_context(
            cafile=own if Path(own).is_file() else None,
            capath=own if own and Path(own).is_dir() else None,
        )
        return context

    def _proxies(self) -> list[urllib.request.BaseHandler]:
        own = self.settings.get("proxy", "")
        return [urllib.request.ProxyHandler({"http": own, "https": own})] if own else []


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def _pip_settings(checkout: Checkout) -> dict[str, str]:
    """pip's options, from the user's files and variables.

    Raises:
        ToolError: pip does not run.
    """
    result = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env=clean_environment(checkout),
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise ToolError(f"pip does not run:\n{result.stderr}")
    rows = re.findall(r"^([\w:]+)\.([\w-]+)=(.+)$", result.stdout, re.MULTILINE)
    rows = [row for row in rows if row[0] in _SECTIONS]
    rows.sort(key=lambda row: _SECTIONS.index(row[0]))
    return {option: str(ast.literal_eval(value)) for _, option, value in rows}


def _default_index() -> str:
    """Where pip looks if nothing is set."""
    from pip._internal.models.index import PyPI  # the system's Python may lack pip

    return PyPI.simple_url
