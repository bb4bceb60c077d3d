# SPDX-License-Identifier: Apache-2.0
"""The playbook: short numbered pieces of advice that grow and change one at a time.

Zhang et al. 2025, "Agentic Context Engineering", arXiv:2510.04618: the model proposes
operations on single bullets, and plain code applies them. So nothing is rewritten as a
whole, and nothing that was learned is lost on the way.
"""

import json
import os
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic_core
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)

Content = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Named = Annotated[str, AfterValidator(lambda text: text.strip("[] "))]  # by its id
Verdict = Literal["helpful", "harmful", "neutral"]


class PlaybookError(ValueError):
    """A file that is no playbook."""


class Bullet(BaseModel):
    id: str
    content: Content
    helpful: int = Field(0, ge=0)  # reflections that found it so
    harmful: int = Field(0, ge=0)

    @property
    def worth(self) -> int:
        return self.helpful - self.harmful


class Add(BaseModel):
    type: Literal["ADD"]
    content: Content


class Update(BaseModel):
    type: Literal["UPDATE"]
    id: Named
    content: Content


class Remove(BaseModel):
    type: Literal["REMOVE"]
    id: Named


Operation = Annotated[Add | Update | Remove, Field(discriminator="type")]
_OPERATION: TypeAdapter[Operation] = TypeAdapter(Operation)


class Reflection(BaseModel):
    """What is to be learned from one answer."""

    lesson: Content
    tags: dict[Named, Verdict] = {}


