# SPDX-License-Identifier: Apache-2.0
"""Which label fits each text best? Scores all labels of all texts, offline.

    .venv/bin/python examples/compare_labels.py

What the prompts begin with, and each text before its labels, is prefilled once.
"""

import argparse
from pathlib import Path

from common import quiet

MODEL = Path(__file__).parent / "reference_model" / "model"
SHOTS = "import numpy as np\nimport torch\n"
TEXTS = ["import numpy as", "import torch.nn as"]
LABELS = [" np", " F", " nn"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(MODEL), help="of 1,024 tokens or more")
    args = parser.parse_args()
    quiet.hush(in_process=True)  # in a copy, leave this and the import out
    from vllm import LLM

    llm = LLM(args.model, enforce_eager=True, kv_cache_memory_bytes=2**30,
              max_model_len=1024, use_tqdm_on_load=False)  # fmt: skip
    requests = [(SHOTS + text, LABELS) for text in TEXTS]
    for text, scores in zip(TEXTS, llm.score_continuations(requests, use_tqdm=False)):
        sums = [score.logprob_sum for score in scores]
        ranked = sorted(range(len(LABELS)), key=sums.__getitem__, reverse=True)
        margin = sums[ranked[0]] - sums[ranked[1]]
        print(f"{text:<32}{LABELS[ranked[0]]:<4} by {margin:.2f} nats")


if __name__ == "__main__":
    main()
