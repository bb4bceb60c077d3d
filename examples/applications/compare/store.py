# SPDX-License-Identifier: Apache-2.0
"""The output folder: what was scored, in files that are whole or not there.

    comparison.json     what the reference is and of which text
    text.json           how many tokens there are
    reference/N.safetensors, described.json
    models/NAME/N.safetensors, described.json
    results.jsonl       a line a finished model, without times
    report.json, report.md, *.png, *.svg
    logs/NAME.log       what vLLM said
"""

import fcntl
import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from compare.divergence import Comparison
from compare.figures import Positions
from compare.files import (
    from_arrays,
    load_arrays,
    load_metadata,
    replacing,
    save_arrays,
    to_arrays,
    write_json,
)
from compare.plan import Model, Plan, PlanError, fingerprint
from compare.plots import PLOTS
from compare.reference import Reference

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


def read_json(path: Path) -> Any:
    """The content, or None if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def weights(model: Model) -> list[Path]:
    """The model's weight files; none if it is a name that was never loaded."""
    folder = Path(model.folder)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            folder = Path(snapshot_download(model.path, local_files_only=True))
        except (LocalEntryNotFoundError, ValueError):
            return []
    for pattern in WEIGHTS:
        if found := sorted(folder.glob(pattern)):
            # Mistral's own form of the same weights, beside Transformers'.
            own = [file for file in found if not file.name.startswith("consolidated")]
            return own or found
    return []


def size_on_disk(model: Model) -> int | None:
    size = sum(path.stat().st_size for path in weights(model))
    return model.size_on_disk or size or None


def model_fingerprint(model: Model) -> str:
    """Changes with how the model is run and when the weights in its folder are written
    anew. Those of a hub are not looked at: they come with the first run."""
    found = weights(model) if Path(model.folder).is_dir() else []
    stats = [(path.name, path.stat()) for path in found]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return fingerprint(model.model_dump(mode="json", exclude={"size_on_disk"}), files)


def text_files(plan: Plan) -> list[tuple[str, int, int]]:
    texts = plan.texts
    paths = [*(texts.text or []), *filter(None, [texts.held_out])]
    stats = [(str(path), path.stat()) for path in paths]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def written(seconds: float) -> str:
    """So that a file's size, which is reported, does not depend on its time."""
    return f"{seconds:.6e}"


