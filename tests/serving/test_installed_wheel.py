# SPDX-License-Identifier: Apache-2.0
"""The built wheel, installed where nothing else of this project is."""

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import runners
from scoring import FLOAT32_TOLERANCE, random_ids
from tiny_models import CONFIGS

DIST = Path(__file__).parents[2] / "dist"
PROGRAM = """
import json, sys

def main():
    import vllm
    from vllm import LLM, SamplingParams, TokensPrompt

    job = json.load(open("job.json"))
    llm = LLM(
        model=job["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=2**26,
    )
    ids = job["ids"]
    prompt = TokensPrompt(prompt_token_ids=ids, target_token_ids=ids[1:])
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=0))
    answer = {
        "file": vllm.__file__,
        "logprobs": output.target_logprobs.logprobs[:, 0].tolist(),
    }
    json.dump(answer, open("answer.json", "w"))
    # Or the thread that waits for the engine's outputs lives on into the
    # interpreter's end, which has aborted the process once in many runs.
    llm.llm_engine.engine_core.shutdown()

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def wheel() -> Path:
    wheels = sorted(DIST.glob("vllm-*.cpu-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        pytest.skip("no wheel in dist/, ./build.sh makes one")
    return wheels[-1]


def test_scores_in_an_environment_without_the_project(
    wheel, tmp_path, model_folder, oracle
):
    """What the wheel depends on is lent from this environment; the wheel's own files
    come from the new one alone."""
    ids = random_ids(1, CONFIGS["llama"].vocab_size, 40)
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    command += ["--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run(command, check=True)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lent |= {path for path in sys.path if path.endswith("site-packages")}
    (packages / "lent.pth").write_text("\n".join(sorted(lent)) + "\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    job = {"model": str(model_folder("llama")), "ids": ids}
    (tmp_path / "job.json").write_text(json.dumps(job))

    environment = runners.environment("v1")
    environment.pop("PYTHONPATH")
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    environment["PYTHONFAULTHANDLER"] = "1"
    command = [str(python), "program.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert Path(answer["file"]).is_relative_to(packages)
    expected = oracle("llama").scores(ids, ids[1:]).logprobs[:, 0]
    assert answer["logprobs"] == pytest.approx(expected, abs=FLOAT32_TOLERANCE)
