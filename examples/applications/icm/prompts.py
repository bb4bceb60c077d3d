# SPDX-License-Identifier: Apache-2.0
"""Prompts with the labelled examples as demonstrations, in an order that the server's
prefix cache likes."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from common import ClientError
from scorer import Piece, Scorer, join
from search import Example, Labels, normalize

Context = tuple[tuple[int, int], ...]
RECENT = 8
"""Demonstrations that may be outside the tree of `leave_one_out`. About the logarithm
of their number costs least."""


def leave_one_out(order: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Orders demonstrations for the prompts that leave out one each, so that these
    prompts share prefixes as long as possible, with each other and with those of
    the iteration before.

    In one order with one left out, two prompts differ from the first of the two on,
    so half of all tokens are shared. Here the older demonstrations are halved: one
    half stands first in the prompts of all of the other half, and so on within each
    half. The prompts of n demonstrations then have n * log2(n) different places of
    n * (n - 1). The up to `RECENT` newest come last, in order, so that a further one
    leaves what is before it as it was.

    Args:
        order: the demonstrations, by age.

    Yields:
        Each demonstration and the others in order. Prompts that follow each other
        share the most.
    """
    old = len(order) // RECENT * RECENT
    newest = tuple(order[old:])
    for left_out, others in _halve(tuple(order[:old])):
        yield left_out, others + newest
    for left_out in newest:
        yield left_out, tuple(slot for slot in order if slot != left_out)


