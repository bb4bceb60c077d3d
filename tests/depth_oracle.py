# SPDX-License-Identifier: Apache-2.0
"""The oracle of depth routing (DESIGN section 6): Hugging Face modules in float32.

One request at a time, prompt first, then token by token, on Transformers' own
forward. What the layers [d, L) make of a decode token of depth d is thrown away, all
but the keys and values that they make of its exit state (state propagation). That
saves no work, so there is little here that could be wrong, and nothing is shared with
vLLM.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache


class DepthOracle:
    """A causal model in float32 of which each decode token runs a number of layers.

    Args:
        folder: a Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Gemma 3 or OPT,
            as `save_pretrained` leaves it.
        propagate: False drops state propagation: a token that has left writes zeros
            as its keys and values. It is there to show what propagation is worth.
        weights: precision that the weights are rounded to; arithmetic is in float32.
        calibration: file of translators, which make the state that the final norm
            gets out of an exit state.
    """

    def __init__(
        self,
        folder: Path,
        *,
        propagate: bool = True,
        weights: torch.dtype = torch.float32,
        calibration: str | None = None,
    ):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=weights).float()
        self._model = model.eval()
        decoder = (
            model.model.decoder if hasattr(model.model, "decoder") else model.model
        )
        self._layers = [_Layer(layer, propagate) for layer in decoder.layers]
        decoder.layers = nn.ModuleList(self._layers)
        self._translators = {}
        if calibration is not None:
            with safe_open(calibration, framework="pt") as file:
                cutoffs = file.metadata()["cutoffs"].split(",")
                fields = "weight", "bias", "weight_1", "bias_1", "weight_2"
                stacks = (file.get_tensor(f"translator_{field}") for field in fields)
                self._translators = dict(zip(map(int, cutoffs), zip(*stacks)))
        self._known: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def logits(
        self,
        prompt: Sequence[int],
        generated: Sequence[int],
        depths: Sequence[int],
    ) -> np.ndarray:
        """Logits from which each generated token was chosen.

        Args:
            prompt: token ids that run all layers in one forward.
            generated: n ≥ 1 token ids that follow, whatever chose them.
            depths: layers that each of them runs, but for the last, which is never
                run: n - 1 numbers in [1, L]; further ones are not looked at.

        Returns:
            float64 `[n, vocabulary]`; row 0 comes from the prompt's last token, row i
            from the generated token i - 1 at `depths[i - 1]`.
        """
        return self._cached(prompt, generated, depths)[0]

    def states(self, prompt, generated, depths) -> np.ndarray:
        """The states, after the final norm, that gave those logits; float64
        `[n, hidden size]`."""
        return self._cached(prompt, generated, depths)[1]

    def _cached(self, prompt, generated, depths):
        depths = depths[: len(generated) - 1]
        assert len(depths) == len(generated) - 1, (len(depths), len(generated))
        assert all(1 <= depth <= self.num_layers for depth in depths), depths
        key = tuple(map(tuple, (prompt, generated[:-1], depths)))
        if key not in self._known:
            self._known[key] = self._run(*key)
        return self._known[key]

    @torch.inference_mode()
    def _run(self, prompt, generated, depths) -> tuple[np.ndarray, np.ndarray]:
        cache = DynamicCache(config=self._model.config)
        states = [self._forward(prompt, self.num_layers, cache)]
        for token, depth in zip(generated, depths, strict=True):
            states.append(self._forward((token,), depth, cache))
        logits = self._model.lm_head(torch.stack(states))
        return logits.double().numpy(), torch.stack(states).double().numpy()

    def _forward(self, tokens, depth: int, cache: DynamicCache) -> torch.Tensor:
        """State `[hidden size]` after the last of `tokens` and the final norm."""
        for index, layer in enumerate(self._layers):
            layer.runs = index < depth
        self._layers[-1].translator = self._translators.get(depth)
        out = self._model.model(torch.tensor([tokens]), past_key_values=cache)
        return out.last_hidden_state[0, -1]


class _Layer(nn.Module):
    """A decoder layer that runs, or leaves nothing but its keys and values."""

    def __init__(self, layer: nn.Module, propagate: bool):
        super().__init__()
        self.layer = layer
        self.propagate = propagate
        self.runs = True
        self.translator = None

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        output = self.layer(hidden_states, **kwargs)
        if self.runs:
            return output
        # The layer has written the keys and values of the state it was given, which
        # is all that is wanted of it.
        if not self.propagate:
            cached = kwargs["past_key_values"].layers[self.layer.self_attn.layer_idx]
            cached.keys[..., -1:, :] = cached.values[..., -1:, :] = 0
        if self.translator is not None:
            weight, bias, weight_1, bias_1, weight_2 = self.translator
            rms = hidden_states.square().mean(-1, keepdim=True).sqrt()
            unit = hidden_states / rms
            inner = unit @ weight_1.T + bias_1
            inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2  # GELU
            return unit @ weight.T + bias + inner @ weight_2.T
        return hidden_states
