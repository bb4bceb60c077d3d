# SPDX-License-Identifier: Apache-2.0
"""Drafting with a model's first layers loses nothing: tokens, keys and distributions.

PROMPTS=300 takes so many prompts of each family, and so many that are preempted;
DRAWS=50000 draws so many tokens (test_early_exit_draws.py, test_early_exit_lookup.py).
"""

import os
from itertools import islice

import numpy as np
import pytest
from depth_routing import CACHES, POISON, model_runner, no_empty_batches
from early_exits import (
    FAMILIES,
    VOCABULARY,
    assert_greedy,
    assert_others_go_on,
    assert_preempted,
    calibration,  # noqa: F401
    fastest,
    generate,
    options,
    random_prompts,
    start,
    watched,
)
from scoring import assert_generated, assert_scores, params, prompt, random_ids

from vllm.v1.worker.depth.draft_gate import DROPPED_ROUNDS, ROUNDS_PER_LOOK, TRIAL_ROUNDS


@pytest.fixture(params=["fixed", "probes"])
def kind(request, runner) -> str:
    if runner == "v2" and request.param == "fixed":
        pytest.skip("a fixed number is among those that probes let pass")
    return request.param


@pytest.fixture
def llm(engine, kind, calibration):
    """Three drafts always, or as many as random probes let pass."""
    others = {} if kind == "fixed" else dict(calibration=calibration)
    return start(engine, options(**others))


@pytest.fixture
def llama(oracle):
    return oracle("deep_llama")


def num_prompts(default: int) -> int:
    return int(os.environ.get("PROMPTS", default))


# Greedy tokens, against Hugging Face in float32


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_models(engine, oracle, family, runner):
    """Prompts in chunks beside requests that decode, more of them than run at once."""
    llm = start(engine, options(), family)
    count = num_prompts(24 if runner == "v1" else 12)
    prompts = random_prompts(count, VOCABULARY, 120)
    with watched(llm) as drafted:
        completions = generate(llm, prompts, params(12))
    for ids, completion in zip(prompts, completions):
        assert_greedy(oracle(family), ids, completion, 12)
    assert set(drafted.counts) == {3}
    # Some drafts are accepted: a round gives more than one token. Some are not.
    assert 3 * count < len(drafted.counts) < 12 * count
    assert drafted.resumed > 0


def test_greedy_tokens_with_probes(llm, kind, llama):
    prompts = random_prompts(12, VOCABULARY, 90, seed=1)
    with watched(llm) as drafted, no_empty_batches():
        completions = generate(llm, prompts, params(20))
    for ids, completion in zip(prompts, completions):
        assert_greedy(llama, ids, completion, 20)
    assert drafted.resumed > 0
    assert set(drafted.counts) == ({3} if kind == "fixed" else {0, 1, 2, 3})


def test_schedule_by_batch_size(engine, llama):
    """Two requests draft three tokens, three draft one, and more decode plainly."""
    schedule = [[1, 2, 3], [3, 3, 1], [4, 256, 0]]
    others = dict(num_speculative_tokens_per_batch_size=schedule)
    llm = start(engine, options(**others))
    for size, drafts in ((2, {3}), (3, {1, 3}), (6, {1, 3})):
        prompts = random_prompts(size, VOCABULARY, 40, seed=size)
        # They end one after the other: what is drafted changes as the batch shrinks.
        sampling = [params(6 + 3 * n) for n in range(size)]
        with watched(llm) as drafted:
            completions = generate(llm, prompts, sampling)
        for n, (ids, completion) in enumerate(zip(prompts, completions)):
            assert_greedy(llama, ids, completion, 6 + 3 * n)
        assert set(drafted.counts) == drafts
    with watched(llm) as drafted:
        generate(llm, [random_ids(9, VOCABULARY, 9)] * 6, params(8))  # all in one step
    assert drafted.counts == []


