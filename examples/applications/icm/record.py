# SPDX-License-Identifier: Apache-2.0
"""A search in a journal: its beginning, and a line for each iteration.

A line holds what the iteration changed; what it does not name is as in the line
before.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from common import Journal
from prompts import Usage
from search import State, Step


class Record:
    """Writes the states of a search to a journal that has begun."""

    def __init__(self, journal: Journal, fields: dict[str, Any] | None = None):
        self._journal = journal
        self._fields = fields or {}  # as they are written

    def begin(self, state: State, zero_shot: np.ndarray) -> None:
        self._append(_fields(state) | {"zero_shot": zero_shot.tolist()})

    def iteration(self, state: State, usage: Usage, seconds: float) -> None:
        """Args: seconds: of all iterations."""
        self._append(
            _fields(state)
            | {"step": state.history[-1], "usage": usage, "seconds": seconds}
        )

    def _append(self, fields: dict[str, Any]) -> None:
        known = self._fields
        changed = {k: v for k, v in fields.items() if k not in known or known[k] != v}
        self._journal.append(changed | {k: fields[k] for k in _EACH if k in fields})
        self._fields = known | fields


_EACH = "step", "usage", "seconds"  # of an iteration, whether they changed or not


class Found(NamedTuple):
    """What a journal holds."""

    state: State
    zero_shot: np.ndarray  # [examples, labels]
    usage: list[Usage]  # of each iteration
    seconds: float  # of all iterations
    record: Record


def restore(journal: Journal, lines: Sequence[dict]) -> Found:
    """Goes on with the lines of a journal.

    Raises:
        JournalError: they are not those of a search.
    """
    fields: dict[str, Any] = {"seconds": 0.0}
    steps, usage = [], []
    try:
        for line in lines:
            fields |= line
            if "step" in line:
                steps.append(Step(*line["step"]))
                usage.append(Usage(*line["usage"]))
        internal = (*fields["random_words"], fields["random_place"])
        state = State(
            {example: label for example, label in fields["labels"]},
            np.array(fields["scores"]),
            len(steps),
            (fields["random_version"], internal, fields["random_gauss"]),
            tuple(steps),
        )
        zero_shot = np.array(fields["zero_shot"])
    except (LookupError, TypeError, ValueError) as error:
        journal.refuse(f"{type(error).__name__}: {error}")
    return Found(state, zero_shot, usage, fields["seconds"], Record(journal, fields))


def _fields(state: State) -> dict[str, Any]:
    """Of a line. The words of the random state are drawn from one after the other, so
    they change once in hundreds of draws; their place always does."""
    version, (*words, place), gauss = state.random_state
    return {
        "labels": [[*item] for item in state.labels.items()],
        "scores": state.scores.tolist(),
        "random_version": version,
        "random_words": words,
        "random_place": place,
        "random_gauss": gauss,
    }
