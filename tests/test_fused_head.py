# SPDX-License-Identifier: Apache-2.0
"""Scoring inside the LM head (VLLM_FUSED_TARGET_LOGPROBS=1), through an engine: the
kernels run in Triton's interpreter."""

import numpy as np
import pytest
from oracle import Oracle
from scoring import assert_scores, params, prompt, random_ids, run
from test_scoring_lora import RANK, folders  # noqa: F401
from tiny_models import CONFIGS, OTHERS

# An untied head, a tied one, a soft cap, a bias, a scale.
FAMILIES = ("llama", "qwen2", "gemma2", "gptj", "cohere")
CHUNK = 40  # tokens of a step; no other tests' engines have it, nor so the fused head


@pytest.fixture
def fused_engine(runner, engine, monkeypatch):
    """As `engine`, with the environment variable set."""
    if runner == "v1":
        pytest.skip("the V1 runner has no fused head")
    from vllm.envs import disable_envs_cache

    monkeypatch.setenv("VLLM_FUSED_TARGET_LOGPROBS", "1")
    disable_envs_cache()  # an engine that was started before has filled it
    yield lambda family, **options: engine(
        family, max_num_batched_tokens=CHUNK, max_num_seqs=4, **options
    )
    disable_envs_cache()


@pytest.fixture
def fused_rows(fused_engine, monkeypatch) -> list[int]:
    """How many rows each call of the fused head has scored."""
    from vllm.v1.worker.gpu.sample.fused_target_logprobs import FusedHead

    rows = []
    score = FusedHead.score

    def counted(head, states, *args):
        rows.append(len(states))
        return score(head, states, *args)

    monkeypatch.setattr(FusedHead, "score", counted)
    return rows


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_chunked_prompts(fused_engine, fused_rows, oracle, family):
    llm = fused_engine(family)
    vocabulary = (CONFIGS | OTHERS)[family].vocab_size
    prompts = [random_ids(n, vocabulary, n) for n in (2, 30, 70)]
    targets = [
        prompts[0][1:],
        [[0, vocabulary - 1], [5], [], [7, -1]],
        random_ids(3, vocabulary, 69, 3),
    ]
    outputs = run(llm, [prompt(p, t) for p, t in zip(prompts, targets)], params())
    for p, t, output in zip(prompts, targets, outputs):
        assert_scores(output.target_logprobs, oracle(family), p, t)
    assert sum(fused_rows) == 1 + 3 + 69  # the empty row is not computed
    assert len(fused_rows) > 1


def test_more_candidates_than_the_kernel_takes(fused_engine, fused_rows, oracle):
    llm = fused_engine("llama", max_logprobs=-1)
    vocabulary = CONFIGS["llama"].vocab_size
    ids = random_ids(1, vocabulary, 30)
    targets = np.tile(np.arange(vocabulary), (29, 1))
    (few, many) = run(llm, [prompt(ids, ids[1:]), prompt(ids, targets)], params())
    assert_scores(few.target_logprobs, oracle("llama"), ids, ids[1:])
    assert_scores(many.target_logprobs, oracle("llama"), ids, targets)
    assert sum(fused_rows) == 29


def test_adapters_of_the_head_are_scored_from_logits(
    fused_engine,
    fused_rows,
    oracle,
    folders,  # noqa: F811
):
    from vllm.lora.request import LoRARequest

    adapter, merged = folders
    llm = fused_engine("llama", enable_lora=True, max_lora_rank=RANK)
    ids = random_ids(1, CONFIGS["llama"].vocab_size, 60)
    outputs = llm.generate(
        [prompt(ids, ids[1:])] * 2,
        params(),
        lora_request=[None, LoRARequest("a", 1, str(adapter))],
        use_tqdm=False,
    )
    for output, scored_by in zip(outputs, (oracle("llama"), Oracle(merged))):
        assert_scores(output.target_logprobs, scored_by, ids, ids[1:])
    assert fused_rows == []