def in_one_order(order: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """As `leave_one_out`, without care for the cache."""
    for left_out in order:
        yield left_out, tuple(slot for slot in order if slot != left_out)


def _halve(
    order: tuple[int, ...], prefix: tuple[int, ...] = ()
) -> Iterator[tuple[int, tuple[int, ...]]]:
    if len(order) < 2:
        yield from ((left_out, prefix) for left_out in order)
        return
    # A power of two: halves stay what they are as the whole grows.
    middle = 1 << (len(order) - 1).bit_length() - 1
    left, right = order[:middle], order[middle:]
    yield from _halve(left, prefix + right)
    yield from _halve(right, prefix + left)


class Prompt(NamedTuple):
    example: int
    demonstrations: Piece  # with the header
    whole: Piece  # up to where the label begins


class Usage(NamedTuple):
    """What scoring cost."""

    calls: int = 0
    prompts: int = 0
    # Tokens, of the calls whose answers say how many came from the cache:
    tokens: int = 0  # of the prompts and a label each
    demonstration_tokens: int = 0
    cached_tokens: int = 0
    cached_beyond: int = 0  # at most so many of these are outside the demonstrations

    def __add__(self, other: "Usage") -> "Usage":  # type: ignore[override]
        return Usage(*(a + b for a, b in zip(self, other, strict=True)))

    def hit_rate(self) -> float | None:
        """Share of all prompt tokens that the server took from its cache."""
        return self.cached_tokens / self.tokens if self.tokens else None

    def demonstration_hit_rate(self) -> float | None:
        """Share of the demonstrations' tokens, at least. The server says how many
        tokens were cached, not where; all that may have been elsewhere is taken
        off."""
        if not self.demonstration_tokens:
            return None
        return (self.cached_tokens - self.cached_beyond) / self.demonstration_tokens


class Prompts:
    """Scores the pool in the context of a labelling.

    Args:
        client: the server.
        examples: the pool; an example's index is its slot.
        labels: names of the labels, each one token.
        header: text at the start of every prompt.
        separator: text between a demonstration's label and the next one.
        max_demonstrations: only the examples in the first so many slots ever serve as
            demonstrations; None: as many as fit the model's context at their longest.

    Raises:
        ClientError: a label is not one token, or not even one demonstration fits.
    """

    def __init__(
        self,
        client: Scorer,
        examples: Sequence[Example],
        labels: Sequence[str],
        header: str = "",
        separator: str = "\n",
        max_demonstrations: int | None = None,
    ):
        self.client = client
        self.block_size = client.block_size() if client.scores_by_name else 1
        self.labels = client.encode_labels(labels)
        (self.header,) = client.encode([header], begin=True)
        (self.separator,) = client.encode([separator])
        self.texts = client.encode([example.text for example in examples])
        self.slots = self._fitting(client.max_model_len)
        if max_demonstrations is not None:
            self.slots = min(self.slots, max_demonstrations)
        if not self.slots:
            raise ClientError(
                f"Not one demonstration fits the {client.max_model_len} tokens of "
                f"context that {client.model} is served with (--max-model-len)."
            )
        self.usage = Usage()
        """Of all calls of this object."""
        self._known: dict[Context, np.ndarray] = {}

    def _fitting(self, context: int | None) -> int:
        """How many slots fit beside the longest example, all of them labelled."""
        if context is None or not self.client.scores_by_name:
            return len(self.texts)  # the server will say so if it is too much
        # One token for a label.
        room = context - len(self.header) - max(map(len, self.texts)) - 1
        for slot, text in enumerate(self.texts):
            room -= len(text) + 1 + len(self.separator)
            if room < 0:
                return slot
        return len(self.texts)

    def demonstration(self, slot: int, label: int) -> Piece:
        return self.texts[slot] + self.labels[label] + self.separator

    def zero_shot(self) -> list[Prompt]:
        return [
            Prompt(example, self.header, self.header + text)
            for example, text in enumerate(self.texts)
        ]

    def of(self, labels: Labels, leave_one_out=leave_one_out) -> list[Prompt]:
        """A prompt for each example, without its own label, those that share the
        most next to each other."""
        members = tuple(slot for slot in labels if slot < self.slots)
        inside = set(members)
        orders = [(e, members) for e in range(len(self.texts)) if e not in inside]
        orders += leave_one_out(members)
        pieces = {slot: self.demonstration(slot, labels[slot]) for slot in members}
        prompts = []
        for example, order in orders:
            demonstrations = self.header + join(
                [pieces[slot] for slot in order], like=self.header
            )
            whole = demonstrations + self.texts[example]
            prompts.append(Prompt(example, demonstrations, whole))
        return prompts

    def score(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Log-probabilities of the labels, [prompts, labels], normalized among
        themselves. One request."""
        scores = self.client.score([prompt.whole for prompt in prompts], self.labels)
        self.usage += self._usage(prompts, scores.cached_tokens)
        return normalize(scores.logprobs)

    def _usage(self, prompts: Sequence[Prompt], cached_tokens: int | None) -> Usage:
        if cached_tokens is None:
            return Usage(1, len(prompts))
        # A hit ends with a block, and before the position that predicts the label.
        block = self.block_size
        beyond = (
            (len(p.whole) - 1) // block * block - len(p.demonstrations) for p in prompts
        )
        return Usage(
            1,
            len(prompts),
            sum(len(p.whole) + 1 for p in prompts),
            sum(len(p.demonstrations) for p in prompts),
            cached_tokens,
            sum(max(0, tokens) for tokens in beyond),
        )

    def _context(self, labels: Labels) -> Context:
        """What of a labelling the prompts depend on."""
        return tuple(item for item in labels.items() if item[0] < self.slots)

    def remember(self, labels: Labels, scores: np.ndarray) -> None:
        """Keeps the scores of one labelling, the search's present one: what has the
        same demonstrations is not asked again."""
        self._known = {self._context(labels): scores}

    def evaluate(self, labellings: list[Labels]) -> list[np.ndarray]:
        """Scores of all examples for each labelling, [examples, labels], in one
        request, or none if all is known. Labels outside the demonstrations' slots
        change no prompt."""
        contexts = [self._context(labels) for labels in labellings]
        tables = dict(self._known)
        batches = {
            context: self.of(labels)
            for context, labels in zip(contexts, labellings, strict=True)
            if context not in tables
        }
        if batches:
            scores = iter(self.score([p for b in batches.values() for p in b]))
        for context, batch in batches.items():
            table = np.empty((len(self.texts), len(self.labels)))
            for prompt in batch:
                table[prompt.example] = next(scores)
            tables[context] = table
        return [tables[context] for context in contexts]
