# SPDX-License-Identifier: Apache-2.0
"""Scoring with the model, and so the vocabulary, in two processes."""

import pytest
from scoring import (
    assert_generated,
    assert_options,
    assert_scores,
    params,
    prompt,
    random_ids,
    run,
)
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["llama"].vocab_size
BLOCK = 32
SHARED = 2 * BLOCK + 5


@pytest.fixture
def llm(tensor_parallel_engine):
    """Chunked prefill; a cache too small for all requests."""
    return tensor_parallel_engine(
        "llama",
        max_num_batched_tokens=48,
        block_size=BLOCK,
        num_gpu_blocks_override=10,
        disable_log_stats=False,
    )


def value(llm, metric: str) -> int:
    return sum(m.value for m in llm.get_metrics() if m.name == f"vllm:{metric}")


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("generated", [0, 40], ids=["never", "preempted"])
def test_scores_of_both_halves_of_the_vocabulary(llm, oracle, cached, generated):
    """Candidates of either half, in prompts with a shared prefix."""
    shared = random_ids(0, VOCABULARY, SHARED)
    prompts = [shared + random_ids(n, VOCABULARY, 30 + n) for n in range(1, 5)]
    targets = [random_ids(n, VOCABULARY, 30, 4) for n in range(1, 5)]
    assert llm.reset_prefix_cache()
    run(llm, [prompt(shared, shared[-1:])], params())
    before = value(llm, "num_preemptions")

    outputs = run(
        llm,
        [prompt(ids, rows) for ids, rows in zip(prompts, targets)],
        params(generated, skip_reading_prefix_cache=not cached),
    )

    assert (value(llm, "num_preemptions") > before) == (generated > 0)
    assert (outputs[0].num_cached_tokens > 0) == cached
    for ids, rows, output in zip(prompts, targets, outputs):
        assert_scores(output.target_logprobs, oracle("llama"), ids, rows)
        assert len(output.outputs[0].token_ids) == generated


def test_the_most_probable_of_both_halves(llm, oracle):
    ids = random_ids(0, VOCABULARY, 90)
    request = prompt(ids, ids[-60:]) | {"target_temperature": 2.0, "target_top_k": 20}
    (output,) = run(llm, [request], params())
    options = {"temperature": 2.0, "top_k": 20}
    assert_options(output.target_logprobs, oracle("llama"), ids, ids[-60:], **options)


def test_generated_tokens(llm, oracle):
    asked = {"token_ids": [0, VOCABULARY - 1], "top_k": 5, "temperature": 0.5}
    prompts = [random_ids(n, VOCABULARY, 20 + 30 * n) for n in range(4)]
    outputs = run(llm, [prompt(ids) for ids in prompts], params(40, target_generated=asked))
    for ids, output in zip(prompts, outputs):
        assert_generated(output.outputs[0], oracle("llama"), ids, asked)
