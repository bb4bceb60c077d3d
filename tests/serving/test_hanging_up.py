# SPDX-License-Identifier: Apache-2.0
"""Two hundred clients that hang up, on a server whose clock is set: nothing stays behind.

    HANGING_UP_SECONDS=1800 HANGING_UP_COMPILED=1 HANGING_UP_DEPTH=gate \\
        python -m pytest tests/serving/test_hanging_up.py --runner v1

The score cache is on, and early exits draft (`HANGING_UP_DEPTH=drafts`, the default) or
routing decides by its gate (`gate`). Most clients ask for what takes long and are gone
before it is there: scores, arrays, `echo`, streams. The others check what they get. In the
middle the wall clock jumps a day ahead and then two days back, as when a machine wakes or
its clock is set: libfaketime stands before the server's clock.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import aiohttp
import psutil
import pytest
import requests
from early_exits import options as drafting
from live_server import live_server
from scoring_server import COMPLETIONS, MODEL, OPTIONS, REQUEST_SECONDS, assert_choice
from tiny_models import CONFIGS

libfaketime = pytest.importorskip("libfaketime")
from waiting import until

pytestmark = pytest.mark.any_runner

FAMILY = "deep_llama"
VOCABULARY = CONFIGS[FAMILY].vocab_size
LAYERS = CONFIGS[FAMILY].num_hidden_layers
SECONDS = float(os.environ.get("HANGING_UP_SECONDS", "9"))
COMPILED = os.environ.get("HANGING_UP_COMPILED") == "1"
DEPTH = {
    "drafts": [f"--speculative-config={json.dumps(drafting())}"],
    "gate": ["--enable-utio", "--utio-bucket-cutoffs=2,4", "--utio-min-batch-size=1"],
}[os.environ.get("HANGING_UP_DEPTH", "drafts")]
WHOLE_MODEL = {"max_depth": LAYERS} if "--enable-utio" in DEPTH else {}
CLIENTS = 200
PAUSE = 4
"""Seconds between two requests of a client, on average."""
LEAK = (48 if SECONDS > 300 else 160) * 2**20
"""Bytes that the server may grow by after the first third, which is noise of its heap; in a
short run the heap is not what it becomes."""
DAY = 86_400


class Clock:
    """The wall clock of a server, by a file that libfaketime reads each second."""

    def __init__(self, folder: Path):
        self.file = folder / "clock"
        self.set(0)
        library = Path(libfaketime.__file__).parent / "vendor" / "libfaketime"
        self.environ = {
            "LD_PRELOAD": str(next(library.rglob("libfaketime.so.1"))),
            "FAKETIME_TIMESTAMP_FILE": str(self.file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, ahead: int) -> None:
        """Sets it so many seconds ahead of the machine's."""
        written = self.file.with_suffix(".new")
        written.write_text(f"{ahead:+d}\n")
        written.replace(self.file)  # never read half written


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    return Clock(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="module")
def server(runner, model_folder, clock, tmp_path_factory):
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    options += [*DEPTH, "--block-size=32", *["--enforce-eager"] * (not COMPILED)]
    log = tmp_path_factory.mktemp("hanging_up") / "log"
    # Its worker is a process of its own, as it is for who serves on a CPU.
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | clock.environ
    with live_server(model_folder(FAMILY), options, runner, log, environ) as started:
        yield started


