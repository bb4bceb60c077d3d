# SPDX-License-Identifier: Apache-2.0
"""Starts `vllm serve` for the two models on this machine, and ends it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from transformers import AutoModelForCausalLM, AutoTokenizer

REFERENCE_MODEL = Path(__file__).parents[1] / "reference_model" / "model"
START_SECONDS = 900


class LaunchError(Exception):
    """A server did not start."""


class LocalServer:
    """A `vllm serve` process, which can be started again at the same address."""

    def __init__(self, model: str, log: Path, arguments: Sequence[str] = ()):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.process: subprocess.Popen | None = None
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
        command += ["--host=127.0.0.1", f"--port={port}", *arguments]
        self._command = command

    def start(self, env: dict[str, str] | None = None) -> None:
        """Returns at once."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as out:
            # In a group of its own: Ctrl-C is for the program, which ends the server.
            self.process = subprocess.Popen(
                self._command, stdout=out, stderr=out, env=env, start_new_session=True
            )

    def wait(self) -> None:
        """Until it answers.

        Raises:
            LaunchError: it has ended, or takes too long.
        """
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                if httpx.get(self.url + "/health", timeout=10).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = self.log.read_text(errors="replace")[-2000:]
                raise LaunchError(f"{' '.join(self._command)}\n{tail}\nsee {self.log}")
            time.sleep(0.2)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Without a chance to finish anything. Its engine process goes with it: left
        alone it would go on, and hold what the next one needs."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def servers(
    models: Sequence[str], logs: Path, arguments: Sequence[str]
) -> Iterator[list[LocalServer]]:
    """A server of each model, started side by side, for as long as the context."""
    with ExitStack() as stack:
        started = []
        for name, model in zip("abcdefgh", models):
            server = LocalServer(model, logs / f"{name}.log", arguments)
            stack.callback(server.stop)
            server.start()
            started.append(server)
        for server in started:
            server.wait()
        yield started


def first_layers(model: str | Path, layers: int, folder: Path) -> Path:
    """Writes a model of the first `layers` layers of a model, with its tokenizer.
    Returns the folder."""
    whole = AutoModelForCausalLM.from_pretrained(model)
    whole.model.layers = whole.model.layers[:layers]
    whole.config.num_hidden_layers = layers
    whole.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder
