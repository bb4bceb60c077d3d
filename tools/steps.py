# SPDX-License-Identifier: Apache-2.0
"""Steps that are done once: a stamp holds the hash of what a step depended on.

Each step is commands, run in order; their output goes to a log.
"""

import contextlib
import fcntl
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools import stamp
from tools.common import Checkout, ToolError, python_version
from tools.index import pip_environment
from tools.processes import Log

_GIB = 2**30
_NETWORK_FAILED = (
    "NewConnectionError",
    "NameResolutionError",
    "Failed to establish",
    "Temporary failure in name resolution",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "Network is unreachable",
    "Connection refused",
    "SSLError",
    "Max retries exceeded",
)
"""Signs in pip's messages of an index that can not be reached."""
# Measured: environment 3.7 (6.4 with torch for CUDA), archives and trees 0.6, while a
# wheel is built 1.3 GiB.
_SPACE = {"environment": 6 * _GIB, "wheel": 3 * _GIB // 2}


@dataclass(frozen=True)
class Step:
    """One stamped command.

    Attributes:
        name: of the stamp.
        title: what the person reads.
        key: digest of the inputs.
        present: whether what the step makes is still there.
        commands: run one after the other.
    """

    name: str
    title: str
    key: Callable[[], str]
    present: Callable[[], bool]
    commands: list[list[str]]


def works(python: str) -> bool:
    """Whether an environment is of this Python, where it was made, and has pip."""
    command = [python, "-m", "pip", "--version"]
    script = Path(python).with_name("pip")  # a moved one runs the old place's Python
    try:
        said = subprocess.run(command, capture_output=True, text=True).stdout
        is_here = python in script.read_text()
    except OSError:
        return False
    return is_here and f"(python {python_version()})" in said


def _space(checkout: Checkout, step: str) -> None:
    needed = _SPACE.get(step.split("-")[0], 0)
    if step == "environment" and works(str(checkout.venv / "bin" / "python")):
        return  # most of it is there, or all but a new version of something
    free = shutil.disk_usage(checkout.root).free
    if free < needed:
        raise ToolError(
            f"this step wants {needed / _GIB:.0f} GiB of disk space and "
            f"{checkout.root} has {free / _GIB:.1f} GiB free"
        )


def _failure(step: Step, lines: list[str], log: Path) -> ToolError:
    text = "\n".join(lines)
    errors = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    if "No space left on device" in text:
        said = (
            "the disk is full; a build needs about 8 GiB, and 12 where the package "
            "index has torch for CUDA only (see README.md)"
        )
    elif errors:
        # Such an error may speak of the messages above it.
        above = lines[max(0, errors[-1] - 12) : errors[-1]]
        said = "\n".join(lines[errors[-1] :]).removeprefix("error: ")
        if "above" in said:
            said = "\n".join([*above, said])
    elif any(sign in text for sign in _NETWORK_FAILED):
        said = (
            "the package index could not be reached. Check the network, or "
            "PIP_INDEX_URL and the proxy settings, and run again: it goes on from here"
        )
    else:
        said = f"{step.title} failed:\n  " + "\n  ".join(lines[-12:])
    return ToolError(f"{said}\nfull log: {log}")


def run_steps(checkout: Checkout, chosen: list[Step], log: Log) -> None:
    """Run what is not done yet, one line of progress each.

    Raises:
        ToolError: a step failed; its last words and the path of the log.
    """
    for number, step in enumerate(chosen, start=1):
        head = f"[{number}/{len(chosen)}] {step.title} ..."
        present = step.present()
        if stamp.is_done(checkout, step.name, step.key()) and present:
            print(head, "up to date")
            continue
        print(head, end=" ", flush=True)
        _space(checkout, step.name)
        started = time.monotonic()
        stamp.clear(checkout, step.name)
        for command in step.commands:
            status, lines = log.run(command, checkout.root, pip_environment(checkout))
            if status:
                print("failed")
                raise _failure(step, lines, log.path)
        stamp.done(checkout, step.name, step.key())
        print(f"{time.monotonic() - started:.0f} s")


@contextlib.contextmanager
def alone(checkout: Checkout, name: str = ".lock") -> Iterator[None]:
    """Keep a second build of this checkout out.

    Raises:
        ToolError: one is running.
    """
    checkout.build.mkdir(exist_ok=True)
    with (checkout.build / name).open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ToolError("another build of this checkout is running") from None
        except OSError:
            print("this file system has no locks: run one build at a time")
        yield
