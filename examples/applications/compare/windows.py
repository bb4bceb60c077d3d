# SPDX-License-Identifier: Apache-2.0
"""Windows of a stream of tokens, and calls of bounded size.

A text is cut into overlapping windows of `context` tokens, each `stride` after the
last, and a token counts once: in the first window that holds it. That is Hugging
Face's definition (https://huggingface.co/docs/transformers/perplexity).
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

TOKENS_PER_CALL = 500_000
"""Most prompt tokens in one `generate` call. It bounds what is held at once: 16 bytes
a token for named tokens, about half a kilobyte for the objects of `prompt_logprobs`."""

NAMED_PER_CALL = 2**22
"""Most tokens to name in one `generate` call. Finding the most probable makes some
hundred bytes of Python objects each."""


class Window(NamedTuple):
    token_ids: list[int]
    scored: int  # how many tokens, at the end, no window before this one holds


def windows_of(
    pieces: Iterable[list[int]], context: int, stride: int
) -> Iterator[Window]:
    """Cuts one text, given as consecutive pieces of its token ids, into windows.

    The first token of a window is not scored, as nothing precedes it. Holds a window
    and a piece at a time.
    """
    held: list[int] = []
    covered = 0  # how many of the held tokens an earlier window holds
    for piece in pieces:
        held += piece
        begin = 0
        while len(held) - begin > context:  # more follows, so it is not the last
            yield from _window(held[begin : begin + context], covered)
            begin += stride
            covered = context - stride
        del held[:begin]
    yield from _window(held, covered)


def _window(token_ids: list[int], covered: int) -> Iterator[Window]:
    scored = min(len(token_ids) - covered, len(token_ids) - 1)
    if scored > 0:
        yield Window(token_ids, scored)


def cut(token_ids: list[int], context: int, stride: int) -> list[Window]:
    return list(windows_of([token_ids], context, stride))


def first_positions(windows: Iterable[Window], positions: int) -> list[Window]:
    """The first windows, and of the last one a part, up to `positions` scored."""
    few = []
    for ids, scored in windows:
        if positions <= 0:
            break
        excess = max(scored - positions, 0)
        few.append(Window(ids[: len(ids) - excess], scored - excess))
        positions -= scored
    return few


def calls(
    windows: Iterable[Window], limit: int = TOKENS_PER_CALL
) -> Iterator[list[Window]]:
    """Splits the windows into `generate` calls of up to `limit` prompt tokens; a
    window that is longer than that is a call of its own."""
    call: list[Window] = []
    tokens = 0
    for window in windows:
        if call and tokens + len(window.token_ids) > limit:
            yield call
            call, tokens = [], 0
        call.append(window)
        tokens += len(window.token_ids)
    if call:
        yield call
