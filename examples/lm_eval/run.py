# SPDX-License-Identifier: Apache-2.0
"""lm-eval's command line with the model `utio` and the tasks of this folder.

python examples/lm_eval/run.py run --model utio --tasks held_out_next_line \\
    --batch_size auto \\
    --model_args pretrained=examples/reference_model/model,enforce_eager=True,kv_cache_memory_bytes=1073741824
"""

import os
import sys
from pathlib import Path

from lm_eval.__main__ import cli_evaluate

HERE = Path(__file__).parent


def main() -> None:
    if not {"-h", "--help"} & {*sys.argv}:  # it imports vLLM
        import utio_model  # noqa: F401  # registers the model

    # Before the caller's own, which is taken if there is one; a --config may name one
    # too. Without "run", options alone are lm-eval's older form of it.
    if len(sys.argv) > 1 and sys.argv[1].startswith("--") and sys.argv[1] != "--help":
        sys.argv.insert(1, "run")
    given = any(word.split("=")[0] in ("--config", "-C") for word in sys.argv)
    if len(sys.argv) > 1 and sys.argv[1] == "run" and not given:
        sys.argv[2:2] = ["--include_path", str(HERE / "tasks")]
    cli_evaluate()


if __name__ == "__main__":
    # The engine in this process: the arrays need not cross to another one.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    main()
