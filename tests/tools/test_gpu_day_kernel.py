# SPDX-License-Identifier: Apache-2.0
"""The kernel's own program runs with torch and triton alone, in the interpreter."""

import json
import os
import subprocess
import sys

import pytest

from tools.common import HERE

PROGRAM = HERE.root / "benchmarks" / "gpu_day_kernel.py"


def run(tmp_path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROGRAM), "--device", "cpu", *options]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_kernel_of_the_patch_is_right(tmp_path):
    pytest.importorskip("triton")
    found = tmp_path / "kernel.json"
    result = run(tmp_path, "--rows", "3", "--vocabularies", "17", "3000", "--json", str(found))
    assert result.returncode == 0, result.stderr
    report = json.loads(found.read_text())
    assert report["problems"] == []
    assert len(report["tables"][0]["rows"]) == 12


def test_a_kernel_that_is_wrong_is_told(tmp_path):
    """Its error is the program's, so that a report cannot hide it."""
    pytest.importorskip("triton")
    wrong = tmp_path / "kernel.py"
    wrong.write_text(
        "import torch\n"
        "def read_logits(logits, values):\n"
        "    x = logits.float()\n"
        "    top = x.max(1, keepdim=True).values\n"
        "    total = (x - top).exp().sum(1, keepdim=True).log()\n"
        "    return top, total, total, torch.zeros_like(values, dtype=torch.int64)\n"
    )
    result = run(tmp_path, "--rows", "3", "--vocabularies", "50", "--kernel", str(wrong))
    assert result.returncode == 1
    assert "counts wrong" in result.stderr
