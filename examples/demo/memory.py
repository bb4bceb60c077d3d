# SPDX-License-Identifier: Apache-2.0
"""Peak memory of scoring a long prompt, above that of reading it."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from engine import options, perplexity, score_named, score_prompt_logprobs
from files import Files, held_out

LENGTH = 1023
"""Tokens of the prompt; the model takes 1,024, and vLLM wants room for one."""


class Peak(NamedTuple):
    above: float  # MiB above prefill
    perplexity: float


def run(files: Files, upstream: bool) -> Iterator[Peak]:
    """Yields one. Upstream's way and this fork's have a process each."""
    import vllm

    llm = vllm.LLM(
        **options(
            str(files.model),
            max_model_len=LENGTH + 1,
            enable_prefix_caching=False,
        )
    )
    score = score_prompt_logprobs if upstream else score_named
    tokenizer = llm.get_tokenizer()
    tokens = (tokenizer.encode(text, verbose=False) for text in held_out(files.archive))
    prompt = next(ids[:LENGTH] for ids in tokens if len(ids) >= LENGTH)
    for way in (prefill, score):  # compiles what is compiled on first use
        way(llm, [prompt[:64]], 63)
    prefilled = peak(lambda: prefill(llm, [prompt], 0))
    scores = []
    scored = peak(lambda: scores.append(score(llm, [prompt], LENGTH - 1)))
    yield Peak((scored - prefilled) / 2**20, perplexity(scores[0]))


def prefill(llm, prompts: list[list[int]], rows: int) -> None:
    from vllm import SamplingParams, TokensPrompt

    requests = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
    params = SamplingParams(max_tokens=1, detokenize=False)
    llm.generate(requests, params, use_tqdm=False)


def peak(work) -> int:
    """Most resident memory while it runs, in bytes, as the kernel counts it."""
    Path("/proc/self/clear_refs").write_text("5")  # the mark falls to what is used now
    work()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status does not say VmHWM")
