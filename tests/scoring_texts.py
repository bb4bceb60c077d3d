# SPDX-License-Identifier: Apache-2.0
"""Texts and token ids that are scored over HTTP, and what is expected of their answers."""

import numpy as np
from scoring import random_ids
from scoring_server import VOCABULARY, assert_choice, decode
from tiny_models import make_tokenizer

LONG = random_ids(1, VOCABULARY, 150)
SHORT = random_ids(2, VOCABULARY, 12)
RAGGED = [[5, 6, 7], [], [-1, 8], [9, 9, 9]]


def continuation(prompt: str, target: str) -> tuple[list[int], list[int]]:
    """Tokens of prompt + target, and of these the ones that reach into the target.

    Found by decoding ever more tokens, which for plain ASCII is one character a byte.
    """
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(prompt + target)
    inside = [
        n for n in range(len(ids)) if len(tokenizer.decode(ids[: n + 1])) <= len(prompt)
    ]
    return ids, ids[len(inside) :]


def straddling() -> tuple[str, str]:
    """A prompt and a target that share a token: the longest word, cut in two."""
    words = (token for token in make_tokenizer().get_vocab() if token[1:].isalpha())
    word = max((word for word in words if word[0] == "Ġ"), key=len)
    return f"x {word[1:3]}", f"{word[3:]} y"


TEXTS = [
    ("def test_a(server):", "\n    return server"),
    straddling(),
    ("assert x ", "== 3"),  # a space before the boundary
    ("self.assertEq", "ual"),
    ("x = [1, 2, 3", "]"),
]


def assert_continuation(choice: dict, oracle, prompt: list[int], targets) -> None:
    """Asserts the scores of one of `continuations`, with its sum and flag."""
    assert_choice(choice, oracle, prompt, targets, ("logprob_sum", "is_greedy"))
    body = choice["target_logprobs"]
    logprobs = decode("logprobs", body["logprobs"]).sum(dtype=np.float64)
    assert body["logprob_sum"] == logprobs
    assert body["is_greedy"] == (decode("ranks", body["ranks"]) == 1).all()
