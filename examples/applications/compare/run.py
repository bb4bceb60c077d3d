# SPDX-License-Identifier: Apache-2.0
"""Runs the engines of a comparison, one after the other, and reads their results."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from compare.figures import summarize
from compare.plan import FLOOR, NOISE, Model, Plan
from compare.store import Scores, Store, model_fingerprint, size_on_disk

NO_FLOAT16 = {"gemma2", "gemma3", "gemma3_text", "glm4"}
"""Model types that vLLM refuses to compute in float16."""
LOG_TAIL = 2000  # characters of a log that are shown of an engine that died


class EngineError(Exception):
    """An engine did not do its work; the message says why."""


def run(plan: Plan, store: Store, lock: int) -> list[dict[str, str]]:
    """Scores all that is missing.

    Returns:
        Name and error of each model that failed; without a reference there are none.

    Raises:
        EngineError: the reference failed.
    """
    models = [*plan.candidates]
    scores = {model.label: store.open_model(model) for model in models}
    failed = []
    with new_progress() as progress:
        bar = Bars(progress, store, models, plan.noise_floor)
        bar.begin(plan.reference.label, store.reference)
        if not store.complete:
            start_worker(plan, store, None, plan.reference.label, lock, bar)
        if plan.noise_floor:
            floor = floor_model(plan, store)
            scores[floor.label] = store.open_model(floor)
            models.insert(0, floor)
        for model in models:
            bar.begin(model.label, scores[model.label])
            if scores[model.label].count() < store.text["calls"]:
                try:
                    start_worker(plan, store, model, model.label, lock, bar)
                except EngineError as error:
                    failed.append({"model": model.label, "error": str(error)})
                    said = f"{model.label} failed: {error}"
                    progress.console.print(said, style="red", markup=False)
                    continue
            store.add_result(result_of(plan, store, model))
    return failed


def floor_model(plan: Plan, store: Store) -> Model:
    """The reference in another dtype, to be scored in other batches."""
    dtype = plan.noise_dtype or other_dtype(store.reference.described)
    return plan.reference.model_copy(update={"name": FLOOR, "dtype": dtype})


def other_dtype(described: dict[str, str]) -> str:
    if described["dtype"] != "bfloat16":
        return "bfloat16"
    return "float32" if described.get("model_type") in NO_FLOAT16 else "float16"


def start_worker(
    plan: Plan, store: Store, model: Model | None, name: str, lock: int, bar: "Bars"
) -> None:
    """Has a process of its own score a model, and follows what it tells."""
    job = {
        "plan": plan.model_dump(mode="json"),
        "folder": str(store.folder),
        "model": model and model.model_dump(mode="json"),
        "backwards": name == FLOOR,
    }
    reading, writing = os.pipe()
    command = [sys.executable, str(Path(__file__).parent), "worker"]
    command += [str(writing), str(os.getpid())]
    said = None
    with store.log(name).open("w") as log, os.fdopen(reading) as pipe:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True,
            pass_fds=[writing, lock],
        )  # fmt: skip
        os.close(writing)
        try:
            process.stdin.write(json.dumps(job))
            process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once; its exit status says so
        for line in pipe:
            event = json.loads(line)
            said = event.get("error", said)
            bar.follow(event)
        code = process.wait()
    if code:
        raise EngineError(said or f"{died(code)}: {tail(store.log(name))}")


def died(code: int) -> str:
    if code == -9:
        return "its process was killed, perhaps for memory"
    return f"its process ended with status {code}"


def tail(path: Path) -> str:
    """The end of a log, and where it is."""
    return f"{path}\n{path.read_text(errors='replace')[-LOG_TAIL:]}"


def new_progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("positions"), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(), console=Console(stderr=True),
    )  # fmt: skip


class Bars:
    """A bar for the engine at work and one for all of them."""

    def __init__(
        self, progress: Progress, store: Store, models: list[Model], floor: bool
    ):
        self._progress = progress
        self._store = store
        self._engines = 1 + len(models) + floor
        self._all = progress.add_task("all", total=None)
        self._one = progress.add_task("", total=None)

    def begin(self, name: str, scores: Scores) -> None:
        """Of a model whose files that are there do not have to be scored."""
        self._progress.reset(self._one, description=name)
        if text := self._store.text:
            self._total(text["positions"])
            there = text["positions"] * scores.count() // text["calls"]
            self._progress.update(self._one, completed=there)
            self._progress.advance(self._all, there)

    def _total(self, positions: int) -> None:
        self._progress.update(self._one, total=positions)
        self._progress.update(self._all, total=positions * self._engines)

    def follow(self, event: dict[str, Any]) -> None:
        if total := event.get("total"):
            self._total(total)
        if scored := event.get("scored"):
            self._progress.advance(self._one, scored)
            self._progress.advance(self._all, scored)
        self._progress.refresh()


def result_of(plan: Plan, store: Store, model: Model) -> dict[str, Any]:
    """All that is said of a model but times: the same bytes, whatever interrupted it."""
    scores = store.scores(model.label)
    positions, fewer = scores.load_positions()
    return without_nan({
        "model": NOISE if model.label == FLOOR else model.label,
        "path": model.path,
        **{k: scores.described[k] for k in ("dtype", "quantization", "vllm")},
        "size_on_disk": size_on_disk(model),
        "fingerprint": model_fingerprint(model),
        "figures": summarize(positions, store.text["bytes"])
        | {"kl_lower_bound_of_fewer_candidates": fewer},
    })  # fmt: skip


def times_of(store: Store, model: Model) -> dict[str, float]:
    """Seconds in calls that score, and scored tokens a second."""
    seconds = store.scores(model.label).seconds()
    return {
        "seconds": seconds, "tokens_per_second": store.text["positions"] / seconds
    }  # fmt: skip


def without_nan(value: Any) -> Any:
    """With None, which JSON knows, for what is not a number or not finite."""
    if isinstance(value, dict):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
