# SPDX-License-Identifier: Apache-2.0
"""`examples/score_perplexity.py` from end to end, against Hugging Face float32."""

import json
import math
from pathlib import Path

import forks
import pytest
import runners
from oracle import Oracle

SCRIPT = Path(__file__).parents[2] / "examples" / "score_perplexity.py"
SOURCE = Path(__file__).read_text()
TEXTS = ["x", SOURCE[:700], SOURCE[700:2700]]
"""Three files: one of a single token, of which nothing can be scored."""
CONTEXT, STRIDE = 96, 40
LIMIT = 600  # tokens, in the third text
RELATIVE = 1e-6
"""Agreement of two float32 perplexities. The relative error of a perplexity is the
absolute one of the mean log-probability. Single ones are off by about 2e-6 at random
(`scoring.LOGIT_ERROR` is the most), so the mean of six hundred by about 8e-8."""


def mean_nll(oracle: Oracle, texts: list[list[int]]) -> tuple[float, int]:
    """Strided perplexity as Hugging Face documents it, in nats a token, and the
    number of tokens."""
    total, count = 0.0, 0
    for ids in texts:
        previous_end = 0
        for begin in range(0, len(ids), STRIDE):
            end = min(begin + CONTEXT, len(ids))
            first = max(previous_end, begin + 1)
            if end > first:
                scores = oracle.scores(ids[begin:end], ids[first:end])
                total -= scores.logprobs.sum()
                count += end - first
            previous_end = end
            if end == len(ids):
                break
    return total / count, count


@pytest.fixture(scope="module")
def result(runner, model_folder, tmp_path_factory) -> tuple[dict, str]:
    """Report and terminal output of one run with every path."""
    folder = tmp_path_factory.mktemp("perplexity")
    files = [folder / f"{n}.txt" for n in range(len(TEXTS))]
    for file, text in zip(files, TEXTS):
        file.write_text(text)
    report = folder / "report.json"
    command = [str(SCRIPT), "--model", str(model_folder("llama"))]
    command += ["--text", *map(str, files), "--limit-tokens", str(LIMIT)]
    command += ["--context-length", str(CONTEXT), "--stride", str(STRIDE)]
    command += ["--dtype", "float32", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(64 * 2**20)]
    command += ["--baseline", "prompt_logprobs", "--baseline-full-positions", "20"]
    command += ["--json", str(report)]
    environment = runners.environment(runner) | {"COLUMNS": "120"}
    if runner == "v2":  # on one of them the engine is in a process of its own
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    done = forks.run(command, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(report.read_text()), done.stdout


@pytest.fixture(scope="module")
def texts(model_folder) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder("llama"))
    one, first, second = (tokenizer(text)["input_ids"] for text in TEXTS)
    whole = 1 + len(first)
    assert len(one) == 1 and whole < LIMIT < whole + len(second)
    return [one, first, second[: LIMIT - whole]]


def test_both_paths_give_hugging_faces_perplexity(result, oracle, texts):
    mean, count = mean_nll(oracle("llama"), texts)
    report, _ = result
    assert report["scored_tokens"] == count == LIMIT - len(texts)
    assert report["unscored_tokens"] == len(texts)
    assert [row["path"] for row in report["paths"]] == [
        "target_token_ids",
        "prompt_logprobs=0",
    ]
    for row in report["paths"]:
        assert row["perplexity"] == pytest.approx(math.exp(mean), rel=RELATIVE)


def test_the_full_vocabulary_agrees_on_few_positions(result, oracle, texts):
    expected = oracle("llama").scores(texts[1][:21], texts[1][1:21])
    few = result[0]["few_positions"]
    assert few["scored_tokens"] == 20
    assert len(few["paths"]) == 3
    for row in few["paths"]:
        mean = -expected.logprobs.mean()
        assert row["nats_per_token"] == pytest.approx(mean, rel=RELATIVE)


def test_bits_per_byte_count_the_scored_text(result, oracle, texts, model_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder("llama"))
    size = sum(len(tokenizer.decode(ids[1:]).encode()) for ids in texts)
    mean, count = mean_nll(oracle("llama"), texts)
    row = result[0]["paths"][0]
    assert row["bits_per_byte"] == pytest.approx(
        mean * count / math.log(2) / size, rel=RELATIVE
    )


def test_the_terminal_shows_the_comparison(result):
    report, output = result
    for row in report["paths"] + report["few_positions"]["paths"]:
        assert row["path"] in output
        assert f"{row['perplexity']:.4f}" in output
    assert f"{report['scored_tokens']} tokens scored" in output
