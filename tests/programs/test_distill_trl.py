# SPDX-License-Identifier: Apache-2.0
"""TRL as it is, with a teacher that this fork serves, against Transformers in float32."""

import asyncio
import os
import queue
import re
from pathlib import Path

import forks
import numpy as np
import pytest
from live_server import live_server
from oracle import log_softmax
from scoring import LOGIT_ERROR, random_ids
from tiny_models import CONFIGS

trl = pytest.importorskip("trl")

ROOT = Path(__file__).parents[2]
VOCABULARY = CONFIGS["llama"].vocab_size
TOP_K = 100
TEMPERATURES = [1.0, 0.7, 2.0]
OPTIONS = ["--enforce-eager", f"--max-logprobs={TOP_K}", "--prompt-logprobs-at-temperature"]
SEQUENCES = [random_ids(seed, VOCABULARY, 20 + 30 * seed) for seed in range(4)]
PROMPT_LENGTHS = [1, 7, 40, 3]


@pytest.fixture(scope="module")
def teacher(runner, model_folder, tmp_path_factory):
    """The address of a server of the tiny Llama."""
    options = [*OPTIONS, "--dtype=float32", "--max-model-len=256"]
    options += ["--kv-cache-memory-bytes=67108864", "--max-num-batched-tokens=64"]
    log = tmp_path_factory.mktemp("teacher") / "log"
    with live_server(model_folder("llama"), options, runner, log) as (_, port):
        yield f"http://127.0.0.1:{port}"


def assert_top(ids, logprobs, expected: np.ndarray, temperature: float) -> None:
    """Asserts that these are the most probable tokens of a row, best first."""
    tolerance = 4 * LOGIT_ERROR / min(temperature, 1)
    assert len(set(ids)) == len(ids)
    np.testing.assert_allclose(logprobs, expected[ids], atol=tolerance)
    best = np.sort(expected)[::-1][: len(ids)]
    np.testing.assert_allclose(logprobs, best, atol=tolerance)


@pytest.mark.filterwarnings("ignore:TRL currently supports")
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("chunk_size", [0, 1])
def test_client(teacher, llama, temperature, chunk_size):
    from trl.generation.vllm_client import VLLMClient

    said = VLLMClient(teacher).get_sequence_logprobs(
        SEQUENCES, PROMPT_LENGTHS, TOP_K, temperature, chunk_size
    )
    outside = 0
    for number, (sequence, begin) in enumerate(zip(SEQUENCES, PROMPT_LENGTHS)):
        expected = log_softmax(llama.logits(sequence) / temperature)
        ids, logprobs, own = (
            said[key][number]
            for key in ("logprob_token_ids", "logprobs", "actual_logprobs")
        )
        assert len(ids) == len(own) == len(sequence) - begin
        for row in range(len(ids)):
            truth = expected[begin + row - 1]
            assert len(ids[row]) == TOP_K
            assert_top(ids[row], logprobs[row], truth, temperature)
            # TRL looks for the token itself among all that the server says of it.
            token = sequence[begin + row]
            assert own[row] == pytest.approx([truth[token]], abs=8 * LOGIT_ERROR)
            outside += token not in ids[row]
    assert outside


@pytest.mark.filterwarnings("ignore:TRL currently supports", "ignore:.*trl.experimental")
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_asynchronous_distillation(teacher, llama, temperature):
    """What its worker asks for: one sequence, its 8 most probable tokens and its own."""
    import aiohttp
    from trl.experimental.async_distillation import async_rollout_worker

    sequence, begin = SEQUENCES[3], PROMPT_LENGTHS[3]
    nothing = dict.fromkeys(
        ["model_version_value", "heartbeat_value", "failed_event", "exception_info_queue",
         "metrics_queue", "processing_class"]
    )  # fmt: skip
    loop = async_rollout_worker._AsyncRolloutLoop(
        model_name="student", dataset=[], eos_token_ids=[], rollout_buffer=queue.Queue(),
        teacher_server_urls={"default": teacher}, teacher_temperature=temperature,
        **nothing,
    )  # fmt: skip

    async def ask():
        async with aiohttp.ClientSession() as loop.session:
            models = await loop._get(teacher, "/v1/models", 60)
            name = models["data"][0]["id"]
            return await loop._score_with_teacher(
                sequence[:begin], sequence[begin:], teacher, name
            )

    rows = [*zip(*asyncio.run(ask()), strict=True)]
    expected = log_softmax(llama.logits(sequence) / temperature)
    assert len(rows) == len(sequence) - begin
    for position, (ids, logprobs) in enumerate(rows, start=begin):
        truth = expected[position - 1]
        assert_top(ids[:8], logprobs[:8], truth, temperature)
        assert {sequence[position], *ids[:8]} == {*ids}
        np.testing.assert_allclose(logprobs, truth[ids], atol=8 * LOGIT_ERROR)


def test_the_student_learns(tmp_path):
    options = [*OPTIONS, "--kv-cache-memory-bytes=268435456"]
    model = ROOT / "examples" / "reference_model" / "model"
    with live_server(model, options, "v1", tmp_path / "log") as (_, port):
        command = [str(ROOT / "examples" / "distill_trl.py")]
        command += ["--teacher", f"http://127.0.0.1:{port}", "--steps=8", "--batch=16"]
        command += ["--output", str(tmp_path / "student")]
        command += ["--plot", str(tmp_path / "loss.png")]
        done = forks.run(command, os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = map(float, re.findall(r"([\d.]+)(?: nats a token before| after)",
                                          done.stdout))  # fmt: skip
    assert after < 0.85 * before
    assert (tmp_path / "loss.png").stat().st_size
    assert (tmp_path / "student" / "model.safetensors").exists()
