# SPDX-License-Identifier: Apache-2.0
"""The oracle: the scores of DESIGN section 5 from Hugging Face in float32.

Nothing here is shared with vLLM: the model runs on Transformers' own code, one whole
prompt at a time, and the scores are plain NumPy over the full vocabulary in float64.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

NOT_SCORED = -1


class Expected(NamedTuple):
    start: int  # position of the first scored token
    logits: np.ndarray  # [n, vocabulary] float64, row r predicts position start + r
    ids: np.ndarray  # [n, K] int64, short rows filled with -1
    logprobs: np.ndarray  # [n, K] float64, -inf where the id is -1
    ranks: np.ndarray  # [n, K] int64, 0 where the id is -1
    entropy: np.ndarray  # [n] float64 in nats, NaN where no id of the row is scored


def pad_targets(targets) -> np.ndarray:
    """Any accepted form of `target_token_ids` as int64 `[n, K]`."""
    rows = [np.atleast_1d(np.asarray(row, dtype=np.int64)) for row in targets]
    ids = np.full((len(rows), max(map(len, rows))), NOT_SCORED)
    for row, values in zip(ids, rows):
        row[: len(values)] = values
    return ids


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def ranks_of(logits: np.ndarray, ids: np.ndarray, margin: float = 0.0) -> np.ndarray:
    """1 + number of logits greater than the id's own by more than `margin`; `[n, K]`,
    0 where the id is -1."""
    own = np.take_along_axis(logits, np.maximum(ids, 0), axis=-1)
    greater = (logits[:, None, :] > own[:, :, None] + margin).sum(axis=-1)
    return np.where(ids == NOT_SCORED, 0, 1 + greater)


class Oracle:
    """A causal model in float32 and what it says of tokens that a caller names."""

    def __init__(self, folder: Path, *, weights: torch.dtype = torch.float32):
        """Loads the model; `weights` is the precision that its weights are rounded
        to first. The arithmetic is float32 always."""
        # Other implementations of attention leave out a soft cap.
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self._model = model.to(weights).to(torch.float32).eval()
        self._logits: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, prompt: list[int]) -> np.ndarray:
        """Logits after each prompt token, float64 `[len(prompt), vocabulary]`."""
        key = tuple(map(int, prompt))
        if key not in self._logits:
            with torch.inference_mode():
                out = self._model(torch.tensor([key])).logits[0]
            self._logits[key] = out.double().numpy()
        return self._logits[key]

    def scores(self, prompt: list[int], targets) -> Expected:
        """Scores the rows of `targets`, aligned to the end of `prompt`: the row for
        position p is read from the logits after token p - 1."""
        ids = pad_targets(targets)
        start = len(prompt) - len(ids)
        logits = self.logits(prompt)[start - 1 : len(prompt) - 1]
        logprobs = log_softmax(logits)
        scored = ids != NOT_SCORED
        named = np.take_along_axis(logprobs, np.maximum(ids, 0), axis=-1)
        entropy = -(np.exp(logprobs) * logprobs).sum(axis=-1)
        return Expected(
            start=start,
            logits=logits,
            ids=ids,
            logprobs=np.where(scored, named, -np.inf),
            ranks=ranks_of(logits, ids),
            entropy=np.where(scored.any(axis=-1), entropy, np.nan),
        )
