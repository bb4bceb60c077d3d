# SPDX-License-Identifier: Apache-2.0
"""`examples/applications/dual_vllm` with two live servers on the loopback: the reference
model and its first eight layers. Between them and the coordinator is a proxy that can spoil
answers; what it passes on is the servers' own.

The servers are V1's. Nothing here depends on the model runner.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Self

import numpy as np
import psutil
import pytest
import runners
from aiohttp import ClientSession, web
from waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "applications"), str(EXAMPLES)]

from dual_vllm import (
    ClientError,
    CoordinatorConfig,
    DualVLLMCoordinator,
    ServerGone,
    bench,
    compare,
    launch,
)
from dual_vllm.__main__ import main
from dual_vllm.compare import HuggingFace, errors
from dual_vllm.launch import REFERENCE_MODEL, first_layers

PROGRAM = EXAMPLES / "applications" / "dual_vllm"
PROMPTS = ["import numpy as", "def main(", "# The number of", "class"]
TOKENS = 12
MAX_MODEL_LEN = 128
ARGUMENTS = [
    "--dtype=float32",
    "--enforce-eager",
    "--block-size=32",
    f"--max-model-len={MAX_MODEL_LEN}",
    "--max-num-seqs=16",
    "--kv-cache-memory-bytes=67108864",
    "--max-logprobs=400",
    "--served-model-name=llama",
]
LONG = ["--max-tokens=40"]
"""Of a command that is stopped in the middle: long enough not to be done before."""
KILL_AFTER = 20  # tokens
SLOW_SECONDS = 8
"""That a slow answer takes; what is tested is a client's patience, half as long."""
WAIT_SECONDS = 600
"""Far more than anything takes; a machine may have other work."""
ROUNDING = 5e-5
"""What float32 moves a total variation or a divergence by: logits of two
implementations differ by 2e-5 (`scoring.LOGIT_ERROR`), and q by twice that."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Both servers, started side by side."""
    folder = tmp_path_factory.mktemp("dual")
    part = first_layers(REFERENCE_MODEL, 8, folder / "eight-layers")
    # As some models have one, on which nothing may depend.
    file = part / "generation_config.json"
    given = json.loads(file.read_text())
    file.write_text(json.dumps(given | {"repetition_penalty": 5.0}))
    models = [str(REFERENCE_MODEL), str(part)]
    with launch.servers(models, folder, ARGUMENTS) as pair:
        pair[0].folder, pair[1].folder = models
        yield pair


def test_each_server_has_its_own_cores(servers):
    """All its processes and threads, among them vLLM's, which it binds to cores."""
    if len(os.sched_getaffinity(0)) < 2 or "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        pytest.skip("no cores to share")
    used = []
    for server in servers:
        main = psutil.Process(server.process.pid)
        processes = [main, *main.children(recursive=True)]
        assert len(processes) > 1
        threads = [thread.id for p in processes for thread in p.threads()]
        used.append(set.union(*map(os.sched_getaffinity, threads)))
    assert used[0] and used[1] and not used[0] & used[1]


