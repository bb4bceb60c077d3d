# SPDX-License-Identifier: Apache-2.0
"""Drafts are looked up where they are found, and made by the first layers where not."""

import os

import numpy as np
import pytest
from depth_routing import model_runner
from early_exits import (
    STEPS,
    VOCABULARY,
    assert_greedy,
    fastest,
    generate,
    options,
    pvalue,
    random_prompts,
    start,
    watched,
)
from oracle import log_softmax
from scoring import params, prompt, random_ids

WINDOW = dict(prompt_lookup_max=4, prompt_lookup_min=2)
ALLOWED = [40, 41, 42, 43, 44, 45]
"""So few that most short windows occur in a prompt of them, and many drafts are right."""


@pytest.fixture
def llama(oracle):
    return oracle("deep_llama")


def repetitive_prompts(count: int) -> list[list[int]]:
    """Each is a few tokens, again and again."""
    return [random_ids(50 + n, VOCABULARY, 5 + n) * 4 for n in range(count)]


def test_greedy_tokens_are_the_models(engine, llama):
    """Requests with drafts of both kinds in one batch."""
    llm = start(engine, options(**WINDOW))
    prompts = repetitive_prompts(6) + random_prompts(6, VOCABULARY, 60, seed=3)
    with watched(llm) as drafted:
        completions = generate(llm, prompts, params(20))
    for ids, completion in zip(prompts, completions):
        assert_greedy(llama, ids, completion, 20)
    assert drafted.looked_up > 0
    assert len(drafted.counts) > 0


def test_text_that_repeats_itself_needs_no_layers(engine, llama):
    """One request, whose only allowed tokens make each window occur again."""
    llm = start(engine, options(**WINDOW))
    ids = [40] * 20
    pick = np.full(VOCABULARY, -np.inf)
    pick[40] = 0
    with watched(llm) as drafted:
        (completion,) = generate(llm, [ids], params(24, allowed_token_ids=[40]))
    assert_greedy(llama, ids, completion, 24, pick)
    assert drafted.counts == []
    # All drafts are accepted: a round gives more than three tokens on average.
    assert 0 < drafted.looked_up <= 24 / 3 + 1


@pytest.mark.parametrize("best", [0, 1, 3])
def test_a_gate_chooses_whether_layers_draft_as_well(engine, runner, llama, best):
    """No drafts, those that are looked up, or these and others, by a clock of the test's.
    Tokens stay the model's."""
    if runner == "v2" and best != 3:
        pytest.skip("both runners ask the same gate")
    llm = start(engine, options(2, 2, draft_gate=True, **WINDOW), max_model_len=512)
    early_exit = model_runner(llm).depth_router
    ways = early_exit.ways(2)
    assert [(way.num_drafts, way.exit_layer) for way in ways] == [
        (0, 0), (2, 0), (1, 2), (2, 2),
    ]  # fmt: skip
    chosen = fastest(early_exit.gate, best)
    pick = np.full(VOCABULARY, -np.inf)
    pick[ALLOWED] = 0
    sampling = dict(allowed_token_ids=ALLOWED)
    for count in (300, 50):  # a trial, and what follows
        ids = np.random.default_rng(count).choice(ALLOWED, 60).tolist()
        with watched(llm) as drafted:
            (completion,) = generate(llm, [ids], params(count, **sampling))
        assert_greedy(llama, ids, completion, count, pick)
        assert (drafted.looked_up > 0) == (count == 300 or best > 0)
        assert (drafted.counts != []) == (count == 300 or best > 1)
    assert chosen[: 4 * 28] == 28 * [0, 1, 2, 3]
    if runner == "v2":  # whose warm-up verifies them, whether they were drafted or not
        assert model_runner(llm).req_states.draft_tokens.min() >= 0


@pytest.mark.parametrize("window", [(2, 1), (3, 3)], ids=["short", "long"])
def test_frequencies(engine, runner, llama, window):
    """Chi-square of drawn tokens, after what is often drawn before them. A long window
    is seldom found: the same batches have drafts of both kinds."""
    if runner == "v2" and window == (2, 1):
        pytest.skip("Triton's interpreter takes its time")
    most, least = window
    lookup = dict(prompt_lookup_max=most, prompt_lookup_min=least)
    llm = start(engine, options(5, 2, **lookup), **STEPS[runner])
    rng = np.random.default_rng(0)
    ids = rng.choice(ALLOWED, 60).tolist()
    count = int(os.environ.get("DRAWS", 1000 if runner == "v1" else 200))
    sampling = params(5, temperature=1.0, allowed_token_ids=ALLOWED)
    with watched(llm) as drafted:
        outputs = llm.generate([prompt(ids)] * count, sampling, use_tqdm=False)
    assert drafted.looked_up > 0
    assert least == 1 or len(drafted.counts) > 0
    answers = np.array([output.outputs[0].token_ids for output in outputs])
    pvalues = []
    for place in range(1, 4):
        starts, counts = np.unique(answers[:, :place], axis=0, return_counts=True)
        for before in starts[counts >= 50]:
            drawn = answers[(answers[:, :place] == before).all(axis=1), place]
            logits = llama.logits(ids + before.tolist())[-1][ALLOWED]
            expected = np.exp(log_softmax(logits[None])[0]) * len(drawn)
            found = np.bincount(drawn - ALLOWED[0], minlength=len(ALLOWED))
            pvalues.append(pvalue(found, expected))
    assert pvalues
    assert min(pvalues) > 1e-4 / len(pvalues), sorted(pvalues)[:3]


@pytest.mark.parametrize(
    "window, named",
    [
        (dict(prompt_lookup_min=2), "prompt_lookup_min needs prompt_lookup_max"),
        (dict(prompt_lookup_max=2, prompt_lookup_min=3), "prompt_lookup_min 3 is more"),
    ],
)
def test_windows_that_do_not_fit_are_refused(engine, window, named):
    with pytest.raises(ValueError, match=named):
        start(engine, options(**window))
