# SPDX-License-Identifier: Apache-2.0
"""Scores with a LoRA adapter, on the LM head too, against merged weights."""

import numpy as np
from adapters import RANK
from oracle import Oracle, log_softmax
from scoring import FLOAT32_TOLERANCE, assert_scores, params, prompt, random_ids
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["llama"].vocab_size
ENGINE = {
    "enable_lora": True,
    "max_lora_rank": RANK,
    "max_num_batched_tokens": 48,
    "max_logprobs": -1,
}


def test_adapters_apply_to_their_own_rows(engine, oracle, adapter_folders):
    """Requests with and without an adapter in one batch, prefilled in chunks."""
    from vllm.lora.request import LoRARequest

    adapter, merged = adapter_folders
    llm = engine("llama", **ENGINE)
    oracles = (oracle("llama"), Oracle(merged))
    lengths = np.random.default_rng(0).integers(5, 100, 6).tolist()
    prompts = [random_ids(i, VOCABULARY, n) for i, n in enumerate(lengths)]
    adapters = [LoRARequest("a", 1, str(adapter)) if i % 2 else None for i in range(6)]

    outputs = llm.generate(
        [prompt(ids, ids[1:]) for ids in prompts],
        params(2),
        lora_request=adapters,
        use_tqdm=False,
    )

    for index, (ids, output) in enumerate(zip(prompts, outputs)):
        scored_by = oracles[index % 2]
        assert_scores(output.target_logprobs, scored_by, ids, ids[1:])
        # The sampled rows still have the adapter of their own request.
        generated = list(output.outputs[0].token_ids)
        best = scored_by.logits(ids + generated)[len(ids) - 1 : -1].argmax(axis=-1)
        assert generated == best.tolist()


def test_adapters_apply_to_prompt_logprobs_of_all_the_vocabulary(
    engine, oracle, adapter_folders
):
    """They are made in the model runner's own way."""
    from vllm.lora.request import LoRARequest

    adapter, merged = adapter_folders
    llm = engine("llama", **ENGINE)
    oracles = (oracle("llama"), Oracle(merged))
    prompts = [random_ids(10 + i, VOCABULARY, 12 + 21 * i) for i in range(4)]
    adapters = [LoRARequest("a", 1, str(adapter)) if i % 2 else None for i in range(4)]

    outputs = llm.generate(
        [prompt(ids) for ids in prompts],
        params(2, prompt_logprobs=-1),
        lora_request=adapters,
        use_tqdm=False,
    )

    for index, (ids, output) in enumerate(zip(prompts, outputs)):
        expected = log_softmax(oracles[index % 2].logits(ids))
        assert len(output.prompt_logprobs) == len(ids)
        for row, entry in zip(expected, output.prompt_logprobs[1:]):
            found = np.array([entry[token].logprob for token in range(VOCABULARY)])
            np.testing.assert_allclose(found, row, rtol=0, atol=FLOAT32_TOLERANCE)
