# SPDX-License-Identifier: Apache-2.0
"""Scores of generated tokens, and of tokens named beside them, against Hugging Face
float32."""

import numpy as np
import pytest
from adapters import RANK
from oracle import Oracle, log_softmax
from scoring import assert_generated, assert_same_scores, params, prompt, random_ids, run
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["llama"].vocab_size
CHUNKED = dict(max_num_batched_tokens=32, max_num_seqs=4)
ASKED = [
    {},
    {"token_ids": [5]},
    {"temperature": 0.5},
    {"top_k": 20},
    {"token_ids": [7, 7, 0], "top_k": 3, "temperature": 2.0},
    {"token_ids": list(range(20)), "top_k": 1},
]
SAMPLED = [
    {},
    {"temperature": 1.3, "seed": 1, "logprobs": 2},
    {"temperature": 0.7, "min_p": 0.1, "seed": 2},
    {"repetition_penalty": 2.0, "presence_penalty": 1.0},
    {"logit_bias": {3: 100.0}, "logprobs": 0},
]


def generating(max_tokens: int, asked: dict | None, **sampling):
    return params(max_tokens, target_generated=asked, **sampling)


@pytest.mark.parametrize("family", CONFIGS)
def test_families(engine, oracle, family):
    """Requests of all kinds in one batch, among them some that do not ask."""
    vocabulary = CONFIGS[family].vocab_size
    cases = [(n, asked, SAMPLED[n % len(SAMPLED)]) for n, asked in enumerate(ASKED)]
    cases += [(9, None, {}), (10, {}, SAMPLED[3]), (11, {"top_k": 20}, SAMPLED[4])]
    prompts = [random_ids(n, vocabulary, 3 + 9 * n) for n, _, _ in cases]
    sampling = [generating(4 + n, asked, **options) for n, asked, options in cases]
    outputs = run(engine(family), [prompt(ids) for ids in prompts], sampling)
    for ids, output, (n, asked, options) in zip(prompts, outputs, cases):
        (completion,) = output.outputs
        assert output.target_logprobs is None
        assert len(completion.token_ids) == 4 + n
        if asked is None:
            assert completion.target_logprobs is None
            continue
        assert_generated(completion, oracle(family), ids, asked)
        scores = completion.target_logprobs
        if not options:
            assert (scores.ranks[:, 0] == 1).all(), "greedy tokens"
        if "logprobs" in options and "temperature" not in asked:
            own = [d[t].logprob for t, d in zip(completion.token_ids, completion.logprobs)]
            np.testing.assert_allclose(scores.logprobs[:, 0], own, rtol=0, atol=1e-4)


def test_prompt_and_answer_alike(llm, llama):
    """One request's prompt rows and generated rows, put together, are what a request
    says that has the whole text as its prompt."""
    from vllm import SamplingParams

    ids = random_ids(1, VOCABULARY, 40)
    request = prompt(ids, [[token, 9] for token in ids[1:]])
    request["target_top_k"] = 4
    asked = {"token_ids": [9], "top_k": 4}
    sampling = SamplingParams(max_tokens=7, seed=3, target_generated=asked)
    (output,) = run(llm, [request], sampling)
    (completion,) = output.outputs
    assert_generated(completion, llama, ids, asked)
    whole = ids + list(completion.token_ids)
    later = prompt(whole, [[token, 9] for token in whole[1:]])
    later["target_top_k"] = 4
    (again,) = run(llm, [later], params())
    for name, expected in vars(again.target_logprobs).items():
        if name == "start":
            assert output.target_logprobs.start == expected == 1
            assert completion.target_logprobs.start == len(ids)
            continue
        parts = [getattr(o.target_logprobs, name) for o in (output, completion)]
        np.testing.assert_allclose(np.concatenate(parts), expected, rtol=0, atol=1e-4)


def test_each_choice_has_its_own(llm, llama):
    ids = random_ids(2, VOCABULARY, 20)
    request = prompt(ids, [1, 2])
    asked = {"token_ids": [4], "top_k": 2}
    sampling = generating(5, asked, n=3, temperature=1.0, seed=5)
    (output,) = run(llm, [request], sampling)
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    assert output.target_logprobs.logprobs.shape == (2, 1)
    for completion in output.outputs:
        assert_generated(completion, llama, ids, asked)


