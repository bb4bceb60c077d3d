# SPDX-License-Identifier: Apache-2.0
"""A file that holds a run, so that it can end at any moment and go on later.

JSON lines. The first one holds settings, models and prompts; each other one a drawn
token with its diagnostics, written when it is drawn. A line that was cut short is
dropped.
"""

import fcntl
import json
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn, Self

from dual_vllm.coordinator import Diagnostics, GenerationOutput, Sample, Step
from dual_vllm.server import Model

# Of no influence on what is drawn, so that a run may go on with others; of the models
# the header says what the servers do.
FREE_SETTINGS = {"url_a", "url_b", "model_a", "model_b"}
FREE_SETTINGS |= {"batch_size", "patience", "timeout", "api_key"}


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

    def resume(
        self, settings: dict, models: Iterable[Model], samples: Iterable[Sample]
    ) -> deque[Sample]:
        """Gives the samples the tokens that were drawn already.

        Returns:
            Those that are not finished.

        Raises:
            JournalError: the file holds a run with other settings, models or prompts,
                or something else. It is left as it is.
        """
        outputs = {sample.output.sample: sample for sample in samples}
        header = {
            "settings": {k: v for k, v in settings.items() if k not in FREE_SETTINGS},
            "models": [[model.name, model.root] for model in models],
            "prompts": [s.output.prompt_token_ids for s in outputs.values()],
        }
        for line in self._lines_after(header):
            output = outputs[line["sample"]].output
            assert line["position"] == len(output.token_ids), line
            _append(output, line)
        return deque(s for s in outputs.values() if s.output.finish_reason is None)

    def append(self, steps: list[Step]) -> None:
        """Writes drawn tokens; when this returns they survive the process."""
        self._write(
            b"".join(
                _encode(
                    {
                        "sample": step.sample,
                        "position": step.position,
                        "token_id": step.token_id,
                        "finish_reason": step.finish_reason,
                        **step.diagnostics._asdict(),
                    }
                )
                for step in steps
            )
        )

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._file.flush()

    def _lines_after(self, header: dict) -> list[dict]:
        """Whole lines after this header, which is written to an empty file. What is
        left of a line that was cut short goes, once the file is known to be ours."""
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if not whole:
            if not _encode(header).startswith(content):
                self._refuse("no line of a run")
            self._file.truncate(0)
            self._write(_encode(header))
            return []
        try:
            first, *lines = map(json.loads, whole.splitlines())
        except ValueError as error:
            self._refuse(str(error))
        if first != header:
            raise JournalError(
                f"{self.path} holds a run with other {_differences(first, header)}: "
                "name another file, or remove this one to start again"
            )
        self._file.truncate(len(whole))
        return lines

    def _refuse(self, reason: str) -> NoReturn:
        raise JournalError(f"{self.path} is no file of a run: {reason}")


def _encode(line: dict) -> bytes:
    return json.dumps(line).encode() + b"\n"


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
    names += [n for n in ("models", "prompts") if found.get(n) != header[n]]
    return ", ".join(names)
