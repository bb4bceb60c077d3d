# SPDX-License-Identifier: Apache-2.0
"""One of the two servers: what is asked of it, and what to do when it fails."""

import base64
import io
import json
import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx
import numpy as np
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential_jitter,
)

logger = logging.getLogger(__name__)

TOKEN_ID = "token_id:"  # how vLLM writes a token when asked for ids


class ServerError(Exception):
    """The server can not do what is asked; asking again does not help."""


class ServerUnavailable(ServerError):
    """The server gave no good answer for as long as was agreed to wait."""


class _Passing(Exception):
    """A failure that may pass: try again."""


class Model(NamedTuple):
    """What a server says that it serves."""

    name: str
    root: str  # folder or hub name
    max_model_len: int


class TopK(NamedTuple):
    """The most likely tokens of one position, best first."""

    ids: np.ndarray  # [k] int64
    logprobs: np.ndarray  # [k] float64, nats


class Answer(NamedTuple):
    """What a server says of one prompt."""

    scores: np.ndarray  # [K] float64, nats; -inf where no id was named
    entropy: float  # nats, of the whole vocabulary; NaN where no id was named
    top: TopK  # of the position after the prompt


class Server:
    """A vLLM server of this fork, over HTTP.

    Failures that may pass are tried again with growing pauses for `patience` seconds
    a call: no connection, a time-out, 408, 429 and 5xx, a broken, incomplete or
    foreign answer.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        patience: float = 600.0,
        timeout: float = 60.0,
    ):
        """
        Args:
            url: address, with or without `/v1`.
            model: the served name; by default the first one.
            patience: seconds for which failures are tried again.
            timeout: seconds to wait for an answer.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model: Model | None = None
        self.retries = 0
        self._wanted = model
        self._patience = patience
        self._lost = False  # a connection was lost, so the server may be another
        # Keeps its connections.
        self._client = httpx.AsyncClient(base_url=self.url, timeout=timeout)

    async def close(self) -> None:
        await self._client.aclose()

    async def connect(self) -> Model:
        """Looks which model is served, which must not change afterwards.

        Raises:
            ServerError: it is not the wanted one, or has changed.
            ServerUnavailable: no answer.
        """
        return await self._patiently(self._check_model)

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, as the server makes them of a prompt."""
        body = {"model": self.model.name, "prompt": text}
        return (await self._ask("/tokenize", body, "tokens"))["tokens"]

    async def detokenize(self, ids: list[int]) -> str:
        body = {"model": self.model.name, "tokens": ids}
        return (await self._ask("/detokenize", body, "prompt"))["prompt"]

    async def ask(
        self,
        prompts: Sequence[list[int]],
        targets: Sequence[list[int]] | None,
        *,
        top_k: int,
    ) -> list[Answer]:
        """In one request: the most likely tokens after each prompt, and exact
        log-probabilities of named ids as its last token.

        Args:
            prompts: token ids.
            targets: the named ids of each prompt.
            top_k: how many of the most likely tokens.

        Raises:
            ServerError: the server refuses.
            ServerUnavailable: no good answer.
        """
        body = {
            "model": self.model.name,
            "prompt": prompts,
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": top_k,
            "return_tokens_as_token_ids": True,
        }
        if targets is not None:
            body["target_token_ids"] = [[row] for row in targets]
            body["target_logprobs_encoding"] = "npy"
        data = json.dumps(body, separators=(",", ":")).encode()

        def read(content: bytes) -> list[Answer]:
            choices = _load(content, "choices")["choices"]
            if len(choices) != len(prompts):
                raise _Passing(f"{len(choices)} choices for {len(prompts)} prompts")
            rows = targets if targets is not None else [None] * len(prompts)
            return [_read_choice(*pair) for pair in zip(choices, rows)]

        return await self._patiently(self._post, "/v1/completions", data, read)

    async def _ask(self, path: str, body: dict, field: str) -> dict:
        data = json.dumps(body).encode()
        return await self._patiently(self._post, path, data, lambda c: _load(c, field))

    async def _patiently(self, call, *args):
        def report(state: RetryCallState) -> None:
            self.retries += 1
            logger.warning(
                "%s: %s; again in %.1f s",
                self.url,
                state.outcome.exception(),
                state.next_action.sleep,
            )

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Passing),
            wait=wait_exponential_jitter(multiplier=0.1, max=5.0, jitter=0.1),
            stop=stop_after_delay(self._patience),
            before_sleep=report,
            reraise=True,
        )
        try:
            return await retrying(call, *args)
        except _Passing as failure:
            raise ServerUnavailable(
                f"{self.url}: no good answer for {self._patience:g} s: {failure}"
            ) from failure

    async def _check_model(self) -> Model:
        response = await self._send("GET", "/v1/models")
        cards = _load(response.content, "data")["data"]
        names = [card["id"] for card in cards]
        wanted = self.model.name if self.model else self._wanted or names[0]
        if wanted not in names:
            raise ServerError(
                f"{self.url} does not serve {wanted!r}, but {', '.join(names)}"
            )
        card = cards[names.index(wanted)]
        found = Model(wanted, card.get("root") or wanted, card.get("max_model_len"))
        if found.max_model_len is None:
            raise ServerError(f"{self.url} is no vLLM server: no max_model_len")
        if self.model is not None and found != self.model:
            raise ServerError(f"{self.url} now serves {found}, before {self.model}")
        self.model = found
        self._lost = False
        return found

    async def _post(self, path: str, data: bytes, read) -> Any:
        if self._lost:
            await self._check_model()
        response = await self._send("POST", path, data)
        return read(response.content)

    async def _send(
        self, method: str, path: str, data: bytes | None = None
    ) -> httpx.Response:
        """A 200 with JSON in it."""
        headers = {"Content-Type": "application/json"} if data is not None else {}
        try:
            response = await self._client.request(
                method, path, content=data, headers=headers
            )
        except httpx.UnsupportedProtocol as error:
            raise ServerError(f"{self.url} is no address of a server") from error
        except httpx.TransportError as error:
            self._lost = True
            raise _Passing(f"{type(error).__name__} {error}".strip()) from error
        status = response.status_code
        if status in (408, 429) or status >= 500:
            raise _Passing(f"{status} on {path}: {response.text[:200]}")
        if status != 200:
            raise ServerError(f"{self.url}{path}: {_message(response)}")
        kind = response.headers.get("content-type", "none")
        if kind.partition(";")[0] != "application/json":
            raise _Passing(f"{path} answered with {kind}, not with JSON")
        return response


def _load(content: bytes, field: str) -> dict:
    """An object with this field."""
    try:
        value = json.loads(content)
    except ValueError as error:
        raise _Passing(f"broken JSON: {error}") from error
    if not isinstance(value, dict) or field not in value:
        raise _Passing(f"an answer without {field!r}: {content[:200]!r}")
    return value


def _message(response: httpx.Response) -> str:
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"{response.status_code}: {response.text[:200]}"


def _read_choice(choice: dict, row: list[int] | None) -> Answer:
    try:
        logprobs = choice["logprobs"]
        if logprobs is None:
            raise ServerError("the server gives no log-probabilities")
        top = _read_top(logprobs["top_logprobs"][0])
        if row is None:
            return Answer(np.empty(0), math.nan, top)
        scores = choice.get("target_logprobs")
        if scores is None:
            raise ServerError(
                "the server does not score named tokens (target_token_ids): it is not "
                "this project's vLLM"
            )
        values = _array(scores["logprobs"]).astype(np.float64)
        if values.shape[0] != 1 or values.shape[1] < len(row):
            raise _Passing(f"scores of shape {values.shape} for {len(row)} ids")
        entropy = float(_array(scores["entropy"])[0])
        return Answer(values[0, : len(row)], entropy, top)
    except (LookupError, TypeError, ValueError, AttributeError, EOFError) as error:
        raise _Passing(f"an incomplete choice: {error!r}") from error


def _read_top(entries: dict[str, float]) -> TopK:
    if not all(name.startswith(TOKEN_ID) for name in entries):
        raise ServerError("the server gives tokens as text, not as token ids")
    ids = np.array([int(name[len(TOKEN_ID) :]) for name in entries], dtype=np.int64)
    logprobs = np.array([*entries.values()], dtype=np.float64)
    if not (logprobs <= 1e-3).all():
        raise ServerError("not log-probabilities: use --logprobs-mode raw_logprobs")
    order = np.argsort(-logprobs, kind="stable")
    return TopK(ids[order], logprobs[order])


def _array(encoded: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
