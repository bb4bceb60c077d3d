# SPDX-License-Identifier: Apache-2.0
"""Without a scoring request, the fork generates what upstream generates."""

from conftest import engine_options
from release import run_both, upstream  # noqa: F401
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
    fork, upstreams = run_both(PROGRAM, job, runner, upstream, tmp_path)
    assert fork == upstreams
