# SPDX-License-Identifier: Apache-2.0
"""Run commands with a log, and leave none of what they started behind."""

import contextlib
import ctypes
import datetime
import itertools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TypeVar

from tools.common import Checkout

_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_SECONDS_TO_END = 10
_INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Key = TypeVar("Key")


class Log:
    """The full log of one call of ``build.sh``."""

    def __init__(self, checkout: Checkout, verb: str) -> None:
        folder = checkout.build / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        moment = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        self.path = folder / f"{moment}-{verb}.log"
        self.stream = self.path.open("w", buffering=1)
        for old in sorted(folder.glob("*.log"))[:-20]:
            old.unlink()

    def run(
        self,
        command: list[str],
        cwd: Path,
        environment: dict[str, str],
        show: Callable[[str], None] = lambda line: None,
    ) -> tuple[int, list[str]]:
        """Run a command; every line goes to the log and to ``show``.

        Returns:
            the exit status and the lines.
        """
        process = _start(command, cwd, environment, subprocess.PIPE)
        assert process.stdout is not None
        return self._follow(process, process.stdout, show)

    def run_at_once(
        self,
        lanes: Iterable[tuple[int, Iterable[tuple[Key, list[str]]]]],
        cwd: Path,
        environment: dict[str, str],
    ) -> Iterator[tuple[Key, int, list[str]]]:
        """Run commands beside each other; nothing is shown.

        The lines of one go to the log in one piece, when it has ended.

        Args:
            lanes: commands in order, each with what it is known by, and how many of them
                run at once.

        Yields:
            as commands end: what it is known by, and what ``run`` returns.
        """
        free = [(count, iter(commands)) for count, commands in lanes]
        running: dict[int, tuple[int, Key, subprocess.Popen[str], IO[str]]] = {}
        with contextlib.ExitStack() as files:
            while True:
                for lane, (count, waiting) in enumerate(free):
                    taken = sum(one[0] == lane for one in running.values())
                    for key, command in itertools.islice(waiting, count - taken):
                        output = files.enter_context(
                            tempfile.TemporaryFile("w+", errors="replace")
                        )
                        process = _start(command, cwd, environment, output)
                        running[process.pid] = lane, key, process, output
                if not running:
                    return
                # Also those that lost their parent, below `nothing_left_behind`.
                pid, status = os.waitpid(-1, 0)
                if pid in running:
                    _, key, process, output = running.pop(pid)
                    process.returncode = os.waitstatus_to_exitcode(status)
                    output.seek(0)
                    yield key, *self._follow(process, output, lambda line: None)

    def _follow(
        self,
        process: subprocess.Popen[str],
        output: IO[str],
        show: Callable[[str], None],
    ) -> tuple[int, list[str]]:
        self.stream.write(f"\n$ {' '.join(map(str, process.args))}\n")
        lines = []
        try:
            for line in output:
                self.stream.write(line)
                lines.append(line.rstrip("\n"))
                show(line)
            return process.wait(), lines
        except BaseException:
            _end(process)
            raise


def _start(
    command: list[str], cwd: Path, environment: dict[str, str], output: int | IO[str]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _end(process: subprocess.Popen[str]) -> None:
    """End a command and what it started; it gets time to clean up."""
    # A shell starts background jobs with SIGINT ignored, and so are their children.
    for number, seconds in ((signal.SIGINT, 5), (signal.SIGTERM, 30)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=seconds)
            return
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """End whatever the body started and is still there, in a session of its own too.

    What loses its parent becomes a child of this process, so nothing can get away
    (prctl(2), PR_SET_CHILD_SUBREAPER).
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        handlers = {n: signal.signal(n, signal.SIG_IGN) for n in _INTERRUPTIONS}
        _end_descendants()
        prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end_descendants() -> None:
    deadline = time.monotonic() + _SECONDS_TO_END
    asked: set[int] = set()
    # A process that the kernel does not let go is not waited for.
    while (running := _descendants()) and time.monotonic() < deadline + _SECONDS_TO_END:
        late = time.monotonic() > deadline
        for process in running:
            if late or process not in asked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL if late else signal.SIGTERM)
                asked.add(process)
        time.sleep(0.05)


def _descendants() -> list[int]:
    """Running processes below this one; those that have ended are reaped."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [os.getpid()]
    for process in found:
        found += children.get(process, [])
    return found[1:]
