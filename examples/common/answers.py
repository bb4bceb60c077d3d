# SPDX-License-Identifier: Apache-2.0
"""What a client returns, and how it is read from a server's JSON."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from common.errors import ClientError
from common.retry import Malformed
from common.transport import decode

TOKEN_ID = "token_id:"
"""How vLLM writes a token with `return_tokens_as_token_ids`."""


class Model(NamedTuple):
    """A model that a server serves. The last three are None if it does not say."""

    name: str
    root: str | None = None  # folder or hub name
    max_model_len: int | None = None  # tokens
    owned_by: str | None = None  # "vllm" for vLLM's servers


class Scores(NamedTuple):
    """Scores of the last `n` prompt positions, `K` candidates each.

    JSON has no -inf and no NaN: of a log-probability both are read as -inf.
    """

    start: int  # position of the first row's token
    token_ids: np.ndarray  # [n, K] int32, -1 where nothing is scored
    logprobs: np.ndarray  # [n, K] float32, nats; -inf where nothing is scored
    ranks: np.ndarray  # [n, K] int32, 1 + number of likelier tokens; 0 for none
    entropy: np.ndarray  # [n] float32, nats; NaN where nothing is scored
    # With top_k; -1 and -inf where nothing is scored:
    top_token_ids: np.ndarray | None = None  # [n, k] int32, most probable first
    top_logprobs: np.ndarray | None = None  # [n, k] float32, nats
    tail_logprob: np.ndarray | None = None  # [n] float32, nats, of all others together


class ContinuationScore(NamedTuple):
    """How likely one continuation is; the fields are `vllm.LLM`'s."""

    token_ids: np.ndarray  # [n] int32
    logprob_sum: float  # nats
    is_greedy: bool  # greedy decoding would choose all of its tokens
    target_logprobs: Scores  # of n rows and one column

    @property
    def num_tokens(self) -> int:
        """Scored tokens."""
        return int((self.token_ids >= 0).sum())


@dataclass
class Choice:
    """One text of an answer. Fields are None if they were not asked for."""

    text: str
    finish_reason: str | None = None  # stop or length
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    top: list[dict[str, float]] | None = None
    """For each token, the likeliest tokens and their log-probabilities in nats."""
    scores: Scores | None = None
    generated: Scores | None = None
    """With `target_generated`, of the text's tokens, which column 0 has."""
    continuation: ContinuationScore | None = None


@dataclass
class Answer:
    """Of a completion or chat request."""

    choices: list[Choice]  # in the order of the prompts, `n` for each
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # prompt tokens from the prefix cache
    completion_tokens: int | None = None

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @classmethod
    def joined(cls, answers: "Sequence[Answer]") -> "Answer":
        """As of one request. A number that an answer lacks is lacking."""
        counts = [
            (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens)
            for answer in answers
        ]
        return cls(
            [choice for answer in answers for choice in answer.choices],
            *(None if None in column else sum(column) for column in zip(*counts)),
        )


def top_ids(top: dict[str, float]) -> dict[int, float]:
    """One entry of `Choice.top` by token id.

    Raises:
        ClientError: the server named tokens by their texts.
    """
    first = len(TOKEN_ID)
    try:
        return {int(name[first:]): logprob for name, logprob in top.items()}
    except ValueError as error:
        raise ClientError(
            "the server gives tokens as text, not as token ids"
        ) from error


# The JSON


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None
    owned_by: str | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Targets(msgspec.Struct):
    start: int
    token_ids: list[list[int]] | str
    logprobs: list[list[float | None]] | str
    ranks: list[list[int]] | str
    entropy: list[float | None] | str
    top_token_ids: list[list[int]] | str | None = None
    top_logprobs: list[list[float | None]] | str | None = None
    tail_logprob: list[float | None] | str | None = None
    logprob_sum: float | None = None
    is_greedy: bool | None = None


class _Logprobs(msgspec.Struct):
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    text: str
    index: int = 0
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    target_logprobs: _Targets | None = None
    generated_logprobs: _Targets | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Message(msgspec.Struct):
    content: str | None = None  # None: it thought until the tokens were used up


class _TopToken(msgspec.Struct):
    token: str
    logprob: float


class _ChatToken(msgspec.Struct):
    top_logprobs: list[_TopToken] = []


class _ChatLogprobs(msgspec.Struct):
    content: list[_ChatToken] | None = None


class _ChatChoice(msgspec.Struct):
    message: _Message
    finish_reason: str
    index: int = 0
    logprobs: _ChatLogprobs | None = None
    token_ids: list[int] | None = None
    generated_logprobs: _Targets | None = None


