# SPDX-License-Identifier: Apache-2.0
"""Answers a fixed set of prompts with the ``vllm`` that is imported.

The job comes as JSON on standard input, with the folders of ``models`` and the
``runner``; the answers leave as the last line of standard output. Tokens and
log-probabilities are Python numbers, which JSON keeps to the last bit.
"""

import json
import random
import sys
import time

ROUNDS = 3
"""Calls that are timed, after one that is not; all must say the same."""
LENGTHS = (5, 25, 45, 65, 85, 105)


NARROWED = {"v1": ({"top_p": 0.9}, {"top_k": 20}), "v2": ({}, {"min_p": 0.05})}
"""What the two samples are drawn from: Triton's interpreter, in which V2 runs here, fails
in the release's kernel for `top_p` and `top_k`."""


def calls(requests: list, runner: str) -> list[tuple]:
    """Prompts and parameters of each call: greedy, in chunks beside others, and seeded
    samples of prompts that one step takes whole (the release can not chunk these on a
    CPU, which is what one of the fixes is for)."""
    from vllm import SamplingParams

    common = dict(max_tokens=8, logprobs=5, ignore_eos=True)
    first, second = NARROWED[runner]
    samples = [
        SamplingParams(temperature=0.8, seed=7, **first, **common),
        SamplingParams(temperature=1.3, seed=8, n=2, **second, **common),
    ]
    return [
        (requests, SamplingParams(temperature=0.0, **common)),
        (requests[:2], samples),
    ]


def prompts(vocabulary: int) -> list:
    """Prompts of random tokens; the last two share a prefix."""
    from vllm import TokensPrompt

    choose = random.Random(0)
    ids = [[choose.randrange(2, vocabulary) for _ in range(n)] for n in LENGTHS]
    ids[-1][:64] = ids[-2][:64]
    return [TokensPrompt(prompt_token_ids=i) for i in ids]


def answer(output) -> list:
    """All that a caller reads of an output."""
    return [
        [
            list(choice.token_ids),
            choice.text,
            choice.finish_reason,
            [
                [[i, x.logprob, x.rank, x.decoded_token] for i, x in entry.items()]
                for entry in choice.logprobs
            ],
        ]
        for choice in output.outputs
    ]


def run(model: str, runner: str) -> tuple[list, float]:
    """The answers of one model, and the CPU seconds of a call."""
    from vllm import LLM

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=64 * 2**20,
        seed=0,
    )
    config = llm.llm_engine.vllm_config
    assert config.use_v2_model_runner == (runner == "v2"), "the other runner"
    requests = prompts(config.model_config.get_vocab_size())
    seconds, found = [], []
    for _ in range(ROUNDS + 1):
        assert llm.reset_prefix_cache()
        begin = time.process_time()
        outputs = [
            output
            for prompts_, sampling in calls(requests, runner)
            for output in llm.generate(prompts_, sampling, use_tqdm=False)
        ]
        seconds.append(time.process_time() - begin)
        found.append([answer(output) for output in outputs])
    assert all(one == found[0] for one in found), "a second call says something else"
    return found[0], min(seconds[1:])


def main() -> None:
    job = json.load(sys.stdin)
    import vllm

    answers, total = {}, 0.0
    for model in job["models"]:
        answers[model], seconds = run(model, job["runner"])
        total += seconds
    print(json.dumps({"file": vllm.__file__, "seconds": total, "answers": answers}))


if __name__ == "__main__":
    main()
