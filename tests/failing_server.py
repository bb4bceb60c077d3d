# SPDX-License-Identifier: Apache-2.0
"""A server without a model that answers as one of this fork does, except for faults
that are ordered."""

import base64
import hashlib
import io
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import NamedTuple

import numpy as np
from live_server import LoopbackServer

BLOCK = 4  # tokens of a block of the prefix cache
SLOW = 1.0
"""Seconds that a client may wait for the fault "slow", which is never answered."""


def _npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def _lists(array: np.ndarray) -> list:
    """With null for what JSON does not have."""
    return np.where(np.isfinite(array), array.astype(object), None).tolist()


ENCODED = {"npy": _npy, "json": _lists}


class Reply(NamedTuple):
    """An answer in full."""

    content: bytes = b""
    status: int = 200
    headers: dict[str, str] = {}


class FailingServer:
    """Its "model" likes tokens as a hash of the prompt says; a token is a character.
    What it says in a chat is `says(messages)`. It has a prefix cache of blocks that
    never forgets.

    Each POST of a completion or chat takes the next of `faults`, where None is none;
    each request takes the next of `replies` before anything else.
    """

    def __init__(self):
        self.faults: list[str | None] = []
        self.replies: list[Reply] = []
        self.got: list[str] = []  # paths of GETs
        self.keys: set[str] = set()  # of the header Authorization
        self.bodies: list[dict] = []  # of the completions and chats that are answered
        self.key: str | None = None  # whose bodies these are; anyone's
        self.owner = "vllm"
        self.root: str | None = None  # folder or hub name of the model, if it tells
        self.by_name = True  # whether it scores named tokens
        self.most_logprobs = 20  # a request for more is refused
        self.retry_after: str | None = "0"  # of a 429
        self.cached: set[tuple[int, ...]] = set()  # prefixes of whole blocks
        self.says: Callable[[list[dict]], str] = lambda messages: "Hello"
        self.hold_after: int | None = None
        """So many answers are given; then `holding` is set and `go` waited for."""
        self.holding, self.go = threading.Event(), threading.Event()
        self.closed = threading.Event()
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"owner": self})
        self.http = LoopbackServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self._thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.closed.set()
        self.go.set()
        self.http.shutdown()
        self.http.server_close()

    def __enter__(self) -> "FailingServer":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # What it answers; tests replace these

    def models(self) -> dict:
        card = {"id": "m", "max_model_len": 4000, "owned_by": self.owner}
        return {"data": [card | {"root": self.root}]}

    begin, end = (), ()  # tokens around a whole text

    @staticmethod
    def tokenize(text: str) -> list[int]:
        return [ord(c) for c in text]

    @staticmethod
    def logprob(prompt: list[int] | str, label: int | str) -> float:
        text = prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
        name = label if isinstance(label, str) else chr(label)
        digest = hashlib.sha256(f"{text[-40:]}|{name}".encode()).digest()
        return -1 - digest[0] / 64

    def complete(self, body: dict) -> dict:
        prompts = body["prompt"]
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts] * len(body.get("continuations", [0]))
        cached, choices = 0, []
        for index, prompt in enumerate(prompts):
            choice: dict = {"index": index, "text": "#### 7"}
            named = self.named(body, index, prompt)
            if named and self.by_name:
                choice["target_logprobs"] = self.score(body, *named)
                cached += self.look_up(named[0][: -len(named[1])])
            elif "logprobs" in body:
                top = {name: self.logprob(prompt, name) for name in "abcd"}
                choice["logprobs"] = {"top_logprobs": [top]}
            choices.append(choice)
        usage = {"prompt_tokens_details": {"cached_tokens": cached}}
        # In no order, as a client must expect.
        return {"choices": choices[::-1], "usage": usage}

    def named(
        self, body: dict, index: int, prompt: list[int] | str
    ) -> tuple[list[int], list[list[int]]] | None:
        """The whole prompt of a choice, and the ids of its rows."""
        if "target_token_ids" in body:
            rows = body["target_token_ids"][index]
            return prompt, [row if isinstance(row, list) else [row] for row in rows]
        added = body.get("continuations") or body.get("target_text")
        if not added:
            return None
        first, last = (
            self.tokenize(part) if isinstance(part, str) else part
            for part in (prompt, added[index])
        )
        return first + last, [[i] for i in last]

    def score(self, body: dict, prompt: list[int], rows: list[list[int]]) -> dict:
        start, width = len(prompt) - len(rows), max(map(len, rows))
        ids = np.array([row + [-1] * (width - len(row)) for row in rows], np.int32)
        logprobs = np.full(ids.shape, -np.inf, np.float32)
        for (n, k), i in np.ndenumerate(ids):
            if i >= 0:
                logprobs[n, k] = self.logprob(prompt[: start + n], int(i))
        found: dict = {
            "token_ids": ids,
            "logprobs": logprobs,
            "ranks": np.where(ids < 0, 0, 1).astype(np.int32),
            "entropy": np.where(ids.max(1) < 0, np.nan, 1.5).astype(np.float32),
        }
        form = body.get("target_logprobs_encoding", "json")
        found = {name: ENCODED[form](value) for name, value in found.items()}
        if "continuations" in body:
            found |= {"logprob_sum": float(logprobs.sum()), "is_greedy": True}
        return found | {"start": start}

    def look_up(self, prompt: list[int]) -> int:
        """How many tokens were cached, of all but the last, as that one predicts the
        label; now all are, but for the rest of a block."""
        ends = range(BLOCK, len(prompt), BLOCK)
        prefixes = [tuple(prompt[:end]) for end in ends]
        hits = sum(prefix in self.cached for prefix in prefixes)
        self.cached.update(prefixes)
        return hits * BLOCK

    def chat(self, body: dict) -> dict:
        text = self.says(body["messages"])
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        if body.get("return_token_ids"):
            choice["token_ids"] = [ord(c) for c in text]
        return {"choices": [choice | {"logprobs": None}]}


