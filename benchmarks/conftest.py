# SPDX-License-Identifier: Apache-2.0
"""Models of realistic width with random weights, and the table at the end.

Speed does not depend on what the weights say, and the overheads of a toy would hide
everything else. Run on an idle machine, on as many cores as `taskset` gives:

    taskset -c 0 .venv/bin/python -m pytest benchmarks --benchmark-json=build/bench.json
"""

import os
from pathlib import Path

import pytest
from processes import random_llama

CORES = sorted(os.sched_getaffinity(0))
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": str(len(CORES)),
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, CORES)),
}


TABLES = pytest.StashKey[dict[str, list[list[str]]]]()


@pytest.fixture(scope="session")
def wide_model() -> Path:
    """2 layers of width 1,024 with Llama 3's vocabulary."""
    return random_llama(128_256, 1024, 2, "float32")


@pytest.fixture(scope="session")
def tables(request: pytest.FixtureRequest) -> dict[str, list[list[str]]]:
    """Tables to print at the end: rows of cells by title, the first one the head."""
    request.config.stash[TABLES] = {}
    return request.config.stash[TABLES]


def pytest_terminal_summary(terminalreporter, config) -> None:
    for title, rows in config.stash.get(TABLES, {}).items():
        terminalreporter.write_line(f"\n{title}\n")
        head, *body = rows
        for cells in (head, ["---:"] * len(head), *body):
            terminalreporter.write_line(f"| {' | '.join(cells)} |")
    write_benchmarks(terminalreporter, config)


def write_benchmarks(terminalreporter, config) -> None:
    """Prints, for each group, every path's median and its ratio to the first."""
    session = getattr(config, "_benchmarksession", None)
    if session is None:
        return
    groups: dict[str, list] = {}
    for bench in session.benchmarks:
        groups.setdefault(bench.group, []).append(bench)
    write = terminalreporter.write_line
    for group, benches in groups.items():
        write(f"\n{group}")
        write("| path | ms | spread | of the first |")
        write("| --- | ---: | ---: | ---: |")
        unit = [bench.extra_info.get("positions", 1) for bench in benches]
        first = benches[0].stats.median / unit[0]
        for bench, positions in zip(benches, unit):
            stats = bench.stats
            spread = (stats.q3 - stats.q1) / stats.median
            write(
                f"| {bench.name.removeprefix('test_')} | {stats.median * 1e3:.1f} "
                f"| ±{spread / 2:.0%} | {stats.median / positions / first:.2f} |"
            )
