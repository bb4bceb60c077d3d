# SPDX-License-Identifier: Apache-2.0
"""Makes samples.json: is a name in vLLM's source annotated as int or as str?

    python examples/applications/ace/make_samples.py

The names and the truth are those of the shipped testbed of ICM, which are the annotations
in the source. As many of either type; 50 to learn from, 30 to validate.
"""

import json
import random
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TESTBED = FOLDER.parent / "icm" / "testbeds" / "vllm-types.json"
COUNTS = {"train": 50, "validation": 30}


def main() -> None:
    testbed = json.loads(TESTBED.read_text())
    choices = [label.strip() for label in testbed["labels"]]
    by_type: dict[str, list[str]] = {choice: [] for choice in choices}
    for example in testbed["examples"]:
        names = by_type[choices[example["truth"]]]
        if example["group"] not in names:
            names.append(example["group"])
    rng = random.Random(0)
    for names in by_type.values():
        rng.shuffle(names)
    samples = []
    for split, count in COUNTS.items():
        part = []
        for answer, names in by_type.items():
            for _ in range(count // len(choices)):
                name = names.pop()
                question = f"In Python source code, is {name} an int or a str?"
                part.append(
                    {
                        "question": question,
                        "answer": answer,
                        "choices": choices,
                        "prefix": f"    {name}:",
                        "split": split,
                    }
                )
        rng.shuffle(part)
        samples += part
    lines = ",\n".join(json.dumps(sample) for sample in samples)
    path = FOLDER / "samples.json"
    path.write_text(f"[\n{lines}\n]\n")
    print(f"{len(samples)} samples: {path}")


if __name__ == "__main__":
    main()
