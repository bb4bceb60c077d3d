# SPDX-License-Identifier: Apache-2.0
"""Scores every token of a text, offline.

    .venv/bin/python examples/score_text.py README.md
"""

import argparse
import math
from pathlib import Path

from common import quiet

MODEL = Path(__file__).parent / "reference_model" / "model"
LONGEST = 1024  # tokens that the model takes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default=str(MODEL))
    args = parser.parse_args()
    quiet.hush(in_process=True)  # leave it out to see vLLM's own log
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(args.model, enforce_eager=True, kv_cache_memory_bytes=2**30,
              use_tqdm_on_load=False)  # fmt: skip
    tokenizer = llm.get_tokenizer()
    tokens = tokenizer.encode(args.file.read_text(), verbose=False)[:LONGEST]
    [output] = llm.generate(
        TokensPrompt(prompt_token_ids=tokens, target_token_ids=tokens[1:]),
        SamplingParams(max_tokens=0),  # scores, and generates nothing
        use_tqdm=False,
    )
    logprobs = output.target_logprobs.logprobs[:, 0]  # float32 [tokens - 1], nats
    print(f"{len(logprobs)} tokens, perplexity {math.exp(-logprobs.mean()):.2f}")
    print("the least likely:")
    for row in logprobs.argsort()[:5]:
        token = tokenizer.decode([tokens[row + 1]])
        print(f"  {token!r} after {tokenizer.decode(tokens[: row + 1])[-30:]!r}: "
              f"{logprobs[row]:.2f} nats")  # fmt: skip


if __name__ == "__main__":
    main()
