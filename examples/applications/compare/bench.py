# SPDX-License-Identifier: Apache-2.0
"""Time of one comparison, three ways, by turns on the same windows: `compare bench`.

- named tokens: this program's way, the reference made and a model compared with it;
- Transformers: both models' logits of the whole vocabulary, and the divergence of these;
- full vocabulary: `prompt_logprobs=-1` of vLLM, both models, on the first positions alone.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from compare.engine import new_engine, with_cache
from compare.reference import TOKENS_PER_STEP, compare_with, make_reference
from compare.store import Scores
from compare.windows import Window, first_positions

if TYPE_CHECKING:
    from vllm import LLM

Way = Callable[[list[Window]], float]
"""Compares two models on windows and gives the mean KL divergence in nats."""


def run(args: argparse.Namespace) -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    plan = json.loads((args.folder / "report.json").read_text())["plan"]
    windows = Scores(args.folder / "reference").load_reference(0).windows
    many = first_positions(windows, args.positions)
    few = first_positions(windows, args.full_positions)
    paths = plan["reference"]["path"], args.candidate
    engines = [start(path, plan) for path in paths]
    top_k, samples = plan["top_k"], plan["tail_samples"]
    ways: dict[str, tuple[Way, list[Window]]] = {
        "named tokens": (lambda w: by_name(engines, w, top_k, samples), many),
        "Transformers": (with_transformers(paths), many),
        "full vocabulary": (lambda w: by_full_vocabulary(engines, w), few),
    }
    show(measure(ways, args.repeat))


def start(path: str, plan: dict[str, Any]) -> "LLM":
    options = {"max_num_batched_tokens": TOKENS_PER_STEP} | plan["reference"]["options"]
    return new_engine(
        "OUTPUT", model=path, max_model_len=plan["context_length"] + 1, max_logprobs=-1,
        enable_prefix_caching=False, **with_cache(options),
    )  # fmt: skip


def measure(
    ways: dict[str, tuple[Way, list[Window]]], repeat: int
) -> list[dict[str, Any]]:
    """Warms each way up, then times them by turns."""
    for way, windows in ways.values():
        way(first_positions(windows, 16))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found = {}
    for _ in range(repeat):
        for name, (way, windows) in ways.items():
            begin = time.perf_counter()
            found[name] = way(windows)
            seconds[name].append(time.perf_counter() - begin)
    counts = {name: sum(w.scored for w in windows) for name, (_, windows) in ways.items()}
    return [
        {"way": name, "positions": counts[name], "kl": found[name], "seconds": times}
        for name, times in seconds.items()
    ]


def by_name(
    engines: list["LLM"], windows: list[Window], top_k: int, samples: int
) -> float:
    reference = make_reference(engines[0], windows, top_k, samples)
    return float(compare_with(engines[1], reference).estimate.mean())


def with_transformers(paths: tuple[str, str]) -> Way:
    import torch
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in paths]

    def logprobs(model: Any, ids: list[int], scored: int) -> torch.Tensor:
        rows = model(torch.tensor([ids])).logits[0, -scored - 1 : -1]
        return rows.float().log_softmax(-1)

    @torch.inference_mode()
    def compare(windows: list[Window]) -> float:
        total = 0.0
        for ids, scored in windows:
            p, q = (logprobs(model, ids, scored) for model in models)
            total += float((p.exp() * (p - q)).sum())
        return total / sum(window.scored for window in windows)

    return compare


def by_full_vocabulary(engines: list["LLM"], windows: list[Window]) -> float:
    p, q = (all_logprobs(llm, windows) for llm in engines)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def all_logprobs(llm: "LLM", windows: list[Window]) -> np.ndarray:
    """Log-probabilities `[N, vocabulary]` at the scored positions."""
    from vllm import SamplingParams, TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=window.token_ids) for window in windows]
    params = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)
    rows = []
    for output, window in zip(llm.generate(prompts, params, use_tqdm=False), windows):
        for entry in output.prompt_logprobs[-window.scored :]:
            row = np.empty(len(entry))
            for token, value in entry.items():
                row[token] = value.logprob
            rows.append(row)
    return np.array(rows)


def show(rows: list[dict[str, Any]]) -> None:
    """Prints a row a way; the first is what the others are compared with."""
    from rich.console import Console

    from compare.tables import new_table

    def pace(row: dict[str, Any]) -> list[float]:
        return [second / row["positions"] for second in row["seconds"]]

    texts = []
    for row in rows:
        ratios = [own / first for own, first in zip(pace(row), pace(rows[0]))]
        half = (max(ratios) - min(ratios)) / 2
        texts.append([
            row["way"], str(row["positions"]), f"{row['kl']:.4g}",
            f"{1000 * statistics.median(pace(row)):.3f}",
            f"{statistics.median(ratios):.2f} ±{half:.2f}",
        ])  # fmt: skip
    headings = ["way", "positions", "KL, nats", "ms a position", "times the first"]
    Console().print(new_table("One reference and one model", headings, texts))