class _Chat(msgspec.Struct):
    choices: list[_ChatChoice]
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str


# Readers: content of an answer to what a client returns; all raise Malformed.


def read_models(content: bytes) -> list[Model]:
    cards = decode(content, _Models).data
    return [Model(c.id, c.root, c.max_model_len, c.owned_by) for c in cards]


def read_tokens(content: bytes) -> list[int]:
    return decode(content, _Tokens).tokens


def read_text(content: bytes) -> str:
    return decode(content, _Text).prompt


def read_completion(content: bytes, count: int) -> Answer:
    """An answer of `count` choices."""
    answer = decode(content, _Completion)
    choices = _in_order(answer.choices, count)
    return _answer([_read_choice(choice) for choice in choices], answer.usage)


def read_chat(content: bytes, count: int) -> Answer:
    """An answer of `count` choices."""
    answer = decode(content, _Chat)
    choices = [
        Choice(
            choice.message.content or "",
            choice.finish_reason,
            answer.prompt_token_ids,
            choice.token_ids,
            _read_chat_top(choice.logprobs),
            generated=_read_generated(choice),
        )
        for choice in _in_order(answer.choices, count)
    ]
    return _answer(choices, answer.usage)


def _in_order(choices: Sequence[Any], count: int) -> list[Any]:
    if len(choices) != count:
        raise Malformed(f"malformed answer: {len(choices)} choices, not {count}")
    return sorted(choices, key=lambda choice: choice.index)


def _answer(choices: list[Choice], usage: _Usage | None) -> Answer:
    usage = usage or _Usage()
    details = usage.prompt_tokens_details or _Details()
    return Answer(
        choices, usage.prompt_tokens, details.cached_tokens, usage.completion_tokens
    )


def _read_generated(choice: _Choice | _ChatChoice) -> Scores | None:
    scores = choice.generated_logprobs
    return None if scores is None else read_scores(scores)


def _read_choice(choice: _Choice) -> Choice:
    top = choice.logprobs and choice.logprobs.top_logprobs
    found = Choice(
        choice.text,
        choice.finish_reason,
        choice.prompt_token_ids,
        choice.token_ids,
        [entry or {} for entry in top] if top else None,
        generated=_read_generated(choice),
    )
    targets = choice.target_logprobs
    if targets is not None:
        found.scores = scores = read_scores(targets)
        if targets.is_greedy is not None:
            total = targets.logprob_sum
            found.continuation = ContinuationScore(
                scores.token_ids[:, 0],
                -np.inf if total is None else total,
                targets.is_greedy,
                scores,
            )
    return found


def _read_chat_top(logprobs: _ChatLogprobs | None) -> list[dict[str, float]] | None:
    if logprobs is None or logprobs.content is None:
        return None
    return [
        {entry.token: entry.logprob for entry in token.top_logprobs}
        for token in logprobs.content
    ]


def read_scores(targets: _Targets) -> Scores:
    try:
        scores = Scores(
            targets.start,
            _array(targets.token_ids, np.int32),
            _logprobs(targets.logprobs),
            _array(targets.ranks, np.int32),
            _array(targets.entropy, np.float32),
        )
        if targets.top_token_ids is not None:
            scores = scores._replace(
                top_token_ids=_array(targets.top_token_ids, np.int32),
                top_logprobs=_logprobs(targets.top_logprobs),
                tail_logprob=_logprobs(targets.tail_logprob),
            )
    except (ValueError, OSError, EOFError) as error:
        raise Malformed(f"malformed answer: target_logprobs: {error}") from error
    shape = scores.token_ids.shape
    shapes = scores.logprobs.shape, scores.ranks.shape, scores.entropy.shape
    if len(shape) != 2 or shapes != (shape, shape, shape[:1]):
        raise Malformed(f"malformed answer: target_logprobs of shapes {shape, *shapes}")
    return scores


def _logprobs(value: list | str | None) -> np.ndarray:
    array = _array([] if value is None else value, np.float32)
    return np.where(np.isnan(array), np.float32(-np.inf), array)


def _array(value: list | str, dtype: type) -> np.ndarray:
    """Of a list, or of a base64-encoded `.npy` file."""
    if isinstance(value, str):
        content = io.BytesIO(base64.b64decode(value, validate=True))
        return np.load(content, allow_pickle=False).astype(dtype, copy=False)
    return np.array(value, dtype=dtype)
