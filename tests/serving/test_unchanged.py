# SPDX-License-Identifier: Apache-2.0
"""Without a scoring request, the fork generates what upstream generates."""

import json
import subprocess
import sys
from pathlib import Path

import runners
from conftest import engine_options
from release import upstream  # noqa: F401
from scoring import random_ids
from tiny_models import CONFIGS

PROGRAM = """
import json, sys

def main():
    import vllm
    from vllm import LLM, SamplingParams, TokensPrompt

    job = json.load(open(sys.argv[1]))
    llm = LLM(model=job["model"], **job["options"])
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in job["prompts"]]
    sampling = SamplingParams(**job["sampling"])
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    answer = {
        "file": vllm.__file__,
        "token_ids": [list(o.outputs[0].token_ids) for o in outputs],
        "logprobs": [
            [[[i, x.logprob, x.rank, x.decoded_token] for i, x in entry.items()]
             for entry in o.outputs[0].logprobs]
            for o in outputs
        ],
    }
    json.dump(answer, open(sys.argv[2], "w"))

if __name__ == "__main__":
    main()
"""


def test_greedy_tokens_and_logprobs(runner, upstream, model_folder, tmp_path):
    job = {
        "model": str(model_folder("llama")),
        "options": engine_options() | {"max_num_batched_tokens": 64},
        "prompts": [
            random_ids(n, CONFIGS["llama"].vocab_size, 5 + 20 * n) for n in range(6)
        ],
        "sampling": {
            "max_tokens": 8,
            "temperature": 0.0,
            "logprobs": 5,
            "ignore_eos": True,
        },
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    (tmp_path / "program.py").write_text(PROGRAM)
    answers = []
    for name, paths in (("fork", []), ("upstream", [upstream])):
        environment = runners.environment(runner, paths)
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        command = [sys.executable, "program.py", "job.json", f"{name}.json"]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True)
        answers.append(json.loads((tmp_path / f"{name}.json").read_text()))
    fork, upstreams = answers
    assert Path(upstreams.pop("file")).is_relative_to(upstream)
    assert not Path(fork.pop("file")).is_relative_to(upstream)
    assert fork == upstreams
