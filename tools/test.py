# SPDX-License-Identifier: Apache-2.0
"""What ``./build.sh test`` runs: the parts, side by side where there is room."""

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from tools.common import PYTEST_OPTIONS, Checkout, ToolError
from tools.processes import Log, nothing_left_behind

PARTS = ("series", "lint", "tools", "upstream", "v1", "v2")
QUICK = ("series", "v1", "v2")
"""Parts of a quick test, the engines' in short."""
_ENGINE = ["tests", "--ignore=tests/tools", "--parts=3"]
_LONGEST = "v1"
_ROOM_FOR_TWO = 16 * 2**30
"""Bytes of memory for two sessions of the engine tests at once, seen to take 14 GiB."""

_SUMMARY = re.compile(
    r"=* ?((?:\d+ (?:subtests )?(?:passed|failed|errors?|skipped|deselected|xfailed|"
    r"xpassed|warnings?)(?:, )?)+ in [\d.]+s.*?|no tests ran in [\d.]+s) ?=*$"
)


def commands(checkout: Checkout, quick: bool = False) -> dict[str, list[str]]:
    """The command of each part."""
    engine = ["tests", "--ignore=tests/tools", "--quick"] if quick else _ENGINE
    python = str(checkout.venv / "bin" / "python")
    pytest = [python, "-s", "-m", "pytest", *PYTEST_OPTIONS]
    return {
        "series": [python, "-m", "tools.series", "check"],
        "lint": [python, "-m", "tools.build", "lint"],
        "tools": [*pytest, "--confcutdir=tests/tools", "tests/tools"],
        "upstream": [python, "-m", "tools.upstream_tests"],
        "v1": [*pytest, *engine, "--runner=v1"],
        "v2": [*pytest, *engine, "--runner=v2"],
    }


class _Report:
    """What each part said, printed as it runs and summed up at the end."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.failed: list[str] = []

    def part(self, name: str, run: Callable[..., tuple[int, list[str]]]) -> None:
        print(f"\n--- {name}", flush=True)
        started = time.monotonic()
        status, lines = run(show=lambda line: print(line, end="", flush=True))
        matches = [found for line in lines if (found := _SUMMARY.match(line))]
        # A part can be several sessions of pytest, each with a summary.
        said = "; ".join(m.group(1) for m in matches) or f"exit status {status}"
        if name in ("series", "lint") and not status:
            said = lines[-1].strip()
        word = "FAILED" if status else "ok"
        self.rows.append(f"{word:6} {name}: {said}")
        print(f"--- {name}: {word}, {time.monotonic() - started:.0f} s")
        if status:
            self.failed.append(name)


def test(
    checkout: Checkout,
    log: Log,
    environment: dict[str, str],
    chosen: tuple[str, ...],
    quick: bool = False,
) -> None:
    """Run parts of the tests and print one summary of all.

    The longest part runs beside others where there is room.

    Args:
        quick: the engine tests in short.

    Raises:
        ToolError: a part failed.
    """
    parts, report = commands(checkout, quick), _Report()

    def run(*names: str) -> None:
        for name in names:
            command = functools.partial(log.run, parts[name], checkout.root, environment)
            if name in chosen:
                report.part(name, command)

    with nothing_left_behind():
        run("series", "lint", "tools")
        if {_LONGEST, "v2"} <= set(chosen) and has_room_for_two():
            # Each on the core that is free; vLLM would bind both to the same one.
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            threads = max(len(os.sched_getaffinity(0)) // 2, 1)
            environment.setdefault("OMP_NUM_THREADS", str(threads))
            with log.beside(parts[_LONGEST], checkout.root, environment) as wait:
                run("upstream", "v2")
                report.part(_LONGEST, wait)
        else:
            run("upstream", "v1", "v2")
    print(f"\nfull log: {log.path}\n" + "\n".join(report.rows))
    if report.failed:
        count = f"{len(report.failed)} of {len(report.rows)}"
        raise ToolError(f"{count} parts failed: {', '.join(report.failed)}")


def has_room_for_two() -> bool:
    """Whether two sessions of the engine tests can run at once."""
    return len(os.sched_getaffinity(0)) > 1 and free_memory() > _ROOM_FOR_TWO


def free_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be had: the machine's, in a container at most its own."""
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    free = int(found[1]) * 1024 if found else 0
    with contextlib.suppress(OSError, ValueError):  # no container; no limit: "max"
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = (group / "memory.stat").read_text()
        cached = re.search(r"^inactive_file (\d+)$", stat, re.MULTILINE)
        free = min(free, limit - used + (int(cached[1]) if cached else 0))
    return free
