# SPDX-License-Identifier: Apache-2.0
"""Scores with a LoRA adapter, on the LM head too, against merged weights."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import Oracle
from safetensors.torch import save_file
from scoring import assert_scores, params, prompt, random_ids
from tiny_models import CONFIGS, SPREAD
from transformers import AutoModelForCausalLM

VOCABULARY = CONFIGS["llama"].vocab_size
RANK, ALPHA = 8, 16
TARGETS = ("model.layers.0.self_attn.q_proj", "lm_head")


@pytest.fixture(scope="module")
def folders(model_folder, tmp_path_factory) -> tuple[Path, Path]:
    """Folders of a random adapter of the tiny Llama and of the merged model."""
    adapter = tmp_path_factory.mktemp("adapter")
    merged = tmp_path_factory.mktemp("merged")
    model = AutoModelForCausalLM.from_pretrained(
        model_folder("llama"), dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name in TARGETS:
        weight = model.get_submodule(name).weight
        rows, columns = weight.shape
        down = torch.randn(RANK, columns, generator=generator) * SPREAD
        up = torch.randn(rows, RANK, generator=generator) * SPREAD
        weights[f"base_model.model.{name}.lora_A.weight"] = down
        weights[f"base_model.model.{name}.lora_B.weight"] = up
        with torch.no_grad():
            weight += up @ down * (ALPHA / RANK)
    model.save_pretrained(merged)
    save_file(weights, adapter / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": [name.split(".")[-1] for name in TARGETS],
        "bias": "none",
    }
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return adapter, merged


def test_adapters_apply_to_their_own_rows(engine, oracle, folders):
    """Requests with and without an adapter in one batch, prefilled in chunks."""
    from vllm.lora.request import LoRARequest

    adapter, merged = folders
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
