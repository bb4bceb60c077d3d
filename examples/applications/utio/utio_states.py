# SPDX-License-Identifier: Apache-2.0
"""A Transformers model's states at its exits, and what each exit says.

Attention is full depth's throughout: every token attends to keys and values that all
layers wrote.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm
from utio_texts import count

RMS_EPSILON = 1e-6
LOGITS_AT_ONCE = 2**22
"""Elements of one block of logits; a few such blocks are held at a time."""
BAR = {"leave": False, "disable": None}
"""Of progress bars: none where the output is no terminal."""


class Rows(NamedTuple):
    """The tokens of one window; C cutoffs, n tokens."""

    features: torch.Tensor  # float32 [C, n, hidden], on the model's device
    kl: np.ndarray  # float64 [C, n], full depth against the exit, nats
    exit_entropy: np.ndarray  # float64 [C, n]
    exit_nll: np.ndarray  # float64 [C, n], of the token that comes next
    agrees: np.ndarray  # bool [C, n], with full depth's greedy choice
    full_nll: np.ndarray  # float64 [n]
    lagged_entropy: np.ndarray  # float64 [n], full depth, from the token before
    overlap: np.ndarray  # float64 [C, n], of the two distributions, from 0 to 1


class Translator(NamedTuple):
    """Makes features of the last layer's state out of those at a cutoff; float32."""

    weight: torch.Tensor  # [hidden, hidden]
    bias: torch.Tensor  # [hidden]
    weight_1: torch.Tensor  # [width, hidden]
    bias_1: torch.Tensor  # [width]
    weight_2: torch.Tensor  # [hidden, width]

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(F.linear(features, self.weight_1, self.bias_1))
        linear = F.linear(features, self.weight, self.bias)
        return linear + F.linear(inner, self.weight_2)


class Exits:
    """A causal model with exits after some of its layers.

    Args:
        model: a Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Gemma 3 or OPT of Transformers.
        cutoffs: numbers of layers, from 1 to one less than the model has.
    """

    def __init__(self, model: nn.Module, cutoffs: Sequence[int]):
        self._model = model.requires_grad_(False)
        decoder = getattr(model.model, "decoder", model.model)
        self._decoder = decoder
        if decoder is model.model:
            tail = [decoder.norm]
        else:  # OPT; 350m has no final norm, most have no projection
            tail = [decoder.final_layer_norm, decoder.project_out]
        self._tail = [module for module in tail if module is not None]
        self._states: dict[int, torch.Tensor] = {}
        self._cutoffs = cutoffs
        self._last = len(decoder.layers)
        self.translators: list[Translator] = []  # one a cutoff, or none
        for cutoff in (*cutoffs, self._last):
            decoder.layers[cutoff - 1].register_forward_hook(self._keep(cutoff))

    def _keep(self, cutoff: int):
        def hook(module, inputs, output) -> None:
            is_tuple = isinstance(output, tuple)
            self._states[cutoff] = output[0] if is_tuple else output

        return hook

    def rows(self, windows: list[list[int]], batch_size: int) -> Iterator[Rows]:
        """The usable tokens of each window, in order."""
        for full, states, _, ids in self._run(windows, batch_size):
            yield self._window(full, states, ids)

    def samples(
        self, windows: list[list[int]], batch_size: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Of the usable tokens of each window: features at the cutoffs, float32 [C, n,
        hidden]; those after the last layer, [n, hidden], or the states as they are where
        no norm follows; and what the head then takes, [n, size]."""
        normed = any("norm" in type(module).__name__.lower() for module in self._tail)
        for full, states, last, _ in self._run(windows, batch_size):
            ends = features(last) if normed else last.float()
            at_cutoffs = torch.stack([features(state[1:]) for state in states])
            yield at_cutoffs, ends[1:], full[1:].float()

    def divergence(self, full: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """KL in nats, `[n]`, of what the final norm and the head make of features from
        what the head makes of `full`."""
        head = self._model.get_output_embeddings()
        x = features.to(head.weight.dtype)
        for module in self._tail:
            x = module(x)
        p = head(full.to(x.dtype)).float().log_softmax(-1)
        q = head(x).float().log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1)

    @property
    def rows_at_once(self) -> int:
        """Tokens whose logits may be held."""
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        return max(LOGITS_AT_ONCE // vocabulary, 1)

    @torch.inference_mode()
    def _run(self, windows: list[list[int]], batch_size: int):
        """Of each window: the decoder's output, the states at the cutoffs and after
        the last layer, and the tokens that follow."""
        device = self._model.device
        for begin in range(0, len(windows), batch_size):
            batch = windows[begin : begin + batch_size]
            # Filled up on the right, where causal attention does not look.
            ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.int64)
            for row, window in zip(ids, batch):
                row[: len(window)] = torch.tensor(window)
            ids = ids.to(device)
            full = self._decoder(input_ids=ids, use_cache=False).last_hidden_state
            for i, window in enumerate(batch):
                end = len(window) - 1
                states = [self._states[cutoff][i, :end] for cutoff in self._cutoffs]
                last = self._states[self._last][i, :end]
                yield full[i, :end], states, last, ids[i, 1 : end + 1]
            self._states.clear()

    @torch.inference_mode()
    def _window(self, full, states, following) -> Rows:
        head = self._model.get_output_embeddings()
        step = self.rows_at_once
        parts = []
        for begin in range(0, len(following), step):
            rows = slice(begin, begin + step)
            next_ids = following[rows, None]
            p = head(full[rows]).float().log_softmax(-1)
            base = [entropy(p), -p.gather(-1, next_ids)[:, 0]]
            leaving = []
            for index, state in enumerate(states):
                x = state[rows]
                if self.translators:
                    x = self.translators[index](features(x)).to(x.dtype)
                for module in self._tail:
                    x = module(x)
                q = head(x).float().log_softmax(-1)
                kl = (p.exp() * (p - q)).sum(-1).clamp(min=0)
                agrees = p.argmax(-1) == q.argmax(-1)
                nll = -q.gather(-1, next_ids)[:, 0]
                overlap = torch.minimum(p, q).exp().sum(-1)
                leaving.append(torch.stack([kl, entropy(q), nll, agrees, overlap]))
            parts.append((torch.stack(base), torch.stack(leaving)))
        base = torch.cat([part[0] for part in parts], -1).double().cpu().numpy()
        leaving = torch.cat([part[1] for part in parts], -1).double().cpu().numpy()
        kl, exit_entropy, exit_nll, agrees, overlap = leaving[:, :, 1:].swapaxes(0, 1)
        return Rows(
            features=torch.stack([features(state[1:]) for state in states]),
            kl=kl,
            exit_entropy=exit_entropy,
            exit_nll=exit_nll,
            agrees=agrees.astype(bool),
            full_nll=base[1, 1:],
            lagged_entropy=base[0, :-1],
            overlap=overlap,
        )


def features(states: torch.Tensor) -> torch.Tensor:
    """float32 of the states' shape: each divided by its root mean square."""
    x = states.float()
    return x / (x.square().mean(-1, keepdim=True) + RMS_EPSILON).sqrt()


def entropy(logprobs: torch.Tensor) -> torch.Tensor:
    return -(logprobs.exp() * logprobs).sum(-1)


def progress(exits: Exits, windows, batch_size: int, name: str) -> Iterator[Rows]:
    with tqdm(total=count(windows), desc=name, unit="tok", **BAR) as bar:
        for rows in exits.rows(windows, batch_size):
            yield rows
            bar.update(len(rows.full_nll))
