# SPDX-License-Identifier: Apache-2.0
"""The README's program does what it says, and its figures are the benchmarks'."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_first_program(tmp_path):
    """Run as the README runs it, it says its two lines, and before them shows progress."""
    program, command = (
        re.search(rf"```{language}\n((?:(?!```).)*?(?:{inside}).*?)```", README, re.S)[1]
        for language, inside in (("python", "import vllm|from vllm"), ("bash", "six_lines"))
    )
    file = tmp_path / "six_lines.py"
    file.write_text(program)
    *settings, python, name = command.split()
    assert (python, name) == (".venv/bin/python", file.name)
    done = subprocess.run(
        [sys.executable, str(file)],
        cwd=ROOT,
        env=os.environ | dict(setting.split("=") for setting in settings),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(
        r"\Aperplexity (\d+\.\d)\n(\d+)% of the tokens are what greedy decoding would "
        r"choose\n\Z",
        done.stdout,
        re.M,
    )
    assert found, done.stdout
    others = [line for line in re.split(r"[\r\n]+", done.stderr) if line.strip()]
    assert all(re.search(r"\d% Completed|\d%\|", line) for line in others), others
    assert float(found[1]) > 1 and 0 <= int(found[2]) <= 100


def test_tables_and_charts_hold_the_figures_of_the_benchmarks():
    program = ROOT / "benchmarks" / "figures.py"
    done = subprocess.run(
        [sys.executable, str(program), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("chart_light.svg", "chart_dark.svg"):
        assert f"benchmarks/{name}" in README


def test_links_lead_to_files():
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), (page.name, link)
