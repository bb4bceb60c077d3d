# SPDX-License-Identifier: Apache-2.0
"""Asks a server how likely each label is.

A server of this fork scores the labels by name (`target_token_ids`): one call for any
number of prompts, every label exact. Any other server is asked for the top
log-probabilities of the next token, where a label can be missing.
"""

import ipaddress
import itertools
import logging
import re
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Self
from urllib.parse import urlsplit

import numpy as np
from common import Answer, Client, ClientError, ServerGone, top_ids

logger = logging.getLogger("icm")

TOP_LOGPROBS = 20  # vLLM's own default limit
POLITE = 60  # requests a minute, to servers of others

Piece = list[int] | str
"""Part of a prompt: token ids for a server of this fork, text for others."""


class LabelScores(NamedTuple):
    logprobs: np.ndarray  # [prompts, labels] float64, nats
    cached_tokens: int | None  # of all prompts; None: the server does not say


class Scorer:
    """Scores labels with one model of one server.

    Args:
        base_url: as other clients take it, with `/v1` or the path of another service;
            an address without a path is one with `/v1`.
        model: the served name; the server's only model if None.
        requests_per_minute: at most so many; None: unlimited for a server of this
            fork or on this machine or network, `POLITE` for others.
        top_logprobs: how many to ask of a server that cannot score tokens by name.
        options: of `common.Client`.

    Raises:
        ClientError: `base_url` is no address, or the model is not there.
        ServerGone: nothing answered in time.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        api_key: str = "EMPTY",
        requests_per_minute: float | None = None,
        top_logprobs: int = TOP_LOGPROBS,
        **options: float,
    ):
        self.client = Client(base_url, model, api_key=api_key, **options)
        self.top = top_logprobs
        self.calls = 0  # scoring requests answered
        self.unlisted: Counter[str] = Counter()
        """Label to how often it was not among the top log-probabilities."""
        self._before: dict[str, list[int]] = {}  # tokens of texts before others
        self._after: int | None = None  # number of tokens that are put after a text
        self._lock = threading.Lock()
        try:
            found = self.client.connect()
            self.scores_by_name = self._probe()
        except BaseException:
            self.close()
            raise
        self.model, self.max_model_len = found.name, found.max_model_len
        self.root = found.root or found.name
        """Folder or hub name, which vLLM's servers tell; of others the served name."""
        ours = self.scores_by_name or is_near(self.url)
        if requests_per_minute is None and not ours:
            requests_per_minute = POLITE
        self.client.aio.requests_per_minute = requests_per_minute
        if not self.scores_by_name:
            logger.warning(
                "%s cannot score tokens by name. Asking for the top %d "
                "log-probabilities instead: a label that is not among them counts as "
                "the least likely one listed, and nothing is known of the cache.",
                self.url,
                self.top,
            )

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def retries(self) -> int:
        return self.client.retries

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _probe(self) -> bool:
        """Whether the server scores named tokens: a server that does not know the
        field refuses it, or passes over it in silence."""
        try:
            self.client.score_ids([[1, 2]], [[[2]]])
        except ServerGone:
            raise
        except ClientError:
            return False
        return True

    # Text to tokens

    def encode(self, texts: Sequence[str], begin: bool = False) -> list[Piece]:
        """Makes pieces of prompts; they are joined with `join`.

        Args:
            begin: whether a text is the begin of a prompt, to which the tokenizer adds
                what it begins prompts with.
        """
        if not self.scores_by_name:
            return list(texts)
        encode = self._tokens_at_begin if begin else self._tokens_inside
        return [encode(text) for text in texts]

    def _tokens_at_begin(self, text: str) -> list[int]:
        """A text's tokens, without what some tokenizers put after a text."""
        whole = partial(self.client.tokenize, add_special_tokens=True)
        if self._after is None:
            one, inside = whole("x"), self._tokens("x")
            begins = range(len(one) - len(inside) + 1)
            begin = next((i for i in begins if one[i:][: len(inside)] == inside), None)
            self._after = 0 if begin is None else len(one) - len(inside) - begin
        tokens = whole(text)
        return tokens[: len(tokens) - self._after]

    def _tokens_inside(self, text: str) -> list[int]:
        """A text's tokens where another text is before it: some tokenizers put a space
        in front of whatever they are given."""
        before = "x" if text[:1].isspace() else "\n"
        if before not in self._before:
            self._before[before] = self._tokens(before)
        first, tokens = self._before[before], self._tokens(before + text)
        if tokens[: len(first)] == first:
            return tokens[len(first) :]
        return self._tokens(text)

    def _tokens(self, text: str) -> list[int]:
        return self.client.tokenize(text, add_special_tokens=False)

    def encode_labels(self, labels: Sequence[str]) -> list[Piece]:
        """As `encode`; each label must be one token.

        Raises:
            ClientError: a label is several tokens, or two are the same one.
        """
        pieces = self.encode(labels)
        if self.scores_by_name:
            for label, piece in zip(labels, pieces, strict=True):
                if len(piece) != 1:
                    raise ClientError(
                        f"The label {label!r} is {len(piece)} tokens of {self.model}, "
                        "and must be one. With most tokenizers it is one only with a "
                        "space in front."
                    )
        if len({tuple(piece) for piece in pieces}) != len(pieces):
            raise ClientError(f"The labels {list(labels)} are not different tokens.")
        return pieces

    # Scores

    def score(self, prompts: Sequence[Piece], labels: Sequence[Piece]) -> LabelScores:
        """Scores every label after every prompt, in one call.

        Raises:
            ClientError: the server refuses the request, or gives no
                log-probabilities.
        """
        if not self.scores_by_name:
            return self._top_scores(prompts, labels)
        ids = [label[0] for label in labels]
        answer = self._complete(
            [[*prompt, ids[0]] for prompt in prompts],
            target_token_ids=[[ids]] * len(prompts),
            max_tokens=0,
        )
        rows = [choice.scores.logprobs[0] for choice in answer.choices]
        scores = np.array(rows, dtype=np.float64)
        if scores.shape != (len(prompts), len(ids)) or not np.isfinite(scores).all():
            raise ClientError(
                f"scores of shape {scores.shape}, or not finite", url=self.url
            )
        return LabelScores(scores, answer.cached_tokens)

    def _top_scores(
        self, prompts: Sequence[Piece], labels: Sequence[Piece]
    ) -> LabelScores:
        scores = np.empty((len(prompts), len(labels)))
        for row, top in zip(scores, self._top(prompts), strict=True):
            floor = min(top.values())
            with self._lock:
                self.unlisted.update(label for label in labels if label not in top)
            row[:] = [top.get(label, floor) for label in labels]
        return LabelScores(scores, None)

    def top_logprobs(self, prompt: Piece) -> dict[str, float]:
        """The likeliest next tokens and their log-probabilities in nats: what any
        server gives, by generating a token.

        Raises:
            ClientError: the server gives none.
        """
        (top,) = self._top([prompt])
        return top

    def top_ids(self, prompt: Piece) -> dict[int, float]:
        """As `top_logprobs`, of a server that scores named tokens: by token id."""
        (top,) = self._top([prompt], return_tokens_as_token_ids=True)
        return top_ids(top)

    def _top(self, prompts: Sequence[Piece], **fields: bool) -> list[dict[str, float]]:
        try:
            answer = self._complete(
                prompts, max_tokens=1, temperature=0, logprobs=self.top, **fields
            )
        except ServerGone:
            raise
        except ClientError as error:
            raise ClientError(
                f"{error} (If it allows fewer log-probabilities: --top-logprobs.)"
            ) from error
        if not all(choice.top and choice.top[0] for choice in answer.choices):
            raise ClientError(
                f"{self.url} gives no log-probabilities: an answer of "
                "/v1/completions, asked for `logprobs`, has no `top_logprobs`. "
                "Labels cannot be scored there; take another server or model."
            )
        return [choice.top[0] for choice in answer.choices]

    def _complete(self, prompts: Sequence[Piece], **fields: object) -> Answer:
        answer = self.client.complete(list(prompts), **fields)
        with self._lock:
            self.calls += 1
        return answer

    def sample(self, prompts: Sequence[str], **fields: object) -> list[list[str]]:
        """Generates texts.

        Args:
            fields: of the completions request: `n`, `max_tokens`, `stop`, ...

        Returns:
            For each prompt, its `n` texts.
        """
        answer = self.client.complete(list(prompts), **fields)
        texts = [choice.text for choice in answer.choices]
        count = fields.get("n", 1)
        return [texts[i : i + count] for i in range(0, len(texts), count)]

    def block_size(self) -> int:
        """Tokens a block of the server's prefix cache; 1 if it does not say, of
        which any other is a multiple."""
        try:
            text = self.client.metrics()
        except ClientError:
            return 1
        found = re.search(
            r'^vllm:cache_config_info{.*\bblock_size="(\d+)"', text, re.MULTILINE
        )
        return int(found[1]) if found else 1


def join(pieces: Sequence[Piece], like: Piece) -> Piece:
    """Joins pieces of the type of `like`."""
    if isinstance(like, str):
        return "".join(pieces)
    return list(itertools.chain.from_iterable(pieces))


def is_near(url: str) -> bool:
    """Whether a server is on this machine or network."""
    host = urlsplit(url).hostname
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return host == "localhost" or "." not in host
