# SPDX-License-Identifier: Apache-2.0
"""Deals test files to the sessions of a runner, `--parts`, so that they end together."""

from pathlib import Path

import pytest

SECONDS = {
    "v1": {
        "test_ace_live.py": 90,
        "test_compare_quantized.py": 44,
        "test_compare_run.py": 193,
        "test_compare_texts.py": 50,
        "test_data_parallel.py": 29,
        "test_demo.py": 60,
        "test_distill_trl.py": 89,
        "test_dual_vllm_live.py": 170,
        "test_early_exit.py": 75,
        "test_early_exit_compiled.py": 65,
        "test_early_exit_draws.py": 50,
        "test_everything_at_once.py": 28,
        "test_faults.py": 112,
        "test_gpu_day.py": 180,
        "test_hanging_up.py": 66,
        "test_icm.py": 26,
        "test_icm_live.py": 47,
        "test_installed_wheel.py": 70,
        "test_large_answers.py": 30,
        "test_lm_eval.py": 99,
        "test_route_or_draft.py": 146,
        "test_short_examples.py": 33,
        "test_unchanged.py": 34,
        "test_utio.py": 66,
        "test_utio_compiled.py": 137,
        "test_utio_refusals.py": 39,
        "test_utio_tensor_parallel.py": 69,
        "test_utio_tradeoff.py": 34,
    },
    "v2": {
        "test_early_exit.py": 80,
        "test_early_exit_ahead.py": 148,
        "test_early_exit_compiled.py": 34,
        "test_early_exit_draws.py": 36,
        "test_early_exit_graphs.py": 26,
        "test_early_exit_lookup.py": 47,
        "test_everything_at_once.py": 26,
        "test_route_or_draft.py": 27,
        "test_score_cache.py": 31,
        "test_unchanged.py": 37,
        "test_utio.py": 30,
        "test_utio_compiled.py": 23,
        "test_utio_soak.py": 40,
        "test_utio_tensor_parallel.py": 57,
    },
}
"""About what files take that take longest, by which they are dealt to parts."""
OTHERS = 6
"""Seconds of any other file."""
LONGER = {"v1": 170, "v2": 0}
"""Seconds that the last part takes longer than the others: beside V1's, `tools/test.py` runs
both of V2's."""


def deal(items: list[pytest.Item], runner: str, parts: int) -> list[set[Path]]:
    """The files of each part: those that take longest first, to the part that has least."""
    seconds = {item.path: SECONDS[runner].get(item.path.name, OTHERS) for item in items}
    # Files that share a server stay together.
    ahead, *groups = (
        {item.path for item in items if fixture in item.fixturenames}
        for fixture in ("ahead", "scoring_server", "routing_server")
    )
    for n, group in enumerate(groups):
        group.difference_update(ahead, *groups[:n])
    groups += [{path} for path in seconds.keys() - ahead.union(*groups)]
    dealt: list[set[Path]] = [set() for _ in range(parts)]
    # Engines that schedule ahead are the last part's, which has memory for them.
    dealt[-1] |= ahead

    def total(files: set[Path]) -> int:
        return sum(seconds[path] for path in files) - LONGER[runner] * (files is dealt[-1])

    for group in sorted(groups, key=lambda group: (-total(group), sorted(group))):
        min(dealt, key=total).update(group)
    return dealt
