# SPDX-License-Identifier: Apache-2.0
"""The README's first program does what it says, saved as a file."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_first_program(tmp_path, runner):
    if runner == "v2":
        pytest.skip("it starts engines of the default kind")
    program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    file = tmp_path / "program.py"
    file.write_text(program[1])
    command = [sys.executable, str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    perplexity, share = map(float, done.stdout.split()[-2:])
    assert perplexity > 1 and 0 <= share <= 1
