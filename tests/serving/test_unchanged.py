# SPDX-License-Identifier: Apache-2.0
"""Without a scoring request, the fork generates what upstream generates, and its
`prompt_logprobs` are upstream's, field by field."""

import pytest
from conftest import engine_options
from release import run_both, upstream  # noqa: F401
from scoring import random_ids
from tiny_models import CONFIGS, save_model

PROGRAM = """
import json, sys

def entries(logprobs):
    return [
        entry and [[i, x.logprob, x.rank, x.decoded_token] for i, x in entry.items()]
        for entry in logprobs
    ]

def answer(model, options, requests, generated):
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(model=model, **options)
    answers = []
    for ids, sampling in requests:
        llm.reset_prefix_cache()
        request = TokensPrompt(prompt_token_ids=ids)
        (output,) = llm.generate([request], SamplingParams(**sampling), use_tqdm=False)
        assert type(output.prompt_logprobs).__name__ == (
            "FlatLogprobs" if sampling.get("flat_logprobs") else "list"
        )
        answers.append(entries(output.prompt_logprobs))
    llm.reset_prefix_cache()
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in generated["prompts"]]
    sampling = SamplingParams(**generated["sampling"])
    outputs = [x.outputs[0] for x in llm.generate(prompts, sampling, use_tqdm=False)]
    return {
        "prompt_logprobs": answers,
        "token_ids": [list(output.token_ids) for output in outputs],
        "logprobs": [entries(output.logprobs) for output in outputs],
    }

def main():
    import vllm

    jobs = json.load(open(sys.argv[1]))
    answers = {name: answer(**job) for name, job in jobs.items()}
    json.dump({"file": vllm.__file__} | answers, open(sys.argv[2], "w"))

if __name__ == "__main__":
    main()
"""
TOLERANCE = 1e-5  # nats, between two orders of adding up a float32 row
MODES = {
    "llama": "raw_logprobs",
    "qwen2": "processed_logprobs",
    "opt": "processed_logits",
}
"""By family."""
SAMPLINGS = [
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 1},
    # It says nothing of them, in any mode.
    {"prompt_logprobs": 5, "temperature": 0.7},
    {"prompt_logprobs": 1, "temperature": 2.0},
    {"prompt_logprobs": 20, "detokenize": False},
    {"prompt_logprobs": 3, "flat_logprobs": True},
    {"prompt_logprobs": -1},
    {"prompt_logprobs": 2, "n": 2},
]
GREEDY = {"max_tokens": 8, "temperature": 0.0, "logprobs": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def both(runner, upstream, tmp_path_factory) -> tuple[dict, dict, dict]:
    """Jobs by family, and what the fork and the release answer to them."""
    folder = tmp_path_factory.mktemp("both")
    options = engine_options() | {"max_num_batched_tokens": 64, "max_logprobs": -1}
    jobs = {}
    for family, mode in MODES.items():
        vocabulary = CONFIGS[family].vocab_size
        jobs[family] = {
            "model": str(save_model(family, folder / family)),
            "options": options | {"logprobs_mode": mode},
            "requests": [
                (random_ids(i, vocabulary, length), {"max_tokens": 2} | sampling)
                for i, sampling in enumerate(SAMPLINGS)
                for length in (2, 70)
            ],
            "generated": {
                "prompts": [random_ids(n, vocabulary, 5 + 20 * n) for n in range(6)],
                "sampling": GREEDY,
            },
        }
    return jobs, *run_both(PROGRAM, jobs, runner, upstream, folder)


@pytest.mark.parametrize("family", MODES)
def test_greedy_tokens_and_logprobs(both, family):
    _, fork, release = (answers[family] for answers in both)
    for field in ("token_ids", "logprobs"):
        assert len(fork[field]) == 6
        assert fork[field] == release[field]


@pytest.mark.parametrize("family", MODES)
def test_every_field_of_prompt_logprobs(both, family):
    job, *answers = (one[family] for one in both)
    fork, release = (answer["prompt_logprobs"] for answer in answers)
    for (ids, _), ours, theirs in zip(job["requests"], fork, release, strict=True):
        assert len(ours) == len(theirs) == len(ids)
        assert not ours[0] and not theirs[0]
        for position in range(1, len(ids)):
            assert_same_entry(ours[position], theirs[position])
            assert ours[position][0][0] == ids[position]


def assert_same_entry(ours: list, theirs: list) -> None:
    """Asserts that two entries name the same tokens, in the same order unless their
    log-probabilities are equal but for rounding."""
    assert len(ours) == len(theirs)
    texts = {token: text for token, _, _, text in theirs}
    for (token, logprob, rank, text), (other, expected, best, _) in zip(ours, theirs):
        assert abs(logprob - expected) < TOLERANCE
        if token == other:
            assert text == texts[token]
        else:
            near = [i for i, value, _, _ in theirs if abs(value - logprob) < TOLERANCE]
            assert token in near or abs(theirs[-1][1] - logprob) < TOLERANCE
        # Rounding can make a tie of two that were none.
        assert abs(rank - best) <= 1
