# SPDX-License-Identifier: Apache-2.0
"""Servers on the loopback for the time of some tests."""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType

import forks
import ports
import requests
import runners
from waiting import until

START_SECONDS = 600


class LoopbackServer(ThreadingHTTPServer):
    """For answers that a test makes itself."""

    request_queue_size = 64  # of connections; beyond 5, they would be reset

    def serve_forever(self, poll_interval: float = 0.02) -> None:
        """By default it would look each half second whether it is to end."""
        super().serve_forever(poll_interval)


@contextmanager
def live_server(
    model: Path,
    options: Sequence[str],
    runner: str,
    log: Path,
    environ: Mapping[str, str] = MappingProxyType({}),
    survives: bool = True,
) -> Iterator[tuple[subprocess.Popen | forks.Process, int]]:
    """Starts `vllm serve`; yields its process and its port once it answers.

    It is a fork of a process that has imported vLLM, unless it has an environment of its
    own, which it may need before that. It then leads a process group, as in a terminal.

    Args:
        model: folder of the model.
        options: of the command line.
        runner: one of `runners.RUNNERS`.
        log: file for what it prints.
        environ: more of its environment.
        survives: whether it has to run still when the tests are done.
    """
    reserved = ports.reserve()
    port = ports.number(reserved)
    command = ["vllm", "serve", str(model), f"--port={port}", *options]
    environment = runners.environment(runner) | dict(environ)
    if environ:
        command[:1] = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        with log.open("w") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, env=environment, start_new_session=True
            )
    else:
        process = forks.Process(command, environment, log)

    def said() -> str:
        return log.read_text()[-4000:]

    def answers() -> bool:
        assert process.poll() is None, said()
        return _is_healthy(port)

    try:
        until(answers, START_SECONDS, said)
        yield process, port
        assert not survives or process.poll() is None, said()
    finally:
        process.terminate()
        process.wait(60)
        reserved.close()


def _is_healthy(port: int) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{port}/health", timeout=10).ok
    except requests.ConnectionError:
        return False
