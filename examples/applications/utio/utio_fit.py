# SPDX-License-Identifier: Apache-2.0
"""Fits translators and probes to a model's states at its exits.

What utio_calibrate.py says about them is true of this module: features, networks, losses,
and which text each of them is fitted to.
"""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm
from utio_states import BAR, Exits, Rows, Translator, progress
from utio_texts import count, split

STRENGTH = 1e-4
"""Of the ridge regressions, a token; the features' own mean square is 1."""
EPOCHS = 8
RATE = 0.5
"""Learning rate times the inputs of a layer, so that widths need no rate of their own."""
DECAY = 0.05
BATCH = 256
SOME = 4096
"""Tokens that say whether descent was any good."""
ACCEPTANCE_WIDTH = 64
"""Units of the probes that predict acceptance, at most."""


class Probes(NamedTuple):
    """One a cutoff of each."""

    costs: list[nn.Sequential]
    greedy: list[nn.Sequential]  # logits of `agrees`
    sampled: list[nn.Sequential]  # logits of `overlap`


class NormalEquations:
    """Sums of a least-squares fit, in float64, as tokens come by."""

    def __init__(self, size: int, outputs: int):
        self.count = 0
        self._x = torch.zeros(size, dtype=torch.float64)
        self._y = torch.zeros(outputs, dtype=torch.float64)
        self._xx = torch.zeros(size, size, dtype=torch.float64)
        self._xy = torch.zeros(size, outputs, dtype=torch.float64)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Takes in features `[n, size]` and targets `[n, outputs]`."""
        x, y = x.double(), y.to(x.device).double()
        if self._xx.device != x.device:
            self._x, self._y, self._xx, self._xy = (
                sums.to(x.device) for sums in (self._x, self._y, self._xx, self._xy)
            )
        self.count += len(x)
        self._x += x.sum(0)
        self._y += y.sum(0)
        self._xx += x.T @ x
        self._xy += x.T @ y

    def solve(self, strength: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Minimises the mean square error + strength * |weight|², the intercept free.

        Returns:
            Weights float64 `[size, outputs]` and intercepts `[outputs]`.
        """
        mean, mean_y = self._x / self.count, self._y / self.count
        centred = self._xx / self.count - torch.outer(mean, mean)
        moment = self._xy / self.count - torch.outer(mean, mean_y)
        centred.diagonal().add_(strength)
        weight = torch.linalg.solve(centred, moment)
        return weight, mean_y - mean @ weight


def fit(
    args, exits: Exits, windows, hidden_size: int
) -> tuple[list[Translator], Probes]:
    """Translators, and probes of what leaving with them costs on text that they have
    not seen: of each half of the windows, with translators fitted to the other half."""
    if not args.translators:
        return [], fit_probes(args, exits, [(windows, [])], hidden_size)
    first, second = split(windows, 0.5)
    unseen = [
        (first, fit_translators(args, exits, second, hidden_size)),
        (second, fit_translators(args, exits, first, hidden_size)),
    ]
    probes = fit_probes(args, exits, unseen, hidden_size)
    return fit_translators(args, exits, windows, hidden_size), probes


def fit_translators(args, exits: Exits, windows, hidden_size: int) -> list[Translator]:
    size, width = count(windows), args.translator_width or hidden_size
    xs = scratch(args, (len(args.cutoffs), size, hidden_size), np.float16)
    fulls, filled = None, 0
    equations = [NormalEquations(hidden_size, hidden_size) for _ in args.cutoffs]
    with tqdm(total=size, desc="states", unit="tok", **BAR) as bar:
        for at_cutoffs, ends, full in exits.samples(windows, args.batch_size):
            if not at_cutoffs.isfinite().all() or not full.isfinite().all():
                refuse_overflow(args)
            if fulls is None:
                fulls = scratch(args, (size, full.shape[1]), np.float32)
            new = slice(filled, filled + len(full))
            xs[:, new], fulls[new] = at_cutoffs.cpu().numpy(), full.cpu().numpy()
            for sums, x in zip(equations, at_cutoffs):
                sums.add(x, ends)
            filled = new.stop
            bar.update(len(full))
    return [
        fit_translator(exits, x, fulls, sums, width, args.device)
        for x, sums in zip(xs, equations)
    ]


def fit_translator(
    exits: Exits,
    x: np.ndarray,
    full: np.ndarray,
    linear: NormalEquations,
    width: int,
    device: str,
) -> Translator:
    """The least divergence from full depth.

    Args:
        x: features `[n, hidden]`.
        full: what the head takes at full depth, `[n, size]`.
        linear: gives the map to begin with.
    """
    weight, bias = linear.solve(STRENGTH)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = nn.Linear(x.shape[1], width)
    start = weight.T, bias, first.weight, first.bias, torch.zeros(len(weight), width)
    tensors = [
        tensor.detach().to(device, torch.float32).requires_grad_() for tensor in start
    ]
    translator = Translator(*tensors)

    def loss(rows: np.ndarray) -> torch.Tensor:
        inputs = torch.from_numpy(x[rows]).to(device).float()
        return exits.divergence(
            torch.from_numpy(full[rows]).to(device), translator(inputs)
        )

    groups = [
        {"params": tensors[:4], "lr": RATE / x.shape[1]},
        {"params": tensors[4:], "lr": RATE / width},
    ]
    at_once = exits.rows_at_once
    some = np.random.default_rng(0).choice(len(x), min(len(x), SOME), replace=False)

    @torch.no_grad()
    def mean_loss() -> float:
        parts = [some[i : i + at_once] for i in range(0, len(some), at_once)]
        return sum(loss(part).sum().item() for part in parts) / len(some)

    before, begun_with = mean_loss(), [tensor.detach().clone() for tensor in tensors]
    descend("translator", groups, len(x), loss, at_once)
    # Where a linear map is nearly right, steps can lead away from it.
    if not mean_loss() < before:
        return Translator(*begun_with)
    return Translator(*(tensor.detach() for tensor in tensors))


