# SPDX-License-Identifier: Apache-2.0
"""Scoring with a KV connector: vLLM's example, which keeps the cache in files."""

import pytest
from scoring import assert_scores, params, prompt, random_ids, run
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["llama"].vocab_size
BLOCK = 32  # the smallest that attention on a CPU takes


@pytest.fixture(scope="module")
def llm(engine, tmp_path_factory):
    from vllm.config import KVTransferConfig

    connector = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config=dict(
            shared_storage_path=str(tmp_path_factory.mktemp("connector"))
        ),
    )
    # The class compares by value and so has no hash, which `engine` needs.
    return engine.__wrapped__(
        "llama",
        block_size=BLOCK,
        kv_transfer_config=connector,
        enable_score_cache=False,
    )


def test_the_connector_gives_ordinary_requests_its_hits(llm, oracle):
    """What makes the next test say something."""
    ids = random_ids(0, VOCABULARY, 4 * BLOCK + 5)
    run(llm, [prompt(ids)], params(1))
    assert llm.reset_prefix_cache()
    (output,) = run(llm, [prompt(ids)], params(4))
    assert output.num_cached_tokens == 4 * BLOCK
    answer = list(output.outputs[0].token_ids)
    best = oracle("llama").logits(ids + answer)[len(ids) - 1 : -1].argmax(axis=1)
    assert answer == best.tolist()


@pytest.mark.parametrize("rows", [10, 3 * BLOCK, 4 * BLOCK + 4])
def test_scores_are_complete(llm, oracle, rows):
    """A scoring request loads nothing from the connector, reads the local cache up to
    its first scored row, and goes on generating."""
    ids = random_ids(1, VOCABULARY, 4 * BLOCK + 5)
    run(llm, [prompt(ids)], params(1))  # the connector has it now, and the cache
    request = prompt(ids, ids[-rows:])
    outputs = []
    for forget in (True, False):
        assert not forget or llm.reset_prefix_cache()
        outputs += run(llm, [request], params(2))
    cold, warm = outputs
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == (len(ids) - rows - 1) // BLOCK * BLOCK
    for output in outputs:
        assert_scores(output.target_logprobs, oracle("llama"), ids, ids[-rows:])
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids


def test_what_scoring_computes_is_saved(llm):
    ids = random_ids(2, VOCABULARY, 4 * BLOCK + 5)
    run(llm, [prompt(ids, ids[1:])], params())
    assert llm.reset_prefix_cache()
    (output,) = run(llm, [prompt(ids)], params(1))
    assert output.num_cached_tokens == 4 * BLOCK
