# SPDX-License-Identifier: Apache-2.0
"""What is asked of one of the two servers."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from common import AsyncClient, Choice, ClientError, Model, top_ids


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
    """A vLLM server of this fork. All methods raise `ClientError` and `ServerGone`.

    Args:
        url: address, with or without `/v1`.
        model: the served name; by default the first one.
        options: of `common.AsyncClient`.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str = "EMPTY",
        **options: float,
    ):
        self.client = AsyncClient(url, model, api_key=api_key, **options)
        self.model: Model | None = None

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def retries(self) -> int:
        return self.client.retries

    async def close(self) -> None:
        await self.client.close()

    async def connect(self) -> Model:
        """Looks which model is served, which must not change afterwards."""
        if self.client.wanted is None:
            first, *_ = await self.client.models()
            self.client.wanted = first.name
        found = await self.client.connect()
        if found.max_model_len is None:
            raise ClientError("is no vLLM server: no max_model_len", url=self.url)
        self.model = found._replace(root=found.root or found.name)
        return self.model

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, as the server makes them of a prompt."""
        return await self.client.tokenize(text)

    async def detokenize(self, ids: list[int]) -> str:
        return await self.client.detokenize(ids)

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
        """
        fields = {
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
            fields["target_token_ids"] = [[row] for row in targets]
        answer = await self.client.complete(prompts, **fields)
        rows = targets if targets is not None else [None] * len(prompts)
        return [_read(*pair) for pair in zip(answer.choices, rows, strict=True)]


def _read(choice: Choice, row: list[int] | None) -> Answer:
    if not choice.top:
        raise ClientError("the server gives no log-probabilities")
    top = _read_top(choice.top[0])
    if row is None:
        return Answer(np.empty(0), math.nan, top)
    logprobs = choice.scores.logprobs
    if len(logprobs) != 1 or logprobs.shape[1] < len(row):
        raise ClientError(f"scores of shape {logprobs.shape} for {len(row)} ids")
    values = logprobs[0, : len(row)].astype(np.float64)
    return Answer(values, float(choice.scores.entropy[0]), top)


def _read_top(entries: dict[str, float]) -> TopK:
    by_id = top_ids(entries)
    ids = np.array([*by_id], dtype=np.int64)
    logprobs = np.array([*by_id.values()], dtype=np.float64)
    if not (logprobs <= 1e-3).all():
        raise ClientError("not log-probabilities: use --logprobs-mode raw_logprobs")
    order = np.argsort(-logprobs, kind="stable")
    return TopK(ids[order], logprobs[order])
