# SPDX-License-Identifier: Apache-2.0
"""`prompt_logprobs` are upstream's, field by field, and are made as named tokens are."""

import pytest
from conftest import engine_options
from oracle import log_softmax
from release import run_both, upstream  # noqa: F401
from scoring import FLOAT32_TOLERANCE, params, prompt, random_ids, run
from tiny_models import CONFIGS, save_model

PROGRAM = """
import json, sys

def answer(model, options, requests):
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
        answers.append([
            entry and [[i, x.logprob, x.rank, x.decoded_token] for i, x in entry.items()]
            for entry in output.prompt_logprobs
        ])
    return answers

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


@pytest.fixture(scope="module")
def both(runner, upstream, tmp_path_factory) -> tuple[dict, dict, dict]:
    """Requests by family, and what the fork and the release answer to them."""
    samplings = [
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
    folder = tmp_path_factory.mktemp("both")
    options = engine_options() | {"max_num_batched_tokens": 64, "max_logprobs": -1}
    jobs = {
        family: {
            "model": str(save_model(family, folder / family)),
            "options": options | {"logprobs_mode": mode},
            "requests": [
                (
                    random_ids(i, CONFIGS[family].vocab_size, length),
                    {"max_tokens": 2} | sampling,
                )
                for i, sampling in enumerate(samplings)
                for length in (2, 70)
            ],
        }
        for family, mode in MODES.items()
    }
    requests = {family: job["requests"] for family, job in jobs.items()}
    return requests, *run_both(PROGRAM, jobs, runner, upstream, folder)


@pytest.mark.parametrize("family", MODES)
def test_every_field_is_upstreams(both, family):
    requests, fork, release = (answers[family] for answers in both)
    for (ids, _), ours, theirs in zip(requests, fork, release, strict=True):
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


def test_they_are_made_as_named_tokens_are(engine, monkeypatch):
    """Not a second time in the runner's own way, whose buffers grow."""
    llm = engine("llama")
    model_runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    scored = []
    worker = getattr(model_runner, "target_logprobs", None)
    if worker is None:
        worker = model_runner.prompt_logprobs_worker.target_logprobs
    compute = worker.compute
    monkeypatch.setattr(
        worker,
        "compute",
        lambda fn, states, chunks: (
            scored.extend(chunks := list(chunks)) or compute(fn, states, chunks)
        ),
    )
    ids = random_ids(0, CONFIGS["llama"].vocab_size, 30)
    run(llm, [prompt(ids)], params(1, prompt_logprobs=1))
    assert [(chunk.start, chunk.end) for chunk in scored][:1] == [(0, 30)]


def test_at_the_temperature_of_generation(engine, llama):
    """With the flag, where T does what a trainer means by it."""
    from vllm.exceptions import VLLMValidationError

    llm = engine("llama", prompt_logprobs_at_temperature=True, max_logprobs=-1)
    ids = random_ids(3, CONFIGS["llama"].vocab_size, 60)
    for temperature in (0.5, 1.0, 2.0):
        sampling = params(1, prompt_logprobs=5, temperature=temperature)
        (output,) = run(llm, [prompt(ids)], sampling)
        expected = log_softmax(llama.logits(ids) / temperature)
        atol = FLOAT32_TOLERANCE * max(1, 1 / temperature)
        for position, entry in enumerate(output.prompt_logprobs[1:]):
            assert ids[position + 1] in entry
            for token, found in entry.items():
                assert abs(found.logprob - expected[position, token]) < atol
    for bad in (dict(temperature=0.0), dict(temperature=0.5, prompt_logprobs=-1)):
        with pytest.raises(VLLMValidationError) as error:
            run(llm, [prompt(ids)], params(1, **{"prompt_logprobs": 1} | bad))
        assert error.value.parameter == "temperature"


def test_the_flag_needs_log_probabilities(model_folder):
    from vllm.engine.arg_utils import EngineArgs

    for other in ({"logprobs_mode": "raw_logits"}, {"bounded_prompt_logprobs": False}):
        with pytest.raises(ValueError, match="--prompt-logprobs-at-temperature"):
            EngineArgs(
                model=str(model_folder("llama")),
                prompt_logprobs_at_temperature=True,
                **other,
            ).create_model_config()


@pytest.mark.parametrize("n", [1, 3])
def test_each_sequence_has_them(engine, n):
    from vllm import SamplingParams

    llm = engine("llama")
    ids = random_ids(1, CONFIGS["llama"].vocab_size, 30)
    sampling = SamplingParams(n=n, max_tokens=3, prompt_logprobs=2, seed=0)
    (output,) = run(llm, [prompt(ids)], sampling)
    assert len(output.outputs) == n
    assert len(output.prompt_logprobs) == 30 and output.target_logprobs is None


def test_nothing_is_refused_or_allowed_that_was_not(engine):
    from vllm.exceptions import VLLMValidationError

    llm = engine("llama")
    ids = random_ids(2, CONFIGS["llama"].vocab_size, 30)
    for sampling, words in (
        (dict(max_tokens=0, prompt_logprobs=1), "max_tokens"),
        (dict(max_tokens=1, prompt_logprobs=1000), "prompt logprobs"),
        (dict(max_tokens=1, prompt_logprobs=-2), "prompt_logprobs"),
    ):
        with pytest.raises(VLLMValidationError, match=words):
            run(llm, [prompt(ids)], params(**sampling))
    for bad in (CONFIGS["llama"].vocab_size, 2**40):
        with pytest.raises(VLLMValidationError, match="out of vocabulary"):
            run(llm, [prompt([*ids, bad])], params(1, prompt_logprobs=1))
    run(llm, [prompt(ids)], params(1, prompt_logprobs=1))
