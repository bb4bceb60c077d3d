# SPDX-License-Identifier: Apache-2.0
"""One attempt of an HTTP request: address, connections, and what a status means."""

import urllib.request
from base64 import b64encode
from typing import NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

import aiohttp
import msgspec

from common.errors import ClientError
from common.retry import Malformed, Passing, passes, retry_after

CONNECT_SECONDS = 10
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
SHOWN = 500
"""Characters of an answer that an error shows."""


class Address(NamedTuple):
    """Where a server is.

    `http://host:8000` and `http://host:8000/v1` are the same. Another path is taken
    as it is, for services whose API is elsewhere.
    """

    root: str  # without credentials and API path; vLLM's own endpoints are there
    api: str  # path of the OpenAI-compatible API
    login: str | None  # header Authorization of the credentials

    @classmethod
    def parse(cls, base_url: str) -> "Address":
        """Raises: ClientError."""
        try:
            parts = urlsplit(base_url.strip())
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("http:// or https:// and a host are missing")
            host = parts.netloc.rpartition("@")[2]
            parts.port  # noqa: B018 - raises if it is none
        except ValueError as error:
            raise ClientError(
                f"is like http://localhost:8000/v1, and {base_url!r} is no address: "
                f"{error}",
                param="base_url",
            ) from None
        login = None
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            login = "Basic " + b64encode(pair.encode()).decode()
        path = parts.path.rstrip("/")
        api = "" if path.removesuffix("/v1") else "/v1"
        if path.endswith("/v1"):
            path, api = path.removesuffix("/v1"), "/v1"
        return cls(urlunsplit((parts.scheme, host, path, "", "")), api, login)


class _Detail(msgspec.Struct):
    message: str
    param: str | None = None


class _Error(msgspec.Struct):
    error: _Detail


class Transport:
    """Keeps connections to one server."""

    def __init__(self, address: Address, api_key: str | None, timeout: float):
        self.address = address
        self.lost = False
        """A connection failed, so another server may be at the address."""
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ClientError("has other characters than ASCII", param="api_key")
        self._headers = {"Content-Type": "application/json"}
        if address.login is not None:
            self._headers["Authorization"] = address.login
        elif api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = aiohttp.ClientTimeout(
            total=timeout, sock_connect=min(timeout, CONNECT_SECONDS)
        )
        self._session: aiohttp.ClientSession | None = None  # made in its event loop

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(
        self, method: str, path: str, data: bytes | None, kind: str = "json"
    ) -> bytes:
        """Returns the content of a 200.

        Args:
            kind: part of the content type that is wanted.

        Raises:
            ClientError: the server refuses.
            Passing: no connection, a time-out, a status that may pass, or another
                content type.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=self._timeout,
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0),
                proxy=_proxy(self.address.root),
            )
        url = self.address.root + path
        try:
            async with self._session.request(
                method, url, data=data, allow_redirects=False
            ) as response:
                content = await response.read()
        except aiohttp.InvalidURL as error:
            raise ClientError(f"is no address: {url}", param="base_url") from error
        except (aiohttp.ClientError, OSError) as error:  # time-outs as well
            self.lost = True
            raise Passing(f"{type(error).__name__}: {error}".strip(": ")) from error
        status = response.status
        if status == 200:
            found = response.headers.get("Content-Type", "none")
            if kind not in found:
                raise Malformed(f"malformed answer: {found}, not {kind}")
            return content
        message, param = _read_error(content)
        if passes(status):
            wait = retry_after(response.headers.get("Retry-After", ""))
            raise Passing(f"{status}: {message}", wait)
        if "Location" in response.headers:
            message = f"the server is at {response.headers['Location']}"
        raise ClientError(message, status=status, param=param, url=url)


def _proxy(url: str) -> str | None:
    """What the environment says (`HTTPS_PROXY`, `NO_PROXY`, ...) of other machines."""
    parts = urlsplit(url)
    if parts.hostname in LOCAL or urllib.request.proxy_bypass(parts.netloc):
        return None
    proxy = urllib.request.getproxies().get(parts.scheme)
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


def _read_error(content: bytes) -> tuple[str, str | None]:
    """Message and parameter of an error in OpenAI's form, else the text."""
    try:
        detail = msgspec.json.decode(content, type=_Error).error
    except (msgspec.MsgspecError, ValueError):
        return content[:SHOWN].decode(errors="replace"), None
    return detail.message[:SHOWN], detail.param


def decode(content: bytes, kind: type) -> object:
    """JSON of a type.

    Raises:
        Malformed: it is something else.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:  # what is no UTF-8 as well
        start = content[:100].decode(errors="replace")
        raise Malformed(f"malformed answer: {error}: {start}") from error
