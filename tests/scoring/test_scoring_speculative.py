# SPDX-License-Identifier: Apache-2.0
"""Scoring requests in the batches of speculative decoding."""

import numpy as np
import pytest
from scoring import assert_generated, assert_scores, params, prompt, random_ids, run
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["llama"].vocab_size
GENERATED = 20
METHODS = {
    "ngram": dict(prompt_lookup_max=2, prompt_lookup_min=1),
    "draft_model": {},
}


@pytest.fixture(scope="module", params=METHODS)
def llm(request, runner, model_folder, engine):
    """Guesses 3 tokens of each request, and computes at most 48 a step."""
    method = request.param
    if (runner, method) == ("v2", "ngram"):
        pytest.skip("Triton's interpreter does not take this drafter's masks")
    speculative = dict(method=method, num_speculative_tokens=3, **METHODS[method])
    if method == "draft_model":
        # The model itself: all that it guesses is accepted.
        speculative |= dict(model=str(model_folder("llama")))
    return engine(
        "llama",
        max_num_batched_tokens=48,
        max_num_seqs=4,
        speculative_config=Options(speculative),
        disable_log_stats=False,
    )


class Options(dict):
    """Lets the `engine` fixture tell engines apart by options of options."""

    def __hash__(self) -> int:
        return hash(tuple(self.items()))


def drafts(llm) -> int:
    values = {metric.name: metric for metric in llm.get_metrics()}
    return values["vllm:spec_decode_num_drafts"].value


def assert_greedy(llama, ids: list[int], completion, count: int, allowed=None) -> None:
    """Asserts `count` tokens, each the most probable allowed one after the others."""
    answer = list(completion.token_ids)
    assert len(answer) == count
    candidates = np.arange(VOCABULARY) if allowed is None else np.array(allowed)
    logits = llama.logits(ids + answer)[len(ids) - 1 : -1, candidates]
    assert answer == candidates[logits.argmax(axis=1)].tolist()


def test_scoring_beside_speculative_requests(llm, oracle):
    """Prefill chunks of scoring requests share their steps with verified guesses."""
    llama = oracle("llama")
    engine = llm.llm_engine
    generating = {f"generates {n}": [5, 6 + n] * 6 for n in range(2)}
    allowed = {"generates 0": [5, 6, 7], "generates 1": None}
    scoring = {f"scores {n}": random_ids(n, VOCABULARY, 60 + n) for n in range(2)}
    for name, ids in generating.items():
        # With three tokens to choose from, n-grams come again.
        sampling = params(GENERATED, allowed_token_ids=allowed[name])
        engine.add_request(name, prompt(ids), sampling)
    engine.step()
    guessed = drafts(llm)
    for n, (name, ids) in enumerate(scoring.items()):
        # The second goes on to generate, with guesses of its own.
        engine.add_request(name, prompt(ids, ids[1:]), params(4 * n))
    outputs, guessed_beside = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
        if len(outputs.keys() & scoring.keys()) < len(scoring):
            guessed_beside = drafts(llm) - guessed

    assert outputs.keys() == generating.keys() | scoring.keys()
    assert guessed_beside > 0
    for name, ids in generating.items():
        assert outputs[name].target_logprobs is None
        assert_greedy(llama, ids, outputs[name].outputs[0], GENERATED, allowed[name])
    for n, (name, ids) in enumerate(scoring.items()):
        assert_scores(outputs[name].target_logprobs, llama, ids, ids[1:])
        assert_greedy(llama, ids, outputs[name].outputs[0], 4 * n)


def test_scores_of_accepted_tokens(llm, oracle):
    """Those of a round have a row each, those that are rejected none."""
    before = drafts(llm)
    # With three tokens to choose from, n-grams come again; the other drafter knows no
    # such limits.
    method = llm.llm_engine.vllm_config.speculative_config.method
    limits = {"allowed_token_ids": [5, 6, 7]} if method == "ngram" else {}
    cases = [({}, {}), ({"token_ids": [6], "top_k": 3}, {}), (None, {})]
    cases += [({"top_k": 2, "temperature": 0.5}, {"temperature": 1.0, "seed": 1})]
    prompts = [[5, 6 + n] * (3 + n) for n in range(len(cases))]
    sampling = [
        params(GENERATED, target_generated=asked, **limits | options)
        for asked, options in cases
    ]
    outputs = run(llm, [prompt(ids) for ids in prompts], sampling)
    # Fewer rounds than tokens: some were accepted.
    assert 0 < drafts(llm) - before < len(cases) * (GENERATED - 1)
    for ids, output, (asked, _) in zip(prompts, outputs, cases):
        (completion,) = output.outputs
        assert len(completion.token_ids) == GENERATED
        if asked is None:
            assert completion.target_logprobs is None
        else:
            assert_generated(completion, oracle("llama"), ids, asked)


def test_stops_in_the_middle_of_a_round(llm, oracle):
    """What a round accepts after a stop string is dropped, with its scores."""
    ids = random_ids(3, VOCABULARY, 30)
    (free,) = run(llm, [prompt(ids)], params(GENERATED))
    tokens, text = list(free.outputs[0].token_ids), free.outputs[0].text
    stops = [text[n : n + 2] for n in range(len(text) - 1)]
    stops = [stop for stop in dict.fromkeys(stops) if "\ufffd" not in stop]
    sampling = [params(GENERATED, stop=[stop], target_generated={}) for stop in stops]
    lengths = set()
    for stop, output in zip(stops, run(llm, [prompt(ids)] * len(stops), sampling)):
        (completion,) = output.outputs
        found = list(completion.token_ids)
        assert completion.stop_reason == stop
        assert found == tokens[: len(found)]
        assert_generated(completion, oracle("llama"), ids, {})
        lengths.add(len(found))
    # A round has at most four tokens: these end at each of them.
    assert len({length % 4 for length in lengths}) == 4, lengths
