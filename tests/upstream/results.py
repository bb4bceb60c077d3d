# SPDX-License-Identifier: Apache-2.0
"""Run test files on a side and keep what each test did, one JSON line a test."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.upstream import sides
from tests.upstream.sides import Side

RESULTS = sides.BUILD / "results"
ATTEMPTS = 12
"""How often a file goes on after a test that hung or ended its process."""
FINISHED = (0, 1, 2, 3, 4, 5)
"""The exit statuses of a pytest that ran to its end."""


@dataclass(frozen=True)
class Result:
    """What one test did.

    Attributes:
        outcome: ``passed``, ``failed``, ``error`` (before or after the test itself),
            ``skipped``, ``xfailed``, ``stuck`` or ``crashed``.
        seconds: its time, set-up and tear-down included.
        why: the last words of what was raised.

    """

    outcome: str
    seconds: float
    why: str = ""


class Worker:
    """A process with one side's ``vllm``, started on first use.

    Args:
        side: whose.
        fresh: whether its caches are to be empty.

    """

    def __init__(self, side: Side, fresh: bool = False) -> None:
        self.side, self.fresh = side, fresh
        self.process: subprocess.Popen[str] | None = None

    def run(self, order: dict) -> dict:
        """Run a file as ``worker.py`` says."""
        if self.process is None or self.process.poll() is not None:
            command = [str(self.side.python), "-s", "-P"]
            self.process = subprocess.Popen(
                [*command, str(Path(__file__).with_name("worker.py"))],
                cwd=self.side.tests,
                env=sides.environment(self.side, self.fresh),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                bufsize=1,
            )
            imported = self._answer()["vllm"]
            assert str(self.side.python.parents[1]) in imported, imported
        self.process.stdin.write(json.dumps(order) + "\n")
        return self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"error: the {self.side.name} side's process ended")
        return json.loads(line)

    def close(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


def read(path: Path) -> tuple[dict[str, Result], dict]:
    """The results of a file by node id, and its head and end in one dictionary."""
    found, about = {}, {}
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        if "id" in row:
            found[row["id"]] = Result(row["outcome"], row["seconds"], row["why"])
        elif "start" not in row:
            about |= row
    return found, about


def _unfinished(path: Path) -> str | None:
    """The test that started and did not end."""
    started = None
    for line in path.read_text().splitlines():
        row = json.loads(line)
        started = row.get("start", None if "id" in row else started)
    return started


def run_file(
    worker: Worker,
    file: str,
    standins: Mapping[str, str],
    limit_s: float,
    only: list[str] | None = None,
) -> dict[str, Result]:
    """Run a test file, or tests of it, unless its results are there.

    Args:
        worker: of the side.
        file: its path in upstream's tree.
        standins: what each stand-in is made by; results are taken only if those that
            the tests asked for are the same.
        limit_s: seconds within which a test has to end.
        only: node ids; these run whatever results there are.

    """
    name = file.removesuffix(".py").replace("/", ".") + (".again" if only else "")
    path = RESULTS / worker.side.name / f"{name}.jsonl"
    key = worker.side.key[:16]
    found, about = read(path)
    used = about.get("standins", {}).items()
    ended = about.get("key") == key and "seconds" in about
    if ended and not only and all(standins.get(name) == old for name, old in used):
        return found
    log = path.with_suffix(".log")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"key": key}) + "\n")
    log.unlink(missing_ok=True)
    order = {"file": file, "results": str(path), "log": str(log), "limit_s": limit_s}
    seconds = 0.0
    for _ in range(ATTEMPTS):
        found, _ = read(path)
        answer = worker.run(order | {"skip": [*found], "only": only})
        seconds += answer["seconds"]
        if answer["status"] in FINISHED:
            break
        culprit = _unfinished(path)
        outcome = "stuck" if answer["status"] == "stuck" else "crashed"
        why = f"the process ended with {answer['status']}" * (outcome == "crashed")
        row = dict(id=culprit or file, outcome=outcome, why=why, seconds=0)
        _append(path, row)
        if culprit is None:
            break
    asked = _asked(path, worker.side.tests / file, standins)
    used = {name: standins.get(name) for name in asked}
    _append(path, {"seconds": round(seconds, 1), "standins": used})
    return read(path)[0]


def _asked(path: Path, file: Path, standins: Mapping[str, str]) -> list[str]:
    """The models that tests asked for, or that their processes may ask for."""
    text = file.read_text()
    found = {name for name in standins if name in text}
    for line in path.read_text().splitlines():
        found.update(json.loads(line).get("asked", ()))
    return sorted(found)


def _append(path: Path, row: dict) -> None:
    with path.open("a") as stream:
        stream.write(json.dumps(row) + "\n")


def run_files(
    both: Sequence[Side], files: list[str], standins: Mapping[str, str], limit_s: float
) -> dict[str, list[dict[str, Result]]]:
    """Run test files on the sides, one after the other; says on stderr how far it is.

    Returns:
        by file and side, what each test did; nothing for a file that a side lacks.

    """
    workers, done = [Worker(side) for side in both], {}
    try:
        for number, file in enumerate(files, start=1):
            done[file] = [
                run_file(worker, file, standins, limit_s)
                if (worker.side.tests / file).exists()
                else {}
                for worker in workers
            ]
            passed = [
                sum(result.outcome == "passed" for result in run.values())
                for run in done[file]
            ]
            row = f"{number}/{len(files)} {file}: {passed[0]} and {passed[1]}"
            print(f"{row} of {len(done[file][1])}", file=sys.stderr, flush=True)
    finally:
        for worker in workers:
            worker.close()
    return done
