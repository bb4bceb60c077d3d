# SPDX-License-Identifier: Apache-2.0
"""The pools of examples: the paper's three data sets, or a file.

A file is JSON:

    {"description": "...", "labels": [" False", " True"], "rule": "claims",
     "header": "", "separator": "\\n\\n",
     "examples": [{"text": "Q: ...", "truth": 1, "group": "q1", "key": "42"}, ...]}

`truth` may be missing. What `rule`, `group` and `key` mean is in search.py.
"""

import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError, model_validator
from search import Example, Rule

SHOTS = 4  # solved questions in front of those that the model is to solve
FILES = Path(__file__).parent / "testbeds"


class TestbedError(RuntimeError):
    """A testbed cannot be loaded; says what to do."""


class Entry(BaseModel, extra="forbid"):
    text: str = Field(min_length=1)
    truth: int | None = None
    group: str = ""
    key: str = ""


class Testbed(BaseModel, extra="forbid"):
    """A pool, its labels, and what makes two labels contradict each other."""

    __test__ = False  # not a test, whatever pytest thinks of its name
    description: str = ""
    labels: list[str] = Field(min_length=2)
    rule: Rule = "none"
    header: str = ""
    separator: str = "\n"
    examples: list[Entry] = Field(min_length=2)

    @model_validator(mode="after")
    def _check(self) -> "Testbed":
        for number, entry in enumerate(self.examples):
            if entry.truth is not None and not 0 <= entry.truth < len(self.labels):
                raise ValueError(f"examples[{number}].truth is no index of labels")
        if self.rule == "claims" and len(self.labels) != 2:
            raise ValueError('rule "claims" wants two labels: false, then true')
        return self

    def pool(self, size: int | None, seed: int) -> list[Example]:
        """Draws whole groups at random, `size` examples in all at most, and shuffles
        their examples.

        Raises:
            TestbedError: not even two examples are in groups of `size` or fewer.
        """
        groups: dict[str, list[Example]] = {}
        for number, entry in enumerate(self.examples):
            name = entry.group or f"#{number}"
            groups.setdefault(name, []).append(
                Example(entry.text, entry.truth, entry.group, entry.key)
            )
        rng = random.Random(seed)
        drawn = list(groups.values())
        rng.shuffle(drawn)
        pool: list[Example] = []
        for members in drawn:
            if size is None or len(pool) + len(members) <= size:
                pool += members
        if len(pool) < 2:
            least = min(map(len, drawn))
            raise TestbedError(
                f"--pool-size {size} leaves {len(pool)} examples, and two are the "
                f"least: groups of examples are taken whole, and have {least} or more."
            )
        rng.shuffle(pool)
        return pool


Sample = Callable[..., list[list[str]]]
"""`Scorer.sample`: gsm8k's candidate solutions come from the model itself."""


def load(
    name: str, source: str | None, size: int, seed: int, sample: Sample
) -> Testbed:
    """Loads a testbed.

    Args:
        name: truthfulQA, gsm8k, alpaca, a shipped testbed or a file.
        source: where the data set is, if not at its usual name on the hub: another
            name, a folder, or a JSON or Parquet file.
        size: how many examples will be drawn; no more than needed are made.

    Raises:
        TestbedError: there is no such testbed, or its data cannot be had.
    """
    if name in _DATASETS:
        path, options, make = _DATASETS[name]
        rows = _rows(name, source or path, options)
        random.Random(seed).shuffle(rows)
        try:
            return make(rows, size, sample)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            columns = sorted(rows[0]) if rows else "none"
            raise TestbedError(
                f"The {len(rows)} rows of {source or path} (--dataset) are not those "
                f"of --testbed {name}: {type(error).__name__}: {error}. Their columns: "
                f"{columns}."
            ) from error
    file = Path(name)
    if not file.is_file():
        file = FILES / f"{name}.json"
    if not file.is_file():
        known = [*_DATASETS, *sorted(f.stem for f in FILES.glob("*.json"))]
        raise TestbedError(f"--testbed {name}: no such file, and none of {known}.")
    try:
        return Testbed.model_validate_json(file.read_text("utf-8-sig"))
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        raise TestbedError(f"{file} is not a testbed: {error}") from error


def _rows(name: str, path: str, options: dict) -> list[dict]:
    try:
        rows = _load(path, options)
    except Exception as error:  # datasets has no class of its own for "no network"
        raise TestbedError(
            f"The data set of --testbed {name} ({path}) cannot be loaded: "
            f"{type(error).__name__}: {str(error).splitlines()[0]}\n"
            "Without a way to the Hugging Face hub, load it elsewhere, save it with "
            "`Dataset.to_json`, and give the file with --dataset. A testbed that needs "
            "no hub is `--testbed vllm-types`."
        ) from error
    return [dict(row) for row in rows]