@pytest.mark.parametrize("stop", ["token", "string", "length"])
def test_as_many_rows_as_tokens(llm, llama, stop):
    ids = random_ids(3, VOCABULARY, 30)
    (free,) = run(llm, [prompt(ids)], params(8))
    tokens, text = list(free.outputs[0].token_ids), free.outputs[0].text
    options = {
        "token": dict(stop_token_ids=tokens[4:5]),
        "string": dict(stop=[text[len(text) // 2 :][:4]]),
        "length": {},
    }[stop]
    (output,) = run(llm, [prompt(ids)], generating(8, {}, **options))
    (completion,) = output.outputs
    found = list(completion.token_ids)
    assert found == tokens[: len(found)] and (len(found) < 8) == (stop != "length")
    assert_generated(completion, llama, ids, {})


@pytest.mark.parametrize("steps", range(1, 8))
def test_preempted_after_any_step(engine, llama, steps):
    """Of a prompt of 100 tokens, computed in four steps, and of what follows."""
    llm = engine("llama", **CHUNKED)
    ids, asked = random_ids(9, VOCABULARY, 100), {"token_ids": [1], "top_k": 2}
    engine = llm.llm_engine
    engine.add_request("a", prompt(ids), generating(6, asked))
    engine.add_request("b", prompt(ids[:20]), generating(9, {}))
    for _ in range(steps):
        engine.step()
    assert engine.reset_prefix_cache(reset_running_requests=True)
    last = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output.outputs[0] for output in engine.step()}
    assert len(last["a"].token_ids) == 6 and len(last["b"].token_ids) == 9
    assert_generated(last["a"], llama, ids, asked)
    assert_generated(last["b"], llama, ids[:20], {})


def test_deltas_and_running_totals(engine, llama):
    """Deltas bring each row once; an output that is not the last brings none."""
    from vllm.sampling_params import RequestOutputKind

    llm = engine("llama", **CHUNKED)
    ids, asked = random_ids(7, VOCABULARY, 50), {"top_k": 3}
    for name in ("DELTA", "CUMULATIVE"):
        kind = RequestOutputKind[name]
        sampling = generating(5, asked, output_kind=kind)
        llm.llm_engine.add_request(name, prompt(ids), sampling)
    outputs = {"DELTA": [], "CUMULATIVE": []}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            outputs[output.request_id].append(output)
    *earlier, last = (output.outputs[0] for output in outputs["CUMULATIVE"])
    assert len(earlier) == 4
    assert all(one.target_logprobs is None for one in earlier)
    assert_generated(last, llama, ids, asked)
    deltas = outputs["DELTA"]
    scores = [output.outputs[0].target_logprobs for output in deltas]
    assert [one.start for one in scores] == [50, 51, 52, 53, 54]
    assert all(one.logprobs.shape == (1, 1) for one in scores)
    # As a slow reader gets them: put together by the frontend.
    first, *others = deltas
    for other in others:
        first.add(other, aggregate=True)
    assert_generated(first.outputs[0], llama, ids, asked)
    assert_same_scores(first.outputs[0].target_logprobs, last.target_logprobs)


def test_structured_output(llm, llama):
    """Of the logits that `logprobs` come from: what the grammar forbids is not there."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    ids = random_ids(4, VOCABULARY, 12)
    sampling = SamplingParams(
        max_tokens=6,
        temperature=0,
        structured_outputs=StructuredOutputsParams(choice=["yes", "no"]),
        logprobs=1,
        target_generated={"top_k": 20},
    )
    free = generating(6, {"top_k": 2})
    outputs = run(llm, [prompt(ids), prompt(ids)], [sampling, free])
    (completion,) = outputs[0].outputs
    assert completion.text in ("yes", "no")
    scores = completion.target_logprobs
    assert len(scores.logprobs) == len(completion.token_ids)
    own = [d[t].logprob for t, d in zip(completion.token_ids, completion.logprobs)]
    np.testing.assert_allclose(scores.logprobs[:, 0], own, rtol=0, atol=1e-5)
    # Few are allowed, and they are all.
    assert (np.isfinite(scores.top_logprobs).sum(axis=1) < 20).all()
    assert np.isneginf(scores.tail_logprob).all()
    np.testing.assert_allclose(np.exp(scores.top_logprobs).sum(axis=1), 1, atol=1e-5)
    # The first is one of those that begin an answer, by the oracle's logits.
    allowed = scores.top_token_ids[0][np.isfinite(scores.top_logprobs[0])]
    expected = log_softmax(llama.logits(ids)[-1][allowed])
    found = scores.top_logprobs[0][: len(allowed)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert_generated(outputs[1].outputs[0], llama, ids, {"top_k": 2})


def test_adapters(engine, oracle, adapter_folders):
    from vllm.lora.request import LoRARequest

    adapter, merged = adapter_folders
    llm = engine("llama", enable_lora=True, max_lora_rank=RANK)
    oracles = (oracle("llama"), Oracle(merged))
    ids = random_ids(5, VOCABULARY, 25)
    adapters = [LoRARequest("a", 1, str(adapter)) if i % 2 else None for i in range(4)]
    asked = {"token_ids": [3], "top_k": 2}
    outputs = llm.generate(
        [prompt(ids)] * 4, generating(5, asked), lora_request=adapters, use_tqdm=False
    )
    for index, output in enumerate(outputs):
        assert_generated(output.outputs[0], oracles[index % 2], ids, asked)


def test_logits_in_place_of_logprobs(engine, llama):
    llm = engine("llama", logprobs_mode="raw_logits")
    ids = random_ids(6, VOCABULARY, 25)
    (output,) = run(llm, [prompt(ids)], generating(5, {"token_ids": [8], "top_k": 2}))
    completion = output.outputs[0]
    tokens, scores = list(completion.token_ids), completion.target_logprobs
    logits = llama.logits(ids + tokens)[len(ids) - 1 : -1]
    expected = [[row[token], row[8]] for token, row in zip(tokens, logits)]
    np.testing.assert_allclose(scores.logprobs, expected, rtol=0, atol=1e-4)
    top = -np.sort(-logits, axis=1)[:, :2]
    np.testing.assert_allclose(scores.top_logprobs, top, rtol=0, atol=1e-4)


REFUSED = [
    ("target_generated", 5),
    ("target_generated", "{}"),
    ("target_generated", {"tokens": [1]}),
    ("target_generated", {1: 2}),
    ("target_generated.token_ids", {"token_ids": 5}),
    ("target_generated.token_ids", {"token_ids": "12"}),
    ("target_generated.token_ids", {"token_ids": [1.0]}),
    ("target_generated.token_ids", {"token_ids": [True]}),
    ("target_generated.token_ids", {"token_ids": [-1]}),
    ("target_generated.token_ids", {"token_ids": [VOCABULARY]}),
    ("target_generated.token_ids", {"token_ids": [2**70]}),
    ("target_generated.token_ids", {"token_ids": [1] * 21}),
    ("target_generated.token_ids", {"token_ids": [[1]]}),
    ("target_generated.top_k", {"top_k": 0}),
    ("target_generated.top_k", {"top_k": 21}),
    ("target_generated.top_k", {"top_k": "3"}),
    ("target_generated.top_k", {"top_k": True}),
    ("target_generated.temperature", {"temperature": 0}),
    ("target_generated.temperature", {"temperature": -1.0}),
    ("target_generated.temperature", {"temperature": float("nan")}),
    ("target_generated.temperature", {"temperature": True}),
    ("target_generated.temperature", {"temperature": "1"}),
]


@pytest.mark.any_runner
@pytest.mark.parametrize(("parameter", "value"), REFUSED, ids=str)
def test_refusals(llm, parameter, value):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError) as caught:
        run(llm, [prompt([1, 2, 3])], generating(2, value))
    assert caught.value.parameter == parameter
    assert str(caught.value).startswith(parameter)
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.any_runner
def test_nothing_is_generated(llm):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="generates nothing"):
        run(llm, [prompt([1, 2, 3], [4])], generating(0, {}))
