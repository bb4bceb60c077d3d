# SPDX-License-Identifier: Apache-2.0
"""Scores with a LoRA adapter, on the LM head too, against merged weights."""

import numpy as np
from adapters import RANK
from oracle import Oracle
from scoring import assert_scores, params, prompt, random_ids
from tiny_models import CONFIGS

VOCABULARY = CONFIGS["llama"].vocab_size


def test_adapters_apply_to_their_own_rows(engine, oracle, adapter_folders):
    """Requests with and without an adapter in one batch, prefilled in chunks."""
    from vllm.lora.request import LoRARequest

    adapter, merged = adapter_folders
    llm = engine(
        "llama",
        enable_lora=True,
        max_lora_rank=RANK,
        max_num_batched_tokens=48,
    )
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