def _no_logprobs(answer: dict, value: object) -> str:
    choices = [choice | {"logprobs": value} for choice in answer["choices"]]
    return json.dumps(answer | {"choices": choices})


SPOILT: dict[str, Callable[[dict], str]] = {
    "cut JSON": lambda answer: json.dumps(answer)[: len(json.dumps(answer)) // 2],
    "half of the choices": lambda answer: json.dumps(
        answer | {"choices": answer["choices"][: len(answer["choices"]) // 2]}
    ),
    "no choice": lambda answer: json.dumps(answer | {"choices": []}),
    "no message": lambda answer: json.dumps(answer).replace('"message":', '"other":'),
    "no reason to end": lambda answer: json.dumps(answer).replace(
        '"finish_reason":', '"other":'
    ),
    "no logprobs": lambda answer: _no_logprobs(answer, None),
    "empty logprobs": lambda answer: _no_logprobs(answer, {"top_logprobs": [None]}),
    "logprobs of another kind": lambda answer: _no_logprobs(answer, "none"),
}
"""Contents of 200s that are not what was asked for, by fault."""
REFUSED = {
    "400": (400, "prompt: too long"),
    "no system role": (400, "System role not supported"),
    "500": (500, "out of luck"),
}
"""Status and message, by fault."""


class _Handler(BaseHTTPRequestHandler):
    owner: FailingServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the body waits 40 ms for its headers' receipt

    def log_message(self, *_) -> None:
        pass

    def reply(
        self, content: str | bytes, status=200, headers=(), *, cut: int = 0
    ) -> None:
        data = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        headers = {"Content-Type": "application/json", **dict(headers)}
        for header in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(data[: len(data) - cut])
        if cut:
            self.close_connection = True

    def replied(self) -> bool:
        """Gives the next of `replies`, if there is one."""
        self.owner.keys.add(self.headers["Authorization"])
        with self.owner.lock:
            ready = self.owner.replies.pop(0) if self.owner.replies else None
        if ready is not None:
            self.reply(*ready)
        return ready is not None

    def do_GET(self) -> None:
        self.owner.got.append(self.path)
        if self.replied():
            return
        if self.path.endswith("/models"):
            self.reply(json.dumps(self.owner.models()))
        elif self.path == "/metrics":
            line = f'vllm:cache_config_info{{block_size="{BLOCK}",engine="0"}} 1.0'
            self.reply(line + "\n", headers={"Content-Type": "text/plain"})
        else:
            self.reply("{}", 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.replied():
            return
        if self.path == "/tokenize":
            tokens = self.owner.tokenize(body["prompt"])
            if body.get("add_special_tokens", True):
                tokens = [*self.owner.begin, *tokens, *self.owner.end]
            self.reply(json.dumps({"tokens": tokens}))
        elif self.path == "/detokenize":
            text = "".join(map(chr, body["tokens"]))
            self.reply(json.dumps({"prompt": text}))
        else:
            with self.owner.lock:
                fault = self.owner.faults.pop(0) if self.owner.faults else None
            self.answer(body, fault)

    def answer(self, body: dict, fault: str | None) -> None:
        owner = self.owner
        if (body.get("logprobs") or 0) > owner.most_logprobs:
            self.refuse(400, "logprobs: too many")
            return
        answer = owner.chat(body) if "messages" in body else owner.complete(body)
        if fault in REFUSED:
            self.refuse(*REFUSED[fault])
        elif fault == "429":
            after = owner.retry_after
            self.reply("{}", 429, {"Retry-After": after} if after else {})
        elif fault == "wrong content type":
            self.reply("<html>hello</html>", headers={"Content-Type": "text/html"})
        elif fault == "half an answer":
            content = json.dumps(answer)
            self.reply(content, cut=len(content) // 2)
        elif fault == "gone":
            self.close_connection = True
        elif fault == "slow":
            owner.closed.wait()
            self.close_connection = True
        elif fault == "drip":
            self.drip()
        else:
            self.hold()
            self.keep(body)
            content = SPOILT[fault](answer) if fault else json.dumps(answer)
            with suppress(OSError):  # the client did not wait
                self.reply(content)

    def drip(self) -> None:
        """An answer that does not end."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(10**6))
        self.end_headers()
        with suppress(OSError):  # the client did not wait
            while not self.owner.closed.wait(0.05):
                self.wfile.write(b" ")
                self.wfile.flush()
        self.close_connection = True

    def refuse(self, status: int, message: str) -> None:
        self.reply(json.dumps({"error": {"message": message}}), status)

    def hold(self) -> None:
        owner = self.owner
        if owner.hold_after is not None and len(owner.bodies) >= owner.hold_after:
            owner.holding.set()
            owner.go.wait()

    def keep(self, body: dict) -> None:
        key = (self.headers["Authorization"] or "").removeprefix("Bearer ")
        if self.owner.key in (None, key):
            with self.owner.lock:
                self.owner.bodies.append(body)
