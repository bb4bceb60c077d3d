# SPDX-License-Identifier: Apache-2.0
"""`examples/applications/icm` from end to end against a live server of the reference
model, which is killed and started again in the middle of a run."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import forks
import httpx
import numpy as np
import ports
import pytest
import runners
from waiting import until

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "applications" / "icm"
sys.path[:0] = [str(FOLDER), str(ROOT / "examples")]

import icm
import testbeds
from oracle import Oracle
from prompts import Prompt, Prompts, Usage, in_one_order
from scorer import Scorer
from search import normalize

POOL, ITERATIONS = 24, 24
CACHE_POOL = 48  # for the cache: longer prompts, of which a block is a small part
BLOCK = 32  # tokens of a cache block, by the configuration
KILL_AFTER = 8  # iterations
START_SECONDS = 600
SCORE_ERROR = 2e-4
"""Nats between two float32 log-probabilities of the reference model: the bound of
`scoring.LOGIT_ERROR` for a deeper and wider model."""


class Server:
    """A `vllm serve` that can be killed and started again on the same port."""

    def __init__(self, log: Path):
        self._reserved = ports.reserve()
        self.port = ports.number(self._reserved)
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.process: forks.Process | None = None

    def start(self) -> None:
        command = ["vllm", "serve", "--config", str(FOLDER / "configs" / "reference.yaml")]
        command += [f"--port={self.port}", f"--kv-cache-memory-bytes={256 * 2**20}"]
        self.process = forks.Process(command, runners.environment("v1"), self.log, ROOT)

    def wait(self) -> None:
        def answers() -> bool:
            assert self.process and self.process.poll() is None, self.tail()
            try:
                return httpx.get(self.url + "/health", timeout=10).is_success
            except httpx.TransportError:
                return False

        until(answers, START_SECONDS, self.tail)

    def kill(self) -> None:
        """Without a chance to finish anything; its engine process goes with it."""
        assert self.process
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()

    def tail(self) -> str:
        return self.log.read_text()[-4000:]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("serve") / "log")
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def settings(server: Server, output: Path) -> icm.Settings:
    return icm.Settings(
        base_url=server.url,
        pool_size=POOL,
        iterations=ITERATIONS,
        output=output,
        compare=1,
    )


def saved(output: Path) -> dict:
    """What the journal says; of a line that is being written nothing is read."""
    text = (output / icm.JOURNAL).read_text()
    _, *lines = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
    fields: dict = {}
    for line in lines:
        fields |= line
    steps = [line for line in lines if "step" in line]
    fields["history"] = [line["step"] for line in steps]
    return {"state": fields, "usage": [line["usage"] for line in steps]}


@pytest.fixture(scope="module")
def whole(server, tmp_path_factory) -> tuple[dict, Path]:
    """Report and folder of a run that nothing disturbs."""
    output = tmp_path_factory.mktemp("whole")
    return icm.run(settings(server, output)), output


def test_the_scores_are_hugging_faces(server, whole):
    _, output = whole
    state = saved(output)["state"]
    labels, scores = dict(state["labels"]), np.array(state["scores"])
    testbed = testbeds.load("vllm-types", None, POOL, 0, None)
    examples = testbed.pool(POOL, 0)
    oracle = Oracle(ROOT / "examples" / "reference_model" / "model")
    with Scorer(server.url) as client:
        prompts = Prompts(client, examples, testbed.labels)
        ids = [label[0] for label in prompts.labels]
        for prompt in prompts.of(labels)[::5]:
            tokens = [*prompt.whole, ids[0]]
            expected = normalize(oracle.scores(tokens, [ids]).logprobs[0])
            got = scores[prompt.example]
            assert np.abs(got - expected).max() < SCORE_ERROR


def test_one_call_for_all_prompts(whole):
    """As many calls as labels that changed, but for fixes of several rounds."""
    report, output = whole
    steps = saved(output)["state"]["history"]
    assert sum(step[2] for step in steps) == report["proposals"] > 0
    assert report["usage"]["prompts"] >= POOL * report["usage"]["calls"] > 0
    assert report["compare"]["calls"] == {
        "one call": 1,
        "N calls": POOL,
        "N calls, 32 at once": POOL,
        "N calls, one order, top log-probs": POOL,
    }


def first_seen(prompts: list[Prompt], seen: set[tuple[int, ...]]) -> int:
    """Tokens that a cache without blocks would have to compute, and then has."""
    before = len(seen)
    for prompt in prompts:
        seen.update(tuple(prompt.whole[:n]) for n in range(1, len(prompt.whole) + 1))
    return len(seen) - before


def counters(server: Server) -> dict[str, float]:
    """The server's own count of tokens, over all requests."""
    text = httpx.get(server.url + "/metrics").text
    found = re.findall(r"^vllm:prefix_cache_(\w+)_total{.*} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_demonstrations_come_from_the_cache(server):
    """All but what the order predicts and a block a prompt, at first, with a further
    label, and with a changed one. Demonstrations in one order could not do that."""
    testbed = testbeds.load("vllm-types", None, CACHE_POOL, 0, None)
    examples = testbed.pool(CACHE_POOL, 0)
    whole = {i: example.truth for i, example in enumerate(examples)}
    most = CACHE_POOL - 1
    labellings = [{i: whole[i] for i in range(most)}, whole, whole | {3: 1 - whole[3]}]
    seen: set[tuple[int, ...]] = set()
    with Scorer(server.url) as client:
        header = f"# {uuid.uuid4()}\n"  # nothing of it is cached
        prompts = Prompts(client, examples, testbed.labels, header)
        assert prompts.slots == CACHE_POOL and prompts.block_size == BLOCK
        for labels in labellings:
            asked = prompts.of(labels)
            bound = first_seen(asked, seen) + (BLOCK + 1) * len(asked)  # 1: the label
            prompts.usage = Usage()
            before = counters(server)
            prompts.evaluate([labels])
            after = counters(server)
            usage = prompts.usage
            # A prompt's last token is only scored, so it is not looked up.
            queries = after["queries"] - before["queries"]
            assert usage.tokens - usage.prompts == queries
            assert usage.cached_tokens == after["hits"] - before["hits"]
            assert usage.tokens - usage.cached_tokens <= bound
            if labels == labellings[0]:
                usual = first_seen(prompts.of(labels, in_one_order), set())
                assert usual > 1.5 * bound


def test_a_server_that_is_killed_in_the_middle(server, whole, tmp_path):
    """Waits for the next one and goes on: the same labels by the same iterations."""
    done = threading.Event()

    def kill_and_restart() -> None:
        journal = tmp_path / icm.JOURNAL

        def is_underway() -> bool:
            lines = journal.read_bytes().count(b"\n") if journal.exists() else 0
            return lines >= 2 + KILL_AFTER  # the header and the beginning are two

        until(lambda: done.is_set() or is_underway(), START_SECONDS)
        if not done.is_set():
            server.kill()
            server.start()

    killer = threading.Thread(target=kill_and_restart)
    killer.start()
    try:
        report = icm.run(settings(server, tmp_path))
    finally:
        done.set()
        killer.join()
    assert report["retries"] > 0
    ours, theirs = saved(tmp_path)["state"], saved(whole[1])["state"]
    assert ours["labels"] == theirs["labels"]
    for name in ("random_words", "random_place", "random_gauss"):
        assert ours[name] == theirs[name]
    np.testing.assert_allclose(ours["scores"], theirs["scores"], atol=SCORE_ERROR)
    # Iteration, example, proposed, accepted: each iteration once.
    decisions = [[step[:4] for step in s["history"]] for s in (ours, theirs)]
    assert decisions[0] == decisions[1]
    assert [step[0] for step in decisions[0]] == [*range(1, ITERATIONS + 1)]
    # Calls and prompts of each iteration.
    costs = [[cost[:2] for cost in saved(f)["usage"]] for f in (tmp_path, whole[1])]
    assert costs[0] == costs[1]


def test_two_clients_at_once(server):
    testbed = testbeds.load("vllm-types", None, POOL, 0, None)
    results: dict[int, list[np.ndarray]] = {}

    def work(seed: int) -> None:
        with Scorer(server.url) as client:
            examples = testbed.pool(POOL, seed)
            prompts = Prompts(client, examples, testbed.labels)
            truth = {i: example.truth for i, example in enumerate(examples)}
            results[seed] = prompts.evaluate([truth]) + prompts.evaluate([truth])

    work(1)
    alone = results.pop(1)
    threads = [threading.Thread(target=work, args=[seed]) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(results) == {1, 2}
    for table in results[1]:
        np.testing.assert_allclose(table, alone[0], atol=SCORE_ERROR)


def test_verify_server(server):
    command = [sys.executable, FOLDER / "verify_server.py", "--base-url", server.url]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") == 7 and "✗" not in done.stdout


def test_the_command_line(server, tmp_path):
    command = [sys.executable, FOLDER / "icm.py", "--base-url", server.url]
    command += ["--pool-size", "6", "--iterations", "2", "--seeds", "2"]
    command += ["--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "zero-shot" in done.stdout and "prefix cache" in done.stdout