@pytest.mark.parametrize("best", [0, 2, 3])
def test_a_gate_drafts_as_is_fastest(engine, llama, runner, best):
    """None, or one or two after one or after four layers, by a clock of the test's, after
    a trial of each. Tokens stay the model's."""
    if runner == "v2" and best != 2:
        pytest.skip("both runners ask the same gate")
    llm = start(engine, options([1, 4], num_drafts=2, draft_gate=True), max_model_len=512)
    early_exit = model_runner(llm).depth_router
    gate, ways = early_exit.gate, early_exit.ways(2)
    assert [(way.num_drafts, way.exit_layer) for way in ways] == [
        (0, 0), (1, 1), (2, 1), (1, 4), (2, 4),
    ]  # fmt: skip
    chosen = fastest(gate, best)
    ids = random_ids(best, VOCABULARY, 20)
    with watched(llm) as drafted:
        (completion,) = generate(llm, [ids], params(400))
    assert_greedy(llama, ids, completion, 400)
    trial = 5 * (DROPPED_ROUNDS + TRIAL_ROUNDS)
    assert [chosen[:trial].count(n) for n in range(5)] == [trial // 5] * 5
    # Until the others take a turn again.
    after = chosen[trial : trial + ROUNDS_PER_LOOK - 1]
    assert {*after} == {best} and len(after) > 20
    # What was drafted is what was chosen, but at the end of the sequence.
    expected = [ways[n] for n in chosen if n]
    found = zip(drafted.counts, drafted.exits)
    assert [*islice(found, len(expected))] == [
        (way.num_drafts, way.exit_layer) for way in expected
    ]


@pytest.mark.parametrize("exit_layer, num_drafts", [(1, 1), (5, 2), (4, 6)])
def test_other_exits_and_lengths(engine, llama, exit_layer, num_drafts):
    llm = start(engine, options(exit_layer, num_drafts))
    prompts = random_prompts(6, VOCABULARY, 40, seed=exit_layer)
    for ids, completion in zip(prompts, generate(llm, prompts, params(15))):
        assert_greedy(llama, ids, completion, 15)


def test_one_request_at_a_time(llm, llama):
    for seed in range(3):
        ids = random_ids(seed, VOCABULARY, 10 + seed)
        (completion,) = generate(llm, [ids], params(25))
        assert_greedy(llama, ids, completion, 25)


def test_up_to_the_longest_sequence(engine, llama):
    """Drafts end with the sequence; the last tokens come one by one."""
    llm = start(engine, options(), max_model_len=64)
    prompts = [random_ids(n, VOCABULARY, 64 - n) for n in range(2, 12)]
    for ids, completion in zip(prompts, generate(llm, prompts, params(100))):
        assert_greedy(llama, ids, completion, 64 - len(ids))


# The cache: what drafts leave there is never read


@pytest.mark.parametrize("family", CACHES)
def test_slots_are_written_before_they_are_read(engine, oracle, calibration, family):
    """In a cache that holds what no model writes."""
    for others in ({}, dict(calibration=calibration)):
        llm = start(engine, options(**others), family)
        assert llm.reset_prefix_cache()
        for cache in model_runner(llm).kv_caches:
            cache.fill_(POISON)
        prompts = random_prompts(10, VOCABULARY, 70, seed=2)
        for ids, completion in zip(prompts, generate(llm, prompts, params(20))):
            assert_greedy(oracle(family), ids, completion, 20)


@pytest.mark.parametrize("family", CACHES)
def test_what_is_cached_is_the_models(engine, oracle, family):
    """Prompt and answer come again as a prompt: its keys, which drafting and verifying
    wrote, give the scores of the model."""
    llm = start(engine, options(), family, **CACHES[family])
    assert llm.reset_prefix_cache()
    ids = random_ids(3, VOCABULARY, 20)
    (completion,) = generate(llm, [ids], params(90))
    longer = ids + list(completion.token_ids) + random_ids(4, VOCABULARY, 10)
    (output,) = llm.generate([prompt(longer, longer[-8:])], params(), use_tqdm=False)
    assert output.num_cached_tokens >= 64
    assert_scores(output.target_logprobs, oracle(family), longer, longer[-8:])


def test_preempted_requests(engine, llama, monkeypatch):
    llm = start(engine, options(), max_model_len=128, num_gpu_blocks_override=12)
    assert_preempted(llm, llama, num_prompts(6), monkeypatch)


def test_aborted_and_new_requests_in_the_same_batches(llm, llama):
    assert_others_go_on(llm, llama)


def test_scoring_in_the_same_batches(llm, llama):
    engine = llm.llm_engine
    ids = random_ids(30, VOCABULARY, 100)
    for n in range(3):
        engine.add_request(
            f"decodes {n}", prompt(random_ids(n, VOCABULARY, 9)), params(15)
        )
    engine.step()
    engine.add_request("scored", prompt(ids, ids[1:]), params())
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
    assert_scores(outputs["scored"].target_logprobs, llama, ids, ids[1:])
    for n in range(3):
        completion = outputs[f"decodes {n}"].outputs[0]
        assert_greedy(llama, random_ids(n, VOCABULARY, 9), completion, 15)


# Beside other parameters


def test_logprobs_of_generated_tokens(llm, llama):
    prompts = random_prompts(4, VOCABULARY, 30, seed=5)
    for ids, completion in zip(prompts, generate(llm, prompts, params(12, logprobs=3))):
        answer = list(completion.token_ids)
        rows = llama.logits(ids + answer)[len(ids) - 1 : -1]
        expected = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        for token, row, found in zip(
            answer, expected, completion.logprobs, strict=True
        ):
            assert abs(found[token].logprob - row[token]) < 1e-4
            best = np.sort(row)[::-1][:3]
            ranked = sorted((x.logprob for x in found.values()), reverse=True)[:3]
            assert np.allclose(ranked, best, atol=1e-4)


def test_scores_of_generated_tokens(llm, llama):
    prompts = random_prompts(4, VOCABULARY, 30, seed=9)
    asked = {"token_ids": [3], "top_k": 2}
    sampling = params(20, allowed_token_ids=[5, 6, 7], target_generated=asked)
    for ids, completion in zip(prompts, generate(llm, prompts, sampling)):
        assert len(completion.token_ids) == 20
        assert_generated(completion, llama, ids, asked)


def test_penalties_and_allowed_tokens(llm, llama):
    prompts = random_prompts(4, VOCABULARY, 30, seed=6)
    allowed = [5, 6, 7, 8, 9]
    pick = np.full(VOCABULARY, -np.inf)
    pick[allowed] = 0
    sampling = params(20, allowed_token_ids=allowed)
    for ids, completion in zip(prompts, generate(llm, prompts, sampling)):
        assert_greedy(llama, ids, completion, 20, pick)
    sampling = params(30, presence_penalty=1.5)
    for ids, completion in zip(prompts, generate(llm, prompts, sampling)):
        answer = list(completion.token_ids)
        logits = llama.logits(ids + answer)[len(ids) - 1 : -1].copy()
        for row in range(len(answer)):
            logits[row, sorted(set(answer[:row]))] -= 1.5
        chosen = logits[np.arange(len(answer)), answer]
        assert (chosen >= logits.max(axis=1) - 1e-4).all()


def test_seeds_are_reproducible(llm):
    ids = random_ids(8, VOCABULARY, 12)
    sampling = params(40, temperature=1.0, seed=7)
    first, second = (generate(llm, [ids], sampling)[0].token_ids for _ in range(2))
    assert list(first) == list(second)
    (other,) = generate(llm, [ids], params(40, temperature=1.0, seed=8))
    assert list(other.token_ids) != list(first)


def test_greedy_and_drawn_tokens_in_one_batch(llm, llama):
    prompts = random_prompts(8, VOCABULARY, 30, seed=9)
    sampling = [params(15, temperature=float(n % 2)) for n in range(8)]
    completions = generate(llm, prompts, sampling)
    for n in range(0, 8, 2):
        assert_greedy(llama, prompts[n], completions[n], 15)
    assert all(len(completion.token_ids) == 15 for completion in completions)


# What cannot draft


@pytest.mark.parametrize(
    "family, named",
    [
        ("gemma2", "Gemma2ForCausalLM: its layer loop has no max_depth"),
        ("qwen2_moe", "Qwen2MoeForCausalLM: its layer loop has no max_depth"),
    ],
)
def test_other_families_are_refused_by_name(engine, family, named):
    with pytest.raises(ValueError, match=f"'early_exit' does not support {named}"):
        start(engine, options(), family)


@pytest.mark.parametrize("family", ["deep_qwen3_moe", "deep_gemma3"])
def test_a_fitted_file_of_other_families(
    runner, engine, model_folder, oracle, tmp_path, family
):
    """What `utio_calibrate.py` fits to experts, or to windows, an engine drafts with."""
    if runner == "v2":
        pytest.skip("the program fits the same file")
    from calibrations import arguments  # where the program is, too

    import utio_calibrate

    file = tmp_path / "fitted.safetensors"
    argv = arguments(model_folder(family), file, "--tokens", "3000", "--holdout", "0.3")
    utio_calibrate.main(argv)
    llm = start(engine, options(5, 2, calibration=str(file), min_acceptance=0), family)
    prompts = random_prompts(6, VOCABULARY, 60)
    with watched(llm) as drafted:
        completions = generate(llm, prompts, params(20))
    for ids, completion in zip(prompts, completions):
        assert_greedy(oracle(family), ids, completion, 20)
    # More tokens than rounds: some of the drafts were accepted.
    assert 0 < len(drafted.counts) < 6 * 19
