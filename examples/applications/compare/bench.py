# SPDX-License-Identifier: Apache-2.0
"""What a comparison takes, three ways, by turns on the same windows: `compare bench`.

- named tokens: this program's way, the reference made and each model compared with it;
- Transformers: all models' logits of the whole vocabulary, and the divergence of these;
- full vocabulary: `prompt_logprobs=-1` of vLLM, all models, on the first positions alone.

Each way makes the reference's part once. Models are loaded before the time is taken. A
file of the reference is written beside one of all its logits.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compare.engine import new_engine
from compare.files import save_arrays, to_arrays
from compare.plan import Model, Plan
from compare.reference import TOKENS_PER_STEP, compare_with, make_reference
from compare.store import Scores
from compare.windows import Window, first_positions

if TYPE_CHECKING:
    import torch
    from vllm import LLM

WIDTH = 160

Way = Callable[[list[Window]], list[float]]
"""Compares models with the first on windows; gives each mean KL divergence in nats."""


def run(args: argparse.Namespace) -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    plan = Plan(**json.loads((args.folder / "report.json").read_bytes())["plan"])
    windows = Scores(args.folder / "reference").load_reference(0).windows
    many = first_positions(windows, args.positions)
    few = first_positions(windows, args.full_positions)
    candidates = [Model(path=path) for path in args.candidate] or plan.candidates
    models = [plan.reference, *candidates]
    engines = [start(model, plan) for model in models]
    loaded = [load(model) for model in models]
    ways: dict[str, tuple[Way, list[Window]]] = {
        "named tokens": (lambda w: by_name(engines, w, plan), many),
        "Transformers": (lambda w: with_transformers(loaded, w), many),
        "full vocabulary": (lambda w: by_full_vocabulary(engines, w), few),
    }
    show_times(measure(ways, args.repeat), [model.label for model in candidates])
    show_bytes(bytes_of_files(engines[0], loaded[0], many, plan))


def start(model: Model, plan: Plan) -> "LLM":
    options = {"max_num_batched_tokens": TOKENS_PER_STEP} | model.options
    if model.tensor_parallel_size > 1:
        options["tensor_parallel_size"] = model.tensor_parallel_size
    # Each GPU holds several engines, and Transformers' models; vLLM wants this share
    # free at each start.
    options |= {"gpu_memory_utilization": 0.05}
    options.setdefault("kv_cache_memory_bytes", 2**30)
    return new_engine(
        "OUTPUT", model=model.folder, dtype=model.dtype, quantization=model.quantization,
        max_model_len=plan.context_length + 1, max_logprobs=-1,
        enable_prefix_caching=False, **options,
    )  # fmt: skip


def measure(
    ways: dict[str, tuple[Way, list[Window]]], repeat: int
) -> list[dict[str, Any]]:
    """Warms each way up, then times them by turns."""
    for way, windows in ways.values():
        way(first_positions(windows, 16))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, list[float]] = {}
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


def by_name(engines: list["LLM"], windows: list[Window], plan: Plan) -> list[float]:
    first, *others = engines
    reference = make_reference(first, windows, plan.top_k, plan.tail_samples)
    return [float(compare_with(llm, reference).estimate.mean()) for llm in others]


def load(model: Model) -> Any:
    """The model in Transformers; a quantized one computes on its dequantized weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig

    options = {"dtype": {"half": "float16", "float": "float32"}.get(model.dtype, model.dtype)}
    config = getattr(AutoConfig.from_pretrained(model.folder), "quantization_config", None)
    if config and config["quant_method"] == "compressed-tensors":
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(model.folder, **options).eval()
    return loaded.to("cuda" if torch.cuda.is_available() else "cpu")


def logprobs_of(model: Any, window: Window) -> "torch.Tensor":
    """Of the whole vocabulary at the scored positions, float32 `[n, V]`."""
    import torch

    with torch.inference_mode():
        ids, scored = window
        ids = torch.tensor([ids], device=model.device)
        rows = model(ids).logits[0, -scored - 1 : -1]
        return rows.float().log_softmax(-1)


def with_transformers(models: list[Any], windows: list[Window]) -> list[float]:
    totals = np.zeros(len(models) - 1)
    for window in windows:
        p = logprobs_of(models[0], window)
        for number, model in enumerate(models[1:]):
            totals[number] += float((p.exp() * (p - logprobs_of(model, window))).sum())
    return (totals / sum(window.scored for window in windows)).tolist()


def by_full_vocabulary(engines: list["LLM"], windows: list[Window]) -> list[float]:
    p, *others = (all_logprobs(llm, windows) for llm in engines)
    return [float((np.exp(p) * (p - q)).sum(axis=1).mean()) for q in others]


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


def bytes_of_files(
    llm: "LLM", model: Any, windows: list[Window], plan: Plan
) -> dict[str, int]:
    """Sizes of the reference's file and of one of all its logits, written both."""
    reference = make_reference(llm, windows, plan.top_k, plan.tail_samples)
    logits = np.concatenate([logprobs_of(model, window).cpu().numpy() for window in windows])
    with tempfile.TemporaryDirectory() as folder:
        named, whole = Path(folder, "named.safetensors"), Path(folder, "logits.npy")
        save_arrays(named, to_arrays(reference), reference.metadata)
        np.save(whole, logits.astype(np.float16))
        return {
            "positions": len(logits),
            "named tokens": named.stat().st_size,
            "all logits, float16": whole.stat().st_size,
        }


def show_times(rows: list[dict[str, Any]], labels: list[str]) -> None:
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
            row["way"], str(row["positions"]), *(f"{kl:.3g}" for kl in row["kl"]),
            f"{1000 * statistics.median(pace(row)):.3f}",
            f"{statistics.median(ratios):.2f} ±{half:.2f}",
        ])  # fmt: skip
    kls = [f"KL {label}" for label in labels]
    headings = ["way", "positions", *kls, "ms a position", "times the first"]
    title = f"One reference and {len(labels)} models"
    Console(width=WIDTH).print(new_table(title, headings, texts))


def show_bytes(sizes: dict[str, int]) -> None:
    from rich.console import Console

    from compare.tables import new_table

    positions = sizes.pop("positions")
    first = sizes["named tokens"]
    texts = [
        [name, f"{size:,}", f"{size / positions:,.0f}", f"{size / first:.3g}"]
        for name, size in sizes.items()
    ]
    headings = ["file of the reference", "bytes", "bytes a position", "times the first"]
    Console(width=WIDTH).print(new_table(f"{positions} positions", headings, texts))