def fit_probes(
    args,
    exits: Exits,
    parts: Sequence[tuple[list[list[int]], list[Translator]]],
    hidden_size: int,
) -> Probes:
    """
    Args:
        parts: windows, and the translators with which their tokens leave.
    """
    size = sum(count(windows) for windows, _ in parts)
    shape = len(args.cutoffs), size, hidden_size
    xs, filled = scratch(args, shape, np.float16), 0
    costs, agrees, overlap = np.empty((3, *shape[:2]))
    for windows, translators in parts:
        exits.translators = translators
        for rows in progress(exits, windows, args.batch_size, "costs"):
            check_finite(args, rows)
            new = slice(filled, filled + rows.kl.shape[1])
            xs[:, new] = rows.features.cpu().numpy()
            costs[:, new] = np.sqrt(rows.kl)
            agrees[:, new], overlap[:, new] = rows.agrees, rows.overlap
            filled = new.stop
    wide, narrow = args.probe_width, min(args.probe_width, ACCEPTANCE_WIDTH)
    return Probes(
        costs=[fit_probe(x, y, wide, args.device) for x, y in zip(xs, costs)],
        greedy=[fit_probe(x, y, narrow, args.device, True) for x, y in zip(xs, agrees)],
        sampled=[
            fit_probe(x, y, narrow, args.device, True) for x, y in zip(xs, overlap)
        ],
    )


def fit_probe(
    x: np.ndarray, y: np.ndarray, width: int, device: str, is_chance: bool = False
) -> nn.Sequential:
    """Fits targets `[n]` from features `[n, hidden]`: by least squares, or, where they
    are probabilities, their logits by cross-entropy."""
    target = torch.from_numpy(y).float()
    mean, spread = torch.zeros(()), torch.ones(())
    if not is_chance:
        mean, spread = target.mean(), target.std().clamp(min=1e-6)
    target = (target - mean) / spread
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, last = nn.Linear(x.shape[1], width), nn.Linear(width, 1)
    probe = nn.Sequential(first, nn.GELU(), last).to(device)

    def loss(rows: np.ndarray) -> torch.Tensor:
        inputs = torch.from_numpy(x[rows]).to(device).float()
        outputs, wanted = probe(inputs).squeeze(1), target[rows].to(device)
        if is_chance:
            return F.binary_cross_entropy_with_logits(outputs, wanted, reduction="none")
        return (outputs - wanted).square()

    groups = [
        {"params": layer.parameters(), "lr": RATE / layer.in_features}
        for layer in (first, last)
    ]
    descend("probe", groups, len(x), loss, BATCH)
    with torch.no_grad():
        last.weight.mul_(spread)
        last.bias.mul_(spread).add_(mean)
    return probe


def descend(
    name: str,
    groups: list[dict],
    size: int,
    loss: Callable[[np.ndarray], torch.Tensor],
    at_once: int,
) -> None:
    """Fits the parameters in `groups` to `size` samples.

    Args:
        loss: of samples by their indices, `[n]`; of not more than `at_once`.
    """
    optimizer = torch.optim.AdamW(groups, weight_decay=DECAY)
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(size) for _ in range(EPOCHS)])
    batches = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in groups], total_steps=len(batches)
    )
    for batch in tqdm(batches, desc=name, unit="step", **BAR):
        optimizer.zero_grad()
        for begin in range(0, len(batch), at_once):
            (loss(batch[begin : begin + at_once]).sum() / len(batch)).backward()
        optimizer.step()
        schedule.step()


def scratch(args, shape: tuple[int, ...], dtype: type[np.floating]) -> np.ndarray:
    """An array in a file beside the output, which goes with it."""
    try:
        with tempfile.TemporaryFile(dir=args.output.parent) as file:
            # Now, not when a page of it is written, which a full disk would end.
            os.posix_fallocate(file.fileno(), 0, math.prod(shape) * dtype().itemsize)
            return np.memmap(file, dtype, "r+", shape=shape)
    except OSError as error:
        sys.exit(f"--output {args.output}: no scratch file beside it: {error}")


def check_finite(args: argparse.Namespace, rows: Rows) -> None:
    if not np.isfinite(rows.kl).all() or not rows.features.isfinite().all():
        refuse_overflow(args)


def refuse_overflow(args: argparse.Namespace) -> None:
    sys.exit(f"--dtype {args.dtype}: the model's states or logits overflow")
