# SPDX-License-Identifier: Apache-2.0
"""Keeps vLLM from talking over a program that runs it offline.

    from common import quiet

    quiet.hush()  # before vllm, torch or transformers are imported
    from vllm import LLM

Nothing is hidden that says why something failed: errors are still printed, and
`VLLM_LOGGING_LEVEL=INFO` in the environment brings all of vLLM's lines back.
"""

import logging
import os
import sys
import warnings

ERROR = "ERROR"
WARNINGS = (
    ("`torch.jit.script_method` is deprecated", DeprecationWarning),
    # Python gives back what a process that was stopped has left: nothing leaks.
    ("resource_tracker", UserWarning),
)


def hush(*, in_process: bool = False) -> None:
    """Sets what keeps vLLM, torch and Transformers quiet, where the caller has not.

    Args:
        in_process: run the engine in this process. On a CPU that starts in a third of
            the time and leaves no processes to wait for at the end; on a GPU vLLM's own
            process for it is the better choice.
    """
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", ERROR)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", ERROR)  # "NUMA binding: Using ..."
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not progress():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if in_process:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # vLLM sets up its loggers when an engine is made; while it is imported, Python
    # prints their warnings as they come.
    logging.getLogger("vllm").setLevel(level)
    # Of torch for CUDA where there is no GPU: "No CUDA runtime is found, ..."
    logging.getLogger("torch.utils.cpp_extension").setLevel(level)
    ignore_warnings()


def progress() -> bool:
    """Whether somebody watches: for `use_tqdm` of `LLM.generate` and the like, and
    `use_tqdm_on_load` of `LLM`. Written to a file, a bar is a line for each of its
    steps. (`TQDM_DISABLE=1` is no way: vLLM divides by the time that a bar has seen.)
    """
    return sys.stderr.isatty()


def ignore_warnings() -> None:
    """Ignores what vLLM and torch make Python say of each other while they load, and
    of what they leave at the end, here and in the processes started from here."""
    filters = []
    for message, category in WARNINGS:
        warnings.filterwarnings("ignore", message, category)
        filters.append(f"ignore:{message}:{category.__name__}")
    given = os.environ.get("PYTHONWARNINGS")  # the last filter that fits counts
    os.environ["PYTHONWARNINGS"] = ",".join([*filters, *([given] if given else [])])
