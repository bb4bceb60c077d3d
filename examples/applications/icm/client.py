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
from collections import Counter
from collections.abc import Callable, Sequence
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, NamedTuple, Self

import httpx
import numpy as np

logger = logging.getLogger("icm")

TOP_LOGPROBS = 20  # vLLM's own default limit
MALFORMED_ATTEMPTS = 5
"""Answers that are no valid JSON of the right form before we give up: a server that
is starting or a proxy may send some, the wrong server sends nothing else."""
_FEWER = " (If it allows fewer log-probabilities: --top-logprobs.)"
FIRST_WAIT, LONGEST_WAIT = 0.5, 15.0  # seconds between attempts

Piece = list[int] | str
"""Part of a prompt: token ids for a server of this fork, text for others."""


class ServerError(RuntimeError):
    """The server refused a request or cannot be used; says what to do."""


class ServerGone(ServerError):
    """The server did not answer for longer than we are willing to wait."""


class _Malformed(Exception):
    """An answer that is not the JSON we asked for."""


class Scores(NamedTuple):
    logprobs: np.ndarray  # [prompts, labels] float64, nats
    cached_tokens: int | None  # of all prompts; None: the server does not say


class Client:
    """One connection pool to one server.

    Args:
        base_url: as other clients take it, with `/v1` or the path of another service;
            an address without a path is one with `/v1`.
        model: the served name; the server's only model if None.
        api_key: sent as a bearer token.
        timeout: seconds to wait for a server that sends nothing.
        patience: seconds to go on trying while the server fails.
        requests_per_minute: at most so many; None: unlimited for a server of this
            fork or on this machine or network, 60 for others.
        top_logprobs: how many to ask of a server that cannot score tokens by name.
        sleep: for tests.

    Raises:
        ServerError: `base_url` is no address, or the model is not there.
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
        top_logprobs: int = TOP_LOGPROBS,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.url = base_url.rstrip("/")
        self._host, path = _parts(self.url)
        if not api_key.isascii():
            raise ServerError("--api-key has other characters than ASCII")
        self._api = "" if path.strip("/") else "/v1"  # of the paths in OpenAI's API
        if path.endswith("/v1"):
            # vLLM's other endpoints are beside it.
            self.url, self._api = self.url.removesuffix("/v1"), "/v1"
        self.patience = patience
        self.top = top_logprobs
        self._sleep = sleep
        self._http = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(timeout, connect=10),
            headers={"Authorization": f"Bearer {api_key}"},
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=64),
        )
        self.calls = 0  # scoring requests answered
        self.retries = 0
        self.unlisted: Counter[str] = Counter()
        """Label to how often it was not among the top log-probabilities."""
        self._before: dict[str, list[int]] = {}  # tokens of texts before others
        self._next_request = 0.0
        self._lock = threading.Lock()
        self.interval = 0.0  # seconds between two requests
        self.model, self.max_model_len, self.root = self._find_model(model)
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
                self.top,
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
            begin: whether a text is the begin of a prompt, to which the tokenizer adds
                what it begins prompts with.
        """
        if not self.scores_by_name:
            return list(texts)
        encode = partial(self._tokens, begin=True) if begin else self._tokens_inside
        return [encode(text) for text in texts]

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

    def _tokens(self, text: str, begin: bool = False) -> list[int]:
        return self.request(
            "POST",
            "/tokenize",
            {"model": self.model, "prompt": text, "add_special_tokens": begin},
            lambda answer: [int(i) for i in answer["tokens"]],
        )

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
                        "and must be one. With most tokenizers it is one only with a "
                        "space in front."
                    )
        if len({tuple(piece) for piece in pieces}) != len(pieces):
            raise ServerError(f"The labels {list(labels)} are not different tokens.")
        return pieces

    # Scores

    def score(self, prompts: Sequence[Piece], labels: Sequence[Piece]) -> Scores:
        """Scores every label after every prompt, in one request.

        Raises:
            ServerError: the server refuses the request, or gives no
                log-probabilities.
            ServerGone: it did not answer in time.
        """
        if not self.scores_by_name:
            return self._top_scores(prompts, labels)
        ids = [label[0] for label in labels]
        body = {
            "model": self.model,
            "prompt": [[*prompt, ids[0]] for prompt in prompts],
            "target_token_ids": [[ids]] * len(prompts),
            "max_tokens": 0,
        }
        shape = len(prompts), len(labels)

        def read(answer: dict) -> Scores:
            choices = _choices(answer)
            rows = [choice["target_logprobs"]["logprobs"][0] for choice in choices]
            scores = np.array(rows, dtype=np.float64)
            if scores.shape != shape or not np.isfinite(scores).all():
                raise _Malformed(f"scores of shape {scores.shape}, or not finite")
            return Scores(scores, _cached_tokens(answer))

        return self._scoring(body, read)

    def _top_scores(self, prompts: Sequence[Piece], labels: Sequence[Piece]) -> Scores:
        scores = np.empty((len(prompts), len(labels)))
        for row, top in zip(scores, self._top(prompts), strict=True):
            floor = min(top.values())
            with self._lock:
                self.unlisted.update(label for label in labels if label not in top)
            row[:] = [top.get(label, floor) for label in labels]
        return Scores(scores, None)

    def top_logprobs(self, prompt: Piece) -> dict[str, float]:
        """The likeliest next tokens and their log-probabilities in nats: what any
        server gives, by generating a token.

        Raises:
            ServerError: the server gives none.
        """
        (top,) = self._top([prompt])
        return top

    def top_ids(self, prompt: Piece) -> dict[int, float]:
        """As `top_logprobs`, of a server that scores named tokens: by token id."""
        (top,) = self._top([prompt], return_tokens_as_token_ids=True)
        return {int(name.removeprefix("token_id:")): top[name] for name in top}

    def _top(self, prompts: Sequence[Piece], **fields) -> list[dict[str, float]]:
        body = fields | {
            "model": self.model,
            "prompt": list(prompts),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": self.top,
        }

        def read(answer: dict) -> list[dict[str, float]]:
            choices = _choices(answer)
            if len(choices) != len(prompts):
                raise _Malformed(f"{len(choices)} choices for {len(prompts)} prompts")
            tops = [(c.get("logprobs") or {}).get("top_logprobs") for c in choices]
            if not all(top and top[0] for top in tops):
                raise ServerError(
                    f"{self.url} gives no log-probabilities: an answer of "
                    "/v1/completions, asked for `logprobs`, has no `top_logprobs`. "
                    "Labels cannot be scored there; take another server or model."
                )
            return [top[0] for top in tops]

        return self._scoring(body, read)

    def _scoring(self, body: dict, read: Callable[[dict], Any]) -> Any:
        answer = self.request("POST", self._api + "/completions", body, read)
        with self._lock:
            self.calls += 1
        return answer

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
        return self.request("POST", self._api + "/completions", body, read)

    # What the server says of itself

    def block_size(self) -> int:
        """Tokens a block of the server's prefix cache; 1 if it does not say, of
        which any other is a multiple."""
        try:
            text = self._http.get("/metrics").text
        except httpx.HTTPError:
            return 1
        found = re.search(
            r'^vllm:cache_config_info{.*\bblock_size="(\d+)"', text, re.MULTILINE
        )
        return int(found[1]) if found else 1

    def _find_model(self, wanted: str | None) -> tuple[str, int | None, str]:
        """Served name, longest prompt, and the folder or hub name, which vLLM's servers
        tell; of others the served name again."""
        models = self.request(
            "GET",
            self._api + "/models",
            None,
            lambda answer: {model["id"]: model for model in answer["data"]},
        )
        if wanted is None:
            if len(models) != 1:
                raise ServerError(f"Choose a --model of {self.url}: {sorted(models)}")
            (wanted,) = models
        if wanted not in models:
            raise ServerError(
                f"{self.url} does not serve {wanted!r}, but {sorted(models)}."
            )
        card = models[wanted]
        return wanted, card.get("max_model_len"), card.get("root") or wanted

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
                self._api + "/completions",
                body,
                lambda answer: bool(_choices(answer)[0].get("target_logprobs")),
            )
        except ServerGone:
            raise
        except ServerError:
            return False

    def _is_near(self) -> bool:
        """Whether the server is on this machine or network."""
        try:
            return ipaddress.ip_address(self._host).is_private
        except ValueError:
            return self._host == "localhost" or "." not in self._host

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
        asked for are tried again, ever less often, until `patience` seconds after the
        first of them.

        Raises:
            ServerError: a refusal (4xx), or `MALFORMED_ATTEMPTS` malformed answers.
            ServerGone: no answer for `patience` seconds.
        """
        deadline = None
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
                    raise ServerError(
                        f"{self.url}{path} refuses: {problem}"
                        + (_FEWER if body and "logprobs" in body else "")
                    )
                wait = max(wait, _retry_after(response))
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}"
            except (
                _Malformed,
                AttributeError,
                KeyError,
                IndexError,
                TypeError,
                ValueError,
            ) as error:
                malformed += 1
                problem = f"malformed answer: {type(error).__name__}: {error}"
                if malformed == MALFORMED_ATTEMPTS:
                    raise ServerError(
                        f"{self.url}{path} does not answer as an OpenAI-compatible "
                        f"server does ({problem}). Is base_url right?"
                    ) from error
            deadline = deadline or time.monotonic() + self.patience
            if time.monotonic() + wait > deadline:
                raise ServerGone(
                    f"{self.url}{path} failed {attempt + 1} times ({problem}), and "
                    f"the next attempt is later than --patience, {self.patience:.0f} "
                    "s, allows. Is `vllm serve` running? verify_server.py tells more."
                )
            with self._lock:
                self.retries += 1
            logger.warning("%s: trying again in %.1f s", problem[:200], wait)
            self._sleep(wait)
        raise AssertionError

    def _keep_the_pace(self) -> None:
        if not self.interval:
            return
        with self._lock:  # threads share the pace: each takes a time of its own
            now = time.monotonic()
            begin = max(now, self._next_request)
            self._next_request = begin + self.interval
        self._sleep(begin - now)


def join(pieces: Sequence[Piece], like: Piece) -> Piece:
    """Joins pieces of the type of `like`."""
    if isinstance(like, str):
        return "".join(pieces)
    return list(itertools.chain.from_iterable(pieces))


def _parts(url: str) -> tuple[str, str]:
    """Host and path of an address."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ServerError(f"--base-url {url} is no address: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ServerError(
            f"--base-url must be http://HOST:PORT or https://HOST, and is {url}"
        )
    return parts.host, parts.path


def _json(response: httpx.Response) -> dict:
    kind = response.headers.get("content-type", "none")
    if "json" not in kind:
        raise _Malformed(f"content type {kind}")
    return response.json()


def _choices(answer: dict) -> list[dict]:
    return sorted(answer["choices"], key=lambda choice: choice["index"])


def _cached_tokens(answer: dict) -> int | None:
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return details.get("cached_tokens")


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks us to wait: a number, or until a date."""
    value = response.headers.get("retry-after", "")
    try:
        if value.isdecimal():
            return float(value)
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0
