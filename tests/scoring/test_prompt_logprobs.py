# SPDX-License-Identifier: Apache-2.0
"""`prompt_logprobs` are made as named tokens are; `serving/test_unchanged.py` has that they
are upstream's, field by field."""

import pytest
from oracle import log_softmax
from scoring import FLOAT32_TOLERANCE, params, prompt, random_ids, run
from tiny_models import CONFIGS


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


def test_each_stream_begins_with_them(engine):
    """Though one of the sequences computes in four steps what the others find cached."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = engine("llama", block_size=32, long_prefill_token_threshold=32)
    ids = random_ids(5, CONFIGS["llama"].vocab_size, 100)
    run(llm, [prompt(ids)], params(1))
    sampling = SamplingParams(
        n=2, max_tokens=6, prompt_logprobs=1, output_kind=RequestOutputKind.DELTA
    )
    llm.llm_engine.add_request("a", prompt(ids), sampling)
    found = {0: [], 1: []}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            for completion in output.outputs:
                found[completion.index].append(len(output.prompt_logprobs or ()))
    for lengths in found.values():
        assert lengths[0] == 100 and not any(lengths[1:])


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
