# SPDX-License-Identifier: Apache-2.0
"""Runs test files, each in a process forked from this one.

Started by ``python -m tests.upstream`` with one side's interpreter, in the folder of
that side's tests. ``vllm`` is imported once, which takes ten seconds or more, and a
file's process starts with what upstream's ``tests/conftest.py`` imports anyway.

Reads a JSON object a line: ``file``, ``results`` and ``log`` (to append to),
``limit_s``, and node ids, ``skip`` or ``only``. Answers with one, ``{"status",
"seconds"}``: pytest's exit status, or ``"stuck"`` where no test started or ended for
``limit_s`` seconds.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05


class Recorder:
    """A pytest plugin that writes one JSON line as a test starts, one as it ends."""

    def __init__(self, order: dict) -> None:
        self.stream = Path(order["results"]).open("a", buffering=1)  # noqa: SIM115
        self.only, self.skip = order.get("only"), set(order.get("skip", ()))
        self.reports: list = []
        self.asked = _names_asked_for()

    def pytest_collection_modifyitems(self, items: list) -> None:
        # pytest's own --deselect takes a name for the beginning of one.
        items[:] = [
            item
            for item in items
            if item.nodeid not in self.skip
            and (self.only is None or item.nodeid in self.only)
        ]

    def write(self, **row) -> None:
        self.stream.write(json.dumps(row) + "\n")

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.write(id=report.nodeid, outcome="error", why=_why(report), seconds=0)
        elif report.skipped:
            self.write(id=report.nodeid, outcome="skipped", why=_why(report), seconds=0)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(start=nodeid)
        self.reports = []
        self.asked.clear()

    def pytest_runtest_logreport(self, report) -> None:
        self.reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome, why = _outcome(self.reports)
        seconds = sum(report.duration for report in self.reports)
        row = dict(id=nodeid, outcome=outcome, why=why, seconds=round(seconds, 3))
        self.write(**row, asked=sorted(self.asked))


def _names_asked_for() -> set[str]:
    """A set that fills with the names of models which this process looks for."""
    from huggingface_hub.utils import _validators

    names: set[str] = set()
    validate = _validators.validate_repo_id

    def record(repo_id: str) -> None:
        validate(repo_id)
        if not os.path.exists(repo_id):
            names.add(repo_id)

    _validators.validate_repo_id = record
    return names


def _outcome(reports: list) -> tuple[str, str]:
    """What the reports of set-up, call and tear-down come to, and why."""
    for report in reports:
        if report.failed:
            return ("failed" if report.when == "call" else "error"), _why(report)
    for report in reports:
        if report.skipped:
            expected = hasattr(report, "wasxfail")
            return ("xfailed" if expected else "skipped"), _why(report)
    return "passed", ""


def _why(report) -> str:
    """The last line of what was raised."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        text = crash.message
    elif isinstance(report.longrepr, tuple):
        text = report.longrepr[2]
    else:
        text = str(report.longrepr or "").strip().split("\n")[-1]
    return text[:600]


def _test(order: dict) -> None:
    """The forked process: run one file and do not come back."""
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    status: int = 99
    try:
        import pytest

        options = ["-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--tb=short"]
        options += ["-o", "asyncio_default_fixture_loop_scope=function"]
        plugins = [Recorder(order)]
        status = int(pytest.main([*options, order["file"]], plugins=plugins))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _shut_down_no_ray() -> None:
    """Let the clean-up after the tests of LoRA not import Ray, which is not installed."""
    from vllm import distributed

    clean_up = distributed.cleanup_dist_env_and_memory
    for module in (distributed, distributed.parallel_state):
        module.cleanup_dist_env_and_memory = lambda shutdown_ray=False: clean_up()


def _size(path: str) -> int:
    return os.stat(path).st_size if os.path.exists(path) else 0


def _wait(child: int, order: dict) -> int | str:
    """Wait for a file's process as long as its tests end within the limit."""
    size, since = _size(order["results"]), time.monotonic()
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if _size(order["results"]) != size:
            size, since = _size(order["results"]), time.monotonic()
        if time.monotonic() - since > order["limit_s"]:
            return "stuck"
        time.sleep(POLL_S)


def _end_descendants() -> None:
    """End what the file's process left: all of it is below this process."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def _end(number: int, frame: object) -> None:
    _end_descendants()
    os._exit(128 + number)


def run(order: dict) -> dict:
    """Run one file in a process of its own."""
    Path(order["results"]).parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _test(order)
    status = _wait(child, order)
    _end_descendants()
    return {"status": status, "seconds": round(time.monotonic() - started, 2)}


def main() -> None:
    sys.path.insert(0, os.getcwd())
    libc = ctypes.CDLL(None)
    # Orphans of a test become children of this process, so that it can end them.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Whoever started this process may be ended too.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, _end)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import vllm

    _shut_down_no_ray()
    from tests import conftest  # noqa: F401

    del sys.modules["tests.conftest"]  # pytest imports its own
    print(json.dumps({"vllm": vllm.__file__}), file=answers)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Upstream's conftest unfreezes and collects all garbage after each test. What was
    # imported here is none, and to go through it takes half a second a test.
    gc.freeze()
    gc.unfreeze = lambda: None
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
