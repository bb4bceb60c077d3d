# SPDX-License-Identifier: Apache-2.0
"""The file that a run goes on from: all that the model has said, as it said it.

JSON lines. The first says which run it is; each other holds one completion. All else
follows from these, so a run that goes on takes the same steps again without asking,
up to where it was stopped. A line that was cut short is dropped. A file that is none of
ours is left as it is.
"""

import fcntl
import json
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, Self

from ace.client import Completion, Conversation


class JournalError(RuntimeError):
    """The file is in use, or holds another run; says what to do."""


class Reply(NamedTuple):
    text: str
    finish_reason: str  # stop or length
    tokens: int | None  # generated


class Journal:
    """Appends completions; finds those that are there.

    Use as a context manager, which keeps other processes off the file and changes
    nothing in it; then `begin`.
    """

    def __init__(self, path: Path):
        self.path = path
        self._replies: dict[tuple[int, str, int], tuple[str, Reply]] = {}

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
        except OSError as error:
            raise JournalError(f"--output: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise JournalError(f"Another run uses {self.path}.") from error
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._replies)

    def begin(self, identity: dict, restart: bool = False) -> None:
        """Reads the file, or begins it.

        Args:
            identity: what must be the same for a run to go on. None for what is not
                known, which is the same as anything.
            restart: throw away what the file holds.

        Raises:
            JournalError: it holds another run, or is no file of a run.
        """
        self._file.seek(0)
        content = b"" if restart else self._file.read()
        header = _line(identity)
        if not content.endswith(b"\n") and header.startswith(content):
            # New, thrown away, or stopped within the first line.
            self._file.truncate(0)
            self._write(header)
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._read(whole, identity)
        self._file.truncate(len(whole))

    def find(
        self, number: int, phase: str, index: int, conversation: Conversation
    ) -> Reply | None:
        """What was said to this prompt before.

        Raises:
            JournalError: another prompt was in its place.
        """
        found = self._replies.get((number, phase, index))
        if found is None:
            return None
        if found[0] != _digest(conversation):
            raise JournalError(
                f"{self.path} holds another prompt for {phase} {index} of round "
                f"{number}. {_ADVICE}"
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
        self._write(_line(line | reply._asdict()))
        self._replies[number, phase, index] = digest, reply
        return reply

    def _read(self, content: bytes, identity: dict) -> None:
        try:
            header, *lines = map(json.loads, content.splitlines() or [b""])
            theirs = dict(header)
            for line in lines:
                key = line["round"], line["phase"], line["index"]
                values = {name: line[name] for name in Reply._fields}
                self._replies[key] = line["prompt"], Reply(**values)
        except (ValueError, LookupError, TypeError) as error:
            raise JournalError(
                f"{self.path} is no file of a run ({error}). Choose another --output."
            ) from error
        names = []
        for name in {**theirs, **identity}:
            pair = theirs.get(name, ...), identity.get(name, ...)
            known = None not in pair or ... in pair
            if known and pair[0] != pair[1]:
                names.append(name)
        if names:
            raise JournalError(
                f"{self.path} is of another run: it differs in {', '.join(names)}. "
                f"{_ADVICE}"
            )

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()


_ADVICE = "Choose another --output, or throw it away with --restart."


def _line(content: dict) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _digest(conversation: Conversation) -> str:
    return sha256(json.dumps(conversation).encode()).hexdigest()[:16]
