# SPDX-License-Identifier: Apache-2.0
"""vLLM's options and its start. Imports vLLM only where it is started."""

import argparse
from typing import TYPE_CHECKING, Any

from compare.texts import REFERENCE_MODEL, refuse

if TYPE_CHECKING:
    from vllm import LLM

OPTIONS = [
    "model",
    "quantization",
    "dtype",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_num_batched_tokens",
    "seed",
    "trust_remote_code",
    "enforce_eager",
    "disable_custom_all_reduce",
]


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine, as vLLM's own options")
    engine.add_argument("--model", default=str(REFERENCE_MODEL / "model"))
    engine.add_argument("--quantization")
    engine.add_argument("--dtype", default="auto")
    engine.add_argument("--tensor-parallel-size", type=int)
    engine.add_argument("--gpu-memory-utilization", type=float,
                        help="share of a GPU's memory; without effect on a CPU")  # fmt: skip
    engine.add_argument("--kv-cache-memory-bytes", type=int,
                        help="default: 1 GiB on a CPU, where vLLM's own is all that "
                        "92%% of the memory leaves, and has to be free")  # fmt: skip
    engine.add_argument("--max-num-batched-tokens", type=int)
    engine.add_argument("--seed", type=int)
    for flag in ("trust-remote-code", "enforce-eager", "disable-custom-all-reduce"):
        engine.add_argument(f"--{flag}", action="store_true", default=None)


def check_engine(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """A parser error where vLLM's own would not name the option."""
    for name in ("tensor_parallel_size", "kv_cache_memory_bytes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The given options; vLLM's own defaults hold for the others."""
    options = {name: getattr(args, name) for name in OPTIONS}
    return with_cache(
        {name: value for name, value in options.items() if value is not None}
    )


def with_cache(options: dict[str, Any]) -> dict[str, Any]:
    """With a KV cache of 1 GiB on a CPU if its size is not given: `LLM`'s own is a
    share of all memory, which has to be free."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return {"kv_cache_memory_bytes": 2**30} | options
    return options


def new_engine(length: str, **options: Any) -> "LLM":
    """vLLM, or the program's end with what it does not accept.

    Args:
        length: the program's option that `max_model_len` comes from.
    """
    from pydantic import ValidationError
    from safetensors import SafetensorError
    from vllm import LLM

    try:
        return LLM(**options)
    except ValidationError as error:  # of pydantic; what is told once is enough
        found = error.errors()[0]
        said = ": ".join(
            [*(f"--{n}".replace("_", "-") for n in found["loc"]), found["msg"]]
        )
    except (OSError, ValueError, SafetensorError) as error:
        said = str(error)
    except RuntimeError as error:
        if "initialization failed" not in str(error):  # in a process of its own
            raise
        said = str(error)
    if "for the cache blocks" in said or "To serve at least one request" in said:
        given = "kv_cache_memory_bytes" in options
        name = "--kv-cache-memory-bytes" if given else "--gpu-memory-utilization"
        said = f"{name}: {said}"
    elif "max_model_len" in said:
        said = f"{length}: {said}"
    refuse(f"vLLM does not start with {options['model']}: {said}")
