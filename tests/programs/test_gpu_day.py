# SPDX-License-Identifier: Apache-2.0
"""A GPU day, dry: every part of it runs on the CPU, on models that are small."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = (
    "kernel", "scoring", "exactness", "speed", "memory", "routing", "drafting", "lm_eval",
)  # fmt: skip


def run(out: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "benchmarks/gpu_day.py", f"--out={out}", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a dry run of everything."""
    out = tmp_path_factory.mktemp("gpu_day")
    done = run(out, "--device=cpu")
    report = (out / "report.md").read_text()
    assert done.returncode == 0, report
    assert all(f"{part}: passed" in done.stdout for part in PARTS)
    return out


def test_the_report_has_every_part(whole):
    report = (whole / "report.md").read_text()
    assert "A dry run on a CPU: nothing here says how fast or exact a GPU is." in report
    found = json.loads((whole / "report.json").read_text())
    assert found["machine"]["device"] == "cpu" and found["machine"]["vllm"]
    assert [part["part"] for part in found["parts"]] == [*PARTS]
    for part in found["parts"]:
        assert part["status"] == "passed" and not part["problems"]
        assert f"| {part['part']} | passed | {part['seconds']} |" in report
        for table in part["tables"]:
            assert table["title"] in report
            assert table["rows"]
            assert all(len(row) == len(table["columns"]) for row in table["rows"])


def test_what_passed_is_not_run_again(whole):
    """Nor where the last line of the journal was cut."""
    before = (whole / "report.json").read_text()
    journal = whole / "journal.jsonl"
    journal.write_text(journal.read_text() + '{"part": "kern')
    done = run(whole, "--device=cpu")
    assert done.returncode == 0, done.stderr
    assert [f"{part}: passed before" in done.stdout for part in PARTS] == [True] * len(PARTS)
    assert (whole / "report.json").read_text() == before


def test_what_was_found_before_an_interrupt_is_kept(tmp_path, monkeypatch):
    """In a process of several parts: here one that ends one, has a row of the next, and is
    interrupted."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu_day

    def command(parts, device, out, calibration):
        # Not before the program waits for it.
        ended, begun = (f"{out}/{part}.json" for part in parts[:2])
        table = {"title": "Peaks", "columns": ["runner"], "rows": [["V1"]]}
        found = json.dumps({"tables": [table], "problems": [], "ended": False})
        script = f"echo '{{}}' > {ended}; echo '{found}' > {begun}; sleep 1; "
        script += "kill -INT $PPID; sleep 60"
        return ["sh", "-c", script], dict(os.environ)

    monkeypatch.setattr(gpu_day, "command", command)
    argv = ["gpu_day.py", "--device=cpu", "--parts", "speed", "memory", "routing"]
    argv.append(f"--out={tmp_path}")
    monkeypatch.setattr(sys, "argv", argv)
    # Tests that a shell runs in the background ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            gpu_day.main()
    finally:
        signal.signal(signal.SIGINT, before)
    report = (tmp_path / "report.md").read_text()
    assert "| speed | passed |" in report and "| memory | failed |" in report
    assert "| routing | not run |" in report
    assert "Peaks" in report and "| V1 |" in report and "interrupted" in report


def test_what_failed_is_told_and_run_again(tmp_path):
    """On a GPU that is not there."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for _ in range(2):
        done = run(tmp_path, "--parts", "kernel")
        assert done.returncode == 1
        assert "kernel: failed" in done.stdout
        assert "failed: kernel; the report says why" in done.stderr
        assert "Traceback" not in done.stderr
    report = (tmp_path / "report.md").read_text()
    assert "| kernel | failed |" in report and "| scoring | not run |" in report
    assert "cuda" in report.lower() and "Error" in report
    journal = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in journal] == ["failed"] * 2
