# SPDX-License-Identifier: Apache-2.0
"""What counts as lost between two runs of upstream's tests, and what is selected."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.upstream import __main__ as command
from tests.upstream import compare, results
from tests.upstream.results import Result

HERE = Path(__file__).parent


def run(**outcomes: str) -> dict[str, Result]:
    return {name: Result(outcome, 1.0) for name, outcome in outcomes.items()}


@pytest.mark.parametrize(
    "before, after, changed, group",
    [
        ("passed", "passed", False, "kept"),
        ("passed", "failed", False, "lost"),
        ("passed", "skipped", False, "lost"),
        ("passed", "stuck", True, "lost"),
        ("passed", None, False, "lost"),
        ("passed", None, True, "removed"),
        ("failed", "passed", False, "gained"),
        (None, "passed", True, "added"),
        (None, "failed", True, "broken"),
        ("error", "failed", False, "failing"),
        ("skipped", "skipped", False, "skipped"),
    ],
)
def test_groups(before, after, changed, group):
    unpatched = run(test=before) if before else {}
    patched = run(test=after) if after else {}
    found = compare.compare(unpatched, patched, changed)
    groups = {k: v for k, v in vars(found).items() if isinstance(v, list) and v}
    assert groups == {group: ["test"]}


def test_a_second_run_tells_flaky_from_lost():
    unpatched = run(broken="passed", came_back="passed", fails_on_both="failed")
    patched = run(broken="failed", came_back="passed", fails_on_both="failed")
    lost, flaky = compare.judge([*unpatched], unpatched, patched)
    assert lost == ["broken"]
    assert flaky == ["came_back", "fails_on_both"]


def test_table_adds_up():
    both = compare.compare(run(a="passed", b="failed"), run(a="passed"), False)
    text = compare.table({"tests/v1/core/x/test_1.py": both, "tests/test_2.py": both})
    *_, core, total = text.splitlines()
    assert core == "| tests/v1/core | 1 | 1 | 0 | 0 | 0 | 1 | 0 | 2 | 1 |"
    assert total == "| **all** | 2 | 2 | 0 | 0 | 0 | 2 | 0 | 4 | 2 |"


def test_selection_names_what_exists(tmp_path: Path):
    text = (
        "# more\nshort tests/a  # quick\nwhole tests/b.py  # slow\nnot tests/a/c  # x"
    )
    for name in ("tests/a/test_1.py", "tests/a/c/test_2.py", "tests/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    chosen = command.selected(text, short=True)
    assert command.test_files(tmp_path, *chosen) == ["tests/a/test_1.py"]
    chosen = command.selected(text, short=False)
    assert command.test_files(tmp_path, *chosen) == ["tests/a/test_1.py", "tests/b.py"]
    assert command.test_files(tmp_path, ["tests/*"], ["tests/a/t*"]) == [
        "tests/a/c/test_2.py",
        "tests/b.py",
    ]


def test_selection_gives_reasons():
    with pytest.raises(ValueError, match="tests/a"):
        command.selected("short tests/a", short=True)


PROGRAM = """
import os, pytest
def test_passes(): pass
def test_fails(): assert 1 == 2
def test_skips(): pytest.skip("why not")
def test_crashes(): os._exit(7)
def test_comes_after(): pass
"""
EXPECTED = {
    "test_passes": "passed",
    "test_fails": "failed",
    "test_skips": "skipped",
    "test_crashes": "crashed",
    "test_comes_after": "passed",
}


class LocalWorker:
    """Runs files by the program that a side's worker runs, without ``vllm``."""

    def __init__(self, tree: Path, key: str) -> None:
        self.side = results.Side("local", Path(sys.executable), tree, key, "")
        self.runs = 0

    def run(self, order: dict) -> dict:
        self.runs += 1
        code = (
            f"import sys, json; sys.path.insert(0, {str(HERE)!r}); import worker; "
            "print(json.dumps(worker.run(json.loads(sys.stdin.read()))))"
        )
        child = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.side.tests,
            input=json.dumps(order),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return json.loads(child.stdout)


def test_goes_on_after_a_test_that_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    (tmp_path / "test_it.py").write_text(PROGRAM)
    worker = LocalWorker(tmp_path, "one")
    found = results.run_file(worker, "test_it.py", {}, limit_s=600)
    outcomes = {name.partition("::")[2]: r.outcome for name, r in found.items()}
    assert outcomes == EXPECTED
    assert worker.runs == 2

    assert results.run_file(worker, "test_it.py", {}, limit_s=600) == found
    assert worker.runs == 2, "what ran is not run again"

    only = [name for name in found if name.endswith("passes")]
    again = results.run_file(worker, "test_it.py", {}, 600, only)
    assert list(again) == only


class ScriptedWorker:
    """Says that the second test hangs, and then that the third one passes."""

    def __init__(self, tree: Path) -> None:
        self.side = results.Side("scripted", Path(), tree, "key", "")
        self.skipped: list[list[str]] = []

    def run(self, order: dict) -> dict:
        self.skipped.append(order["skip"])
        ended = dict(outcome="passed", why="", seconds=1.0)
        script = [
            [dict(start="first"), dict(id="first", **ended), dict(start="second")],
            [dict(start="third"), dict(id="third", **ended)],
        ][len(self.skipped) - 1]
        with Path(order["results"]).open("a") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in script)
        return {"status": ["stuck", 0][len(self.skipped) - 1], "seconds": 1.0}


def test_goes_on_after_a_test_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    (tmp_path / "test_it.py").touch()
    worker = ScriptedWorker(tmp_path)
    found = results.run_file(worker, "test_it.py", {}, limit_s=1)
    outcomes = {name: result.outcome for name, result in found.items()}
    assert outcomes == {"first": "passed", "second": "stuck", "third": "passed"}
    assert worker.skipped == [[], ["first", "second"]]
