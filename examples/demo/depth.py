# SPDX-License-Identifier: Apache-2.0
"""Decoding by depth: how much faster steps are, and what it costs in quality."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from common.decoding import ForcedTokens, decode_together
from engine import BLOCK, by_turns, options, over
from files import LONGEST, Files, tokens
from rows import Row, ratio
from vllm import LLM, SamplingParams

LAYERS = 12
CUTOFFS = [6, 9]
SHARES = [0.5, 0.4, 0.1]
"""Of the tokens of a step, that exit after 6 and after 9 layers, and that run all."""
SEQUENCES, DECODED = 64, 17
PROMPT = BLOCK + 1
"""Tokens; all but the last come from the prefix cache the second time."""
TIMED = 9
BUDGET = 6
"""Seconds in which the ways take turns."""


def run(files: Files) -> Iterator[Row]:
    """Yields one row: full depth against routed, in one engine by turns."""
    llm = LLM(
        **options(
            str(files.narrow),
            max_num_seqs=SEQUENCES,
            max_model_len=PROMPT + DECODED + 1,
            logits_processors=[ForcedTokens],
            enable_utio=True,
            utio_bucket_cutoffs=CUTOFFS,
            utio_bucket_shares=SHARES,
            utio_calibration=str(files.calibration),
            utio_min_batch_size=1,
            utio_gate=False,  # routes always: it is what is to be seen
        )
    )
    windows = read_windows(files)
    full, greedy, _ = force(llm, windows, LAYERS)
    routed, others, depth = force(llm, windows, None)
    rise = math.exp(full.mean() - routed.mean()) - 1
    slow, fast = by_turns(
        (lambda: decode(llm, windows, LAYERS), lambda: decode(llm, windows, None)),
        BUDGET,
    )
    yield Row(
        "Decoding by depth (experimental)",
        step(slow.answers),
        step(fast.answers),
        ratio(over(slow.answers, fast.answers)),
        [
            f"a step of {SEQUENCES} sequences; all {LAYERS} layers against {depth:.1f} on average",
            f"costs quality: perplexity {rise:+.1%}, {(greedy == others).mean():.0%} of "
            "greedy choices the same",
        ],
    )


def decode(llm: LLM, windows: list[list[int]], max_depth: int | None) -> float:
    """Seconds of a step in which every sequence decodes a token."""
    params = SamplingParams(max_tokens=TIMED, **sampling(max_depth))
    _, seconds = generate(llm, windows, [params] * SEQUENCES)
    return seconds / (TIMED - 1)


def step(seconds: Sequence[float]) -> str:
    return f"{np.median(seconds) * 1e3:.0f} ms"


def read_windows(files: Files) -> list[list[int]]:
    """The beginnings of held-out texts, then what follows in each."""
    length = PROMPT + DECODED
    windows = [
        ids[start : start + length]
        for start in range(0, LONGEST, length)
        for ids in tokens(files)
        if len(ids) >= start + length
    ]
    return windows[:SEQUENCES]


def sampling(max_depth: int | None) -> dict:
    """Of greedy decoding. `max_depth` of all layers exempts a request from routing."""
    return {
        "temperature": 0.0,
        "ignore_eos": True,
        "detokenize": False,
        "max_depth": max_depth,
    }


def force(
    llm: LLM, windows: list[list[int]], max_depth: int | None
) -> tuple[np.ndarray, np.ndarray, float]:
    """Forces the windows through decoding.

    Returns:
        Log-probability of each forced token, the token that greedy decoding would
        choose, both `[sequences, decode steps]`, and the mean number of layers.
    """
    params = [
        SamplingParams(
            max_tokens=DECODED,
            logprobs=1,
            extra_args={"forced": window[PROMPT:]},
            **sampling(max_depth),
        )
        for window in windows
    ]
    outputs, _ = generate(llm, windows, params)
    logprobs = np.empty((len(windows), DECODED))
    greedy = np.empty((len(windows), DECODED), np.int64)
    for row, (output, window) in enumerate(zip(outputs, windows, strict=True)):
        for column, found in enumerate(output.logprobs):
            logprobs[row, column] = found[window[PROMPT + column]].logprob
            greedy[row, column] = next(i for i, x in found.items() if x.rank == 1)
    depth = float(np.mean([output.mean_decode_depth for output in outputs]))
    return logprobs[:, 1:], greedy[:, 1:], depth  # the first comes from the prompt


def generate(
    llm: LLM, windows: list[list[int]], params: list[SamplingParams]
) -> tuple[list, float]:
    """The completions, and the seconds since all requests had a token."""
    prompts = (window[:PROMPT] for window in windows)
    return decode_together(llm, zip(prompts, params, strict=True))
