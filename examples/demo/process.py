# SPDX-License-Identifier: Apache-2.0
"""Runs the parts of the demo, each in a process of its own.

All are forked from one process that has imported vLLM, so the import is paid once, and
a part's memory goes back when it ends. What libraries print goes to a file.
"""

import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

GRACE = 20
"""Seconds that a part which has said its last may take to end."""
LONGEST = 300
"""Characters of an error that are shown."""


class PartFailed(Exception):
    """With what to tell the user."""


class Server:
    """Forks a process for each part."""

    def __init__(self, logs: Path):
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = logs
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["preload"])
        # Python 3.11 does not hand sys.path to the process that preloads.
        with patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path)}):
            resource_tracker.ensure_running()  # else the next call does, and unblocks
            # It would end with a traceback until `preload` has said how to end.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                forkserver.ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def run(self, module: str, *arguments: Any) -> Iterator[Any]:
        """Yields what `run(*arguments)` of a module yields in a process of its own.

        Raises:
            PartFailed: it raised, or the process was killed.
        """
        log = self.logs / f"demo-{module}.log"
        receive, send = self.context.Pipe(duplex=False)
        process = self.context.Process(
            target=child, args=(send, module, arguments, log)
        )
        process.start()
        send.close()
        try:
            yield from received(receive, log)
            process.join(GRACE)
        except EOFError:
            process.join()
            raise PartFailed(died(process.exitcode, log)) from None
        except PartFailed:
            process.join(GRACE)
            raise
        finally:
            receive.close()
            process.kill()
            process.join()


def received(receive: Connection, log: Path) -> Iterator[Any]:
    while True:
        kind, value = receive.recv()
        if kind == "done":
            return
        if kind == "failed":
            raise PartFailed(f"{value[:LONGEST]}\nWhat was printed: {log}")
        yield value


def died(code: int | None, log: Path) -> str:
    if code == -9:
        return (
            "the process was killed, most likely because the machine has too little "
            f"memory\nWhat was printed: {log}"
        )
    return f"the process ended with exit status {code}\nWhat was printed: {log}"


def child(send: Connection, module: str, arguments: tuple, log: Path) -> None:
    """In the new process."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        for row in importlib.import_module(module).run(*arguments):
            send.send(("row", row))
        send.send(("done", None))
    except (BrokenPipeError, KeyboardInterrupt):
        return  # nobody waits for it
    except Exception as error:
        traceback.print_exc()
        send.send(("failed", f"{type(error).__name__}: {error}"))


def available_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be taken, on this machine and in this container. What the
    container has read from files, and may forget, counts as free."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no container; no limit: "max"
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        lines = (group / "memory.stat").read_text().splitlines()
        stat = dict(line.split() for line in lines)
        free = min(free, limit - used + int(stat.get("inactive_file", 0)))
    return free