class Playbook(BaseModel):
    """Bullets, oldest first.

    `max_bullets` and `max_chars` (of one bullet) bound it; two bullets whose words are
    as alike as `alike` (`difflib`'s ratio) are one.
    """

    bullets: list[Bullet] = []
    next_number: int = 1  # an id is never used again
    max_bullets: int = Field(20, ge=1)
    max_chars: int = Field(160, ge=1)
    alike: float = Field(0.9, gt=0, le=1)

    @model_validator(mode="after")
    def _check_ids(self) -> "Playbook":
        ids = [bullet.id for bullet in self.bullets]
        if len(set(ids)) < len(ids):
            raise ValueError("two bullets have the same id")
        numbers = (int(i[1:]) for i in ids if i[:1] == "b" and i[1:].isdecimal())
        self.next_number = max(self.next_number, 1 + max(numbers, default=0))
        return self

    def find(self, bullet_id: str) -> Bullet | None:
        return next((b for b in self.bullets if b.id == bullet_id), None)

    def apply(self, operations: list[Operation]) -> int:
        """Applies operations in their order.

        Returns:
            How many changed something: not those that name no bullet, nor advice that
            is there already.
        """
        changed = 0
        for operation in operations:
            if isinstance(operation, Add):
                changed += self._add(operation.content)
            else:
                bullet = self.find(operation.id)
                if bullet is None:
                    continue
                if isinstance(operation, Remove):
                    self.bullets.remove(bullet)
                    changed += 1
                else:
                    changed += self._update(bullet, operation.content)
        return changed

    def tag(self, tags: dict[str, Verdict]) -> None:
        """Counts what a reflection says of bullets; unknown ids are left out."""
        for bullet_id, verdict in tags.items():
            bullet = self.find(bullet_id)
            if bullet is not None:
                bullet.helpful += verdict == "helpful"
                bullet.harmful += verdict == "harmful"

    def trim(self, room: int = 0) -> None:
        """Drops bullets of least worth, of equals the oldest, until there is room for
        so many new ones."""
        while len(self.bullets) > self.max_bullets - room:
            self.bullets.remove(min(self.bullets, key=lambda b: b.worth))

    def _add(self, content: str) -> bool:
        content = self._clip(content)
        if not content or self._alike(content):
            return False
        self.trim(room=1)
        self.bullets.append(Bullet(id=f"b{self.next_number}", content=content))
        self.next_number += 1
        return True

    def _update(self, bullet: Bullet, content: str) -> bool:
        content = self._clip(content)
        if not content or content == bullet.content:
            return False
        same = self._alike(content, but=bullet)
        if same is None:
            bullet.content = content
        else:  # it says now what another one says
            same.helpful += bullet.helpful
            same.harmful += bullet.harmful
            self.bullets.remove(bullet)
        return True

    def _clip(self, content: str) -> str:
        return " ".join(content.split())[: self.max_chars].strip()

    def _alike(self, content: str, but: Bullet | None = None) -> Bullet | None:
        words = content.lower().split()
        for bullet in self.bullets:
            if bullet is but:
                continue
            matcher = SequenceMatcher(None, words, bullet.content.lower().split())
            if matcher.ratio() >= self.alike:
                return bullet
        return None

    def render(self) -> str:
        """As it stands in a prompt."""
        return "\n".join(
            f"[{b.id}] {b.content} (helpful {b.helpful}, harmful {b.harmful})"
            for b in self.bullets
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises: PlaybookError."""
        try:
            return cls.model_validate_json(path.read_bytes().removeprefix(BOM_UTF8))
        except (OSError, ValidationError) as error:
            raise PlaybookError(f"{path} is no playbook: {error}") from error

    def save(self, path: Path) -> None:
        replace_file(path, self.model_dump_json(indent=1) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Puts a file in place of another at once: whoever reads finds one of the two."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


# What models say


_TRAILING_COMMA = re.compile(r'("(?:\\.|[^"\\])*"?)|,(?=\s*[]}])', re.DOTALL)
"""Or a string, which stays as it is."""


def read_json(text: str, key: str | None = None) -> Any:
    """The last JSON object in a text that has the key, else the first object or array
    of objects, whatever is around it; one that the text leaves open is closed. What is
    before `</think>` is a draft. None if there is none."""
    values = [*_values(text.rpartition("</think>")[2])]
    keyed = [value for value in values if isinstance(value, dict) and key in value]
    if keyed:
        return keyed[-1]
    return next(filter(None, values), values[-1] if values else None)


def _values(text: str) -> Iterator[Any]:
    """Objects, arrays of objects and empty ones; not those within others."""
    while found := re.search(r"[{[]", text):
        text = text[found.start() :]
        try:
            value, rest = _decode(text)
        except (ValueError, RecursionError):
            value, rest = None, ""
        entries = [value] if isinstance(value, dict) else value
        if value == [] or entries and any(isinstance(e, dict) for e in entries):
            yield value
            text = rest
        else:
            text = text[1:]


def _decode(text: str) -> tuple[Any, str]:
    """The JSON that a text begins with, and what comes after it."""
    tidy = _TRAILING_COMMA.sub(r"\1", text)
    for part in (text, tidy):
        try:
            value, end = json.JSONDecoder(strict=False).raw_decode(part)
        except ValueError:
            continue
        return value, part[end:]
    tidy = "".join(max(c, " ") for c in tidy)
    return pydantic_core.from_json(tidy, allow_partial="trailing-strings"), ""


def read_reflection(text: str) -> Reflection | None:
    """None if the text holds none. Tags that are not of the right form are left out."""
    value = read_json(text, "lesson")
    if not isinstance(value, dict):
        return None
    tags = value.get("tags")
    tags = tags if isinstance(tags, dict) else {}
    tags = {k: v for k, v in tags.items() if v in ("helpful", "harmful", "neutral")}
    try:
        return Reflection(lesson=value.get("lesson"), tags=tags)
    except ValidationError:
        return None


def read_operations(text: str) -> tuple[list[Operation], int]:
    """Operations, and how many there were that are of no right form. A text without
    any counts as one."""
    value = read_json(text, "operations")
    if isinstance(value, dict):
        value = value.get("operations", [value])
    if not isinstance(value, list):
        return [], 1
    operations, wrong = [], 0
    for entry in value:
        if isinstance(entry, dict) and isinstance(entry.get("type"), str):
            entry = entry | {"type": entry["type"].upper()}
        try:
            operations.append(_OPERATION.validate_python(entry))
        except ValidationError:
            wrong += 1
    return operations, wrong
