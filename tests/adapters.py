# SPDX-License-Identifier: Apache-2.0
"""A random LoRA adapter of the tiny Llama, on the LM head too."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_models import SPREAD
from transformers import AutoModelForCausalLM

RANK, ALPHA = 8, 16
TARGETS = ("model.layers.0.self_attn.q_proj", "lm_head")


def save_adapter(base: Path, adapter: Path, merged: Path) -> None:
    """Saves an adapter of the model in `base`, and the model it makes of it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
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
