# SPDX-License-Identifier: Apache-2.0
"""What the tests of `examples/applications/compare` share: models beside tiny ones, and
the figures of whole distributions, by plain NumPy in float64."""

import math
from pathlib import Path

import numpy as np
import torch
from oracle import Oracle, log_softmax
from scipy import stats
from tiny_models import make_tokenizer
from transformers import AutoModelForCausalLM

NOISE = 0.02
"""Relative to the weights; the divergence is then about a tenth of a nat."""


def save_noisy(source: Path, folder: Path, noise: float = NOISE) -> Path:
    """The model of `source` with noise on its weights."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn_like(parameter) * parameter.std()
            parameter.add_(drawn, alpha=noise)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def true_logprobs(oracle: Oracle, windows: list) -> np.ndarray:
    """Of the whole vocabulary at the scored positions, float64 `[N, V]`."""
    rows = [oracle.logits(ids)[-scored - 1 : -1] for ids, scored in windows]
    return log_softmax(np.concatenate(rows))


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL divergence of distributions given by log-probabilities `[N, V]`."""
    return (np.exp(p) * (p - q)).sum(axis=1)


def merged(logprobs: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """The distributions over the candidates `[N, K]` and any other: `[N, K + 1]`."""
    few = np.take_along_axis(logprobs, candidates.astype(int), axis=1)
    rest = np.exp(logprobs)
    np.put_along_axis(rest, candidates.astype(int), 0, axis=1)
    return np.column_stack([few, np.log(rest.sum(axis=1))])


def true_figures(p: np.ndarray, q: np.ndarray, ids: np.ndarray) -> dict:
    """The figures of positions whose right tokens are `ids`, without errors.

    Args:
        p, q: log-probabilities of reference and model, `[N, V]`.
    """
    rows = np.arange(len(ids))
    right = [x.argmax(axis=1) == ids for x in (p, q)]
    change = np.exp(q[rows, ids]) - np.exp(p[rows, ids])
    return {
        "perplexity": math.exp(-q[rows, ids].mean()),
        "reference_perplexity": math.exp(-p[rows, ids].mean()),
        "perplexity_ratio": math.exp((p - q)[rows, ids].mean()),
        "correlation": stats.pearsonr(p[rows, ids], q[rows, ids]).statistic,
        "kl": divergence(p, q).mean(),
        "top_1_agreement": (p.argmax(axis=1) == q.argmax(axis=1)).mean(),
        "flips": (right[0] != right[1]).mean(),
        "right_to_wrong": (right[0] & ~right[1]).mean(),
        "delta_p": change.mean(),
        "delta_p_rms": math.sqrt((change**2).mean()),
        "delta_p_p5": np.percentile(change, 5),
        "delta_p_max": change.max(),
    }


def reported(figures: dict) -> dict:
    """The same ones of a report."""
    return {
        "perplexity": figures["perplexity"]["value"],
        "reference_perplexity": figures["reference_perplexity"]["value"],
        "perplexity_ratio": figures["perplexity_ratio"]["value"],
        "correlation": figures["correlation"],
        "kl": figures["kl"]["estimate"]["mean"],
        "top_1_agreement": figures["top_1_agreement"]["mean"],
        "flips": figures["flips"]["mean"],
        "right_to_wrong": figures["flips"]["right_to_wrong"],
        "delta_p": figures["delta_p"]["mean"],
        "delta_p_rms": figures["delta_p"]["rms"]["value"],
        "delta_p_p5": figures["delta_p"]["percentiles"]["p5"],
        "delta_p_max": figures["delta_p"]["percentiles"]["max"],
    }
