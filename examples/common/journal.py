# SPDX-License-Identifier: Apache-2.0
"""A file that a program goes on from after it was stopped at any moment.

JSON lines. The first one, the header, says what must be the same for a run to go on;
each other holds one thing that was done, and is there as soon as it was. A line that
was cut short is dropped. A file that holds anything else is left as it is.
"""

import contextlib
import fcntl
import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")


class JournalError(RuntimeError):
    """The file is in use, or holds something else; says what to do."""


class Journal:
    """Appends lines to a file, and finds those that are there.

    ```python
    with Journal(path) as journal:
        done = journal.begin({"seed": 0})
        for n in range(len(done), 10):
            journal.append({"n": n, "result": work(n)})
    ```

    As a context manager it keeps other processes off the file, and changes nothing in
    it before `begin`.

    Args:
        advice: what to do about a file that holds another run.
    """

    def __init__(self, path: Path, advice: str = "Choose another file."):
        self.path = path
        self.advice = advice

    def __enter__(self) -> Self:
        """Raises: JournalError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
        except OSError as error:
            raise JournalError(
                f"{self.path} cannot be written: {error.strerror}. {self.advice}"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise JournalError(f"Another run uses {self.path}.") from None
        except OSError:
            logger.warning("%s can not be locked: let one run use it", self.path)
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    @property
    def is_empty(self) -> bool:
        return self.path.stat().st_size == 0

    def begin(
        self,
        header: dict[str, Any],
        read: Callable[[dict], T] = dict,
        *,
        restart: bool = False,
        inside: Collection[str] = (),
        unknown: Collection[str] = (),
    ) -> list[T]:
        """Reads the file, or begins it.

        Args:
            header: what must be the same for the run to go on.
            read: makes of a line what is returned of it.
            restart: throw away what the file holds.
            inside: fields of the header that are objects whose own fields are named
                where they differ.
            unknown: fields of the header of which None says that the value is not
                known; that is the same as any value.

        Returns:
            What `read` makes of each line after the header.

        Raises:
            JournalError: the file holds another run, or something else.
        """
        if restart:
            self.clear()
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if not whole:
            if not _encode(header).startswith(content):
                self.refuse("it has no whole line")
            self.clear()
            self.append(header)
            return []
        lines = self._parse(whole)
        differ = _differences(lines[0], header, inside, unknown)
        if differ:
            raise JournalError(
                f"{self.path} is of another run: it differs in {', '.join(differ)}. "
                + self.advice
            )
        try:
            found = [read(line) for line in lines[1:]]
        except (ValueError, LookupError, TypeError) as error:
            self.refuse(f"{type(error).__name__}: {error}")
        self._file.truncate(len(whole))
        return found

    def append(self, *lines: dict[str, Any]) -> None:
        """Writes lines; when this returns they survive the end of the process.

        Raises:
            JournalError: the disk is full, or another fault of it.
        """
        try:
            self._file.write(b"".join(map(_encode, lines)))
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.close()  # it would write again
            raise JournalError(
                f"{self.path} cannot be written: {error.strerror}. It has all lines "
                "before this one; a run that does not restart goes on from them."
            ) from error

    def clear(self) -> None:
        """Throws away what the file holds."""
        self._file.truncate(0)

    def refuse(self, reason: str) -> NoReturn:
        raise JournalError(f"{self.path} is no file of a run ({reason}). {self.advice}")

    def _parse(self, content: bytes) -> list[dict]:
        try:
            lines = [json.loads(line) for line in content.splitlines()]
        except ValueError as error:
            self.refuse(str(error))
        if not all(isinstance(line, dict) for line in lines):
            self.refuse("a line is no JSON object")
        return lines


def _encode(line: dict) -> bytes:
    return json.dumps(line).encode() + b"\n"


def _differences(
    theirs: dict,
    ours: dict,
    inside: Collection[str] = (),
    unknown: Collection[str] = (),
) -> list[str]:
    """Fields that are not the same."""
    names = []
    for name in {**theirs, **ours}:
        pair = theirs.get(name, ...), ours.get(name, ...)
        if name in inside and all(isinstance(value, dict) for value in pair):
            names += _differences(*pair)
        elif name in unknown and None in pair and ... not in pair:
            continue
        elif pair[0] != pair[1]:
            names.append(name)
    return names
