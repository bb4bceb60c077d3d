# SPDX-License-Identifier: Apache-2.0
"""Which steps could replay a CUDA graph with depth routing and drafting: all that run
all layers of all tokens, and no others. Without a GPU: see `graph_padding`."""

from depth_routing import NUM_LAYERS, Request, assert_logits, routing, serve
from early_exits import assert_greedy, generate, options, random_prompts, start
from graph_padding import padding
from scoring import params, random_ids
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["deep_llama"].vocab_size


def test_steps_in_which_tokens_exit_skip_graphs(engine, depth_oracle):
    """Of four that decode together, two exit in every third step."""
    llm = engine("deep_llama", **routing())
    requests = [
        Request(random_ids(n, VOCABULARY, 6 + n), max_tokens=12) for n in range(4)
    ]

    def plan(request: int, step: int) -> int:
        return 2 if step % 3 == 0 and request % 2 else NUM_LAYERS

    with padding(llm) as dispatched:
        serve(llm, requests, plan)
    assert_logits(depth_oracle("deep_llama"), requests)
    assert {depth for r in requests for depth in r.depths} == {2, NUM_LAYERS}
    assert dispatched.planned == [not graph for graph in dispatched.to_graphs]
    # A step of prompts, then eleven of decodes.
    assert dispatched.planned == [False] + ([True, False, False] * 4)[:-1]


def test_max_depth_skips_graphs_and_full_depth_does_not(engine, depth_oracle):
    llm = engine("deep_llama", **routing(utio_min_batch_size=1000))
    for depth in (4, NUM_LAYERS):
        requests = [
            Request(
                random_ids(30 + n, VOCABULARY, 9), 5, options=dict(max_depth=depth)
            )
            for n in range(3)
        ]
        with padding(llm) as dispatched:
            serve(llm, requests)
        assert_logits(depth_oracle("deep_llama"), requests, depth)
        exits = depth < NUM_LAYERS
        assert dispatched.to_graphs == [True] + [not exits] * 4
        assert dispatched.planned == [False] + [exits] * 4


def test_steps_that_begin_after_the_first_layers_skip_graphs(engine, oracle):
    llm = start(engine, options())
    prompts = random_prompts(12, VOCABULARY, 90, seed=4)
    with padding(llm) as dispatched:
        completions = generate(llm, prompts, params(12))
    for ids, completion in zip(prompts, completions):
        assert_greedy(oracle("deep_llama"), ids, completion, 12)
    assert dispatched.planned == [not graph for graph in dispatched.to_graphs]
    # Prefills run all layers, beside which nothing is resumed.
    assert {True, False} == set(dispatched.to_graphs)
