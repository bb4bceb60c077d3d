# SPDX-License-Identifier: Apache-2.0
"""A live server with routing on, under traffic that comes, asks and goes as it likes.

    UTIO_SOAK_SECONDS=1800 python -m pytest tests/depth/test_utio_soak.py --runner v1

Eager, and with UTIO_SOAK_COMPILED=1 as users compile it.

Random arrivals, lengths, ceilings, sampling, sequences, streams, clients that hang up and
requests that are wrong, while audits run. Nothing may crash, get stuck,
be answered wrongly or leak, and the counters must add up to the tokens served.
"""

import asyncio
import contextlib
import os
import random
import re
import time
from collections import Counter

import httpx
import psutil
import requests
import waiting
from depth_routing import CUTOFFS, NUM_LAYERS
from scoring_server import OPTIONS
from tiny_models import CONFIGS

SECONDS = float(os.environ.get("UTIO_SOAK_SECONDS", "12"))
AT_ONCE = 24  # twice as many as the server runs
VOCABULARY = CONFIGS["deep_llama"].vocab_size
LEAK = 48 * 2**20
"""Bytes that the server may grow by in half a run, which is noise of its heap."""
STEPS_AFTER_ABORT = 8
"""Steps that an aborted request may still take before the engine hears of it."""
BAD = [
    dict(max_depth=3),
    dict(max_depth=-1),
    dict(max_depth=[2]),
    dict(max_depth=2, max_tokens=-5),
    dict(max_depth=4, temperature="hot"),
    dict(max_depth=2, prompt=[VOCABULARY + 7]),
    dict(n=0),
]


class Soak:
    def __init__(self, url: str):
        self.url = url
        self.random = random.Random(0)
        self.done = Counter()

    def metrics(self) -> Counter:
        found = Counter()
        page = requests.get(self.url + "/metrics", timeout=60).text
        for name, labels, value in re.findall(
            r"^vllm:(\w+)\{(.*)\} (\S+)$", page, re.M
        ):
            found[name] += float(value)
            if own := re.search(r'(?:depth|reason|batch_size)="(\w+)"', labels):
                found[name, own[1]] += float(value)
        return found

    def body(self) -> dict:
        draw = self.random
        body = dict(
            model=OPTIONS["served-model-name"],
            prompt=[draw.randrange(5, VOCABULARY) for _ in range(draw.randint(1, 120))],
            max_tokens=draw.randint(1, 60),
            temperature=draw.choice([0, 1.0]),
            ignore_eos=True,
        )
        if draw.random() < 0.4:
            body["max_depth"] = draw.choice(CUTOFFS)
        if draw.random() < 0.1:
            body |= dict(n=2, temperature=1.0)
        return body

    async def client(self, http: httpx.AsyncClient, until: float, polite: bool) -> None:
        while time.monotonic() < until:
            kind = "plain"
            if not polite:
                kind = self.random.choices(
                    ["plain", "stream", "abort", "bad", "pause"], [8, 2, 2, 2, 2]
                )[0]
            await getattr(self, kind)(http, self.body())
            self.done[kind] += 1

    async def plain(self, http, body) -> None:
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] == body["max_tokens"] * body.get("n", 1)
        depth = usage.get("mean_decode_depth")
        if body["max_tokens"] == 1:
            assert depth is None
        else:
            assert min(CUTOFFS) <= depth <= body.get("max_depth", NUM_LAYERS)

    async def stream(self, http, body) -> None:
        body |= dict(stream=True, stream_options={"include_usage": True})
        answer = await http.post("/v1/completions", json=body)
        assert answer.text.rstrip().endswith("data: [DONE]"), answer.text[-500:]
        assert f'"completion_tokens":{body["max_tokens"] * body.get("n", 1)}' in (
            answer.text.replace(" ", "")
        )

    async def abort(self, http, body) -> None:
        body["max_tokens"] = 120
        with contextlib.suppress(httpx.TimeoutException):
            await http.post("/v1/completions", json=body, timeout=self.random.random())

    async def bad(self, http, body) -> None:
        wrong = self.random.choice(BAD)
        answer = await http.post("/v1/completions", json=body | wrong)
        assert answer.status_code == 400, (wrong, answer.status_code, answer.text)

    async def pause(self, http, body) -> None:
        await asyncio.sleep(self.random.expovariate(5))

    def run(self, seconds: float, polite: bool = False) -> None:
        async def run():
            limits = httpx.Limits(max_connections=AT_ONCE)
            async with httpx.AsyncClient(
                base_url=self.url, timeout=120, limits=limits
            ) as http:
                until = time.monotonic() + seconds
                clients = [self.client(http, until, polite) for _ in range(AT_ONCE)]
                await asyncio.gather(*clients)

        asyncio.run(run())
        waiting.until(self.is_idle, 60, lambda: "requests are stuck")

    def is_idle(self) -> bool:
        now = self.metrics()
        return not (now["num_requests_running"] or now["num_requests_waiting"])


def decoded(metrics: Counter) -> float:
    """Tokens that came from a decode step: all but the first of each sequence."""
    assert not metrics["num_preemptions_total"]
    return (
        metrics["generation_tokens_total"]
        - metrics["time_to_first_token_seconds_count"]
    )


def resident(process) -> int:
    tree = psutil.Process(process.pid)
    return sum(p.memory_info().rss for p in [tree, *tree.children(recursive=True)])


def test_soak(routing_server):
    process = routing_server.process
    soak = Soak(routing_server.url)
    before = soak.metrics()
    soak.run(SECONDS / 2)
    for _ in range(3):  # what is allocated once may be so late; a leak goes on
        half = resident(process)
        soak.run(SECONDS / 2)
        grown = resident(process) - half
        print(dict(soak.done), f"grown by {grown / 2**20:.1f} MiB")
        if grown < LEAK:
            break
    after = soak.metrics()
    assert process.poll() is None
    assert grown < LEAK
    assert after["kv_cache_usage_perc"] == 0

    found = after.copy()
    found.subtract(before)
    of_depths = {d: found["utio_decode_tokens_total", f"{d}"] for d in CUTOFFS}
    assert all(of_depths.values())
    assert sum(of_depths.values()) == found["utio_decode_tokens_total"]
    layers = sum(depth * count for depth, count in of_depths.items())
    assert layers == found["utio_layers_total"]
    # What was computed for a client that had hung up was not served.
    unserved = found["utio_decode_tokens_total"] - decoded(found)
    assert 0 <= unserved <= 2 * STEPS_AFTER_ABORT * soak.done["abort"]
    assert found["utio_routed_steps_total"] and found["utio_fallback_steps_total"]
    assert 0 < found["utio_audited_tokens_total"] < of_depths[2] + of_depths[4]
    agreeing = found["utio_audit_agreeing_tokens_total"]
    assert 0 < agreeing <= found["utio_audited_tokens_total"]

    # With nobody hanging up they add up to the token.
    soak.run(3, polite=True)
    last = soak.metrics()
    last.subtract(after)
    assert last["utio_decode_tokens_total"] == decoded(last) > 0
