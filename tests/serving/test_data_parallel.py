# SPDX-License-Identifier: Apache-2.0
"""Two engines behind one server (`--data-parallel-size 2`): each scores and decodes to a
depth as one alone does."""

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import requests
from live_server import live_server
from scoring import random_ids
from scoring_server import OPTIONS, Server, assert_choice
from tiny_models import CONFIGS

pytestmark = pytest.mark.any_runner  # what differs is in front of the runners
VOCABULARY = CONFIGS["deep_llama"].vocab_size
REQUESTS, DECODED = 24, 6
CUTOFFS = (2, 4, 6)


@pytest.fixture(scope="module")
def server(runner, model_folder, tmp_path_factory):
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    options += ["--enforce-eager", "--data-parallel-size=2", "--enable-utio"]
    options += ["--utio-bucket-cutoffs=2,4", "--utio-min-batch-size=1000"]
    log = tmp_path_factory.mktemp("dp") / "log"
    model = model_folder("deep_llama")
    with live_server(model, options, runner, log) as started:
        yield Server(*started)


def of_each_engine(server: Server, name: str) -> dict[str, float]:
    page = requests.get(server.url + "/metrics", timeout=60).text
    rows = re.findall(rf'^vllm:{name}\{{.*engine="(\d)".*\}} (\S+)$', page, re.M)
    return {engine: float(value) for engine, value in rows}


def test_scores_and_depths_are_those_of_one_engine(server, oracle, depth_oracle):
    prompts = [random_ids(n, VOCABULARY, 20 + 5 * n) for n in range(REQUESTS)]

    def ask(n: int) -> tuple[dict, list[int]]:
        scored = server.ask(prompt=prompts[n], target_token_ids=prompts[n][1:], max_tokens=0)
        decoded = server.ask(
            prompt=prompts[n], max_tokens=DECODED, temperature=0, ignore_eos=True,
            max_depth=CUTOFFS[n % 3], return_token_ids=True,
        )  # fmt: skip
        return scored["choices"][0], decoded["choices"][0]["token_ids"]

    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(ask, range(REQUESTS))]
    deep, whole = depth_oracle("deep_llama"), oracle("deep_llama")
    for n, (choice, tokens) in enumerate(answers):
        assert_choice(choice, whole, prompts[n], prompts[n][1:])
        logits = deep.logits(prompts[n], tokens, [CUTOFFS[n % 3]] * DECODED)
        best = np.sort(logits, axis=-1)[:, -1]
        chosen = logits[np.arange(DECODED), tokens]
        np.testing.assert_allclose(chosen, best, atol=1e-4)
    done = of_each_engine(server, "request_success_total")
    rows = of_each_engine(server, "scoring_rows_total")
    assert len(done) == len(rows) == 2 and all(rows.values()), (done, rows)
    assert sum(rows.values()) == sum(len(prompt) - 1 for prompt in prompts)
