# SPDX-License-Identifier: Apache-2.0
"""A machine without a C++ compiler, where Inductor can compile nothing for the CPU."""

import pytest
from live_server import live_server
from openai import OpenAI
from oracle import log_softmax
from scoring import FLOAT32_TOLERANCE, random_ids

pytestmark = pytest.mark.any_runner


def test_a_model_is_served(model_folder, oracle, tmp_path):
    """By default a model is compiled, and so is what ranks the tokens of `logprobs`."""
    options = ["--served-model-name=tiny", "--host=127.0.0.1", "--dtype=float32"]
    options += ["--max-model-len=64", "--kv-cache-memory-bytes=67108864"]
    environ = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "a")}
    environ |= {"VLLM_CACHE_ROOT": str(tmp_path / "b"), "VLLM_LOGGING_LEVEL": "INFO"}
    log = tmp_path / "log"
    ids = random_ids(0, 400, 10)
    with live_server(model_folder("llama"), options, "v1", log, environ) as (_, port):
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        answer = client.completions.create(
            model="tiny", prompt=ids, max_tokens=1, temperature=0, logprobs=1
        )
    assert log.read_text().count("No C++ compiler was found") == 1
    (logprob,) = answer.choices[0].logprobs.token_logprobs
    expected = log_softmax(oracle("llama").logits(ids)[-1:]).max()
    assert abs(logprob - expected) < FLOAT32_TOLERANCE