class Crowd:
    """The clients of a server."""

    def __init__(self, port: int, oracle):
        self.url = f"http://127.0.0.1:{port}"
        self.oracle = oracle
        self.random = random.Random(0)
        draw = self.random
        lengths = [2, 33, 64, 65, 100, 130, 200]
        self.prompts = [[draw.randrange(5, VOCABULARY) for _ in range(n)] for n in lengths]
        self.done: Counter[str] = Counter()
        self.greedy: dict[int, str] = {}
        self.created: list[int] = []

    def body(self) -> dict:
        """A request that takes a while, or has a large answer."""
        draw, prompt = self.random, self.random.choice(self.prompts)
        own = prompt[1:]
        kinds = [
            dict(max_tokens=50, n=4, temperature=1, ignore_eos=True),
            dict(max_tokens=50, temperature=0, ignore_eos=True, stream=True),
            dict(max_tokens=0, target_token_ids=own),
            dict(max_tokens=1, echo=True, logprobs=1),
            dict(max_tokens=1, prompt_logprobs=20),
            dict(max_tokens=0, prompt=[prompt] * 8, target_token_ids=[own] * 8,
                 target_top_k=20, target_logprobs_encoding="npy"),
            dict(max_tokens=0, continuations=[[7, 8, 9], [5], [6] * 20]),
            dict(max_tokens=20, target_generated={"token_ids": [5, 6], "top_k": 3}),
            dict(max_tokens=50, n=2, target_generated={"top_k": 20}, stream=True),
        ]  # fmt: skip
        return dict(model=MODEL, prompt=prompt) | draw.choice(kinds)

    async def hang_up(self, http: aiohttp.ClientSession) -> None:
        """Sends a request, and is gone at any moment of it."""
        body = self.body()
        longest = self.random.choice([0.02, 0.5, 8])
        patience = aiohttp.ClientTimeout(total=self.random.uniform(0.001, longest))
        try:
            async with http.post(COMPLETIONS, json=body, timeout=patience) as answer:
                assert answer.status == 200, (body, await answer.text())
                if self.random.random() < 0.5:
                    await answer.content.read(self.random.randrange(1, 4000))
                    self.done["gone in the answer"] += 1
                    answer.close()
                else:
                    await answer.read()
                    self.done["answered"] += 1
        except (TimeoutError, aiohttp.ClientConnectionError):
            self.done["gone"] += 1

    async def score(self, http: aiohttp.ClientSession) -> None:
        prompt = self.random.choice(self.prompts)
        body = dict(prompt=prompt, target_token_ids=prompt[1:], max_tokens=0)
        async with http.post(COMPLETIONS, json=dict(model=MODEL) | body) as answer:
            assert answer.status == 200, await answer.text()
            said = await answer.json()
        assert_choice(said["choices"][0], self.oracle, prompt, prompt[1:])
        self.created.append(said["created"])
        self.done["scored"] += 1

    async def decode(self, http: aiohttp.ClientSession) -> None:
        """Greedy tokens of the whole model are the same each time."""
        number = self.random.randrange(len(self.prompts))
        body = dict(prompt=self.prompts[number], max_tokens=8, temperature=0)
        body |= WHOLE_MODEL | dict(ignore_eos=True)
        async with http.post(COMPLETIONS, json=dict(model=MODEL) | body) as answer:
            assert answer.status == 200, await answer.text()
            text = (await answer.json())["choices"][0]["text"]
        assert self.greedy.setdefault(number, text) == text
        self.done["decoded"] += 1

    async def client(self, http: aiohttp.ClientSession, ends: float) -> None:
        while time.monotonic() < ends:
            stays = self.random.random()
            act = self.hang_up if stays > 0.1 else self.score if stays > 0.05 else self.decode
            await act(http)
            left = max(ends - time.monotonic(), 0)
            await asyncio.sleep(min(self.random.expovariate(1 / PAUSE), left))

    def run(self, seconds: float) -> None:
        async def run() -> None:
            timeout = aiohttp.ClientTimeout(REQUEST_SECONDS)
            # The server ends an idle connection after 5 s: not while a request is sent on it.
            connector = aiohttp.TCPConnector(limit=CLIENTS, keepalive_timeout=1)
            async with aiohttp.ClientSession(
                self.url, timeout=timeout, connector=connector
            ) as http:
                ends = time.monotonic() + seconds
                async with asyncio.TaskGroup() as group:
                    for _ in range(CLIENTS):
                        group.create_task(self.client(http, ends))
                # However slow the machine was, somebody waited for an answer.
                await self.score(http)
                await self.decode(http)

        asyncio.run(run())
        until(self.is_idle, REQUEST_SECONDS, lambda: "requests are stuck")

    def gauges(self) -> dict[str, float]:
        page = requests.get(self.url + "/metrics", timeout=REQUEST_SECONDS).text
        rows = [line.rpartition(" ") for line in page.splitlines() if line[:5] == "vllm:"]
        return {name.partition("{")[0]: float(value) for name, _, value in rows}

    def clock(self) -> int:
        """What the server takes the time to be, in seconds since 1970."""
        models = requests.get(self.url + "/v1/models", timeout=REQUEST_SECONDS).json()
        return models["data"][0]["created"]

    def is_idle(self) -> bool:
        now = self.gauges()
        running, waiting = (
            now[f"vllm:num_requests_{each}"] for each in ("running", "waiting")
        )
        return not running and not waiting


def held(process) -> tuple[int, int]:
    """Bytes and open files of a server's processes."""
    tree = psutil.Process(process.pid)
    tree = [tree, *tree.children(recursive=True)]
    return sum(p.memory_info().rss for p in tree), sum(p.num_fds() for p in tree)


def test_nothing_stays_behind(server, clock, oracle):
    process, port = server
    crowd = Crowd(port, oracle(FAMILY))
    crowd.run(SECONDS / 3)
    before, files_before = held(process)
    crowd.run(SECONDS / 3)
    now = time.time()
    for ahead in (DAY, -2 * DAY):
        clock.set(ahead)
        until(lambda: abs(crowd.clock() - now - ahead) < DAY / 2, REQUEST_SECONDS)
        crowd.created.clear()
        crowd.run(SECONDS / 6)
        assert all(abs(one - now - ahead) < DAY / 2 for one in crowd.created)
    grown, files = held(process)
    grown -= before
    print(dict(crowd.done), f"grown by {grown / 2**20:.1f} MiB, {files} files")
    assert process.poll() is None
    assert grown < LEAK
    assert files <= files_before + 4
    assert crowd.gauges()["vllm:kv_cache_usage_perc"] == 0
    assert crowd.done["gone"] and crowd.done["scored"] >= 4
