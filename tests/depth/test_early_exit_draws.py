# SPDX-License-Identifier: Apache-2.0
"""Tokens that are drawn with drafts by early exits have the model's own distribution."""

import os

import numpy as np
import pytest
from depth_routing import model_runner
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


REGEX = "[a-z_ ]{1,200}"
CHARACTERS = {*"abcdefghijklmnopqrstuvwxyz_Ġ"}
"""Those of REGEX, as the tokenizer writes them."""


@pytest.fixture(params=["fixed", "probes", "greedy drafts"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def llm(kind, engine, runner, tmp_path_factory):
    others = {}
    if kind == "probes":
        folder = tmp_path_factory.mktemp("draws")
        file = save_calibration(folder / "random.safetensors", HIDDEN, [EXIT], 6)
        others = dict(calibration=str(file))
    if kind == "greedy drafts":
        others = dict(draft_sample_method="greedy")
    return start(engine, options(EXIT, 2, **others), **STEPS[runner])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_frequencies(llm, oracle, runner, kind, temperature):
    """Of the second, third and fourth token after what is often drawn before them."""
    if temperature == 1.0 and kind != "fixed":
        pytest.skip("the temperature changes the same logits")
    if runner == "v2" and (temperature == 1.0 or kind == "greedy drafts"):
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


class Allowed:
    """A model that may say some tokens only."""

    def __init__(self, model, allowed: list[int]):
        self.model = model
        self.forbids = np.full(VOCABULARY, -np.inf)
        self.forbids[allowed] = 0

    def logits(self, ids: list[int]) -> np.ndarray:
        return self.model.logits(ids) + self.forbids


def test_drafts_beside_a_grammar_are_certain(engine, runner, monkeypatch):
    """So that those which it forbids need not be verified (reaches into private parts)."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = start(engine, options(EXIT, 2), **STEPS[runner])
    grammar = StructuredOutputsParams(regex=REGEX)
    sampling = SamplingParams(max_tokens=8, structured_outputs=grammar)
    runs = model_runner(llm)
    if runner == "v1":

        def drawing(*args):
            raise AssertionError("a draft is drawn")

        monkeypatch.setattr(runs.drafter, "_make_draw", drawing)
        llm.generate([prompt(PROMPT)] * 4, sampling, use_tqdm=False)
        return
    logits = runs.speculator.draft_logits.zero_()
    llm.generate([prompt(PROMPT)] * 4, sampling, use_tqdm=False)
    drafted = logits[(logits != 0).any(dim=-1)]
    assert len(drafted) >= 4
    assert (drafted.isneginf().sum(dim=-1) == VOCABULARY - 1).all()


def test_frequencies_under_a_grammar(engine, oracle, runner):
    """What it forbids is often drafted, and then not verified, which must not show. Beside
    such requests are some without a grammar."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    temperature, count = 0.5, 2400 if runner == "v1" else 96
    llm = start(engine, options(EXIT, 2), **STEPS[runner])
    vocabulary = llm.get_tokenizer().get_vocab()
    allowed = [token for text, token in vocabulary.items() if not {*text} - CHARACTERS]
    kinds = [
        SamplingParams(
            max_tokens=4,
            min_tokens=4,
            temperature=temperature,
            detokenize=False,
            structured_outputs=StructuredOutputsParams(regex=REGEX),
        ),
        params(4, temperature=temperature),
    ]
    sampling = ([kinds[0]] * 7 + [kinds[1]]) * (count // 8)
    outputs = llm.generate([prompt(PROMPT)] * count, sampling, use_tqdm=False)
    answers = np.array([output.outputs[0].token_ids for output in outputs])
    answers = answers.reshape(-1, 8, answers.shape[1])
    free = oracle("deep_llama")
    some, all_tokens = np.split(answers, [7], axis=1)
    for model, drawn in ((Allowed(free, allowed), some), (free, all_tokens)):
        drawn = drawn.reshape(-1, drawn.shape[-1])
        pvalues = []
        for place in range(1, 4):
            starts, counts = np.unique(drawn[:, :place], axis=0, return_counts=True)
            for before in starts[counts >= 50]:
                rows = drawn[(drawn[:, :place] == before).all(axis=1), place]
                logits = model.logits(PROMPT + before.tolist())[-1]
                probs = np.exp(log_softmax(logits / temperature))
                expected = np.maximum(probs, 1e-12) * len(rows)
                found = np.bincount(rows, minlength=VOCABULARY)
                pvalues.append(pvalue(found, expected))
        assert runner == "v2" or pvalues
        assert min(pvalues, default=1) > 1e-4 / max(len(pvalues), 1), sorted(pvalues)[:3]
