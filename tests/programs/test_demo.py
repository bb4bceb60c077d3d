# SPDX-License-Identifier: Apache-2.0
"""The demo: its parts' processes, its table, its refusals, and the whole of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo"
sys.path[:0] = [str(DEMO), str(ROOT / "examples")]

import engine as ways
import process
import rows

PART = """
import os, signal

def run(kind, *values):
    print("printed by a library")
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raises":
        raise ValueError("what went wrong" + "!" * 1000)
    yield from values
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """With a part of its own, and nothing to import before it."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "demo_part.py").write_text(PART)
    (folder / "preload.py").write_text("")
    sys.path.insert(0, str(folder))
    yield process.Server(folder / "logs")
    sys.path.remove(str(folder))


def test_a_part_yields_from_its_own_process(server):
    assert list(server.run("demo_part", "fine", 1, 2)) == [1, 2]


def test_what_a_part_prints_goes_to_a_file(server, capfd):
    list(server.run("demo_part", "fine", 1))
    assert capfd.readouterr() == ("", "")
    assert "library" in (server.logs / "demo-demo_part.log").read_text()


def test_an_error_of_a_part_is_told_in_short(server):
    with pytest.raises(process.PartFailed, match="ValueError: what went wrong") as told:
        list(server.run("demo_part", "raises"))
    first, second = str(told.value).splitlines()
    assert len(first) <= process.LONGEST
    assert "demo-demo_part.log" in second


def test_a_killed_part_says_memory(server):
    with pytest.raises(process.PartFailed, match="too little memory"):
        list(server.run("demo_part", "killed"))


def test_what_was_read_from_files_is_no_used_memory(tmp_path):
    machine = process.available_memory(tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert process.available_memory(tmp_path) == 200_000 < machine
    (tmp_path / "memory.max").write_text("max\n")
    assert process.available_memory(tmp_path) > 200_000


def test_a_part_that_is_left_early_ends(server):
    others = process.multiprocessing.active_children()
    part = server.run("demo_part", "fine", 1, 2)
    assert next(part) == 1
    (own,) = {*process.multiprocessing.active_children()} - {*others}
    part.close()
    assert not own.is_alive()


def test_ways_take_turns_within_the_budget():
    calls = []
    turns = ways.by_turns(
        (lambda: calls.append("a"), lambda: calls.append("b")), 60.0
    )
    assert calls == ["a", "b"] * ways.MOST_ROUNDS
    assert [len(turn.seconds) for turn in turns] == [ways.MOST_ROUNDS] * 2


def test_a_slow_machine_gets_one_round():
    (turn,) = ways.by_turns((lambda: sum(range(10**5)),), 0.0)
    assert len(turn.seconds) == 1


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        ([1.234], "1.23×"),
        ([2.0, 1.5, 3.0], "2.00× (1.50 to 3.00)"),
        ([12.34, 150.6, 99.0], "99.0× (12.3 to 151)"),
    ],
)
def test_a_ratio_has_its_spread(ratios, text):
    assert rows.ratio(ratios) == text


SMALL = """
import runpy
from pathlib import Path

import files

files.TIMES, files.VOCABULARY, files.FOLDER = 2, 16_384, Path({folder!r})
runpy.run_path({preload!r})

import depth
import scoring

depth.BUDGET = 0
scoring.BUDGET = dict.fromkeys(scoring.BUDGET, 0)
"""
"""A `preload.py` that has the parts, which are forks, take a smaller model, and each way
one turn."""


def run_demo(*lines: str, **environment: str) -> subprocess.CompletedProcess:
    """The demo as a program, after some lines of Python."""
    program = "\n".join(
        ["import runpy, sys", f"sys.path.insert(0, {str(DEMO)!r})", *lines,
         f"runpy.run_path({str(DEMO)!r}, run_name='__main__')"]
    )  # fmt: skip
    return subprocess.run(
        [sys.executable, "-s", "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
    )


def test_too_little_memory_is_said():
    done = run_demo("import process", "process.available_memory = lambda: 2**30")
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the demo needs") and "here are 1.0" in line


def test_a_missing_archive_is_said():
    done = run_demo(
        "import files, corpus, pathlib", "corpus.pinned_archive = lambda: pathlib.Path('none')"
    )
    assert done.returncode == 1
    assert "./build.sh first" in done.stderr


def test_ctrl_c_says_one_line():
    demo = subprocess.Popen(
        [sys.executable, "-s", str(DEMO)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        # In the background a shell has programs ignore it, and their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert demo.stdout is not None
    assert demo.stdout.read(1) == "1"  # of "1/5 ..."
    os.killpg(demo.pid, signal.SIGINT)
    _, said = demo.communicate(timeout=120)
    assert demo.returncode == 130
    assert said.split() == ["interrupted"]


def test_the_whole_demo(tmp_path):
    """Of a model that costs less."""
    first = tmp_path / "first"
    first.mkdir()
    preload = SMALL.format(folder=str(tmp_path / "made"), preload=str(DEMO / "preload.py"))
    (first / "preload.py").write_text(preload)
    done = run_demo(
        "import process",
        "start = process.Server.__init__",
        f"find = lambda: sys.path.insert(0, {str(first)!r})",  # the demo's own comes after
        "process.Server.__init__ = lambda *given: find() or start(*given)",
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stderr == ""
    said = done.stdout
    assert "WARNING" not in said and "INFO" not in said
    assert [line[:3] for line in said.splitlines()[:5]] == [
        f"{n}/5" for n in range(1, 6)
    ]
    assert "the same choice in 3 of 3" in said
    assert "the same best answer" in said
    assert said.count("×") >= 5
    assert max(map(len, said.splitlines())) <= 80
    assert "What to try next" in said
    assert len(said.splitlines()) < 50
