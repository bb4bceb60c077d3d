# SPDX-License-Identifier: Apache-2.0
"""One of the two servers: what is asked of it, and what to do when it fails."""

import logging
import math
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import aiohttp
import msgspec
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
    """A failure that may pass: try again, after a pause that the server may ask for."""

    def __init__(self, reason: str, pause: float = 0.0):
        super().__init__(reason)
        self.pause = pause  # seconds


class Model(NamedTuple):
    """What a server says that it serves."""

    name: str
    root: str  # folder or hub name
    max_model_len: int


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Logprobs(msgspec.Struct):
    top_logprobs: list[dict[str, float]]


class _Scores(msgspec.Struct):
    logprobs: list[list[float | None]]  # null for -inf
    entropy: list[float | None]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None
    target_logprobs: _Scores | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str


class _Detail(msgspec.Struct):
    message: str


class _Error(msgspec.Struct):
    error: _Detail


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
    foreign answer. A pause is at least as long as the server's `Retry-After`.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str = "EMPTY",
        patience: float = 600.0,
        timeout: float = 60.0,
    ):
        """
        Args:
            url: address, with or without `/v1`.
            model: the served name; by default the first one.
            api_key: sent as a bearer token.
            patience: seconds for which failures are tried again.
            timeout: seconds to wait for a whole answer.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model: Model | None = None
        self.retries = 0
        self._wanted = model
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._patience = patience
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._lost = False  # a connection was lost, so the server may be another
        self._session: aiohttp.ClientSession | None = None  # keeps its connections
        self._pause = wait_exponential_jitter(multiplier=0.1, max=5.0, jitter=0.1)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

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
        return (await self._ask("/tokenize", body, _Tokens)).tokens

    async def detokenize(self, ids: list[int]) -> str:
        body = {"model": self.model.name, "tokens": ids}
        return (await self._ask("/detokenize", body, _Text)).prompt

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
            # Not what the model's generation_config.json may say.
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": top_k,
            "return_tokens_as_token_ids": True,
        }
        if targets is not None:
            body["target_token_ids"] = [[row] for row in targets]

        def read(content: bytes) -> list[Answer]:
            choices = _decode(content, _Completion).choices
            if len(choices) != len(prompts):
                raise _Passing(f"{len(choices)} choices for {len(prompts)} prompts")
            rows = targets if targets is not None else [None] * len(prompts)
            return [_read_choice(*pair) for pair in zip(choices, rows)]

        data = msgspec.json.encode(body)
        return await self._patiently(self._post, "/v1/completions", data, read)

    async def _ask(self, path: str, body: dict, kind: type) -> Any:
        data = msgspec.json.encode(body)
        return await self._patiently(self._post, path, data, lambda c: _decode(c, kind))

    async def _patiently(self, call, *args):
        try:
            return await call(*args)  # without what trying again costs to set up
        except _Passing as failure:
            failures = [failure]

        async def again():
            if failures:
                raise failures.pop()
            return await call(*args)

        def report(state: RetryCallState) -> None:
            self.retries += 1
            logger.warning(
                "%s: %s; again in %.1f s",
                self.url,
                state.outcome.exception(),
                state.next_action.sleep,
            )

        def wait(state: RetryCallState) -> float:
            pause = max(self._pause(state), state.outcome.exception().pause)
            return min(pause, self._patience)

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Passing),
            wait=wait,
            stop=stop_after_delay(self._patience),
            before_sleep=report,
            reraise=True,
        )
        try:
            return await retrying(again)
        except _Passing as failure:
            raise ServerUnavailable(
                f"{self.url}: no good answer for {self._patience:g} s: {failure}"
            ) from failure

    async def _check_model(self) -> Model:
        content = await self._send("GET", "/v1/models")
        cards = {card.id: card for card in _decode(content, _Models).data}
        if not cards:
            raise ServerError(f"{self.url} serves no model")
        wanted = self.model.name if self.model else self._wanted or next(iter(cards))
        if wanted not in cards:
            raise ServerError(
                f"{self.url} does not serve {wanted!r}, but {', '.join(cards)}"
            )
        card = cards[wanted]
        found = Model(wanted, card.root or wanted, card.max_model_len)
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
        return read(await self._send("POST", path, data))

    async def _send(self, method: str, path: str, data: bytes | None = None) -> bytes:
        """The JSON of a 200."""
        if self._session is None:  # it has to be made where it is used
            self._session = aiohttp.ClientSession(
                timeout=self._timeout, headers=self._headers
            )
        headers = {"Content-Type": "application/json"} if data is not None else {}
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=data,
                headers=headers,
                allow_redirects=False,
            ) as response:
                content = await response.read()
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise ServerError(f"{self.url} is no address of a server") from error
        except (aiohttp.ClientError, OSError) as error:  # with time-outs
            self._lost = True
            raise _Passing(f"{type(error).__name__} {error}".strip()) from error
        status = response.status
        if status in (408, 429) or status >= 500:
            pause = _retry_after(response.headers.get("Retry-After", ""))
            raise _Passing(f"{status} on {path}: {_text(content)}", pause)
        if status != 200:
            raise ServerError(f"{self.url}{path}: {status}: {_message(content)}")
        kind = response.headers.get("Content-Type", "none")
        if kind.partition(";")[0] != "application/json":
            raise _Passing(f"{path} answered with {kind}, not with JSON")
        return content


def _retry_after(value: str) -> float:
    """Seconds that a `Retry-After` asks for: a number of them, or a date."""
    try:
        if value.isdecimal():
            return float(value)
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0


def _decode(content: bytes, kind: type) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except ValueError as error:  # what is no UTF-8 as well
        raise _Passing(f"an incomplete answer: {error}: {_text(content)}") from error


def _message(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=_Error).error.message
    except ValueError:
        return _text(content)


def _text(content: bytes) -> str:
    return content[:200].decode(errors="replace")


def _read_choice(choice: _Choice, row: list[int] | None) -> Answer:
    if choice.logprobs is None:
        raise ServerError("the server gives no log-probabilities")
    if not choice.logprobs.top_logprobs:
        raise _Passing("no most likely tokens")
    top = _read_top(choice.logprobs.top_logprobs[0])
    if row is None:
        return Answer(np.empty(0), math.nan, top)
    scores = choice.target_logprobs
    if scores is None:
        raise ServerError(
            "the server does not score named tokens (target_token_ids): it is not "
            "this project's vLLM"
        )
    if [len(scores.logprobs), len(scores.entropy)] != [1, 1]:
        raise _Passing(f"scores of {len(scores.logprobs)} rows, not of one")
    [logprobs], [entropy] = scores.logprobs, scores.entropy
    if len(logprobs) < len(row):
        raise _Passing(f"{len(logprobs)} scores for {len(row)} ids")
    values = np.array(logprobs[: len(row)], dtype=np.float64)  # NaN where null
    values[np.isnan(values)] = -np.inf
    return Answer(values, math.nan if entropy is None else entropy, top)


def _read_top(entries: dict[str, float]) -> TopK:
    first = len(TOKEN_ID)
    try:
        ids = np.array([int(name[first:]) for name in entries], dtype=np.int64)
    except ValueError as error:
        raise ServerError(
            "the server gives tokens as text, not as token ids"
        ) from error
    logprobs = np.array([*entries.values()], dtype=np.float64)
    if not (logprobs <= 1e-3).all():
        raise ServerError("not log-probabilities: use --logprobs-mode raw_logprobs")
    order = np.argsort(-logprobs, kind="stable")
    return TopK(ids[order], logprobs[order])
