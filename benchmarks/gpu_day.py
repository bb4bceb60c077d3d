# SPDX-License-Identifier: Apache-2.0
"""Everything that only a GPU can show, in one command, and a report of it.

    .venv/bin/python benchmarks/gpu_day.py                    # with the CUDA wheel
    python benchmarks/gpu_day.py --parts kernel               # torch and triton alone
    .venv/bin/python benchmarks/gpu_day.py --device cpu       # a dry run, tiny models

Each part is a process of its own with a limit of time; in a dry run one process does what
needs the wheel, since the imports of many would be most of the time. When a process ends,
what its parts found is kept in `journal.jsonl` of the output folder; the next call of the
same command skips the parts that went well and runs the others. `report.md` and
`report.json` are there after each process: attach both to an issue, good or bad.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "tests"))

import runners  # tests/runners.py, which needs nothing

LIMITS = {
    "kernel": 180,
    "scoring": 420,
    "exactness": 420,
    "speed": 420,
    "memory": 200,
    "routing": 360,
    "drafting": 420,
    "lm_eval": 160,
}
"""Seconds that each part may take, on a GPU: 43 minutes in all."""
SLOWER = {"cuda": 1, "cpu": 5}


def machine(device: str) -> dict[str, str]:
    """What the report is about: the device, its driver, versions."""
    versions = {}
    for package in ("vllm", "torch", "triton", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    name = platform.machine()
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total"]
        try:
            said = subprocess.run(
                [*query, "--format=csv,noheader"], capture_output=True, text=True
            )
            name = said.stdout.strip().replace("\n", "; ") or "no GPU"
        except FileNotFoundError:
            name = "no nvidia-smi"
    return {"device": device, "name": name, "python": platform.python_version()} | versions


def processes_of(parts: list[str], device: str) -> list[list[str]]:
    """The parts that each process runs."""
    if device == "cuda":
        return [[part] for part in parts]
    return [g for g in ([p for p in parts if p == "kernel"],
                        [p for p in parts if p != "kernel"]) if g]  # fmt: skip


def command(
    parts: list[str], device: str, out: Path, calibration: Path | None
) -> tuple[list[str], dict[str, str]]:
    """How a process is run, which writes `PART.json` for each of its parts."""
    environment = dict(os.environ)
    if parts == ["kernel"]:
        options = [f"--device={device}", f"--json={out / 'kernel.json'}"]
        if device == "cpu":
            environment = runners.environment("v2")  # with Triton's interpreter
            options += ["--rows=3", "--vocabularies", "17", "3000"]
        return [sys.executable, str(HERE / "gpu_day_kernel.py"), *options], environment
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
                    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
                    # Otherwise Triton rounds products of float32 to TF32.
                    "TRITON_F32_DEFAULT": "ieee"}  # fmt: skip
    options = [*parts, f"--device={device}", f"--out={out}"]
    options += [f"--calibration={calibration.resolve()}"] if calibration else []
    return [sys.executable, str(HERE / "gpu_day_parts.py"), *options], environment


def run(
    parts: list[str], device: str, calibration: Path | None = None
) -> Iterator[dict]:
    """Runs the parts of a process; their records: status, seconds, tables and problems.

    After a part that ended the process there are no others.

    Raises:
        KeyboardInterrupt: after the parts that had ended by then.
    """
    limit = sum(LIMITS[part] for part in parts) * SLOWER[device]
    begin, interrupt = time.monotonic(), None
    with tempfile.TemporaryDirectory() as folder:
        argv, environment = command(parts, device, Path(folder), calibration)
        log = Path(folder) / "log"
        with log.open("w") as out:
            process = subprocess.Popen(
                argv, cwd=ROOT, env=environment, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = f"took more than {limit} s"
            except KeyboardInterrupt as error:
                status, interrupt = 0, error
            finally:
                end_group(process)
        whole = round(time.monotonic() - begin, 1)
        for part in parts:
            record = {"part": part, "tables": [], "problems": [], "seconds": whole}
            result = Path(folder) / f"{part}.json"
            if interrupt and not result.exists():
                raise interrupt
            if result.exists():
                record |= json.loads(result.read_text())
            has_ended = record.pop("ended", result.exists())
            if not has_ended:
                tail = log.read_text(errors="replace")[-3000:]
                how = "interrupted" if interrupt else f"exit status {status}"
                record["problems"] += [how if interrupt or status else "no result", tail]
            ended_by = status if part == parts[-1] else 0
            record["status"] = "failed" if ended_by or record["problems"] else "passed"
            yield record
            if not has_ended:
                break
    if interrupt:
        raise interrupt


def end_group(process: subprocess.Popen) -> None:
    """Ends a part and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


