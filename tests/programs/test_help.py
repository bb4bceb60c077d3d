# SPDX-License-Identifier: Apache-2.0
"""`--help` of each program is there at once: nothing large is imported for it."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = [
    "score_perplexity.py",
    "demo",
    "lm_eval/run.py",
    "applications/ace",
    "applications/compare",
    "applications/dual_vllm",
    "applications/icm/icm.py",
    "applications/kld/score_kld.py",
    "applications/utio/utio_calibrate.py",
    "applications/utio/utio_tradeoff.py",
]
CODE = """
import runpy, sys
from pathlib import Path
program = sys.argv[1]
sys.argv = [program, "--help"]
sys.path[0] = program if Path(program).is_dir() else str(Path(program).parent)
try:
    runpy.run_path(program, run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
large = {"torch", "transformers", "vllm"} & {*sys.modules}
assert not large, large
"""


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_imports_nothing_large(program):
    command = [sys.executable, "-s", "-c", CODE, str(EXAMPLES / program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr == ""
