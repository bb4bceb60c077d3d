# SPDX-License-Identifier: Apache-2.0
"""Ways of choosing the tokens that exit early, as policies of the engine.

The program that runs the engine chooses among them in `Chosen`: they share its process.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from utio_options import AGREEMENT, ENTROPY, PROBE, RANDOM
from vllm.model_executor.layers.depth.calibration import ProbeWeights, load_calibration
from vllm.v1.worker.depth.policy import (
    CalibratedProbe,
    CutoffPolicy,
    DepthPolicy,
)


class Chosen:
    """What the engine's policy does now."""

    way = RANDOM
    shares: list[float] = []  # that leave at each cutoff
    generator = torch.Generator()
    # Of each oracle: what an exit costs, [steps], by request and cutoff.
    known: dict[str, dict[tuple[str, int], np.ndarray]] = {}
    steps: Counter[str] = Counter()  # how far each request is
    last: dict[str, int] = {}  # cutoff at which it was scored

    @classmethod
    def set(cls, way: str, shares: Sequence[float], seed: int = 0) -> None:
        cls.way, cls.shares = way, list(shares)
        cls.generator.manual_seed(seed)
        cls.forget()

    @classmethod
    def forget(cls) -> None:
        """Of requests before."""
        cls.steps.clear()
        cls.last.clear()


class BeforeTheStep(DepthPolicy):
    """Random routing, or by the token importance score."""

    def assign(self, scores: torch.Tensor, req_ids: Sequence[str]):
        if Chosen.way == RANDOM:
            scores = torch.rand(len(req_ids), generator=Chosen.generator)
        ends = np.round(np.cumsum([0, *Chosen.shares]) * len(req_ids)).astype(int)
        return scores.argsort(descending=True, stable=True), np.diff(ends).tolist()


class AtTheCutoff(CutoffPolicy):
    """By a probe, by the entropy of the exit, or by what the exit truly costs."""

    head: "ExitHead | None" = None

    def __init__(self, config):
        super().__init__(config)
        AtTheCutoff.newest = self
        self.probe = self.acceptance = None
        if config.calibration:
            self.probe = CalibratedProbe(config)
            calibration = load_calibration(config.calibration, config.cutoffs)
            self.acceptance = calibration.acceptance

    def score(self, cutoff, states, req_indices, req_ids):
        if Chosen.way == PROBE:
            return self.probe.score(cutoff, states, req_indices, req_ids)
        if Chosen.way == AGREEMENT:
            greedy, _ = self.acceptance[cutoff]
            greedy = ProbeWeights(*(tensor.to(states.device) for tensor in greedy))
            return -greedy.predict(states)
        if Chosen.way == ENTROPY:
            logprobs = self.head(cutoff, states).float().log_softmax(-1)
            return -(logprobs.exp() * logprobs).sum(-1)
        known_of = Chosen.known.get(Chosen.way, {})  # none as the engine warms up
        scores = []
        for index in req_indices.tolist():
            # The engine appends eight characters to the ids that it is given.
            name = req_ids[index].rpartition("-")[0]
            known = known_of.get((name, cutoff), (0.0,))
            # A step goes up through the cutoffs, those at which none leaves left out.
            Chosen.steps[name] += cutoff <= Chosen.last.get(name, cutoff)
            Chosen.last[name] = cutoff
            scores.append(known[min(Chosen.steps[name], len(known)) - 1])
        return torch.tensor(scores, dtype=torch.float32, device=states.device)


class ExitHead:
    """What the model says of tokens that exit, from their states.

    Args:
        model: the engine's, which has a depth loop.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        decoder = getattr(model.model, "decoder", model.model)
        self._translators = decoder.depth_loop.translators
        names = ("norm", "final_layer_norm", "project_out")
        found = [getattr(decoder, name, None) for name in names]
        self._tail = [module for module in found if module is not None]

    @torch.inference_mode()
    def __call__(self, cutoff: int, states: torch.Tensor) -> torch.Tensor:
        """Logits `[tokens, vocabulary]` of states `[tokens, hidden size]`."""
        x = states.clone()  # a norm may work in place
        if cutoff in self._translators:
            x, _ = self._translators[cutoff](x, None)
        for module in self._tail:
            x = module(x)
            x = x[0] if isinstance(x, tuple) else x
        return self._model.compute_logits(x)
