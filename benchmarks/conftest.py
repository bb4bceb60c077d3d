# SPDX-License-Identifier: Apache-2.0
"""Models of realistic width with random weights, and the table at the end.

Speed does not depend on what the weights say, and the overheads of a toy would hide
everything else. Run on an idle machine:

    taskset -c 0 .venv/bin/python -m pytest benchmarks --benchmark-json=build/bench.json
"""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


TABLES = pytest.StashKey[dict[str, list[list[str]]]]()


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wide_model(tmp_path_factory.mktemp("wide"))


def save_wide_model(folder: Path) -> Path:
    """Writes a Llama of 2 layers, 1024 wide, with Llama 3's vocabulary of 128,256."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=16_384,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 16 layers, 1024 wide, with a vocabulary of 32,000."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("deep")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


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
