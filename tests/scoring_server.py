# SPDX-License-Identifier: Apache-2.0
"""Short words for the tests of a server that scores."""

import base64
import io
import json
import re
from types import SimpleNamespace

import forks
import numpy as np
import requests
from oracle import pad_targets
from scoring import assert_scores
from tiny_models import CONFIGS

MODEL = "tiny"
VOCABULARY = CONFIGS["llama"].vocab_size
MAX_MODEL_LEN = 256
MAX_LOGPROBS = 20  # vLLM's default
COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
OPTIONS = {
    "served-model-name": MODEL,
    "host": "127.0.0.1",
    "dtype": "float32",
    "max-model-len": MAX_MODEL_LEN,
    "max-num-seqs": 8,
    "max-num-batched-tokens": 64,  # prompts longer than that come in chunks
    "kv-cache-memory-bytes": 64 * 2**20,
    "seed": 0,
}
REQUEST_SECONDS = 120
"""A machine may have other work."""


class Server:
    """A started `vllm serve`."""

    def __init__(self, process: forks.Process, port: int):
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    def post(self, path: str, body: dict | list | bytes) -> requests.Response:
        """The answer to a body; NaN and infinities are written as Python does."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        return requests.post(
            self.url + path, data, headers=headers, timeout=REQUEST_SECONDS
        )

    def ask(self, path: str = COMPLETIONS, **fields) -> dict:
        """The body of a 200."""
        response = self.post(path, {"model": MODEL} | fields)
        assert response.status_code == 200, response.text
        return response.json()

    def refusal(self, path: str, body: dict | bytes) -> dict:
        """The error of a 400."""
        response = self.post(path, body)
        assert response.status_code == 400, (response.status_code, response.text)
        assert len(response.text) < 10_000
        return response.json()["error"]

    def gauges(self) -> dict[str, float]:
        """How many requests the engine says are running and waiting."""
        text = requests.get(self.url + "/metrics", timeout=REQUEST_SECONDS).text
        found = re.findall(
            r"^vllm:num_requests_(running|waiting){.*} (\S+)$", text, re.M
        )
        assert {name for name, _ in found} == {"running", "waiting"}
        return {name: float(value) for name, value in found}


def decode(field: str, value) -> np.ndarray:
    """An array of `target_logprobs`, from lists with null or from base64 npy."""
    if isinstance(value, str):
        return np.load(io.BytesIO(base64.b64decode(value)))
    if field in ("token_ids", "ranks"):
        return np.array(value, dtype=np.int32)
    missing = -np.inf if field == "logprobs" else np.nan
    array = np.array(value, dtype=object)
    array[array == None] = missing  # noqa: E711
    return array.astype(np.float32)


def assert_choice(
    choice: dict, oracle, prompt: list[int], targets, others: tuple[str, ...] = ()
) -> None:
    """Asserts that a choice holds exactly the targets' scores, and `others`."""
    body = choice["target_logprobs"]
    fields = ("token_ids", "logprobs", "ranks", "entropy")
    assert set(body) == {"start", *fields, *others}
    arrays = {field: decode(field, body[field]) for field in fields}
    np.testing.assert_array_equal(arrays.pop("token_ids"), pad_targets(targets))
    scores = SimpleNamespace(start=body["start"], **arrays)
    assert_scores(scores, oracle, prompt, targets)
