# SPDX-License-Identifier: Apache-2.0
"""Writes what was found: JSON, a terminal table, a page for a model card, plots."""

from typing import Any

from compare.files import write_json
from compare.page import write_page
from compare.plan import FLOOR, Plan
from compare.plots import draw
from compare.run import floor_model, result_of, times_of
from compare.store import Store, size_on_disk
from compare.tables import show


def write_report(plan: Plan, store: Store, failed: list[dict[str, str]]) -> None:
    """Reports the models whose scores are complete."""
    report = make_report(plan, store, failed)
    write_json(store.folder / "report.json", report)
    models = with_floor(report)
    plots = draw(report, models, store.folder) if models else []
    write_page(report, models, store.folder / "report.md", plots)
    show(report, models)
    print(f"\n{store.folder}/report.md, report.json, results.jsonl, *.png, *.svg")


def with_floor(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The noise floor, if there is one, and the models."""
    return [*filter(None, [report["noise_floor"]]), *report["models"]]


def make_report(
    plan: Plan, store: Store, failed: list[dict[str, str]]
) -> dict[str, Any]:
    models = [*plan.candidates]
    if plan.noise_floor:
        models.insert(0, floor_model(plan, store))
    done = [model for model in models if store.has_all_of(model)]
    results = [result_of(plan, store, it) | times_of(store, it) for it in done]
    floor = results.pop(0) if done and done[0].label == FLOOR else None
    return {
        "format": "compare-1",
        "plan": plan.model_dump(mode="json"),
        "reference": describe_reference(plan, store),
        "text": store.text,
        "noise_floor": floor,
        "models": results,
        "failed": failed,
        "missing": [model.label for model in models if model not in done],
    }


def describe_reference(plan: Plan, store: Store) -> dict[str, Any]:
    """What it is, and its files' size beside that of all logits."""
    described = store.reference.described
    found = store.reference.of_reference()
    logits = store.text["positions"] * int(described["vocabulary"])
    return {
        "model": plan.reference.label,
        "path": plan.reference.path,
        **{k: described[k] for k in ("dtype", "quantization", "vllm", "vocabulary")},
        "size_on_disk": size_on_disk(plan.reference),
        **found,
        "tokens_per_second": store.text["positions"] / found["seconds"],
        "bytes": sum(path.stat().st_size for path in store.reference.files()),
        "bytes_of_all_logits_in_float16": 2 * logits,
    }
