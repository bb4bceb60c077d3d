# SPDX-License-Identifier: Apache-2.0
"""The programs that are there to be copied do what they say."""

import os
from pathlib import Path

import forks
import numpy as np
import pytest
from live_server import live_server

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *options: str) -> list[str]:
    """Lines that a program prints; its errors must be none."""
    done = forks.run([str(EXAMPLES / name), *options], os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def text(tmp_path) -> Path:
    file = tmp_path / "text"
    file.write_text("import numpy as np\nimport torch\n\n\ndef main():\n" * 3)
    return file


def test_score_a_text(text):
    first, *_ = run("score_text.py", str(text))
    assert "perplexity" in first


@pytest.mark.parametrize("name", ["score_text.py", "teacher.py"])
@pytest.mark.parametrize("content", [None, b"\xe9t\xe9"])
def test_a_file_that_is_no_text_is_refused(name, content, tmp_path):
    file = tmp_path / "text"
    if content:
        file.write_bytes(content)
    output = [f"--output={tmp_path / 'teacher.npz'}"] * (name == "teacher.py")
    done = forks.run([str(EXAMPLES / name), str(file), *output], os.environ)
    assert done.returncode == 2
    assert f"error: {file}: " in done.stderr and "Traceback" not in done.stderr


def test_compare_labels():
    lines = run("compare_labels.py")
    assert [line.split()[3] for line in lines] == ["np", "nn"]


def test_teacher(text, tmp_path):
    output = tmp_path / "teacher.npz"
    run("teacher.py", str(text), "--output", str(output))
    said = np.load(output)
    assert said["top_token_ids"].shape == (len(said["tokens"]), 20)
    mass = np.exp(said["top_logprobs"]).sum(1) + np.exp(said["tail_logprob"])
    assert mass == pytest.approx(1, abs=1e-4)


def test_score_over_http(tmp_path):
    options = ["--served-model-name=reference", "--enforce-eager"]
    options += ["--kv-cache-memory-bytes=268435456"]
    model = EXAMPLES / "reference_model" / "model"
    with live_server(model, options, "v1", tmp_path / "log") as (_, port):
        lines = run("score_over_http.py", "--url", f"http://127.0.0.1:{port}")
    scores = {line.split("'")[1]: float(line.split()[-2]) for line in lines}
    assert scores[" np"] > scores[" numpy"]
