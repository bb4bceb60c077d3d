# SPDX-License-Identifier: Apache-2.0
"""Short words for the tests of routing at the cutoffs: a policy that is recorded, what it
routes, and probes of any numbers."""

import numpy as np
import pytest
import torch
from depth_routing import (
    CUTOFFS,
    NUM_LAYERS,
    Request,
    callers_id,
    logits_options,
    model_runner,
    serve,
)
from safetensors.torch import save_file
from scoring import random_ids
from tiny_models import CONFIGS
from vllm.v1.worker.depth.policy import CutoffPolicy

SHARES = (0.375, 0.25, 0.375)
ABOUT = ("utio-calibration-2", ",".join(map(str, CUTOFFS[:-1])), str(NUM_LAYERS))


class Recorded(CutoffPolicy):
    """Draws the scores and keeps what it was asked and what it said."""

    calls: list[tuple[int, dict[str, float]]]

    def score(self, cutoff, states, req_indices, req_ids):
        names = [callers_id(req_ids[i]) for i in req_indices.tolist()]
        assert len(set(names)) == len(names) == len(states)
        scores = np.random.default_rng(len(self.calls)).random(len(names))
        self.calls.append((cutoff, dict(zip(names, scores))))
        return torch.tensor(scores, dtype=torch.float32)


def engine_options(**options) -> dict:
    return dict(
        enable_utio=True,
        utio_bucket_cutoffs=CUTOFFS[:-1],
        utio_bucket_shares=SHARES,
        utio_min_batch_size=1,
        utio_gate=False,
        utio_policy=f"{Recorded.__module__}.{Recorded.__qualname__}",
    ) | logits_options(**options)


def requests(count: int = 10, **options) -> list[Request]:
    """That join while others decode, with prompts of up to two chunks."""
    lengths = [1, 70, 33, 5, 32, 90, 64, 2, 31, 40]
    return [
        Request(
            random_ids(300 + n, CONFIGS["deep_llama"].vocab_size, lengths[n % 10]),
            max_tokens=3 + n % 8,
            arrival=3 * n % 8,
            options=options,
        )
        for n in range(count)
    ]


@pytest.fixture
def routed(monkeypatch):
    """Serves requests; each gets the depths that the engine says it gave."""

    def run(llm, asked, **kwargs):
        router = model_runner(llm).depth_router
        depths: dict[str, list[int]] = {}
        finish = router.finish

        def finished(step, *args):
            finish(step, *args)
            if step.output is not None:
                for req_id, depth in zip(step.req_ids, step.output.depths.tolist()):
                    if depth:
                        depths.setdefault(callers_id(req_id), []).append(depth)

        Recorded.calls = []
        with monkeypatch.context() as patch:
            patch.setattr(router, "finish", finished)
            serve(llm, asked, **kwargs)
        for request in asked:
            request.depths = depths.get(request.output.request_id, [])
        return asked

    return run


def save_probes(
    folder,
    hidden_size: int,
    cutoffs=CUTOFFS[:-1],
    translators=False,
    acceptance=False,
    **metadata,
) -> str:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(len(cutoffs), *shape, generator=generator)

    width = 24
    tensors = {
        "probe_weight_1": normal(width, hidden_size) / hidden_size**0.5,
        "probe_bias_1": normal(width),
        "probe_weight_2": normal(width),
        "probe_bias_2": normal(),
    }
    if translators:
        mixed = normal(hidden_size, hidden_size) / hidden_size**0.5
        tensors |= {
            "translator_weight": torch.eye(hidden_size) + mixed,
            "translator_bias": normal(hidden_size),
            "translator_weight_1": normal(width, hidden_size) / hidden_size**0.5,
            "translator_bias_1": normal(width),
            "translator_weight_2": normal(hidden_size, width) / width**0.5,
        }
    for kind in ("greedy", "sampled") if acceptance else ():
        tensors |= {
            f"acceptance_{kind}_weight_1": normal(width, hidden_size) / hidden_size**0.5,
            f"acceptance_{kind}_bias_1": normal(width),
            f"acceptance_{kind}_weight_2": normal(width),
            f"acceptance_{kind}_bias_2": normal(),
        }
    file = str(folder / "probes.safetensors")
    about = {
        "format": "utio-calibration-2",
        "cutoffs": ",".join(map(str, cutoffs)),
        "num_layers": str(NUM_LAYERS),
    }
    save_file(tensors, file, about | metadata)
    return file