class Proxy:
    """Passes requests on to a server. `spoil` is a queue of faults: each spoils one
    `POST /v1/completions`, `None` spoils none."""

    def __init__(self, url: str):
        self.target = url
        self.spoil: deque[str | None] = deque()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0)
        self.loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self.loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        self.loop.run_forever()
        self.loop.run_until_complete(runner.cleanup())

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        fault = None
        if request.path == "/v1/completions" and self.spoil:
            fault = self.spoil.popleft()
        if fault == "500":
            return web.Response(status=500, text="Internal Server Error")
        if fault == "429":
            return web.json_response({"error": {"message": "slow down"}}, status=429)
        async with (
            ClientSession() as session,
            session.request(
                request.method,
                self.target + request.path,
                data=await request.read(),
                headers={"Content-Type": request.content_type},
            ) as answer,
        ):
            content = await answer.read()
            kind = answer.content_type
        if fault == "slow":
            await asyncio.sleep(SLOW_SECONDS)
        if fault == "hang up":
            request.transport.abort()
        if fault == "half":  # the length promised is that of the whole
            response = web.StreamResponse(headers={"Content-Type": kind})
            response.content_length = len(content)
            await response.prepare(request)
            await response.write(content[: len(content) // 2])
            request.transport.close()
            return response
        if fault == "half a text":
            content = content[: len(content) // 2]
        if fault == "a choice is missing":
            body = json.loads(content)
            del body["choices"][-1]
            content = json.dumps(body).encode()
        if fault == "no scores":
            body = json.loads(content)
            for choice in body["choices"]:
                choice["target_logprobs"] = None
            content = json.dumps(body).encode()
        if fault == "no logprobs":
            body = json.loads(content)
            for choice in body["choices"]:
                choice["logprobs"] = None
            content = json.dumps(body).encode()
        if fault == "HTML":
            content, kind = b"<html>hello</html>", "text/html"
        return web.Response(
            body=content, status=answer.status, headers={"Content-Type": kind}
        )


@pytest.fixture(scope="module")
def proxy(servers):
    with Proxy(servers[1].url) as proxy:
        yield proxy


def config(servers, proxy=None, **settings) -> CoordinatorConfig:
    urls = {"url_a": servers[0].url, "url_b": proxy.url if proxy else servers[1].url}
    return CoordinatorConfig(**{"max_tokens": TOKENS, **urls, **settings})


def draw(config: CoordinatorConfig, prompts=PROMPTS, change=None):
    """Outputs of a batch, its steps, and the coordinator that drew it."""
    steps = []

    async def run():
        async with DualVLLMCoordinator(config) as dual:
            if change is not None:
                change(dual)
            outputs = await dual.generate_batch(prompts, on_steps=steps.extend)
            return outputs, steps, dual

    return asyncio.run(run())


def tokens(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(servers):
    """What is drawn when nothing goes wrong."""
    outputs, _, dual = draw(config(servers))
    assert [o.finish_reason for o in outputs] == ["length"] * len(PROMPTS)
    assert [len(o.token_ids) for o in outputs] == [TOKENS] * len(PROMPTS)
    # One round a token, one to begin with, and some guesses that were wrong.
    assert TOKENS < dual.rounds < 1.7 * TOKENS
    return outputs


@pytest.mark.parametrize("top_k", [20, 200])
def test_against_hugging_face(servers, top_k):
    """Each step against the whole vocabulary."""
    outputs, steps, _ = draw(config(servers, top_k=top_k))
    hugging_face = HuggingFace(*(server.folder for server in servers))
    right = [hugging_face.references(output) for output in outputs]
    found = [errors(step, right[step.sample][step.position]) for step in steps]
    assert len(found) == len(PROMPTS) * TOKENS
    for error in found:
        assert error.tv <= error.tv_bound + ROUNDING
        assert error.tv_candidates <= error.tv_bound + ROUNDING
        assert error.kl <= error.kl_bound + ROUNDING
        assert error.asymmetry < 1e-6
    assert np.mean([error.tv for error in found]) < 0.005
    assert np.mean([error.tv for error in found]) < 0.05 * np.mean(
        [error.tv_lists for error in found]
    )
    assert np.mean([error.ess_ratio for error in found]) == pytest.approx(1, abs=0.1)
    for step in steps:
        expected = right[step.sample][step.position].logprobs
        np.testing.assert_allclose(
            step.logprobs[:, :-1], expected[:, step.candidates], atol=1e-4
        )
        entropy = -(np.exp(expected) * expected).sum(axis=1)
        known = step.diagnostics
        np.testing.assert_allclose(
            (known.entropy_a, known.entropy_b), entropy, atol=1e-4
        )


def test_compare(servers, capsys):
    models = [server.folder for server in servers]
    settings = config(servers, max_tokens=2)
    results = asyncio.run(compare.compare(settings, models, PROMPTS[:2], [20]))
    assert [len(found) for found in results.values()] == [4]
    compare.show(results)
    assert capsys.readouterr().out.count("0 of 4") == 2


def test_bench(servers, capsys):
    text = (PROGRAM / "coordinator.py").read_text()
    settings = config(servers, max_tokens=3)
    results = asyncio.run(bench.bench(settings, text, [2], repeats=1))
    [speeds] = results.values()
    for values in speeds:
        assert len(values) == 1 and values[0] > 0
    bench.show(results)
    assert "alone" in capsys.readouterr().out


def test_more_candidates_than_the_servers_allow(servers):
    for settings in ({"top_k": 401, "max_candidates": 802}, {"max_candidates": 401}):
        with pytest.raises(ClientError, match="from 1 to 400 are allowed"):
            draw(config(servers, **settings))


def test_only_models_settings_and_seed_decide(servers, alone):
    """Not the guesses, the size of a batch, or what else runs."""

    def guess_wrong(dual):
        guess = dual._guess

        def wrong(*args):
            found = guess(*args)
            found.token = 7
            return found

        dual._guess = wrong

    outputs, _, _ = draw(config(servers, batch_size=3), change=guess_wrong)
    assert tokens(outputs) == tokens(alone)
    outputs, _, _ = draw(config(servers, seed=1))
    assert tokens(outputs) != tokens(alone)


def test_two_clients_at_once(servers, alone):
    async def run():
        duals = [DualVLLMCoordinator(config(servers)) for _ in range(2)]
        async with duals[0], duals[1]:
            return await asyncio.gather(*(d.generate_batch(PROMPTS) for d in duals))

    for outputs in asyncio.run(run()):
        assert tokens(outputs) == tokens(alone)


def test_coordinators_that_share_a_queue(servers, alone):
    async def run():
        duals = [DualVLLMCoordinator(config(servers, batch_size=1)) for _ in range(2)]
        async with duals[0], duals[1]:
            samples = [duals[0].sample(*pair) for pair in enumerate(PROMPTS)]
            queue = deque(samples)

            async def work(dual):
                return [len(steps) async for steps in dual.steps(queue)]

            counts = await asyncio.gather(*map(work, duals))
            assert all(counts)
            return [sample.output for sample in samples]

    assert tokens(asyncio.run(run())) == tokens(alone)


def test_stream(servers, alone):
    async def run():
        async with DualVLLMCoordinator(config(servers)) as dual:
            prompt = alone[0].prompt_token_ids
            return [pair async for pair in dual.stream(prompt)]

    pairs = asyncio.run(run())
    assert [step.token_id for _, step in pairs] == alone[0].token_ids
    assert "".join(text for text, _ in pairs) == alone[0].text


def test_where_a_sample_ends(servers, alone):
    """At the end-of-sequence token, with the context full; a prompt of one token
    beside longer ones."""

    def end_at(dual):
        dual.tokenizer.eos_token_id = end

    end = alone[0].token_ids[4]
    outputs, _, _ = draw(config(servers), change=end_at)
    for output, expected in zip(outputs, alone, strict=True):
        ids = expected.token_ids
        stop = ids.index(end) + 1 if end in ids else TOKENS
        assert output.token_ids == ids[:stop]
        assert output.finish_reason == ("stop" if end in ids else "length")

    long = (alone[0].prompt_token_ids * MAX_MODEL_LEN)[: MAX_MODEL_LEN - 4]
    prompts = [long, [17], long[:-3], [18]]
    settings = config(servers, ignore_eos=True, max_tokens=5, batch_size=2)
    outputs, _, _ = draw(settings, prompts)
    assert [len(o.token_ids) for o in outputs] == [3, 5, 5, 5]
    assert {o.finish_reason for o in outputs} == {"length"}
    with pytest.raises(ValueError, match="prompt 1 has 127 tokens"):
        draw(settings, [[17], [17] * 127])
    for prompt in ([], [5000], [-1]):
        with pytest.raises(ValueError, match="prompt 0"):
            draw(settings, [prompt])


FAULTS = [
    "500",
    "429",
    "half",
    "half a text",
    "a choice is missing",
    "HTML",
    "hang up",
]


def test_faults_that_pass(servers, proxy, alone):
    """Each fault once and again; the text is the same."""
    settings = config(servers, proxy)

    def spoil(_):
        for fault in FAULTS:
            proxy.spoil.extend([None, fault, fault])

    outputs, _, dual = draw(settings, change=spoil)
    assert tokens(outputs) == tokens(alone)
    assert not proxy.spoil
    assert dual.servers[1].retries == 2 * len(FAULTS)


@pytest.mark.parametrize(
    ("fault", "message"),
    [("no scores", "target_token_ids"), ("no logprobs", "no log-probabilities")],
)
def test_a_server_that_can_not(servers, proxy, fault, message):
    proxy.spoil.append(fault)
    with pytest.raises(ClientError, match=message):
        draw(config(servers, proxy))


def test_a_slow_answer(servers, proxy, alone):
    """Waited for no longer than `timeout`, and asked for again."""
    settings = config(servers, proxy, timeout=SLOW_SECONDS / 2)

    def spoil(_):
        proxy.spoil.extend([None, "slow"])

    outputs, _, dual = draw(settings, change=spoil)
    assert tokens(outputs) == tokens(alone)
    assert dual.servers[1].retries >= 1  # a busy machine may make others slow


def test_patience_ends(servers, proxy):
    proxy.spoil.extend(["500"] * 50)
    begin = time.monotonic()
    message = r"/v1/completions: no good answer for 1 s \(500: Internal"
    with pytest.raises(ServerGone, match=message):
        draw(config(servers, proxy, patience=1))
    assert time.monotonic() - begin < 20
    proxy.spoil.clear()


def test_wrong_servers(servers, model_folder):
    with pytest.raises(ServerGone, match="ClientConnectorError"):
        draw(config(servers, url_b="http://127.0.0.1:9", patience=0.5))
    with pytest.raises(ClientError, match="no address"):
        draw(config(servers, url_b="localhost", patience=0.5))
    with pytest.raises(ClientError, match=r"does not serve 'gpt', but \['llama'\]"):
        draw(config(servers, model_b="gpt"))
    with pytest.raises(ClientError, match="tokenizer 'nowhere': "):
        draw(config(servers, tokenizer="nowhere"))
    with pytest.raises(ClientError, match="server a has another vocabulary"):
        draw(config(servers, tokenizer=str(model_folder("llama"))))


def test_another_vocabulary(servers, proxy, monkeypatch):
    """Ids that mean the same, but other rules to split a text; and one other word."""

    async def run(name, change):
        dual = DualVLLMCoordinator(config(servers))
        ask = getattr(dual.servers[1], name)

        async def changed(argument):
            return change(await ask(argument))

        monkeypatch.setattr(dual.servers[1], name, changed)
        async with dual:
            pass

    with pytest.raises(ClientError, match="server b splits text"):
        asyncio.run(run("tokenize", lambda ids: ids[::-1]))
    with pytest.raises(ClientError, match="server b has another vocabulary"):
        asyncio.run(run("detokenize", lambda text: text.replace("import", "export")))


class Command:
    """`python examples/applications/dual_vllm sample` as a process."""

    def __init__(self, servers, out: Path, log: Path, *options: str):
        prompts = out.with_suffix(".prompts")
        rows = [{"prompt": prompt} for prompt in PROMPTS]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        arguments = [f"--url-a={servers[0].url}", f"--url-b={servers[1].url}"]
        arguments += [f"--prompts={prompts}", f"--out={out}", *options]
        self.log = log
        # What was started in the background ignores Ctrl-C, and so would its children.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with log.open("a") as stream:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), "sample", *arguments],
                stdout=stream,
                stderr=stream,
                env=runners.environment("v1") | {"COLUMNS": "120"},
            )
        signal.signal(signal.SIGINT, before)

    def wait_for_tokens(self, out: Path, count: int) -> None:
        def are_there() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return out.exists() and out.read_bytes().count(b"\n") > count

        until(are_there, WAIT_SECONDS, self.log.read_text)

    def wait(self) -> int:
        return self.process.wait(WAIT_SECONDS)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def whole(servers, alone, tmp_path_factory) -> dict[int, list[int]]:
    """What the command draws when nothing goes wrong."""
    out = tmp_path_factory.mktemp("whole") / "out"
    command = Command(servers, out, out.with_suffix(".log"), *LONG)
    assert command.wait() == 0, command.log.read_text()
    found = drawn(out)
    assert [found[n][:TOKENS] for n in sorted(found)] == tokens(alone)
    return found


def test_a_server_that_is_killed_in_the_middle(servers, whole, tmp_path):
    """Waited for until it is there again; nothing is lost, nothing drawn twice."""
    out = tmp_path / "out"
    command = Command(servers, out, tmp_path / "log", *LONG)
    command.wait_for_tokens(out, KILL_AFTER)
    servers[1].kill()
    before = sum(map(len, drawn(out).values()))
    servers[1].start(runners.environment("v1"))
    servers[1].wait()  # fails at once if it does not come up
    assert command.wait() == 0, command.log.read_text()
    assert KILL_AFTER <= before < sum(map(len, whole.values()))
    assert drawn(out) == whole
    repeated = re.search(r"rounds of requests, (\d+) repeated", command.log.read_text())
    assert int(repeated[1]) > 0


def test_ctrl_c(servers, whole, tmp_path):
    """The same command goes on; nothing is lost, nothing drawn twice."""
    out = tmp_path / "out"
    command = Command(servers, out, tmp_path / "log", *LONG)
    command.wait_for_tokens(out, KILL_AFTER)
    command.interrupt()
    assert command.wait() == 130, command.log.read_text()
    before = drawn(out)
    count = sum(map(len, before.values()))
    assert KILL_AFTER <= count < sum(map(len, whole.values()))
    shown = command.log.read_text()
    (line,) = [line for line in shown.splitlines() if "interrupted" in line]
    assert "the same command goes on" in line and "Traceback" not in shown
    command = Command(servers, out, tmp_path / "log-2", *LONG)
    assert command.wait() == 0, command.log.read_text()
    assert drawn(out) == whole
    assert all(whole[n][: len(ids)] == ids for n, ids in before.items())
    assert f"{count} tokens were in {out}" in command.log.read_text()


NOBODY = ["--url-a", "http://127.0.0.1:9", "--url-b", "http://127.0.0.1:9"]
"""Addresses where no server is."""


def drawn(out: Path) -> dict[int, list[int]]:
    """Tokens by sample; each position is there once. Of a line that is being written
    nothing is read."""
    text = out.read_text()
    _, *lines = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
    found: dict[int, list[int]] = {}
    for line in lines:
        ids = found.setdefault(line["sample"], [])
        assert line["position"] == len(ids)
        ids.append(line["token_id"])
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url-a", "http://127.0.0.1:9"], "--url-b"),
        (["--top-k", "0", *NOBODY], "top_k: "),
        (["--prompts", "nowhere", *NOBODY], "nowhere"),
        (
            ["--patience", "0.5", *NOBODY],
            "/v1/models: no good answer for 0.5 s (ClientConnectorError",
        ),
    ],
)
def test_errors_of_the_command(options, message, tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["dual_vllm", "sample", f"--out={tmp_path / 'out'}", *options]
    )
    with pytest.raises(SystemExit) as error:
        main()
    assert str(error.value).startswith("error: ") and message in str(error.value)


def test_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dual_vllm", "sample", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert "--tail-mass" in capsys.readouterr().out
