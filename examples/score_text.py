# SPDX-License-Identifier: Apache-2.0
"""Scores the tokens of a text, offline: of a long one, the first 1,024.

    .venv/bin/python examples/score_text.py README.md
"""

import argparse
import math
import sys
from pathlib import Path

from common import quiet

MODEL = Path(__file__).parent / "reference_model" / "model"
LONGEST = 1024  # tokens; more than that, score_perplexity.py does in windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default=str(MODEL), help="of 1,024 tokens or more")
    args = parser.parse_args()
    try:
        text = args.file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"{args.file}: {error}")
    quiet.hush(in_process=True)  # in a copy, leave this and the import out
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(args.model, enforce_eager=True, kv_cache_memory_bytes=2**30,
              max_model_len=LONGEST, use_tqdm_on_load=False)  # fmt: skip
    tokenizer = llm.get_tokenizer()
    text = tokenizer.encode(text)
    tokens = text[:LONGEST]
    if len(tokens) < 2:
        sys.exit(f"{args.file}: nothing comes after the first token")
    [output] = llm.generate(
        TokensPrompt(prompt_token_ids=tokens, target_token_ids=tokens[1:]),
        SamplingParams(max_tokens=0),  # scores, and generates nothing
        use_tqdm=False,
    )
    logprobs = output.target_logprobs.logprobs[:, 0]  # float32 [tokens - 1], nats
    print(f"{len(logprobs)} of {len(text) - 1} tokens, "
          f"perplexity {math.exp(-logprobs.mean()):.2f}")  # fmt: skip
    print("the least likely:")
    for row in logprobs.argsort()[:5]:
        token = tokenizer.decode([tokens[row + 1]])
        print(f"  {token!r} after {tokenizer.decode(tokens[: row + 1])[-30:]!r}: "
              f"{logprobs[row]:.2f} nats")  # fmt: skip


if __name__ == "__main__":
    main()
