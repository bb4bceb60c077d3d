# SPDX-License-Identifier: Apache-2.0
"""The package index that pip is set up for: its list of files, and their bytes.

pip's own files and variables say where it is. ``pip_environment`` hands on what they say
of that and nothing else. The index is asked as PEP 503 says, since
pip runs the code of a source archive to learn its version, and vLLM's needs torch.
"""

import ast
import base64
import contextlib
import errno
import http.client
import netrc
import os
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
_REACHED_BY = (
    "index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "cert",
    "client-cert", "proxy", "timeout", "default-timeout", "retries", "keyring-provider",
    "cache-dir", "no-cache-dir",
)  # fmt: skip
# Older versions of pip trust what the system does by a feature that is asked for.
_TRUST = {"use-feature": "truststore", "use-deprecated": "legacy-certs"}


class Unreachable(ToolError):
    """No answer; the text names no address, which may hold a password."""

    def __init__(self, wanted: str, error: Exception) -> None:
        reason = getattr(error, "reason", error)
        said = f"HTTP {error.code}" if isinstance(error, urllib.error.HTTPError) else ""
        said = said or getattr(reason, "reason", "") or type(reason).__name__
        super().__init__(
            f"no package index could be reached for {wanted} ({said}). Check the network, "
            "or PIP_INDEX_URL and the proxy settings, and run again"
        )


class Index:
    """What pip would look at, by the settings of the user."""

    def __init__(self, checkout: Checkout) -> None:
        self.settings = pip_settings(checkout)
        self.openers = {
            trusted: urllib.request.build_opener(
                urllib.request.HTTPSHandler(context=self._trust(trusted)),
                *self._proxies(),
            )
            for trusted in (False, True)
        }

    def files(self, project: str, pattern: str) -> dict[str, str]:
        """The addresses of a project's files whose names match, by file name.

        An index that refuses or does not answer is passed over, as pip does, if
        another one has such files.

        Raises:
            Unreachable: no index has one, and one does not answer.
        """
        failed: Unreachable | None = None
        found: dict[str, str] = {}
        for address in self._pages(project):
            try:
                links = self._links(address, project)
            except Unreachable as error:
                failed = failed or error
                continue
            for name, link in links.items():
                if re.fullmatch(pattern, name):
                    found.setdefault(name, link)
        if failed and not found:
            raise failed
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
                    length = answer.headers.get("Content-Length")
                    if length is not None and stream.tell() != int(length):
                        # Read by parts, an answer that breaks off looks complete.
                        raise ConnectionResetError
                return
            except (OSError, http.client.HTTPException) as error:
                path.unlink(missing_ok=True)
                if getattr(error, "errno", None) == errno.ENOSPC:
                    raise
                if not left:
                    raise Unreachable(path.name, error) from None

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
                if not left or error.code < 500:
                    raise Unreachable(project, error) from None
            except (OSError, http.client.HTTPException) as error:
                if address.startswith("file:"):
                    return {}
                if not left:
                    raise Unreachable(project, error) from None
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
        names = "timeout", "default-timeout"
        timeout = float(next(filter(None, map(self.settings.get, names)), 60))
        hosts = self.settings.get("trusted-host", "").split()
        is_trusted = host in hosts or parts.hostname in hosts
        return self.openers[is_trusted].open(request, timeout=timeout)

    def _trust(self, trusted: bool) -> ssl.SSLContext:
        """What pip trusts; a host that the user trusts needs no certificate."""
        variables = map(os.environ.get, ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"))
        named = next(filter(None, [self.settings.get("cert"), *variables]), "")
        own = Path(named).expanduser()
        context = ssl.create_default_context(
            cafile=own if own.is_file() else None,
            capath=own if named and own.is_dir() else None,
        )
        if not named:  # the system may have none
            with contextlib.suppress(ImportError, OSError):
                from pip._vendor import certifi

                context.load_verify_locations(certifi.where())
        if self.settings.get("client-cert"):
            client = Path(self.settings["client-cert"]).expanduser()
            try:
                context.load_cert_chain(client)
            except OSError as error:
                raise ToolError(f"pip's client-cert {client}: {error}") from None
        if trusted:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
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


def pip_settings(checkout: Checkout) -> dict[str, str]:
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


def pip_environment(checkout: Checkout) -> dict[str, str]:
    """Variables for pip: the user's indexes, how they are reached, and no other setting.

    A `target`, `user` or `constraint` of theirs would install elsewhere or fail.
    """
    made = clean_environment(checkout)
    try:
        settings = pip_settings(checkout)
    except ToolError:  # a Python without pip can make environments that have it
        return made
    own = ("PIP_DISABLE_PIP_VERSION_CHECK", "PIP_NO_INPUT")
    made = {k: v for k, v in made.items() if not k.startswith("PIP_") or k in own}
    kept = {name: settings[name] for name in _REACHED_BY if name in settings}
    for name, feature in _TRUST.items():
        if feature in settings.get(name, "").split():
            kept[name] = feature
    made |= {f"PIP_{name.upper().replace('-', '_')}": kept[name] for name in kept}
    made["PIP_CONFIG_FILE"] = os.devnull
    return made


def _default_index() -> str:
    """Where pip looks if nothing is set."""
    from pip._internal.models.index import PyPI  # the system's Python may lack pip

    return PyPI.simple_url
