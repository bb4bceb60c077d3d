# SPDX-License-Identifier: Apache-2.0
"""How far the drawn distribution is from the one over the whole vocabulary.

The reference is computed with Hugging Face in float32, and shares no code with the
coordinator: alpha is where a minimizer finds Z least.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, logsumexp
from transformers import AutoModelForCausalLM

from dual_vllm import report
from dual_vllm.config import CoordinatorConfig
from dual_vllm.coordinator import DualVLLMCoordinator, GenerationOutput, Step


class Reference(NamedTuple):
    """The right answer at one position."""

    logprobs: np.ndarray  # [2, vocabulary] float64, nats
    q: np.ndarray  # [vocabulary]
    kl: float  # nats, of either divergence


class Errors(NamedTuple):
    """Errors of one step, each against the whole vocabulary."""

    tv_lists: float  # top-k alone
    tv_candidates: float  # exact union, the rest left out
    tv: float  # exact union, the rest drawn: tail="keep"
    tv_bound: float
    kl_lists: float  # |dKL|, nats
    kl: float
    kl_bound: float
    asymmetry: float  # |KL(q||a) - KL(q||b)| as solved
    asymmetry_vocabulary: float  # the same over the whole vocabulary
    ess_ratio: float


class HuggingFace:
    """Two models in float32."""

    def __init__(self, model_a: str, model_b: str):
        self._models = [
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
            for model in (model_a, model_b)
        ]

    def references(self, output: GenerationOutput) -> list[Reference]:
        """Those of each drawn token of a sample."""
        ids = torch.tensor([output.prompt_token_ids + output.token_ids])
        with torch.inference_mode():
            logits = np.stack([m(ids).logits[0].double().numpy() for m in self._models])
        first = len(output.prompt_token_ids) - 1
        logprobs = log_softmax(logits[:, first:-1], axis=-1)
        return [reference(logprobs[:, n]) for n in range(len(output.token_ids))]


def reference(logprobs: np.ndarray) -> Reference:
    """From log-probabilities `[2, vocabulary]` of a whole vocabulary."""

    def log_z(alpha: float) -> float:
        return logsumexp((1 - alpha) * logprobs[0] + alpha * logprobs[1])

    least = minimize_scalar(
        log_z, bounds=(0, 1), method="bounded", options={"xatol": 1e-10}
    )
    log_q = (1 - least.x) * logprobs[0] + least.x * logprobs[1] - least.fun
    return Reference(logprobs, np.exp(log_q), -least.fun)


def errors(step: Step, right: Reference) -> Errors:
    vocabulary = right.q.size

    def distance(q: np.ndarray) -> float:
        return float(abs(q - right.q).sum() / 2)

    candidates = np.zeros(vocabulary)
    candidates[step.candidates] = step.q[:-1] / step.q[:-1].sum()
    alpha = step.diagnostics.alpha
    log_weight = (1 - alpha) * right.logprobs[0] + alpha * right.logprobs[1]
    drawn = np.exp(log_weight - logsumexp(log_weight))
    difference = right.logprobs[1] - right.logprobs[0]

    lists = np.zeros(vocabulary)
    from_lists = top_k_alone(step)
    lists[step.candidates] = from_lists.q
    known = step.diagnostics
    return Errors(
        tv_lists=distance(lists),
        tv_candidates=distance(candidates),
        tv=distance(drawn),
        tv_bound=known.tv_bound,
        kl_lists=abs(from_lists.kl - right.kl),
        kl=abs(known.kl_a - right.kl),
        kl_bound=known.kl_bound,
        asymmetry=abs(known.kl_a - known.kl_b),
        asymmetry_vocabulary=abs(float(drawn @ difference)),
        ess_ratio=known.ess_a / known.ess_b,
    )


def top_k_alone(step: Step) -> Reference:
    """What the two lists say without exact scores. A token that one of them lacks gets
    its least probability, which did best among what could be put there."""
    logprobs = np.empty((2, len(step.candidates)))
    for row, top in zip(logprobs, step.top):
        listed = dict(zip(top.ids.tolist(), top.logprobs.tolist()))
        row[:] = [listed.get(i, min(top.logprobs)) for i in step.candidates.tolist()]
    return reference(log_softmax(logprobs, axis=-1))


async def compare(
    config: CoordinatorConfig,
    models: Sequence[str],
    prompts: Sequence[str],
    sizes: Sequence[int],
) -> dict[int, list[Errors]]:
    """Errors of each drawn token, by `top_k`."""
    hugging_face = HuggingFace(*models)
    results = {}
    for size in sizes:
        async with DualVLLMCoordinator(config.with_top_k(size)) as dual:
            steps: list[Step] = []
            outputs = await dual.generate_batch(
                prompts, progress=True, on_steps=steps.extend
            )
        right = {o.sample: hugging_face.references(o) for o in outputs}
        results[size] = [errors(s, right[s.sample][s.position]) for s in steps]
    return results


def show(results: dict[int, list[Errors]]) -> None:
    tv, kl, other = [], [], []
    for size, found in results.items():
        means = Errors(*np.mean(found, axis=0))
        most = Errors(*np.max(found, axis=0))
        least = Errors(*np.min(found, axis=0))
        over = sum(e.tv > e.tv_bound or e.tv_candidates > e.tv_bound for e in found)
        tv.append(
            (
                str(size),
                f"{means.tv_lists:.5f}",
                f"{means.tv_candidates:.5f}",
                f"{means.tv:.5f}",
                f"{most.tv:.5f}",
                f"{means.tv_bound:.5f}",
                f"{over} of {len(found)}",
            )
        )
        kl.append(
            (
                str(size),
                f"{means.kl_lists:.5f}",
                f"{means.kl:.5f}",
                f"{most.kl:.5f}",
                f"{means.kl_bound:.5f}",
                f"{sum(e.kl > e.kl_bound for e in found)} of {len(found)}",
            )
        )
        other.append(
            (
                str(size),
                f"{most.asymmetry:.1e}",
                f"{means.asymmetry_vocabulary:.1e}",
                f"{most.asymmetry_vocabulary:.1e}",
                f"{means.ess_ratio:.4f}",
                f"{least.ess_ratio:.4f}",
                f"{most.ess_ratio:.4f}",
            )
        )
    report.table(
        "Total variation from q over the whole vocabulary",
        ("k", "top-k alone", "exact, rest left out", "exact", "most", "bound", "over"),
        tv,
    )
    report.table(
        "|dKL|, nats",
        ("k", "top-k alone", "exact", "most", "bound", "over"),
        kl,
    )
    columns = ("k", "as solved", "vocabulary", "most", "ESS ratio", "least", "most")
    report.table("|KL(q||a) - KL(q||b)|, nats", columns, other)
