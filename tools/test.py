# SPDX-License-Identifier: Apache-2.0
"""What ``./build.sh test`` runs: the parts, several at once where there is room."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

from tools.common import PYTEST_OPTIONS, Checkout, ToolError
from tools.processes import Log, nothing_left_behind

PARTS = ("series", "lint", "tools", "upstream", "v1", "v2")
QUICK = ("series", "v1", "v2")
"""Parts of a quick test, the engines' in short."""
_BESIDE = {"series": 19, "tools": 5, "upstream": 5, "lint": 19}
"""Parts that run beside the engines', one after the other, and how nice each is: they take
time that the others leave, and those in which a test waits for an event a little more."""
_ENGINE_PARTS = {"v1": 3, "v2": 2}
"""Sessions a runner, one after the other: each keeps the engines that it starts."""
_ROOM_FOR_TWO = 18 * 2**30
"""Bytes of memory for two sessions of the engine tests at once, seen to take 14 GiB, and
for what runs beside them."""

_SUMMARY = re.compile(
    r"=* ?((?:\d+ (?:subtests )?(?:passed|failed|errors?|skipped|deselected|xfailed|"
    r"xpassed|warnings?)(?:, )?)+ in [\d.]+s.*?|no tests ran in [\d.]+s) ?=*$"
)


def commands(checkout: Checkout, quick: bool = False) -> dict[str, list[list[str]]]:
    """The sessions of each part, a command each.

    What takes longest comes first, so that both cores have something to do until the end.
    """
    python = str(checkout.venv / "bin" / "python")
    pytest = [python, "-s", "-m", "pytest", *PYTEST_OPTIONS]

    def engine(runner: str) -> list[list[str]]:
        options = [*pytest, "tests", "--ignore=tests/tools", f"--runner={runner}"]
        if quick:
            return [[*options, "--quick"]]
        parts = _ENGINE_PARTS[runner]
        return [[*options, f"--parts={parts}", f"--part={i}"] for i in range(parts)]

    return {
        "series": [[python, "-m", "tools.series", "check"]],
        "v1": engine("v1"),
        "v2": engine("v2"),
        "tools": [[*pytest, "--confcutdir=tests/tools", "tests/tools"]],
        "upstream": [[python, "-m", "tools.upstream_tests"]],
        "lint": [[python, "-m", "tools.build", "lint"]],
    }


@dataclasses.dataclass
class _Part:
    """What the sessions of a part said, as they end."""

    name: str
    sessions: int
    statuses: list[int] = dataclasses.field(default_factory=list)
    said: list[str] = dataclasses.field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(self.statuses)

    def add(self, status: int, lines: list[str]) -> None:
        """Print what a session said."""
        matches = [found for line in lines if (found := _SUMMARY.match(line))]
        # A session can be several of pytest, each with a summary.
        said = [m.group(1) for m in matches] or [f"exit status {status}"]
        if self.name in ("series", "lint") and not status:
            said = [lines[-1].strip()]
        self.statuses.append(status)
        self.said += said
        count = f", {len(self.statuses)} of {self.sessions}" * (self.sessions > 1)
        word = "FAILED" if status else "ok"
        print(f"--- {self.name}{count}: {word}", flush=True)

    def __str__(self) -> str:
        word = "FAILED" if self.failed else "ok"
        return f"{word:6} {self.name}: {'; '.join(self.said)}"


def test(
    checkout: Checkout,
    log: Log,
    environment: dict[str, str],
    chosen: tuple[str, ...],
    quick: bool = False,
) -> None:
    """Run parts of the tests and print one summary of all.

    Two sessions of the engine tests run at once where there is room, and beside them the
    other parts; then what a session prints is shown when it has ended.

    Args:
        quick: the engine tests in short.

    Raises:
        ToolError: a part failed.
    """
    found = commands(checkout, quick)
    parts = {name: _Part(name, len(found[name])) for name in found if name in chosen}
    sessions = [(part, command) for part in parts.values() for command in found[part.name]]
    with nothing_left_behind():
        if {"v1", "v2"} <= set(chosen) and has_room_for_two():
            # Each on the core that is free; vLLM would bind both to the same one.
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            threads = str(max(len(os.sched_getaffinity(0)) // 2, 1))
            environment.setdefault("OMP_NUM_THREADS", threads)
            # Numba hands its own number to OpenMP, whose idle threads would spin.
            environment.setdefault("NUMBA_NUM_THREADS", threads)

            def begin(beside: bool) -> Iterator[tuple[_Part, list[str]]]:
                for part, command in sessions:
                    if (part.name in _BESIDE) == beside:
                        print(f"--- {part.name}: begins", flush=True)
                        nice = ["nice", f"-n{_BESIDE[part.name]}"] if beside else []
                        yield part, [*nice, *command]

            lanes = (2, begin(False)), (1, begin(True))
            for part, status, lines in log.run_at_once(lanes, checkout.root, environment):
                print("\n" + "\n".join(lines), flush=True)
                part.add(status, lines)
        else:
            for part, command in sessions:
                print(f"\n--- {part.name}", flush=True)
                part.add(*log.run(command, checkout.root, environment, _show))
    print(f"\nfull log: {log.path}", *parts.values(), sep="\n")
    if failed := [part.name for part in parts.values() if part.failed]:
        count = f"{len(failed)} of {len(parts)}"
        raise ToolError(f"{count} parts failed: {', '.join(failed)}")


def _show(line: str) -> None:
    print(line, end="", flush=True)


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
