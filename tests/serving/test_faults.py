# SPDX-License-Identifier: Apache-2.0
"""An engine or a worker that is killed in the middle: clients hear of it at once, the
server ends, and nothing of it stays behind.

The fork adds state to scoring and to decoding; this is upstream's behaviour, kept.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import requests
from live_server import live_server
from scoring_server import COMPLETIONS, MODEL, OPTIONS, REQUEST_SECONDS
from waiting import until

pytestmark = pytest.mark.any_runner  # what ends is a process, whatever runs in it

ENDED = "ended"
AT_ONCE = 30
"""Seconds on a busy machine; an engine that is waited for takes `REQUEST_SECONDS`."""
CUTOFFS = [2, 4]


def post(url: str, body: dict) -> int | str:
    """The status of the answer; `ENDED` if the connection ends without one."""
    try:
        answer = requests.post(url, json=body, timeout=REQUEST_SECONDS)
        answer.content  # noqa: B018  a stream is read to its end
    except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
        return ENDED
    if body.get("stream"):
        return ENDED if "[DONE]" not in answer.text or "error" in answer.text else 200
    return answer.status_code


def bodies(seed: int) -> list[dict]:
    """Requests that keep an engine busy for long: scores, routed tokens, a stream."""
    prompt = [5 + (seed + n) % 90 for n in range(200)]
    scored = {"target_token_ids": [[n] for n in prompt[1:]], "max_tokens": 0}
    decoded = {"max_tokens": 50, "n": 8, "temperature": 1.0, "ignore_eos": True}
    return [
        {"model": MODEL, "prompt": [prompt] * 50} | scored | {"target_token_ids": [
            scored["target_token_ids"]] * 50},
        {"model": MODEL, "prompt": [prompt[:100]] * 50} | decoded,
        {"model": MODEL, "prompt": prompt[:100], "stream": True} | decoded,
    ]  # fmt: skip


@pytest.mark.parametrize("parallel", [1, 2], ids=["engine", "worker"])
def test_a_killed_process_is_heard_of_at_once(runner, model_folder, tmp_path, parallel):
    cores = sorted(os.sched_getaffinity(0))[:parallel]
    if len(cores) < parallel:
        pytest.skip("two processes want two cores")
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    options += ["--enforce-eager", f"--tensor-parallel-size={parallel}", "--enable-utio"]
    options += ["--utio-min-batch-size=1", "--no-utio-gate"]
    options += [f"--utio-bucket-cutoffs={','.join(map(str, CUTOFFS))}"]
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores))}
    environ["SPAWN_ENGINES"] = "1"  # as for who serves on a CPU
    with live_server(
        model_folder("deep_llama"), options, runner, tmp_path / "log", environ, False
    ) as (process, port):
        url = f"http://127.0.0.1:{port}"
        assert post(url + COMPLETIONS, bodies(0)[1] | {"prompt": [5], "n": 1}) == 200
        family = psutil.Process(process.pid).children(recursive=True)
        name = "VLLM::EngineCore" if parallel == 1 else "VLLM::Worker"
        victim = [child for child in family if child.name().startswith(name)][-1]
        asked = [body for seed in range(4) for body in bodies(seed)]
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = [pool.submit(post, url + COMPLETIONS, body) for body in asked]

            def busy() -> bool:
                text = requests.get(url + "/metrics", timeout=REQUEST_SECONDS).text
                lines = [x for x in text.splitlines() if "num_requests_running{" in x]
                return any(float(line.split()[-1]) > 4 for line in lines)

            until(busy, REQUEST_SECONDS)
            victim.kill()
            killed = time.monotonic()
            # A health check is answered with a failure, or not at all.
            assert psutil.wait_procs([victim], AT_ONCE)[0]
            heard = [answer.result() for answer in answers]
            assert time.monotonic() - killed < AT_ONCE
        for body, said in zip(asked, heard):
            # What was scored before may be on its way to its client.
            answered = {200} if "target_token_ids" in body else set()
            assert said in {500, 503, ENDED} | answered, heard
        process.wait(AT_ONCE)
        assert not psutil.wait_procs(family, AT_ONCE)[1]
