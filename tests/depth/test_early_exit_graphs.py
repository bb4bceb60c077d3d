# SPDX-License-Identifier: Apache-2.0
"""Drafting with CUDA graphs of its passes. Without a GPU: see `graph_replays`.

What is drafted decides only how fast it goes, so drafts are compared, not just tokens.
"""

from contextlib import nullcontext

import pytest
from depth_routing import CACHES
from early_exits import (
    VOCABULARY,
    assert_greedy,
    calibration,  # noqa: F401
    generate,
    options,
    random_prompts,
    start,
    watched,
)
from graph_padding import padding
from graph_replays import replaying
from scoring import params

LARGEST = 6
"""Rows of a graph: of the engine's 8 requests, all draft without one."""
FAMILIES = ("deep_llama", "deep_qwen3_moe", "deep_gemma3", "deep_opt")


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_without_graphs(engine, oracle, runner, family):
    """Of one request to eight, as they come and go."""
    if runner == "v2" and family not in CACHES:
        pytest.skip("both runners capture the same code of a model")
    llm = start(engine, options(), family)
    prompts = random_prompts(14, VOCABULARY, 90, seed=11)
    lengths = [60, *(4 + 2 * (n % 7) for n in range(1, len(prompts)))]
    drafts = []
    for graphs in (nullcontext(), replaying(llm, LARGEST)):
        llm.reset_prefix_cache()
        with watched(llm) as drafted, graphs as replayed, padding(llm) as dispatched:
            completions = generate(llm, prompts, [params(n) for n in lengths])
        for ids, completion, length in zip(prompts, completions, lengths):
            assert_greedy(oracle(family), ids, completion, length)
        drafts.append(drafted.tokens)
    assert drafts[0] == drafts[1]
    assert set(replayed) == {1, 2, 4, 6}
    # Steps that verify have graphs of all layers, and nothing is kept for them.
    assert drafted.resumed == 0 and all(dispatched.to_graphs)


@pytest.mark.parametrize("temperature", [0, 1])
def test_probes_choose_among_what_a_graph_returns(engine, calibration, temperature):
    """Passes are of some of a step's requests, ever fewer."""
    llm = start(engine, options(calibration=calibration))
    prompts = random_prompts(6, VOCABULARY, 60, seed=12)
    sampling = [params(16, temperature=temperature, seed=n) for n in range(6)]
    found = []
    for graphs in (nullcontext(), replaying(llm, LARGEST)):
        llm.reset_prefix_cache()
        with watched(llm) as drafted, graphs as replayed:
            completions = generate(llm, prompts, sampling)
        found.append((drafted.tokens, [[*c.token_ids] for c in completions]))
    assert found[0] == found[1]
    assert set(drafted.counts) == {0, 1, 2, 3}
    # Some steps have states of all their rows, which the next replay would overwrite.
    assert drafted.resumed == 0
    assert set(replayed) == {1, 2, 4, 6}


def test_an_engine_has_no_graphs_where_decode_steps_have_none(engine):
    """As on the CPU."""
    from depth_routing import model_runner

    llm = start(engine, options())
    model_runner(llm).depth_router.first_layers.capture()
    assert model_runner(llm).depth_router.first_layers.graphs is None
