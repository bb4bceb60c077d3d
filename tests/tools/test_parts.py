# SPDX-License-Identifier: Apache-2.0
"""Every part of the tests is run and counted, and an end of them ends all of them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools import test as parts
from tools.common import HERE, Checkout, ToolError
from tools.processes import Log


def stand_in(root: Path, code: str) -> Checkout:
    """A checkout whose Python is a shell script."""
    checkout = Checkout(root)
    python = checkout.venv / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{code}")
    python.chmod(0o755)
    return checkout


@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize(
    "broken", ["none", "tools.series", "--runner=v1", "--runner=v2 --parts=2 --part=1"]
)
def test_every_part_of_the_tests_is_run_and_counted(
    tmp_path, monkeypatch, capsys, room, broken
):
    """With a stand-in for Python, which fails the part that is `broken`."""
    monkeypatch.setattr(parts, "has_room_for_two", lambda: room)
    checkout = stand_in(
        tmp_path,
        f'echo "$@" >> {tmp_path}/calls\n'
        'echo "=== 3 passed in 0.12s ==="\n'
        f'case "$*" in *"{broken}"*) exit 1;; esac\n',
    )
    log = Log(checkout, "test")
    if broken == "none":
        parts.test(checkout, log, {}, parts.PARTS)
    else:
        with pytest.raises(ToolError, match="^1 of 6 parts failed"):
            parts.test(checkout, log, {}, parts.PARTS)
    calls = (tmp_path / "calls").read_text()
    for part in ("tools.series check", "tools.build lint", "tests/tools", "tools.upstream_tests"):
        assert part in calls
    sessions = [line.partition("--ignore=tests/tools ")[2] for line in calls.splitlines()]
    assert sorted(filter(None, sessions)) == [
        f"--runner={runner} --parts={count} --part={part}"
        for runner, count in (("v1", 3), ("v2", 2))
        for part in range(count)
    ]
    summary = capsys.readouterr().out.partition("full log:")[2].splitlines()[1:]
    assert len(summary) == 6
    assert sum("3 passed" in line for line in summary) >= 4
    failed = [line for line in summary if line.startswith("FAILED")]
    assert len(failed) == (broken != "none")


def test_a_part_can_be_run_alone(tmp_path, capsys):
    checkout = stand_in(tmp_path, f'echo "$@" >> {tmp_path}/calls\n')
    parts.test(checkout, Log(checkout, "test"), {}, ("upstream", "v1"))
    *engine, upstream = (tmp_path / "calls").read_text().splitlines()
    assert "tools.upstream_tests" in upstream
    assert len(engine) == 3 and all("--runner=v1" in line for line in engine)
    assert len(capsys.readouterr().out.partition("full log:")[2].splitlines()) == 3


def test_a_quick_test(tmp_path, capsys):
    """The engines' parts in short, and what is named of it alone."""
    checkout = stand_in(tmp_path, f'echo "$@" >> {tmp_path}/calls; echo fine\n')
    parts.test(checkout, Log(checkout, "test"), {}, parts.QUICK, quick=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    engines = [line for line in calls if "tools.series check" not in line]
    assert len(calls) == 3 and len(engines) == 2
    assert all(line.endswith(" --quick") for line in engines)
    assert not any("--parts" in line for line in engines)
    assert "--quick" not in str(parts.commands(checkout))


def test_a_container_has_no_more_memory_than_its_own(tmp_path):
    machine = parts.free_memory(tmp_path)
    assert machine > 2**20
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100000\nkernel 3\n")
    (tmp_path / "memory.max").write_text("1000000\n")
    assert parts.free_memory(tmp_path) == 200_000
    (tmp_path / "memory.max").write_text("max\n")
    assert parts.free_memory(tmp_path) > 2**20


@pytest.mark.parametrize(
    "line, said",
    [
        ("==== 3 passed, 1 skipped in 2.05s ====", "3 passed, 1 skipped in 2.05s"),
        ("1 failed, 30 passed, 2 warnings in 61.20s (0:01:01)",
         "1 failed, 30 passed, 2 warnings in 61.20s (0:01:01)"),
        ("1 passed, 33 deselected, 13 subtests passed in 9.1s",
         "1 passed, 33 deselected, 13 subtests passed in 9.1s"),
        ("no tests ran in 0.01s", "no tests ran in 0.01s"),
        ("3 passed the gate", None),
    ],
)  # fmt: skip
def test_the_summary_line_of_pytest_is_recognised(line, said):
    found = parts._SUMMARY.match(line)
    assert (found and found.group(1)) == said


def test_commands_at_once_do_not_mix(tmp_path):
    log = Log(Checkout(tmp_path), "test")
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    slow = ["sh", "-c", f"echo one; cat {gate}; echo two"]
    quick = [sys.executable, "-c", "print('quick'); raise SystemExit(3)"]
    quicks = [("quick", quick)] * 2
    lanes = (2, [("slow", slow), *quicks]), (1, [("beside", quick)])
    ends = log.run_at_once(lanes, tmp_path, dict(os.environ))
    names, *said = zip(*(next(ends) for _ in range(3)))
    assert sorted(names) == ["beside", "quick", "quick"]
    assert said == [(3,) * 3, (["quick"],) * 3]
    gate.write_text("")  # lets the first go on
    assert [*ends] == [("slow", 0, ["one", "two"])]
    assert "\none\ntwo\n" in log.path.read_text()


def pipe(file: Path) -> Path:
    """A named pipe, whose text can be read once a process has written it."""
    os.mkfifo(file)
    return file


PROGRAM = """
import signal
import sys
from pathlib import Path

from tools import processes, test
from tools.common import Checkout, run_main

processes._SECONDS_TO_END = 1
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
checkout = Checkout(Path(sys.argv[1]))
log = processes.Log(checkout, "test")
test.has_room_for_two = lambda: True
parts = tuple(sys.argv[2].split(","))
run_main(lambda: test.test(checkout, log, {"PATH": "/usr/bin:/bin"}, parts))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stubborn", ["", "trap '' TERM INT; "])
@pytest.mark.parametrize("names", ["tools", "v1,v2", "tools,v1,v2"])
def test_an_interrupted_run_leaves_nothing_behind(tmp_path, number, stubborn, names):
    """Not even a server in a session of its own, its parent gone, and its child."""
    engine = f"{stubborn}echo $$ > {tmp_path}/engine; sleep 301; sleep 302"
    server = f"{stubborn}sh -c \"{engine}\" & echo $$ > {tmp_path}/server; sleep 303; sleep 304"
    (tmp_path / "server.sh").write_text(server)
    # One of those that run at once.
    started = "*--runner=v1*--part=0" if "v1" in names else "*tests/tools"
    stand_in(
        tmp_path,
        f'echo "$@" >> {tmp_path}/calls\n'
        f'case "$*" in {started}) '
        f"(setsid sh {tmp_path}/server.sh &);; esac\n"
        "sleep 305\n",
    )
    pipes = [pipe(tmp_path / name) for name in ("server", "engine")]
    program = [sys.executable, "-c", PROGRAM, str(tmp_path), names]
    run = subprocess.Popen(program, cwd=HERE.root)
    pids = [file.read_text().strip() for file in pipes]
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    run.send_signal(number)
    assert run.wait(timeout=60) == 1
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    # What was to come was not begun.
    assert len((tmp_path / "calls").read_text().splitlines()) <= len(names.split(","))
