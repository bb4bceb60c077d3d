# SPDX-License-Identifier: Apache-2.0
"""Processes that are forks of one which has imported vLLM.

The import takes a processor six seconds, and a session of the tests starts more than ten
servers, workers and programs. What tests the start itself, how a process ends or what a
command imports is started by `subprocess`.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path

import pytest

IMPORTED = [
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
]


def context() -> multiprocessing.context.BaseContext:
    """Of `multiprocessing`: its processes are forks of the one, which the first call starts
    with the environment of then."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        # OpenMP takes no other cores after the import.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


@contextmanager
def for_engines() -> Iterator[None]:
    """Engines and workers that this process starts are such forks."""
    from vllm.envs import disable_envs_cache

    forks = context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        disable_envs_cache()  # an engine that was started before has filled it
        patch.setattr(multiprocessing, "get_context", lambda method=None: forks)
        yield
    disable_envs_cache()


class Process:
    """A command in a fork, with what tests use of `subprocess.Popen`; it leads a session.

    Args:
        command: `vllm` and its options, or a program of Python and its options.
        environ: its environment.
        output: file for what it prints.
        folder: where it runs, by default where this process does.
        errors: file for what it prints of errors, by default the same.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        output: Path,
        folder: Path | None = None,
        errors: Path | None = None,
    ):
        arguments = [*map(str, command)], dict(environ), folder or Path.cwd()
        arguments += output, errors or output
        self._process = context().Process(target=_run, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()


def run(
    command: Sequence[str], environ: Mapping[str, str], folder: Path | None = None
) -> subprocess.CompletedProcess:
    """Runs a program of Python to its end."""
    with tempfile.TemporaryDirectory() as made:
        output, errors = Path(made, "output"), Path(made, "errors")
        status = Process(command, environ, output, folder, errors).wait()
        return subprocess.CompletedProcess(
            command, status, output.read_text(), errors.read_text()
        )


def _run(
    command: list[str], environ: dict[str, str], folder: Path, output: Path, errors: Path
) -> None:
    """In the fork."""
    os.setsid()
    for path, descriptor in ((output, 1), (errors, 2)):
        with path.open("a") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    # Multiprocessing has handed over that of the tests, with their own folders.
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    named = environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, named), *installed]  # an empty one would be the folder
    sys.argv = command
    program = Path(command[0])
    if command[0] == "vllm":
        from vllm.entrypoints.cli.main import main

        main()
        return
    if program.is_file():  # of a folder, `runpy` does it
        sys.path.insert(0, str(program.resolve().parent))
    runpy.run_path(command[0], run_name="__main__")
