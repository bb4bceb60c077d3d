# SPDX-License-Identifier: Apache-2.0
"""A served teacher under load, beside a chat: the release and the fork.

    .venv/bin/python benchmarks/teacher_load.py --model wide
    .venv/bin/python benchmarks/teacher_load.py --model cheap

Trainers send prompts of token ids and want the `k` most probable tokens of each position:
one request after the other, and 16 at once. Meanwhile somebody chats, ten times a second
at most, and the longest wait for a token is noted. Three ways: `prompt_logprobs=k` of the
release, the same request to the fork, and the fork's arrays (`target_top_k=k`, or the
prompt's own tokens for 0, as npy).

`wide` is the model of `teacher.py`, on which a row costs a core 0.6 ms. `cheap` costs a
few hundredths of a millisecond, as a row costs a GPU: what is left is what the server does.
Rows a second are by the clock, medians of rounds; both servers are started, then take
turns, and the prefix cache is emptied before each turn.
"""

import argparse
import base64
import io
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import processes
import requests
from clients import NAME, OPTIONS, TOLERANCE, Server, both_servers
from teacher import make_tokenizer

VOCABULARY = 32_000
SHAPES = {"wide": (512, 4), "cheap": (64, 1)}
"""Width and layers."""
WAYS = {
    "release": ("release", "prompt_logprobs"),
    "fork, the same request": ("fork", "prompt_logprobs"),
    "fork, arrays": ("fork", "arrays"),
}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
PAUSE = 0.1
"""Seconds between two chats."""
TIMEOUT = 600


def body(ids: list[int], k: int, way: str) -> dict:
    if way == "prompt_logprobs":
        asked = {"max_tokens": 1, "prompt_logprobs": k}
    else:
        asked = {"max_tokens": 0, "target_logprobs_encoding": "npy"}
        asked |= {"target_top_k": k} if k else {"target_token_ids": ids[1:]}
    return {"model": NAME, "prompt": ids} | asked


def best(choice: dict, ids: list[int], k: int) -> np.ndarray:
    """The `k` greatest log-probabilities of each row, or those of the prompt's tokens."""
    if scores := choice.get("target_logprobs"):
        array = scores["top_logprobs" if k else "logprobs"]
        return np.load(io.BytesIO(base64.b64decode(array))).reshape(len(ids) - 1, -1)
    rows = choice["prompt_logprobs"][1:]
    if not k:
        own = [row[str(token)]["logprob"] for row, token in zip(rows, ids[1:])]
        return np.array(own)[:, None]
    return np.array(
        [sorted((x["logprob"] for x in row.values()), reverse=True)[:k] for row in rows]
    )


class Chat:
    """Somebody who chats while a function runs; `waits` are the seconds of each chat."""

    def __init__(self, server: Server):
        self.url = f"{server.url}/v1/chat/completions"
        self.waits: list[float] = []
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.ask)

    def ask(self) -> None:
        messages = [{"role": "user", "content": "word5 word6"}]
        asked = {"model": NAME, "messages": messages, "max_tokens": 1}
        while not self.done.is_set():
            begin = time.perf_counter()
            requests.post(self.url, json=asked, timeout=TIMEOUT).raise_for_status()
            self.waits.append(time.perf_counter() - begin)
            self.done.wait(PAUSE)

    def __enter__(self) -> "Chat":
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.done.set()
        self.thread.join()


def load(
    server: Server, prompts: list[list[int]], k: int, way: str, at_once: int
) -> tuple[float, float, np.ndarray, int]:
    """Rows a second, the longest chat's seconds, what the first answer says, bytes of all."""
    server.forget()

    def ask(ids: list[int]) -> requests.Response:
        url = f"{server.url}/v1/completions"
        answer = requests.post(url, json=body(ids, k, way), timeout=TIMEOUT)
        answer.raise_for_status()
        return answer

    with Chat(server) as chat, ThreadPoolExecutor(at_once) as pool:
        begin = time.perf_counter()
        answers = list(pool.map(ask, prompts))
        seconds = time.perf_counter() - begin
    rows = sum(len(ids) - 1 for ids in prompts)
    said = best(answers[0].json()["choices"][0], prompts[0], k)
    size = sum(len(answer.content) for answer in answers)
    return rows / seconds, max(chat.waits), said, size


def measure(servers: dict[str, Server], prompts, k: int, at_once: int, rounds: int):
    """The rows of the table for a `k` and a number of requests at once."""
    rates = {name: [] for name in WAYS}
    waits = {name: [] for name in WAYS}
    sizes, said = {}, {}
    for turn in range(rounds + 1):
        for name, (server, way) in WAYS.items():
            rate, wait, said[name], sizes[name] = load(
                servers[server], prompts, k, way, at_once
            )
            if turn:  # the first compiles
                rates[name].append(rate)
                waits[name].append(wait)
    for name in WAYS:
        off = float(np.abs(said[name] - said["release"]).max())
        assert off < TOLERANCE, (name, k, off)
        ratios = [ours / theirs for ours, theirs in zip(rates[name], rates["release"])]
        yield [
            k,
            at_once,
            name,
            f"{statistics.median(rates[name]):,.0f}",
            processes.ratio(ratios),
            f"{statistics.median(waits[name]):.2f}",
            f"{sizes[name] / 2**20:.1f}",
            f"{off:.0e}" if name != "release" else "",
        ]


COLUMNS = ["k", "at once", "way", "rows a second", "times the release's",
           "longest wait of a chat, s", "answers, MiB", "greatest |Δ|, nats"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=[*SHAPES], default="cheap")
    parser.add_argument("--top-k", nargs="+", type=int, default=[0, 8, 64, 256])
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = processes.random_llama(VOCABULARY, *SHAPES[args.model], "float32")
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, VOCABULARY, (args.prompts, args.length)).tolist()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(VOCABULARY).save_pretrained(folder)
        options = [one for one in OPTIONS if "max-logprobs" not in one]
        options += [f"--max-logprobs={max(args.top_k)}", f"--tokenizer={folder}"]
        options += [f"--chat-template={TEMPLATE}"]
        with both_servers(model, options) as servers:
            for k in args.top_k:
                for at_once in args.at_once:
                    rows += measure(servers, prompts, k, at_once, args.rounds)
                    print(*(" | ".join(map(str, row)) for row in rows[-3:]), sep="\n")
    title = f"{args.prompts} prompts of {args.length} tokens, {args.model} model, HTTP"
    processes.show(f"teacher_load_{args.model}", title, COLUMNS, rows)


if __name__ == "__main__":
    main()
