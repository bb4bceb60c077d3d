# SPDX-License-Identifier: Apache-2.0
"""Drafting with a model's first layers, compiled: what users run by default.

Traced with Dynamo, the graphs run as they are; `test_route_or_draft.py` compiles them.
"""

from itertools import count

import pytest
from compiling import compiling
from depth_routing import model_runner
from early_exits import (
    HIDDEN,
    VOCABULARY,
    assert_drafts,
    generate,
    options,
    save_calibration,
    start,
    watched,
)
from scoring import params, random_ids

FAMILIES = ("deep_llama", "deep_qwen3_moe", "deep_gemma3", "deep_opt")


@pytest.fixture(scope="module")
def compiled(engine, tmp_path_factory):
    """The compiled engine of a family."""
    folder = tmp_path_factory.mktemp("cache")

    def begin(family: str = "deep_llama", **others):
        with compiling(folder, "eager"):
            return start(engine, options(**others), family, enforce_eager=False)

    return begin


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_models(compiled, oracle, runner, family):
    if runner == "v2" and family != "deep_llama":
        pytest.skip("both runners trace the same code of a model")
    llm = compiled(family)
    for seed in (1, 2):
        assert_drafts(llm, oracle(family), seed)


def test_probes_at_several_exits(compiled, oracle, tmp_path, monkeypatch):
    """Rows are chosen between the graphs, of which each exit has its own."""
    file = save_calibration(tmp_path / "random.safetensors", HIDDEN, [1, 2], 6)
    llm = compiled(exit_layer=[1, 2], calibration=str(file), draft_gate=True)
    turns = count()

    def by_turns(req_ids, sampled, lens, ways):
        return ways[next(turns) % len(ways)]

    monkeypatch.setattr(model_runner(llm).depth_router.gate, "choose", by_turns)
    for seed in (3, 4):
        assert {*assert_drafts(llm, oracle("deep_llama"), seed).exits} == {1, 2}


def test_drafts_and_verification_run_graphs(compiled):
    """No layer's own forward runs, in any kind of step."""
    llm = compiled()
    generate(llm, [random_ids(1, VOCABULARY, 80)], params(2))  # traces, if need be
    called = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_, n=n: called.append(n))
        for n, layer in enumerate(model_runner(llm).model.model.layers)
    ]
    try:
        with watched(llm) as drafted:
            generate(llm, [random_ids(1, VOCABULARY, 80)] * 3, params(9))
    finally:
        for hook in hooks:
            hook.remove()
    assert drafted.resumed > 0
    assert called == []
