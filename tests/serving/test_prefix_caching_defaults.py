# SPDX-License-Identifier: Apache-2.0
"""What needs no flag: prefix caching itself, to be told how much it served, and a server
that says little as it ends."""

import logging
import os
import re
import signal

import pytest
import requests
from live_server import live_server
from openai import OpenAI
from scoring import params, prompt, random_ids, run

BLOCK = 32
PREFIX = random_ids(0, 400, 4 * BLOCK)
PROMPTS = [PREFIX + random_ids(n, 400, 10) for n in (1, 2, 3)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "opt"])
def test_on_without_a_flag(engine, family):
    """As upstream has it; here for every family of the tests."""
    llm = engine(family)
    ids = random_ids(3, 400, 200)
    cold, warm = (run(llm, [prompt(ids)], params(1))[0] for _ in range(2))
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens > 0
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(block_size=64), "on, hits are multiples of 64 tokens"),
        (dict(enable_prefix_caching=False), "off, --no-enable-prefix-caching"),
    ],
)
def test_the_line_at_start(engine, caplog, options, expected):
    import vllm  # noqa: F401  (it sets up its logging)

    caplog.set_level(logging.INFO, logger="vllm")
    # 255: an engine that no other test has started.
    engine("llama", max_model_len=255, **options)
    lines = [m for m in caplog.messages if m.startswith("Prefix caching:")]
    assert len(lines) == 1 and lines[0].startswith(f"Prefix caching: {expected}")


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    """Address, log and process of a server that is told nothing of prefix caching."""
    options = ["--served-model-name=tiny", "--host=127.0.0.1", "--dtype=float32"]
    options += ["--enforce-eager", "--max-model-len=256", f"--block-size={BLOCK}"]
    options += ["--kv-cache-memory-bytes=67108864"]
    log = tmp_path_factory.mktemp("defaults") / "log"
    info = {"VLLM_LOGGING_LEVEL": "INFO"}
    model = model_folder("llama")
    with live_server(model, options, "v1", log, info, survives=False) as (process, port):
        yield f"http://127.0.0.1:{port}", log, process


def test_a_server_reports_cached_tokens(server):
    """In its log, in `usage`, streamed or not, for all prompts together, and in its
    metrics."""
    url, log, _ = server
    assert log.read_text().count("Prefix caching: on, hits are multiples of 32") == 1
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    ask = dict(model="tiny", max_tokens=1, temperature=0)

    first = client.completions.create(prompt=PROMPTS[0], **ask)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    before = hits(url)
    batch = client.completions.create(prompt=PROMPTS, **ask)
    assert batch.usage.prompt_tokens == sum(map(len, PROMPTS))
    assert batch.usage.prompt_tokens_details.cached_tokens == 3 * len(PREFIX)
    assert hits(url) - before == 3 * len(PREFIX)
    *_, last = client.completions.create(
        prompt=PROMPTS, stream=True, stream_options={"include_usage": True}, **ask
    )
    assert last.usage.prompt_tokens_details.cached_tokens == 3 * len(PREFIX)
    scored = client.completions.create(
        prompt=PROMPTS,
        extra_body={"target_token_ids": [ids[-9:] for ids in PROMPTS]},
        **ask | {"max_tokens": 0},
    )
    assert scored.usage.prompt_tokens_details.cached_tokens == 3 * len(PREFIX)


def hits(url: str) -> float:
    text = requests.get(f"{url}/metrics", timeout=60).text
    (value,) = re.findall(r"^vllm:prefix_cache_hits_total{.*} (\S+)$", text, re.M)
    return float(value)


def test_ctrl_c_ends_in_four_lines(server):
    """As a terminal sends it: to all processes at once. Three are of the HTTP server's."""
    _, log, process = server
    before = len(log.read_text())
    os.killpg(process.pid, signal.SIGINT)
    process.wait(60)
    lines = log.read_text()[before:].splitlines()
    assert "[shutdown] API server: shutdown triggered" in lines[0]
    assert [line.split(":")[0] for line in lines[1:]] == ["INFO"] * 3
