# SPDX-License-Identifier: Apache-2.0
"""Tokens that are drawn with drafts by early exits have the model's own distribution."""

import os

import numpy as np
import pytest
from early_exits import (
    HIDDEN,
    STEPS,
    VOCABULARY,
    options,
    pvalue,
    save_calibration,
    start,
    surprise,
    watched,
)
from oracle import log_softmax
from scoring import params, prompt, random_ids

PROMPT = random_ids(40, VOCABULARY, 12)
EXIT = 5
"""Of six layers: their drafts are accepted often enough for a wrong probability to show."""


@pytest.fixture(params=["fixed", "probes", "greedy drafts"])
def llm(request, engine, runner, tmp_path_factory):
    kind = request.param
    others = {}
    if kind == "probes":
        folder = tmp_path_factory.mktemp("draws")
        file = save_calibration(folder / "random.safetensors", HIDDEN, [EXIT], 6)
        others = dict(calibration=str(file))
    if kind == "greedy drafts":
        others = dict(draft_sample_method="greedy")
    return start(engine, options(EXIT, 2, **others), **STEPS[runner])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_frequencies(llm, oracle, runner, temperature):
    """Of the second, third and fourth token after what is often drawn before them."""
    if runner == "v2" and temperature == 1.0:
        pytest.skip("Triton's interpreter takes minutes")
    count = int(os.environ.get("DRAWS", 2500 if runner == "v1" else 120))
    sampling = params(5, temperature=temperature)
    with watched(llm) as drafted:
        outputs = llm.generate([prompt(PROMPT)] * count, sampling, use_tqdm=False)
    assert drafted.resumed > 0
    # A round gives more than a token: drafts were accepted, and judged.
    assert 0 < len(drafted.counts) < 0.98 * 5 * count
    answers = np.array([output.outputs[0].token_ids for output in outputs])
    model = oracle("deep_llama")
    pvalues = [surprise(model, PROMPT, answers[:400], temperature)]
    for place in range(1, 4):
        starts, counts = np.unique(answers[:, :place], axis=0, return_counts=True)
        for before in starts[counts >= 50]:
            rows = answers[(answers[:, :place] == before).all(axis=1), place]
            logits = model.logits(PROMPT + before.tolist())[-1]
            expected = np.exp(log_softmax(logits / temperature)) * len(rows)
            pvalues.append(pvalue(np.bincount(rows, minlength=VOCABULARY), expected))
    assert runner == "v2" or len(pvalues) >= 4
    assert min(pvalues) > 1e-4 / len(pvalues), sorted(pvalues)[:3]
