# SPDX-License-Identifier: Apache-2.0
"""Makes testbeds/vllm-types.json: is a name in vLLM's source an int or a str?

    .venv/bin/python examples/applications/icm/make_testbed.py \\
        --archive build/downloads/vllm-0.32.0.tar.gz

The truth is the annotation in the source. Taken are names that are annotated at least
twice and as only one of the two types. Each name comes in three forms that an annotation
follows in source code, and all of them have one truth: the consistency rule "same".
"""

import argparse
import ast
import json
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "reference_model"))
from corpus import read

TYPES = "int", "str"
FORMS = {"class field": "    {}:", "parameter": "        {}:", "method": "(self, {}:"}


def annotations(archive: Path) -> dict[str, Counter]:
    """Name to how often it has which annotation, `| None` left out."""
    found: dict[str, Counter] = defaultdict(Counter)
    for held_out in (False, True):
        for path, text in read(archive, held_out).items():
            if not path.endswith(".py"):
                continue
            try:
                tree = ast.parse(text)
            except SyntaxError:
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.AnnAssign) and isinstance(
                    node.target, ast.Name
                ):
                    name, annotation = node.target.id, node.annotation
                elif isinstance(node, ast.arg) and node.annotation:
                    name, annotation = node.arg, node.annotation
                else:
                    continue
                found[name][ast.unparse(annotation).removesuffix(" | None")] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--archive", type=Path, required=True)
    parser.add_argument("--names", type=int, default=120, help="of each type")
    parser.add_argument("--out", type=Path,
                        default=Path(__file__).parent / "testbeds/vllm-types.json")  # fmt: skip
    args = parser.parse_args()
    found = annotations(args.archive)
    rng = random.Random(0)
    examples = []
    for truth, wanted in enumerate(TYPES):
        names = sorted(
            name
            for name, counts in found.items()
            if set(counts) == {wanted} and counts[wanted] >= 2 and len(name) > 2
        )
        for name in rng.sample(names, args.names):
            for form in FORMS.values():
                text = form.format(name)
                examples.append(
                    {"text": text, "truth": truth, "group": name, "key": name}
                )
    testbed = {
        "description": "Is a name in vLLM's source annotated as int or as str?",
        "labels": [" " + name for name in TYPES],
        "rule": "same",
        "separator": "\n",
        "examples": examples,
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(testbed, indent=1) + "\n")
    print(f"{len(examples)} examples, {args.names} names of each type: {args.out}")


if __name__ == "__main__":
    main()
