# SPDX-License-Identifier: Apache-2.0
"""What the model has said, as it said it, in a journal.

All else follows from these replies, so a run that goes on takes the same steps again
without asking, up to where it was stopped.
"""

import json
from hashlib import sha256
from typing import NamedTuple

from common import Journal, JournalError

from ace.chat import Completion, Conversation

Place = tuple[int, str, int]
"""Round, phase and index of a prompt."""


class Reply(NamedTuple):
    text: str
    finish_reason: str  # stop or length
    tokens: int | None  # generated


class Replies:
    """Appends completions to a journal; finds those that are there.

    Args:
        identity: what must be the same for a run to go on; `chat_template` is None
            where it is not known.
        restart: throw away what the journal holds.

    Raises:
        JournalError: it holds another run, or is no file of a run.
    """

    def __init__(self, journal: Journal, identity: dict, restart: bool = False):
        self._journal = journal
        found = journal.begin(
            identity, _read, restart=restart, unknown=["chat_template"]
        )
        self._known: dict[Place, tuple[str, Reply]] = dict(found)

    def __len__(self) -> int:
        return len(self._known)

    def find(
        self, number: int, phase: str, index: int, conversation: Conversation
    ) -> Reply | None:
        """What was said to this prompt before.

        Raises:
            JournalError: another prompt was in its place.
        """
        found = self._known.get((number, phase, index))
        if found is None:
            return None
        if found[0] != _digest(conversation):
            raise JournalError(
                f"{self._journal.path} holds another prompt for {phase} {index} of "
                f"round {number}. {self._journal.advice}"
            )
        return found[1]

    def append(
        self,
        number: int,
        phase: str,
        index: int,
        conversation: Conversation,
        completion: Completion,
    ) -> Reply:
        """Writes a completion; when this returns it survives the process."""
        tokens = completion.token_ids
        reply = Reply(
            completion.text,
            completion.finish_reason,
            None if tokens is None else len(tokens),
        )
        digest = _digest(conversation)
        line = {"round": number, "phase": phase, "index": index, "prompt": digest}
        self._journal.append(line | reply._asdict())
        self._known[number, phase, index] = digest, reply
        return reply


def _read(line: dict) -> tuple[Place, tuple[str, Reply]]:
    reply = Reply(**{name: line[name] for name in Reply._fields})
    return (line["round"], line["phase"], line["index"]), (line["prompt"], reply)


def _digest(conversation: Conversation) -> str:
    return sha256(json.dumps(conversation).encode()).hexdigest()[:16]
