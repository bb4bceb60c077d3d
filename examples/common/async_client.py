# SPDX-License-Identifier: Apache-2.0
"""The requests of a client; see client.py for the one that does not await."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import msgspec
import numpy as np

from common import answers, retry
from common.answers import Answer, ContinuationScore, Model, Scores
from common.errors import ClientError, ServerGone
from common.transport import Address, Transport

logger = logging.getLogger(__name__)

NPY_VALUES = 256
"""Scored ids a prompt from which on arrays come as `.npy` files: for fewer, reading
the files takes longer than reading lists."""

SCORING = "target_token_ids", "target_text", "continuations", "target_top_k"
"""Fields that ask for scores."""

PER_PROMPT = "target_token_ids", "target_text"
"""Fields with an entry a prompt, unless they are a text for all."""

MAX_PROMPTS = 1024
"""Of a request: what vLLM takes by default (`VLLM_MAX_COMPLETION_PROMPTS`)."""

T = TypeVar("T")
Ids = Sequence[int]
Rows = Sequence[int] | Sequence[Sequence[int]] | np.ndarray
"""Of `target_token_ids`: one id a row, or several; -1 is not scored."""


class AsyncClient:
    """Asks one server; for use in one event loop.

    A request that fails in a way that may pass (no connection, a time-out, 408, 409,
    425, 429, 5xx, half an answer, one that is not what was asked for) is made again,
    with growing waits and not before the time that `Retry-After` says. If the
    connection was lost, the server must still have the model that it had.

    Every request raises `ClientError` for a refusal and `ServerGone`, a kind of it,
    when there was no good answer for `patience` seconds.

    Args:
        base_url: like `http://localhost:8000`, with `/v1` or without; another path is
            taken as it is. May hold a user and a password, which no error shows.
        model: served name; the server's only model if None.
        api_key: sent as a bearer token.
        timeout: seconds to wait for a whole answer.
        patience: seconds, from a request's first failure, to go on trying.
        concurrency: requests under way at once.
        requests_per_minute: at most so many; None: no limit.

    Raises:
        ClientError: `param` is `base_url` or `api_key`, which no server can have.
    """

    def __init__(
        self,
        base_url: str = "http://localhost:8000/v1",
        model: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        patience: float = 600.0,
        concurrency: int = 64,
        requests_per_minute: float | None = None,
    ):
        self.wanted = model
        """Served name that `connect` looks for."""
        self.model: Model | None = None
        """What `connect` found."""
        self.retries = 0
        """Requests that had to be made again."""
        self.patience = patience
        self.requests_per_minute = requests_per_minute
        self._transport = Transport(Address.parse(base_url), api_key, timeout)
        self._api = self._transport.address.api
        self._free = asyncio.Semaphore(concurrency)
        self._connecting = asyncio.Lock()
        self._next_request = 0.0  # seconds on the event loop's clock
        self._sleep = asyncio.sleep

    @property
    def url(self) -> str:
        """Address without credentials and without the path of the API."""
        return self._transport.address.root

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    # What is served

    async def models(self) -> list[Model]:
        """All that the server serves.

        Raises:
            ClientError: it serves none.
        """
        return await self.request("GET", self._api + "/models", None, self._read_models)

    async def connect(self) -> Model:
        """Looks for the model, once; other requests do so themselves.

        Raises:
            ClientError: it is not there, or there are several to choose from.
        """
        async with self._connecting:
            if self.model is None:
                self.model = self._choose(await self.models(), self.wanted)
            return self.model

    def _read_models(self, content: bytes) -> list[Model]:
        models = answers.read_models(content)
        if not models:
            raise ClientError("serves no model", url=self.url)
        return models

    def _choose(self, models: list[Model], wanted: str | None) -> Model:
        names = sorted(model.name for model in models)
        if wanted is None and len(models) > 1:
            raise ClientError(f"choose a model of {names}", url=self.url)
        for model in models:
            if wanted in (None, model.name):
                return model
        raise ClientError(f"does not serve {wanted!r}, but {names}", url=self.url)

    async def _is_still_there(self) -> None:
        """After a lost connection: another server may be at the address."""
        content = await self.send("GET", self._api + "/models", None)
        found = self._choose(self._read_models(content), self.model.name)
        if found != self.model:
            raise ClientError(f"now serves {found}, before {self.model}", url=self.url)
        self._transport.lost = False

    async def metrics(self) -> str:
        """The server's metrics, in Prometheus' text form."""
        return await self.request(
            "GET", "/metrics", None, lambda content: content.decode(), kind="text"
        )

    # Tokens and text

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a text (vLLM's servers only)."""
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        return await self._post("/tokenize", body, answers.read_tokens)

    async def detokenize(self, ids: Ids) -> str:
        """Text of token ids (vLLM's servers only)."""
        return await self._post("/detokenize", {"tokens": ids}, answers.read_text)

    # Scores

    async def score_ids(
        self,
        prompts: Sequence[Ids],
        targets: Sequence[Rows] | None,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
    ) -> list[Scores]:
        """Scores token ids at the end of prompts of token ids, in one request.

        Args:
            prompts: token ids.
            targets: for each prompt `n` rows, aligned to its end: row `r` scores its
                ids as the token at position `len(prompt) - n + r`, given what is
                before. `prompt[1:]` scores a whole prompt. None, with a `top_k`:
                all positions but the first, and no named tokens.
            temperature: the scores are those of `softmax(logits / temperature)`.
            top_k: so many of the most probable tokens of each position come along.

        Raises:
            ClientError: also if the server does not score named tokens.
            ValueError: neither targets nor a top_k.
        """
        if targets is None and not top_k:
            raise ValueError("score_ids needs targets or a top_k")
        fields: dict[str, Any] = {"max_tokens": 0}
        if targets is not None:
            fields |= {"target_token_ids": targets} | encoding(targets)
        if temperature != 1.0:
            fields["target_temperature"] = temperature
        if top_k:
            fields |= {"target_top_k": top_k, "target_logprobs_encoding": "npy"}
        answer = await self.complete(prompts, **fields)
        found = [choice.scores for choice in answer.choices]
        if top_k and any(scores.top_token_ids is None for scores in found):
            raise ClientError("the server knows no target_top_k", url=self.url)
        for scores, rows in zip(found, targets or (), strict=targets is not None):
            if len(scores.logprobs) != len(rows):
                raise ClientError(
                    f"{len(scores.logprobs)} rows of scores for {len(rows)}",
                    url=self.url,
                )
        return found

    async def score_text(
        self, prompts: Sequence[str], targets: Sequence[str]
    ) -> list[Scores]:
        """Scores the text that follows each prompt, in one request.

        Prompt and target are tokenized together; scored are the tokens that cover a
        character of the target.

        Raises:
            ClientError: also if the server does not score named tokens.
        """
        answer = await self.complete(
            prompts, target_text=targets, max_tokens=0, target_logprobs_encoding="npy"
        )
        return [choice.scores for choice in answer.choices]

    async def score_continuations(
        self, context: str | Ids, continuations: Sequence[str] | Sequence[Ids]
    ) -> list[ContinuationScore]:
        """Scores what may follow one context, in one request and one prefill of it.

        Args:
            context: a text, or token ids.
            continuations: of the same kind.

        Raises:
            ClientError: also if the server does not score continuations.
        """
        body = {"prompt": context, "continuations": continuations, "max_tokens": 0}
        answer = await self._complete(body, len(continuations))
        return [choice.continuation for choice in answer.choices]

    # Generation

    async def complete(
        self, prompts: Sequence[str] | Sequence[Ids], **fields: Any
    ) -> Answer:
        """Continues prompts, in one request for each `MAX_PROMPTS` of them.

        Args:
            prompts: texts, or token ids each.
            fields: any of `/v1/completions`: `max_tokens`, `n`, `logprobs`, ...
                `target_token_ids` and `target_text` fill `Choice.scores`,
                `target_generated` fills `Choice.generated`.
        """
        found = []
        for begin in range(0, max(len(prompts), 1), MAX_PROMPTS):
            part = slice(begin, begin + MAX_PROMPTS)
            body = {"prompt": prompts[part], **fields}
            for name in PER_PROMPT:
                if not isinstance(fields.get(name), str | None):
                    body[name] = fields[name][part]
            count = len(body["prompt"]) * fields.get("n", 1)
            found.append(await self._complete(body, count))
        return Answer.joined(found)

    async def _complete(self, body: dict, count: int) -> Answer:
        read = partial(answers.read_completion, count=count)
        answer = await self._post(self._api + "/completions", body, read)
        scored = any(body.get(name) is not None for name in SCORING)
        if scored and any(choice.scores is None for choice in answer.choices):
            raise ClientError(
                "the server does not score named tokens (target_token_ids): it is not "
                "this project's vLLM",
                url=self.url,
            )
        self._check_generated(body, answer)
        return answer

    def _check_generated(self, body: dict, answer: Answer) -> None:
        # One that was aborted before its first token has none.
        if body.get("target_generated") is not None and all(
            choice.generated is None for choice in answer.choices
        ):
            raise ClientError("the server knows no target_generated", url=self.url)

    async def chat(self, messages: Sequence[dict[str, Any]], **fields: Any) -> Answer:
        """Answers a conversation.

        Args:
            messages: each with `role` and `content`.
            fields: any of `/v1/chat/completions`; `target_generated` fills
                `Choice.generated`.
        """
        body = {"messages": messages, **fields}
        read = partial(answers.read_chat, count=fields.get("n", 1))
        answer = await self._post(self._api + "/chat/completions", body, read)
        self._check_generated(body, answer)
        return answer

    # HTTP

    async def _post(self, path: str, body: dict, read: Callable[[bytes], T]) -> T:
        model = self.model or await self.connect()
        return await self.request("POST", path, {"model": model.name, **body}, read)

    async def request(
        self,
        method: str,
        path: str,
        body: dict | None,
        read: Callable[[bytes], T],
        *,
        kind: str = "json",
    ) -> T:
        """Any other request.

        Args:
            path: after `url`.
            body: sent as JSON; arrays may be in it.
            read: makes what is returned of the answer's content; may raise
                `retry.Malformed` to have the request made again.
            kind: part of the content type that is wanted.
        """
        data = None if body is None else msgspec.json.encode(body, enc_hook=_plain)

        async def attempt() -> T:
            await self._keep_the_pace()
            if self._transport.lost and self.model is not None:
                await self._is_still_there()
            return read(await self.send(method, path, data, kind))

        async with self._free:
            try:
                return await retry.patiently(
                    attempt,
                    patience=self.patience,
                    sleep=self._sleep,
                    report=self._report,
                )
            except retry.Passing as failure:
                raise self._give_up(path, failure) from failure

    async def send(
        self, method: str, path: str, data: bytes | None, kind: str = "json"
    ) -> bytes:
        """One attempt. All traffic goes through here: replace it to record it."""
        return await self._transport.send(method, path, data, kind)

    async def _keep_the_pace(self) -> None:
        if not self.requests_per_minute:
            return
        now = asyncio.get_running_loop().time()
        begin = max(now, self._next_request)
        self._next_request = begin + 60 / self.requests_per_minute
        await self._sleep(begin - now)

    def _report(self, failure: retry.Passing, wait: float) -> None:
        self.retries += 1
        logger.warning("%s: %s; again in %.1f s", self.url, failure, wait)

    def _give_up(self, path: str, failure: retry.Passing) -> ClientError:
        url, patience = self.url + path, f"{self.patience:g} s"
        if isinstance(failure, retry.Malformed):
            return ClientError(
                "does not answer as an OpenAI-compatible server does "
                f"({failure}). Is base_url right?",
                url=url,
            )
        if failure.wait:
            return ServerGone(
                f"{failure}. It wants {failure.wait:.0f} s of pause, which is more "
                f"than is left of the patience, {patience}",
                url=url,
            )
        return ServerGone(
            f"no good answer for {patience} ({failure}). Is `vllm serve` running?",
            url=url,
        )


def encoding(targets: Sequence[Rows]) -> dict[str, str]:
    """The fields of a scoring request that make the server send arrays in the form
    that is read sooner. Servers that do not know them send lists."""
    most = max((len(rows) * _width(rows) for rows in targets), default=0)
    return {"target_logprobs_encoding": "npy"} if most >= NPY_VALUES else {}


def _width(rows: Rows) -> int:
    return max((np.size(row) for row in rows), default=0)


def _plain(value: Any) -> Any:
    """What JSON has no form of."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
