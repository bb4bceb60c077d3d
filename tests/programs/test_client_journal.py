# SPDX-License-Identifier: Apache-2.0
"""`examples/common`'s journal, and how the programs that use it begin and end."""

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = str(ROOT / "examples")
sys.path.insert(0, EXAMPLES)

from common import Journal, JournalError
from common.program import any_terminal, interruptible

HEADER = {"seed": 0, "inner": {"a": 1, "b": None}, "template": "x"}
HELP_SECONDS = 2.0
"""Of processor time, which other work on the machine changes least."""


@pytest.fixture
def path(tmp_path) -> Path:
    """A journal of three lines."""
    path = tmp_path / "folder" / "run.jsonl"
    with Journal(path) as journal:
        assert journal.begin(HEADER) == []
        journal.append({"n": 0}, {"n": 1})
        journal.append({"n": 2})
    return path


def test_a_journal_goes_on(path):
    for count in (3, 4):
        with Journal(path) as journal:
            assert journal.begin(HEADER) == [{"n": n} for n in range(count)]
            journal.append({"n": count})


def test_a_file_system_without_locks_is_told(path, monkeypatch, caplog):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("common.journal.fcntl.flock", no_locks)
    with Journal(path) as journal:
        assert len(journal.begin(HEADER)) == 3
    assert f"{path} can not be locked" in caplog.text


def test_what_is_made_of_a_line(path):
    with Journal(path) as journal:
        assert journal.begin(HEADER, lambda line: line["n"]) == [0, 1, 2]


@pytest.mark.parametrize("cut", [1, 5])
def test_a_line_that_was_cut_is_dropped(path, cut):
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with Journal(path) as journal:
        assert journal.begin(HEADER) == [{"n": 0}, {"n": 1}]
        journal.append({"n": 2})
    assert path.read_bytes() == whole


def test_a_header_that_was_cut_is_written_again(path):
    """Nothing was done then."""
    header = path.read_bytes().splitlines(keepends=True)[0]
    for cut in (0, 10, len(header) - 1):
        path.write_bytes(header[:cut])
        with Journal(path) as journal:
            assert journal.begin(HEADER) == []
        assert path.read_bytes() == header


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"seed": 1}, "seed"),
        ({"seed": 1, "more": 2}, "seed, more"),
        ({"inner": {"a": 2, "b": 3}}, "a, b"),
        ({"inner": 5}, "inner"),
        ({"template": "y"}, "template"),
    ],
)
def test_another_run_is_refused(path, change, names):
    before = path.read_bytes()
    with Journal(path, "Do something.") as journal:
        message = f"differs in {names}. Do something."
        with pytest.raises(JournalError, match=message):
            journal.begin(HEADER | change, inside=["inner"], unknown=["template"])
    assert path.read_bytes() == before


def test_what_is_not_known_is_the_same_as_anything(path):
    unknown = HEADER | {"template": None}
    with Journal(path) as journal:
        assert len(journal.begin(unknown, unknown=["template"])) == 3
        with pytest.raises(JournalError, match="differs in template"):
            journal.begin(unknown)
        del unknown["template"]
        with pytest.raises(JournalError, match="differs in template"):
            journal.begin(unknown, unknown=["template"])


def test_restart(path):
    with Journal(path) as journal:
        assert journal.begin({"seed": 1}, restart=True) == []
    assert path.read_text() == '{"seed": 1}\n'


@pytest.mark.parametrize(
    "content",
    [
        b"no json\n",
        b"5\n",
        b'{"a": 1}\n[]\n',
        b'{"a": 1}\n{"other": 1}\n',
        b'{"a": 1}\n{"other": 1}\n{"n": 1',
        b'{"b": 1}',
        b"\n",
        b"\x00\xff\n",
        b"no line",
    ],
)
def test_a_file_that_is_none_of_ours_stays_as_it_is(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with Journal(path) as journal, pytest.raises(JournalError, match=str(path)):
        journal.begin({"a": 1}, lambda line: line["n"])
    assert path.read_bytes() == content


def test_one_process_at_a_time(path):
    with Journal(path), pytest.raises(JournalError, match="Another run uses"):
        Journal(path).__enter__()
    with Journal(path) as journal:
        assert len(journal.begin(HEADER)) == 3


def test_a_folder_that_cannot_be(path):
    with pytest.raises(JournalError, match="cannot be written: "):
        Journal(path / "inside").__enter__()


def test_what_was_appended_survives_a_kill(tmp_path):
    """Of a process that has no chance to close anything."""
    path = tmp_path / "run.jsonl"
    program = (
        "import os, signal, sys; from pathlib import Path; from common import Journal\n"
        "with Journal(Path(sys.argv[1])) as journal:\n"
        "    journal.begin({'a': 1}); journal.append({'n': 0})\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": EXAMPLES})
    assert done.returncode == -signal.SIGKILL
    with Journal(path) as journal:
        assert journal.begin({"a": 1}) == [{"n": 0}]


# The programs


def test_ctrl_c_is_one_line(capsys):
    with pytest.raises(SystemExit) as error, interruptible("The same goes on."):
        raise KeyboardInterrupt
    assert error.value.code == 130
    assert capsys.readouterr().err == "interrupted. The same goes on.\n"


@pytest.mark.parametrize(
    "command",
    [
        ["icm/icm.py"],
        ["icm/verify_server.py"],
        ["ace"],
        ["ace", "run"],
        ["ace", "bench"],
        ["dual_vllm"],
        ["dual_vllm", "sample"],
        ["dual_vllm", "compare"],
        ["dual_vllm", "bench"],
    ],
    ids=" ".join,
)
def test_help_is_there_at_once(command):
    """Nothing that takes seconds to import is imported for it."""
    program, *arguments = command
    program = ROOT / "examples" / "applications" / program
    process = subprocess.Popen(
        [sys.executable, "-s", "-X", "importtime", program, *arguments, "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    shown, imports = process.communicate()
    assert process.returncode == 0 and len(shown) > 50, imports
    imported = {line.rpartition("|")[2].strip() for line in imports.splitlines()}
    assert "argparse" in imported
    assert not imported & {"torch", "vllm", "transformers", "datasets"}


@pytest.mark.parametrize("command", ["icm/icm.py", "ace run", "dual_vllm sample"])
def test_how_long_help_takes(command):
    program, *arguments = command.split()
    program = ROOT / "examples" / "applications" / program
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-s", str(program), *arguments, "--help"],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, usage = os.wait4(pid, 0)
    assert status == 0 and usage.ru_utime + usage.ru_stime < HELP_SECONDS


def test_a_full_disk_keeps_what_is_there(path):
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(JournalError, match="cannot be written: .* not restart goes on"):
        with Journal(path) as journal:
            journal.begin(HEADER)
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
            try:
                journal.append({"n": "x" * 1000})
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes().startswith(before)
    with Journal(path) as journal:
        journal.begin(HEADER)
    assert path.read_bytes() == before


def test_a_terminal_that_lacks_a_character(capfdbinary, monkeypatch):
    with open(os.dup(1), "w", encoding="latin-1") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        any_terminal()
        print("≥ ±")
    assert capfdbinary.readouterr().out == b"? \xb1\n"
