# SPDX-License-Identifier: Apache-2.0
"""What the parts ask of vLLM: its own way to score a prompt, and this fork's."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BLOCK = 32
"""Tokens of a block of the prefix cache: the least on a CPU; a GPU's default is 16."""
MOST_ROUNDS = 5


class Turns(NamedTuple):
    """Of one way, an entry a round."""

    seconds: list[float]
    answers: list[Any]


def options(model: str, **more: Any) -> dict[str, Any]:
    """Of an engine that starts in seconds."""
    return {
        "model": model,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 2**29,
        "block_size": BLOCK,
        "seed": 0,
        "use_tqdm_on_load": False,
    } | more


def score_named(llm, prompts: Sequence[list[int]], rows: int) -> np.ndarray:
    """Names the last `rows` tokens of each prompt.

    Returns:
        Their log-probabilities, `[prompts, rows]`.
    """
    from vllm import SamplingParams, TokensPrompt

    requests = [
        TokensPrompt(prompt_token_ids=ids, target_token_ids=ids[-rows:])
        for ids in prompts
    ]
    outputs = llm.generate(requests, SamplingParams(max_tokens=0), use_tqdm=False)
    return np.stack([output.target_logprobs.logprobs[:, 0] for output in outputs])


def score_prompt_logprobs(
    llm, prompts: Sequence[list[int]], rows: int, top: int = 0
) -> np.ndarray:
    """The same with `prompt_logprobs=top`: -1 is the whole vocabulary."""
    from vllm import SamplingParams, TokensPrompt

    requests = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
    # Without texts of tokens, which nobody reads here and which take it time.
    params = SamplingParams(max_tokens=1, prompt_logprobs=top, detokenize=False)
    outputs = llm.generate(requests, params, use_tqdm=False)
    return np.array(
        [
            [found[i].logprob for found, i in zip(output.prompt_logprobs[-rows:],
                                                  ids[-rows:])]
            for output, ids in zip(outputs, prompts)
        ]
    )  # fmt: skip


def prefill(llm, prompt: list[int]) -> None:
    """Reads a prompt, and scores nothing."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(max_tokens=1, detokenize=False)
    llm.generate(TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False)


def by_turns(
    ways: Sequence[Callable[[], Any]],
    budget: float,
    before: Callable[[], Any] = lambda: None,
) -> list[Turns]:
    """Runs each way once a round, for as many rounds as fit the time.

    Args:
        budget: seconds; the first round is run in any case.
        before: is called before each way, and not timed.

    Returns:
        One a way.
    """
    turns = [Turns([], []) for _ in ways]
    begin = time.perf_counter()
    for done in range(1, MOST_ROUNDS + 1):
        for way, (seconds, answers) in zip(ways, turns):
            before()
            started = time.perf_counter()
            answers.append(way())
            seconds.append(time.perf_counter() - started)
        if (time.perf_counter() - begin) * (done + 1) / done > budget:
            break
    return turns


def peak(work: Callable[[], Any]) -> tuple[int, Any]:
    """Most resident memory while it runs, in bytes, as the kernel counts it; its answer."""
    Path("/proc/self/clear_refs").write_text("5")  # the mark falls to what is used now
    answer = work()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024, answer
    raise OSError("/proc/self/status does not say VmHWM")


def over(theirs: Sequence[float], ours: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(theirs, ours, strict=True)]


def perplexity(logprobs: np.ndarray) -> float:
    return math.exp(-logprobs.mean(dtype=np.float64))


def took(seconds: Sequence[float]) -> str:
    middle = statistics.median(seconds)
    return f"{middle:.{2 if middle < 1 else 1}f} s"


def differ(theirs: np.ndarray, ours: np.ndarray) -> str:
    """By how much the answers differ, in words."""
    worst = float(np.abs(theirs - ours).max())
    return "to the bit" if worst == 0 else f"within {worst:.0e} nats"