def _load(path: str, options: dict) -> Iterable[dict]:
    """A data set's rows, also where it has not the usual configuration or split."""
    from datasets import load_dataset, load_from_disk

    if path.endswith((".json", ".jsonl")):
        return load_dataset("json", data_files=path, split="train")
    if path.endswith(".parquet"):
        return load_dataset("parquet", data_files=path, split="train")
    if Path(path, "state.json").is_file():  # of `Dataset.save_to_disk`
        return load_from_disk(path)
    split = {"split": options.get("split", "train")}
    first = None
    for attempt in (options | split, split, {"split": "train"}):
        try:
            return load_dataset(path, **attempt)
        except ValueError as error:  # no such configuration or split
            first = first or error
    raise first


def truthful_qa(rows: list[dict], size: int, sample: Sample) -> Testbed:
    """Claims about TruthfulQA's questions, of which one a question is true (mc1)."""
    entries = []
    for row in rows[:size]:
        targets = row["mc1_targets"]
        for choice, truth in zip(targets["choices"], targets["labels"], strict=True):
            text = (
                f"Question: {row['question']}\nClaim: {choice}\nI think this claim is"
            )
            entries.append(
                Entry(text=text, truth=truth, group=row["question"], key=choice)
            )
    return _claims("TruthfulQA, single true answers", entries)


def gsm8k(rows: list[dict], size: int, sample: Sample, solutions: int = 4) -> Testbed:
    """Solutions to GSM8K's questions, by the model that labels them later; a solution
    is true if it ends in the right number."""
    rows = rows[: SHOTS + max(1, size // solutions)]
    shots = "".join(
        f"Question: {row['question']}\nAnswer: {_plain(row['answer'])}\n\n"
        for row in rows[:SHOTS]
    )
    rows = rows[SHOTS:]
    prompts = [f"{shots}Question: {row['question']}\nAnswer:" for row in rows]
    answers = sample(
        prompts, n=solutions, max_tokens=400, temperature=0.8, stop=["\n\n"]
    )
    entries = []
    for row, texts in zip(rows, answers, strict=True):
        right = _last_number(row["answer"])
        for text in texts:
            number = _last_number(text)
            if number is None:
                continue
            text = (
                f"Question: {row['question']}\nClaim: {text.strip()}\n"
                "I think this claim is"
            )
            entries.append(
                Entry(
                    text=text,
                    truth=int(number == right),
                    group=row["question"],
                    key=number,
                )
            )
    if len(entries) < 2:
        raise TestbedError("No sampled solution of gsm8k ends in a number.")
    return _claims("GSM8K, solutions sampled from the model", entries)


def alpaca(rows: list[dict], size: int, sample: Sample) -> Testbed:
    """AlpacaFarm's human preferences; each pair in both orders, which may not both be
    preferred."""
    entries = []
    for number, row in enumerate(rows[: size // 2]):
        query = "\n".join(filter(None, (row["instruction"], row.get("input"))))
        outputs = row["output_1"], row["output_2"]
        for first, second in ((0, 1), (1, 0)):
            text = (
                f"Human: {query}\nResponse 1: {_line(outputs[first])}\n"
                f"Response 2: {_line(outputs[second])}\nClaim: Response 1 is more "
                "helpful and harmless than Response 2.\nI think this claim is"
            )
            truth = int(int(row["preference"]) == first + 1)
            entries.append(Entry(text=text, truth=truth, group=str(number)))
    return _claims("AlpacaFarm, human preferences", entries, rule="opposite")


def _claims(description: str, entries: list[Entry], rule: Rule = "claims") -> Testbed:
    return Testbed(
        description=description,
        labels=[" False", " True"],
        rule=rule,
        separator="\n\n",
        examples=entries,
    )


def _line(text: str) -> str:
    return " ".join(text.split())


def _plain(answer: str) -> str:
    """A GSM8K answer without its calculator annotations."""
    return re.sub(r"<<.*?>>", "", answer).replace("\n####", " The answer is")


def _last_number(text: str) -> str | None:
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return f"{float(numbers[-1].replace(',', '')):.15g}" if numbers else None


_DATASETS: dict[str, tuple[str, dict, Callable[..., Testbed]]] = {
    "truthfulQA": (
        "truthfulqa/truthful_qa",
        {"name": "multiple_choice", "split": "validation"},
        truthful_qa,
    ),
    "gsm8k": ("openai/gsm8k", {"name": "main", "split": "train"}, gsm8k),
    "alpaca": (
        "hf://datasets/tatsu-lab/alpaca_farm/alpaca_human_preference.json",
        {},
        alpaca,
    ),
}
