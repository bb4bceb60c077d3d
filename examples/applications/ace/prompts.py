# SPDX-License-Identifier: Apache-2.0
"""Samples, and the prompts of the three phases."""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ace.chat import Conversation
from ace.playbook import Playbook

SHIPPED = Path(__file__).with_name("samples.json")
LESSON_CHARS = 300
"""Of a lesson, so many reach the curator."""
MARKS = " \t*`\"'."
"""Around an answer, these do not count."""


class SampleError(ValueError):
    """A file that holds no samples."""


class Sample(BaseModel):
    """A question whose answer is known."""

    model_config = ConfigDict(extra="forbid")

    question: str = Field(min_length=1)
    answer: str = Field(min_length=1)
    choices: list[str] = []  # what an answer can be; anything if empty
    prefix: str = ""  # how an answer begins, for models that are given that
    split: Literal["train", "validation"] = "train"


class Judgement(BaseModel):
    """What became of one answer."""

    said: str | None  # None: it names none of the choices
    right: bool


def load_samples(path: Path) -> list[Sample]:
    """Raises: SampleError."""
    try:
        content = path.read_bytes().removeprefix(BOM_UTF8)
        samples = TypeAdapter(list[Sample]).validate_json(content)
    except (OSError, ValidationError) as error:
        raise SampleError(f"--samples: {path}: {error}") from error
    if not any(sample.split == "train" for sample in samples):
        raise SampleError(f"--samples: {path} has none to learn from (split: train)")
    for number, sample in enumerate(samples):
        if sample.choices and sample.answer not in sample.choices:
            raise SampleError(
                f"--samples: {path}: answer {number} is none of its choices"
            )
    return samples


def generator(sample: Sample, playbook: Playbook, prefill: bool) -> Conversation:
    """Asks for an answer, by the playbook."""
    system = (
        "Answer the question. Follow the advice of the playbook where it helps, and "
        "name the numbers of the advice you used, like [b3]. End with a line that "
        "says Answer: and then nothing but the answer."
    )
    return _conversation(
        system,
        f"Playbook:\n{playbook.render() or '(empty)'}\n\nQuestion: {sample.question}",
        sample.prefix if prefill else "",
    )


def reflector(
    sample: Sample, text: str, judged: Judgement, playbook: Playbook, prefill: bool
) -> Conversation:
    """Asks what is to be learned from an answer."""
    system = (
        "Here are a question, an answer and the truth. Find out why the answer is "
        "right or wrong, and which advice of the playbook helped or harmed. Write "
        'JSON: {"lesson": "one short sentence of general use", "tags": '
        '{"b3": "helpful"}} with helpful, harmful or neutral for each advice that was '
        "used."
    )
    answer = text.strip()
    read = "" if judged.said in (None, answer) else f"It was read as: {judged.said}\n"
    user = (
        f"Playbook:\n{playbook.render() or '(empty)'}\n\n"
        f"Question: {sample.question}\nAnswer: {answer}\n{read}"
        f"It is {'right' if judged.right else 'wrong'}. The truth: {sample.answer}"
    )
    return _conversation(system, user, '{"lesson": "' if prefill else "")


def curator(lessons: Sequence[str], playbook: Playbook, prefill: bool) -> Conversation:
    """Asks how lessons are to change the playbook."""
    system = (
        "Keep a playbook of short advice. Here are it and new lessons. Add what is "
        "missing, update what can be said better, remove what harms. Write JSON: "
        '{"operations": [{"type": "ADD", "content": "..."}, {"type": "UPDATE", "id": '
        '"b3", "content": "..."}, {"type": "REMOVE", "id": "b4"}]}, or an empty list.'
    )
    told = "\n".join(f"- {lesson[:LESSON_CHARS]}" for lesson in lessons)
    user = f"Playbook:\n{playbook.render() or '(empty)'}\n\nLessons:\n{told}"
    begin = '{"operations": [{"type": "ADD", "content": "'
    return _conversation(system, user, begin if prefill else "")


def _conversation(system: str, user: str, beginning: str) -> Conversation:
    """With a beginning, the answer goes on from it."""
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
    ]
    if beginning:
        messages.append({"role": "assistant", "content": beginning})
    return messages


def whole(conversation: Conversation, text: str) -> str:
    """The answer with its given beginning."""
    last = conversation[-1]
    return (last["content"] if last["role"] == "assistant" else "") + text


def _places(text: str, choices: Sequence[str], flags: int = 0) -> dict:
    """Where each choice that is in the text comes first, the longest before others."""
    return {
        choice: (found.start(), -len(choice))
        for choice in choices
        if (found := re.search(rf"(?<!\w){re.escape(choice)}(?!\w)", text, flags))
    }


def judge(sample: Sample, text: str) -> Judgement:
    """Reads the answer: what follows the last `Answer:`, or else the whole text
    without its given beginning. Of choices, the one that comes first in it, and of
    several there the longest; small and capital letters are the same, unless they alone
    tell two choices apart or, without `Answer:`, another is there to the letter."""
    text = text.removeprefix(sample.prefix) if sample.prefix else text
    *before, said = re.split(r"(?i)\b_*answer[\s*_`]*[:\uff1a]", text)
    if sample.choices:
        folded = {choice.casefold() for choice in sample.choices}
        loose = re.IGNORECASE if len(folded) == len({*sample.choices}) else 0
        exact = {} if before else _places(said, sample.choices)
        places = exact or _places(said, sample.choices, loose)
        choice = min(places, key=places.__getitem__, default=None)
        return Judgement(said=choice, right=choice == sample.answer)
    lines = [line.strip(MARKS) for line in said.splitlines()]
    first = next(filter(None, lines), None)
    truth = sample.answer.strip(MARKS).casefold()
    right = first is not None and first.casefold() == truth
    return Judgement(said=first, right=right)


def digest(samples: Sequence[Sample]) -> str:
    """What must be the same for a run to go on."""
    return json.dumps([sample.model_dump() for sample in samples])
