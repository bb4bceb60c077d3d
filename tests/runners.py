# SPDX-License-Identifier: Apache-2.0
"""What makes a process, and those it starts, run vLLM's V1 or V2 model runner."""

import os
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path

RUNNERS = ("v1", "v2")
V2_ON_CPU = Path(__file__).parent / "v2_on_cpu"
FEWER_COLLECTIONS = Path(__file__).parent / "fewer_collections"

_BOTH = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # An engine is in the process that makes it, and a server's worker in its engine's:
    # each process takes ten seconds to import vLLM. Tests of what differs say otherwise.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # Two cores and many engines in one process: idle OpenMP threads must not spin.
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",  # which it makes OpenMP's, for all engines of a process
}
_ENVIRONMENTS = {
    "v1": _BOTH | {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "v2": _BOTH | {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"},
}


def environment(runner: str, paths: Iterable[Path] = ()) -> dict[str, str]:
    """The environment of a child process.

    Args:
        runner: one of `RUNNERS`.
        paths: folders for the front of its `PYTHONPATH`.
    """
    paths = [*paths, V2_ON_CPU] if runner == "v2" else [*paths]
    environ = os.environ | _ENVIRONMENTS[runner]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in inherited if path and Path(path) != V2_ON_CPU]
    environ["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *kept])
    return environ


def enter(runner: str) -> None:
    """Gives this process that environment, and has it and those that it starts look for
    garbage less often. Must come before `import vllm`."""
    assert "vllm" not in sys.modules and "triton" not in sys.modules
    os.environ.update(environment(runner, [FEWER_COLLECTIONS]))
    runpy.run_path(str(FEWER_COLLECTIONS / "sitecustomize.py"))
    if runner == "v2":
        sys.path.insert(0, str(V2_ON_CPU))
        from triton_interpreter import libdevice

        libdevice.install()