class Scores:
    """The files of one model, numbered as the calls that they come from."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, number: int) -> Path:
        return self.folder / f"{number:05}.safetensors"

    def has(self, number: int) -> bool:
        return self.path(number).exists()

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]*.safetensors"))

    def count(self) -> int:
        return len(self.files())

    def clear(self) -> None:
        """Forgets all scores, wherever a kill may interrupt it."""
        for path in self.files():
            path.unlink()
        (self.folder / "described.json").unlink(missing_ok=True)

    @property
    def described(self) -> dict[str, str] | None:
        return read_json(self.folder / "described.json")

    @described.setter
    def described(self, described: dict[str, str]) -> None:
        write_json(self.folder / "described.json", described)

    def save_reference(self, number: int, part: Reference, seconds: float) -> None:
        metadata = part.metadata | {"seconds": written(seconds)}
        save_arrays(self.path(number), to_arrays(part), metadata)

    def load_reference(self, number: int) -> Reference:
        return from_arrays(*load_arrays(self.path(number)))

    def save_positions(
        self, number: int, reference: Reference, result: Comparison, seconds: float
    ) -> None:
        positions = Positions(
            p_next=reference.next_logprobs,
            q_next=result.next_logprobs,
            p_top=reference.logprobs[:, 0],
            q_rank=result.next_ranks,
            same_top=result.same_top,
            kl=result.kl,
            estimate=result.estimate,
            variance=result.variance,
            p_tail=reference.tail_mass,
            q_tail=result.tail_mass,
        )
        metadata = {
            "seconds": written(seconds),
            "kl_of_fewer": json.dumps(result.kl_of_fewer),
        }
        save_arrays(self.path(number), positions._asdict(), metadata)

    def load_positions(self) -> tuple[Positions, dict[int, float]]:
        """All positions, and the bound with fewer candidates."""
        columns, metadata = [], []
        for number in range(self.count()):
            arrays, described = load_arrays(self.path(number))
            columns.append([arrays[name] for name in Positions._fields])
            metadata.append(described)
        positions = Positions(*map(np.concatenate, zip(*columns)))
        sizes = [int(Positions(*column).finite().sum()) for column in columns]
        fewer = [json.loads(row["kl_of_fewer"]) for row in metadata]
        means = {}
        for k in fewer[0]:
            sums = [size * row[k] for size, row in zip(sizes, fewer) if size]
            means[int(k)] = sum(sums) / sum(sizes) if sums else math.nan
        return positions, means

    def seconds(self) -> float:
        return sum(float(load_metadata(path)["seconds"]) for path in self.files())

    def of_reference(self) -> dict[str, Any]:
        """Seconds that the reference took, and the number of its rows that have a
        log-probability that is no number."""
        broken = 0
        for path in self.files():
            arrays, _ = load_arrays(path)
            finite = np.isfinite(arrays["next_logprobs"])
            for name in ("logprobs", "tail_logprobs"):
                finite &= ~np.isnan(arrays[name]).any(axis=1)
            broken += int((~finite).sum())
        return {"seconds": self.seconds(), "non_finite": broken}


class Store:
    """The folder of one comparison."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.text_path = folder / "text.json"
        self.results_path = folder / "results.jsonl"
        self._make_folders()

    def _make_folders(self) -> None:
        for name in ("models", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.reference = Scores(self.folder / "reference")

    @property
    def text(self) -> dict[str, Any] | None:
        return read_json(self.text_path)

    def scores(self, name: str) -> Scores:
        return Scores(self.folder / "models" / name)

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Keeps a second run out; gives the lock's file descriptor."""
        with (self.folder / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PlanError(
                    f"--output: another run is at work in {self.folder}"
                ) from None
            except OSError:
                print(f"{self.folder} is where nothing can be locked: run one at a time")
            yield lock.fileno()

    @property
    def complete(self) -> bool:
        """Whether all of the reference is there."""
        text = self.text
        there = self.reference.described and text
        return bool(there) and self.reference.count() == text["calls"]

    def clear(self) -> None:
        """Removes what an earlier run left, and nothing else. What says that the folder
        is a comparison goes last, so that a kill leaves one to be cleared."""
        for name in ("models", "reference", "logs"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        names = ["text.json", "results.jsonl", "report.json", "report.md"]
        names += [f"{plot.__name__}.{end}" for plot in PLOTS for end in ("png", "svg")]
        for name in (*names, "comparison.json"):
            (self.folder / name).unlink(missing_ok=True)
        self._make_folders()

    def open_for(self, plan: Plan) -> None:
        """Raises `PlanError` if the folder holds a comparison with another reference
        or text."""
        wanted = {
            "reference": plan.reference.model_dump(mode="json"),
            "reference_weights": model_fingerprint(plan.reference),
            "texts": plan.texts.model_dump(mode="json"),
            "text_files": [list(row) for row in text_files(plan)],
            "context_length": plan.context_length,
            "stride": plan.step,
            "top_k": plan.top_k,
            "tail_samples": plan.tail_samples,
            "call_tokens": plan.call_tokens,
        }
        path = self.folder / "comparison.json"
        there = read_json(path)
        if there is None:
            write_json(path, wanted)
        elif changed := [key for key in wanted if wanted[key] != there.get(key)]:
            raise PlanError(
                f"--output: {self.folder} holds another comparison, with other "
                f"{' and '.join(changed)}; name another folder, or --restart"
            )

    def open_model(self, model: Model) -> Scores:
        """The model's files, emptied if they are of another model of that name."""
        scores = self.scores(model.label)
        path = scores.folder / "model.json"
        wanted = model_fingerprint(model)
        if read_json(path) != wanted:
            scores.clear()
            write_json(path, wanted)
        return scores

    def has_all_of(self, model: Model) -> bool:
        """Whether all scores are there, and are not another model's of that name."""
        scores = self.scores(model.label)
        there = read_json(scores.folder / "model.json")
        return there == model_fingerprint(model) and scores.count() == self.text["calls"]

    def add_result(self, result: dict[str, Any]) -> None:
        """Adds a line to `results.jsonl`, unless the same is there; drops a line of
        another model of that name, and one that a kill cut off."""
        added = json.dumps(result).encode() + b"\n"
        path = self.results_path
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = [
            line
            for line in lines
            if line.endswith(b"\n")
            and (line == added or json.loads(line)["model"] != result["model"])
        ]
        if added not in kept:
            kept.append(added)
        with replacing(path) as partial:
            partial.write_bytes(b"".join(kept))
