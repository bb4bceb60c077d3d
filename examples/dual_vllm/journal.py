# SPDX-License-Identifier: Apache-2.0
"""A file that holds a run, so that it can end at any moment and go on later.

JSON lines. The first one holds the settings; each other one a drawn token with its
diagnostics, written when it is drawn. A line that was cut short is dropped.
"""

import fcntl
import json
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from dual_vllm.coordinator import Diagnostics, GenerationOutput, Sample, Step

# Of no influence on what is drawn, so that a run may go on with others.
FREE_SETTINGS = {"url_a", "url_b", "batch_size", "patience", "timeout"}


class JournalError(Exception):
    """The file is in use, or holds another run."""


class Journal:
    """Appends the tokens of a run to its file; takes up those that are there.

    Use as a context manager, which keeps other processes off the file.
    """

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise JournalError(f"{self.path} is in use by another process") from error
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def resume(self, settings: dict, samples: Iterable[Sample]) -> deque[Sample]:
        """Gives the samples the tokens that were drawn already.

        Returns:
            Those that are not finished.

        Raises:
            JournalError: the file holds a run with other settings or prompts.
        """
        outputs = {sample.output.sample: sample for sample in samples}
        header = {
            "settings": {k: v for k, v in settings.items() if k not in FREE_SETTINGS},
            "prompts": [s.output.prompt_token_ids for s in outputs.values()],
        }
        lines = self._whole_lines()
        if not lines:
            self._write([header])
        elif lines[0] != header:
            raise JournalError(
                f"{self.path} holds a run with other {_differences(lines[0], header)}: "
                "name another file, or remove this one to start again"
            )
        for line in lines[1:]:
            output = outputs[line["sample"]].output
            assert line["position"] == len(output.token_ids), line
            _append(output, line)
        return deque(s for s in outputs.values() if s.output.finish_reason is None)

    def append(self, steps: list[Step]) -> None:
        """Writes drawn tokens; when this returns they survive the process."""
        self._write(
            {
                "sample": step.sample,
                "position": step.position,
                "token_id": step.token_id,
                "finish_reason": step.finish_reason,
                **step.diagnostics._asdict(),
            }
            for step in steps
        )

    def _write(self, lines: Iterable[dict]) -> None:
        self._file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        self._file.flush()

    def _whole_lines(self) -> list[dict]:
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise JournalError(f"{self.path} is no file of a run: {error}") from error


def _append(output: GenerationOutput, line: dict) -> None:
    output.token_ids.append(line["token_id"])
    values = {name: line[name] for name in Diagnostics._fields}
    output.diagnostics.append(Diagnostics(**values))
    output.finish_reason = line["finish_reason"]


def _differences(found: dict, header: dict) -> str:
    if not isinstance(found, dict) or "settings" not in found:
        return "content"
    before, now = found["settings"], header["settings"]
    names = [n for n in {**before, **now} if before.get(n) != now.get(n)]
    if found.get("prompts") != header["prompts"]:
        names.append("prompts")
    return ", ".join(names)
