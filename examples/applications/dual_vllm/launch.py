# SPDX-License-Identifier: Apache-2.0
"""Starts `vllm serve` for the two models on this machine, and ends it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import ProxyHandler, build_opener

from safetensors import SafetensorError

REFERENCE_MODEL = Path(__file__).parents[2] / "reference_model" / "model"
START_SECONDS = 900
_DIRECTLY = build_opener(ProxyHandler({}))


class LaunchError(Exception):
    """A server did not start."""


class LocalServer:
    """A `vllm serve` process, which can be started again at the same address."""

    def __init__(
        self,
        model: str,
        log: Path,
        arguments: Sequence[str] = (),
        cores: Sequence[int] = (),
    ):
        """
        Args:
            model: folder or hub name.
            log: file for what it prints.
            arguments: of `vllm serve`.
            cores: the only ones it may use, if any.
        """
        # Held, so that nobody else is given its port: vLLM sets SO_REUSEADDR too, and can
        # bind to it as long as this one does not listen.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        port = self._reserved.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.cores = cores
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
        if self.cores:  # long before it has threads or processes, which inherit them
            os.sched_setaffinity(self.process.pid, self.cores)

    def wait(self) -> None:
        """Until it answers.

        Raises:
            LaunchError: it has ended, or takes too long.
        """
        deadline = time.monotonic() + START_SECONDS
        while True:
            if self._is_healthy():
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = self.log.read_text(errors="replace")[-2000:]
                raise LaunchError(f"{' '.join(self._command)}\n{tail}\nsee {self.log}")
            with suppress(subprocess.TimeoutExpired):  # looked at again, and if it ends
                self.process.wait(0.2)

    def _is_healthy(self) -> bool:
        try:
            with _DIRECTLY.open(self.url + "/health", timeout=10) as response:
                return response.status == 200
        except (OSError, HTTPException):  # refusals and time-outs too
            return False

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
    """A server of each model, started side by side, for as long as the context, each
    on its own share of the cores."""
    with ExitStack() as stack:
        started = []
        shares = share_cores(len(models))
        for name, model, cores in zip("abcdefgh", models, shares):
            server = LocalServer(model, logs / f"{name}.log", arguments, cores)
            stack.callback(server.stop)
            server.start()
            started.append(server)
        for server in started:
            server.wait()
        yield started


def share_cores(count: int) -> list[list[int]]:
    """As many shares of the cores that this process may use: vLLM binds its threads to
    the first cores that it may use, so two servers would have the same ones. Empty if
    there are too few, or if VLLM_CPU_OMP_THREADS_BIND says where to bind.

    Logical cores of one physical core, and so of one socket, stay together.
    """
    cores = sorted(os.sched_getaffinity(0), key=_first_sibling)
    if len(cores) < count or os.environ.get("VLLM_CPU_OMP_THREADS_BIND"):
        return [[] for _ in range(count)]
    ends = [len(cores) * n // count for n in range(count + 1)]
    return [cores[begin:end] for begin, end in pairwise(ends)]


def _first_sibling(core: int) -> tuple[int, int]:
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        return int(re.split("[,-]", path.read_text())[0]), core
    except OSError:  # not everywhere
        return core, core


def first_layers(model: str | Path, layers: int, folder: Path) -> Path:
    """Writes a model of the first `layers` layers of a model, with its tokenizer.
    Returns the folder.

    Raises:
        LaunchError: its layers are elsewhere than a Llama's, or not more than that.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer  # takes seconds

    try:
        whole = AutoModelForCausalLM.from_pretrained(model)
    except (OSError, ValueError, SafetensorError) as error:
        raise LaunchError(f"--model-a {model}: {error}") from error
    if len(getattr(getattr(whole, "model", None), "layers", ())) <= layers:
        raise LaunchError(
            f"--model-b: give one, since {model}, a {type(whole).__name__}, has not "
            f"more than {layers} layers in model.layers"
        )
    whole.model.layers = whole.model.layers[:layers]
    # Some families also list the kind of each layer, and compare the lengths.
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(whole.config, name, None):
            setattr(whole.config, name, getattr(whole.config, name)[:layers])
    whole.config.num_hidden_layers = layers
    folder.mkdir(parents=True, exist_ok=True)
    # Moved into place, since a server of another run may have the same files open.
    with TemporaryDirectory(dir=folder.parent) as new:
        whole.save_pretrained(new)
        AutoTokenizer.from_pretrained(model).save_pretrained(new)
        for file in Path(new).iterdir():
            file.replace(folder / file.name)
    return folder
