# SPDX-License-Identifier: Apache-2.0
"""Writes what a teacher says of each token of a text, to train a student with.

    .venv/bin/python examples/teacher.py README.md --output build/teacher.npz

For each position but the first, and of a long text for the first 1,024: the 20 most
probable tokens of softmax(logits / T), their log-probabilities, and the log-probability of
all others together. A student's loss is the divergence over these 21 outcomes.
"""

import argparse
import sys
from pathlib import Path

from common import quiet

MODEL = Path(__file__).parent / "reference_model" / "model"
LONGEST = 1024  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.npz")
    parser.add_argument("--model", default=str(MODEL), help="of 1,024 tokens or more")
    parser.add_argument("--temperature", type=float, default=2.0)
    args = parser.parse_args()
    if args.temperature <= 0:
        parser.error("--temperature must be positive")
    if args.output.suffix != ".npz" or not args.output.parent.is_dir():
        parser.error(f"--output {args.output}: a file that ends in .npz, in a folder that is there")
    try:
        text = args.file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"{args.file}: {error}")
    quiet.hush(in_process=True)  # in a copy, leave this and the import out
    import numpy as np
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(args.model, enforce_eager=True, kv_cache_memory_bytes=2**30,
              max_model_len=LONGEST, use_tqdm_on_load=False)  # fmt: skip
    text = llm.get_tokenizer().encode(text)
    tokens = text[:LONGEST]
    if len(tokens) < 2:
        sys.exit(f"{args.file}: nothing comes after the first token")
    prompt = TokensPrompt(
        prompt_token_ids=tokens, target_top_k=20, target_temperature=args.temperature
    )
    [output] = llm.generate(prompt, SamplingParams(max_tokens=0), use_tqdm=False)
    scores = output.target_logprobs
    np.savez(
        args.output,
        tokens=np.array(tokens[1:]),  # [n]
        top_token_ids=scores.top_token_ids,  # [n, 20]
        top_logprobs=scores.top_logprobs,  # [n, 20], nats
        tail_logprob=scores.tail_logprob,  # [n], of all other tokens together
    )
    tail = np.exp(scores.tail_logprob).mean()
    print(f"{args.output}: {len(scores.top_logprobs)} of {len(text) - 1} positions, the "
          f"20 most probable tokens of each; {tail:.1%} of the probability is in the "
          "tail")  # fmt: skip


if __name__ == "__main__":
    main()
