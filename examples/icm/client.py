# SPDX-License-Identifier: Apache-2.0
"""A client that asks an OpenAI-compatible server how likely each label is.

A server of this fork scores the labels by name (`target_token_ids`): one call for any
number of prompts, every label exact. Any other server is asked for the top
log-probabilities of the next token, where a label can be missing.
"""

import ipaddress
import itertools
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import httpx
import numpy as np

logger = logging.getLogger("icm")

TOP_LOGPROBS = 20
"""Asked of servers that cannot score tokens by name; vLLM's own default limit."""
MALFORMED_ATTEMPTS = 5
"""Answers that are no valid JSON of the right form before we give up: a server that
is starting or a proxy may send some, the wrong server sends nothing else."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 15.0  # seconds between attempts

Piece = list[int] | str
"""Part of a prompt: token ids for a server of this fork, text for others."""


class ServerError(RuntimeError):
    """The server refused a request or cannot be used; says what to do."""


class ServerGone(ServerError):
    """The server did not answer for longer than we are willing to wait."""


class _Malformed(Exception):
    """An answer that is not the JSON we asked for."""


class CacheCounters(NamedTuple):
    """Prompt tokens since the server started, from its `/metrics`."""

    queries: int  # tokens looked up in the prefix cache
    hits: int  # tokens found there
    block_size: int  # tokens a cache block


class Client:
    """One connection pool to one server.

    Args:
        base_url: with or without the `/v1` at its end.
        model: the served name; the server's only model if None.
        api_key: sent as a bearer token.
        timeout: seconds that one request may take.
        patience: seconds to go on trying while the server fails.
        requests_per_minute: at most so many; None: unlimited for a server of this
            fork or on this machine or network, 60 for others.
        sleep: for tests.

    Raises:
        ServerError: the model is not there.
        ServerGone: nothing answered for `patience` seconds.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        api_key: str = "EMPTY",
        timeout: float = 600,
        patience: float = 600,
        requests_per_minute: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.url = base_url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ServerError(
                f"base_url must start with http:// or https://: {self.url}"
            )
        self.patience = patience
        self._sleep = sleep
        self._http = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(timeout, connect=10),
            headers={"Authorization": f"Bearer {api_key}"},
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=64),
        )
        self.calls = 0  # scoring requests answered
        self.retries = 0
        self.missing_labels = 0  # labels that top log-probabilities did not list
        self._next_request = 0.0
        self._lock = threading.Lock()
        self.interval = 0.0  # seconds between two requests
        self.model, self.max_model_len = self._find_model(model)
        self.scores_by_name = self._probe()
        if requests_per_minute is None and not (self.scores_by_name or self._is_near()):
            requests_per_minute = 60
        if requests_per_minute:
            self.interval = 60 / requests_per_minute
        if not self.scores_by_name:
            logger.warning(
                "%s cannot score tokens by name. Asking for the top %d "
                "log-probabilities instead: a label that is not among them counts as "
                "the least likely one listed, and nothing is known of the cache.",
                self.url,
                TOP_LOGPROBS,
            )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # Text to tokens

    def encode(self, texts: Sequence[str], begin: bool = False) -> list[Piece]:
        """Makes pieces of prompts; they are joined with `join`.

        Args:
            begin: whether the tokenizer adds what it begins a text with.
        """
        if not self.scores_by_name:
            return list(texts)
        return [
            self.request(
                "POST",
                "/tokenize",
                {"model": self.model, "prompt": text, "add_special_tokens": begin},
                lambda answer: [int(i) for i in answer["tokens"]],
            )
            for text in texts
        ]

    def encode_labels(self, labels: Sequence[str]) -> list[Piece]:
        """As `encode`; each label must be one token.

        Raises:
            ServerError: a label is several tokens, or two are the same one.
        """
        pieces = self.encode(labels)
        if self.scores_by_name:
            for label, piece in zip(labels, pieces, strict=True):
                if len(piece) != 1:
                    raise ServerError(
                        f"The label {label!r} is {len(piece)} tokens of {self.model}, "
                        "and must be one. With most tokenizers a space in front helps."
                    )
        if len({tuple(piece) for piece in pieces}) != len(pieces):
            raise ServerError(f"The labels {list(labels)} are not different tokens.")
        return pieces

    # Scores

    def score(self, prompts: Sequence[Piece], labels: Sequence[Piece]) -> np.ndarray:
        """Scores every label after every prompt, in one request.

        Returns:
            `[prompts, labels]` float64, log-probabilities in nats.

        Raises:
            ServerError: the server refuses the request.
            ServerGone: it did not answer in time.
        """
        body: dict[str, Any] = {"model": self.model}
        if self.scores_by_name:
            ids = [label[0] for label in labels]
            body |= {
                "prompt": [[*prompt, ids[0]] for prompt in prompts],
                "target_token_ids": [[ids]] * len(prompts),
                "max_tokens": 0,
            }
            read = self._named_scores
        else:
            body |= {
                "prompt": list(prompts),
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": TOP_LOGPROBS,
            }
            read = self._top_scores
        scores = self.request(
            "POST", "/v1/completions", body, lambda a: read(a, len(prompts), labels)
        )
        with self._lock:
            self.calls += 1
        return scores

    def top_logprobs(self, prompt: Piece) -> dict[str, float]:
        """The likeliest next tokens and their log-probabilities in nats: what any
        server gives, by generating a token."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1}
        body |= {"temperature": 0, "logprobs": TOP_LOGPROBS}
        top = self.request(
            "POST",
            "/v1/completions",
            body,
            lambda answer: answer["choices"][0]["logprobs"]["top_logprobs"][0],
        )
        with self._lock:
            self.calls += 1
        return top

    def _named_scores(self, answer: dict, prompts: int, labels) -> np.ndarray:
        rows = [choice["target_logprobs"]["logprobs"][0] for choice in _choices(answer)]
        scores = np.array(rows, dtype=np.float64)
        if scores.shape != (prompts, len(labels)) or not np.isfinite(scores).all():
            raise _Malformed(f"scores of shape {scores.shape}, or not finite")
        return scores

    def _top_scores(self, answer: dict, prompts: int, labels) -> np.ndarray:
        choices = _choices(answer)
        if len(choices) != prompts:
            raise _Malformed(f"{len(choices)} choices for {prompts} prompts")
        scores = np.empty((prompts, len(labels)))
        missing = 0
        for row, choice in zip(scores, choices, strict=True):
            top = choice["logprobs"]["top_logprobs"][0]
            floor = min(top.values())
            missing += sum(label not in top for label in labels)
            row[:] = [top.get(label, floor) for label in labels]
        self.missing_labels += missing
        return scores

    def sample(self, prompts: Sequence[str], **fields) -> list[list[str]]:
        """Generates texts.

        Args:
            fields: of the completions request: `n`, `max_tokens`, `stop`, ...

        Returns:
            For each prompt, its `n` texts.
        """
        count = fields.get("n", 1)

        def read(answer: dict) -> list[list[str]]:
            texts = [choice["text"] for choice in _choices(answer)]
            if len(texts) != count * len(prompts):
                raise _Malformed(f"{len(texts)} texts for {len(prompts)} prompts")
            return [texts[i : i + count] for i in range(0, len(texts), count)]

        body = {"model": self.model, "prompt": list(prompts)} | fields
        return self.request("POST", "/v1/completions", body, read)

    # What the server says of itself

    def cache_counters(self) -> CacheCounters | None:
        """The server's prefix-cache counters, of all its clients together; None if it
        shows none."""
        try:
            response = self._http.get("/metrics")
        except httpx.HTTPError:
            return None
        if response.status_code != 200:
            return None
        totals = []
        for name in ("queries", "hits"):
            pattern = rf"^vllm:prefix_cache_{name}_total{{.*}} (\S+)$"
            found = re.findall(pattern, response.text, re.MULTILINE)
            if not found:
                return None
            totals.append(int(sum(map(float, found))))
        block = re.search(r'^vllm:cache_config_info{.*block_size="(\d+)"',
                          response.text, re.MULTILINE)  # fmt: skip
        return CacheCounters(*totals, int(block[1])) if block else None

    def _find_model(self, wanted: str | None) -> tuple[str, int | None]:
        models = self.request(
            "GET",
            "/v1/models",
            None,
            lambda answer: {m["id"]: m.get("max_model_len") for m in answer["data"]},
        )
        if wanted is None:
            if len(models) != 1:
                raise ServerError(f"Choose a --model of {self.url}: {sorted(models)}")
            (wanted,) = models
        if wanted not in models:
            raise ServerError(
                f"{self.url} does not serve {wanted!r}, but {sorted(models)}."
            )
        return wanted, models[wanted]

    def _probe(self) -> bool:
        """Whether the server scores named tokens: a server that does not know the
        field refuses it, or passes over it in silence."""
        body = {
            "model": self.model,
            "prompt": [[1, 2]],
            "target_token_ids": [[[2]]],
            "max_tokens": 0,
        }
        try:
            return self.request(
                "POST",
                "/v1/completions",
                body,
                lambda answer: bool(_choices(answer)[0].get("target_logprobs")),
            )
        except ServerGone:
            raise
        except ServerError:
            return False

    def _is_near(self) -> bool:
        """Whether the server is on this machine or network."""
        host = urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_private
        except ValueError:
            return host == "localhost" or "." not in host

    # HTTP

    def request(
        self,
        method: str,
        path: str,
        body: dict | None,
        read: Callable[[dict], Any],
    ) -> Any:
        """Sends a request until there is an answer that `read` takes.

        Connections that break, time-outs, 429, 5xx and answers that are not what was
        asked for are tried again, ever less often, for `patience` seconds.

        Raises:
            ServerError: a refusal (4xx), or `MALFORMED_ATTEMPTS` malformed answers.
            ServerGone: no answer for `patience` seconds.
        """
        deadline = time.monotonic() + self.patience
        malformed = 0
        for attempt in itertools.count():
            wait = min(FIRST_WAIT * 2**attempt, LONGEST_WAIT)
            try:
                self._keep_the_pace()
                response = self._http.request(method, path, json=body)
                if response.status_code == 200:
                    return read(_json(response))
                problem = f"{response.status_code}: {_message(response)}"
                if response.status_code < 500 and response.status_code not in (
                    408,
                    429,
                ):
                    raise ServerError(f"{self.url}{path} refuses: {problem}")
                wait = max(wait, _retry_after(response))
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}"
            except (_Malformed, KeyError, IndexError, TypeError, ValueError) as error:
                malformed += 1
                problem = f"malformed answer: {type(error).__name__}: {error}"
                if malformed == MALFORMED_ATTEMPTS:
                    raise ServerError(
                        f"{self.url}{path} does not answer as an OpenAI-compatible "
                        f"server does ({problem}). Is base_url right?"
                    ) from error
            if time.monotonic() + wait > deadline:
                raise ServerGone(
                    f"{self.url}{path} failed for {self.patience:.0f} s, "
                    f"{attempt + 1} attempts ({problem}). Is `vllm serve` running? "
                    "verify_server.py tells more."
                )
            self.retries += 1
            logger.warning("%s: trying again in %.1f s", problem[:200], wait)
            self._sleep(wait)
        raise AssertionError

    def _keep_the_pace(self) -> None:
        if self.interval:
            self._sleep(max(0.0, self._next_request - time.monotonic()))
            self._next_request = time.monotonic() + self.interval


def join(pieces: Sequence[Piece], like: Piece) -> Piece:
    """Joins pieces of the type of `like`."""
    if isinstance(like, str):
        return "".join(pieces)
    return list(itertools.chain.from_iterable(pieces))


def _json(response: httpx.Response) -> dict:
    kind = response.headers.get("content-type", "none")
    if "json" not in kind:
        raise _Malformed(f"content type {kind}")
    return response.json()


def _choices(answer: dict) -> list[dict]:
    return sorted(answer["choices"], key=lambda choice: choice["index"])


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def _retry_after(response: httpx.Response) -> float:
    try:
        return float(response.headers.get("retry-after", 0))
    except ValueError:
        return 0.0