class Journal:
    """The records of parts that ended, on this machine with these versions."""

    def __init__(self, folder: Path, about: dict[str, str]):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.about = folder / "journal.jsonl", about
        self.records: dict[str, dict] = {}
        text = self.path.read_text() if self.path.exists() else ""
        if text and not text.endswith("\n"):  # it was interrupted while writing
            text, _, _ = text.rpartition("\n")
            self.path.write_text(text + "\n" * bool(text))
        for record in map(json.loads, text.splitlines()):
            if record.pop("machine") == about:
                self.records[record["part"]] = record

    def add(self, record: dict) -> None:
        self.records[record["part"]] = record
        with self.path.open("a") as file:
            file.write(json.dumps(record | {"machine": self.about}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def passed(self, part: str) -> bool:
        return self.records.get(part, {}).get("status") == "passed"


def report(journal: Journal, parts: list[str]) -> str:
    """The Markdown of all records."""
    about = ", ".join(f"{name} {value}" for name, value in journal.about.items())
    lines = ["# A GPU day", "", f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC. {about}."]
    if journal.about["device"] == "cpu":
        lines += ["", "A dry run on a CPU: nothing here says how fast or exact a GPU is."]
    lines += ["", "| part | status | seconds |", "| --- | --- | ---: |"]
    for part in parts:
        record = journal.records.get(part, {"status": "not run", "seconds": ""})
        lines.append(f"| {part} | {record['status']} | {record['seconds']} |")
    for part in parts:
        record = journal.records.get(part)
        if not record:
            continue
        lines += ["", f"## {part}"]
        for table in record["tables"]:
            lines += ["", table["title"], "", row(table["columns"])]
            lines += [row(["---"] * len(table["columns"])), *map(row, table["rows"])]
        for problem in record["problems"]:
            lines += ["", "```text", problem, "```"]
    return "\n".join(lines) + "\n"


def row(cells: list) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--parts", nargs="+", choices=[*LIMITS], default=[*LIMITS])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_day")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="for `drafting`: "
                        "of utio_calibrate.py for the reference model, with exit 3 "
                        "(default: drafts without translators)")  # fmt: skip
    args = parser.parse_args()
    journal = Journal(args.out, machine(args.device))
    for part in filter(journal.passed, args.parts):
        print(f"{part}: passed before", flush=True)
    left = [part for part in args.parts if not journal.passed(part)]
    for parts in processes_of(left, args.device):
        print(f"{', '.join(parts)}: runs", flush=True)
        try:
            for record in run(parts, args.device, args.calibration):
                journal.add(record)
                print(f"{record['part']}: {record['status']}, {record['seconds']} s", flush=True)
        finally:
            (args.out / "report.md").write_text(report(journal, [*LIMITS]))
            found = {"machine": journal.about, "parts": [*journal.records.values()]}
            (args.out / "report.json").write_text(json.dumps(found, indent=2) + "\n")
    print(f"attach to an issue: {args.out}/report.md and report.json")
    failed = [part for part in args.parts if not journal.passed(part)]
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}; the report says why")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on")
