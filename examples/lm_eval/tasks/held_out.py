# SPDX-License-Identifier: Apache-2.0
"""Tasks made of the source files that the reference model was not trained on.

The files are those of the pinned source archive that every build has; the items follow
from them alone.
"""

import random
import sys
from pathlib import Path

from datasets import Dataset, DatasetDict

ROOT = Path(__file__).resolve().parents[3]
CONTEXT_LINES = 3
LINE_CHARS = range(12, 41)
"""Length of the lines of an item without their indentation: 16 shots and a question
are some 750 tokens of the reference model then."""
SHOTS = 64
ITEMS = 400
CHOICES = 4
TEXT_CHARS = range(1500, 12_000)


def files(archive: str | None = None, **_) -> list[str]:
    """Texts of the held-out Python files.

    Args:
        archive: the pinned source archive (`.tar.gz`); by default the one that
            `build.sh` fetched.

    Raises:
        FileNotFoundError: there is none.
    """
    sys.path.insert(0, str(ROOT / "examples" / "reference_model"))
    from corpus import pinned_archive, read

    path = Path(archive or pinned_archive())
    if not path.exists():
        raise FileNotFoundError(
            f"no source archive {path}: run ./build.sh, or name one with "
            """--metadata '{"archive": "PATH"}'"""
        )
    texts = read(path, held_out=True)
    return [text for path, text in texts.items() if path.endswith(".py")]


def windows(text: str) -> list[list[str]]:
    """Runs of `CONTEXT_LINES` + 1 consecutive lines of suitable length."""
    lines = text.splitlines()
    size = CONTEXT_LINES + 1
    runs = (lines[begin : begin + size] for begin in range(0, len(lines), size))
    return [
        run
        for run in runs
        if len(run) == size and all(len(line.strip()) in LINE_CHARS for line in run)
    ]


def next_line(**kwargs) -> DatasetDict:
    """Which of four lines comes next? Three of them end other items."""
    rng = random.Random(0)
    items = [run for text in files(**kwargs) for run in windows(text)]
    rng.shuffle(items)
    items = items[: SHOTS + ITEMS]
    rows = []
    for *context, last in items:
        others = {item[-1] for item in items} - {last}
        choices = rng.sample(sorted(others), CHOICES - 1)
        label = rng.randrange(CHOICES)
        choices.insert(label, last)
        rows.append({"context": "\n".join(context), "choices": choices, "label": label})
    return DatasetDict(
        train=Dataset.from_list(rows[:SHOTS]), test=Dataset.from_list(rows[SHOTS:])
    )


def whole_files(**kwargs) -> DatasetDict:
    """Files, to be scored as a whole."""
    texts = [text for text in files(**kwargs) if len(text) in TEXT_CHARS]
    return DatasetDict(test=Dataset.from_dict({"text": texts}))
