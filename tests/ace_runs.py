# SPDX-License-Identifier: Apache-2.0
"""A server that answers for ACE's model, samples, and a run of `examples/applications/ace`."""

import hashlib
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from failing_server import FailingServer

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path[:0] = [str(EXAMPLES / "applications"), str(EXAMPLES)]

from ace import __main__ as program
from ace.settings import RunSettings

SAMPLES = 12
HELLO = [{"role": "system", "content": ""}, {"role": "user", "content": "hello"}]


def says(messages: list[dict]) -> str:
    """Right for about half of the samples at first, for more with a longer playbook."""
    system, user = messages[0]["content"], messages[1]["content"]
    number = hashlib.sha256(user.encode()).digest()[0]
    if system.startswith("Answer"):
        truth = "int" if "name_0" in user or "name_2" in user else "str"
        bullets = user.count("helpful")
        wrong = {"int": "str", "str": "int"}[truth]
        return f"Hm.\nAnswer: {truth if number % 8 < 4 + bullets else wrong}"
    if '"lesson"' in system:
        name = re.search(r"name_\d+", user)[0]
        return json.dumps({"lesson": f"look at {name}", "tags": {"b1": "helpful"}})[12:]
    if system.startswith("Keep"):
        lesson = re.search(r"look at name_\d+", user)[0]
        return f'{lesson}"}}]}}'
    return "Hello"


@pytest.fixture
def server():
    with FailingServer() as server:
        server.says = says
        yield server


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> Path:
    rows = [
        {
            "question": f"Is name_{n}x an int or a str?",
            "answer": "int" if n in (0, 2) else "str",
            "choices": ["int", "str"],
            "split": "validation" if n % 3 == 2 else "train",
        }
        for n in range(SAMPLES)
    ]
    path = tmp_path_factory.mktemp("samples") / "samples.json"
    path.write_text(json.dumps(rows))
    return path


def settings(server, samples, output, **options) -> RunSettings:
    defaults = {"rounds": 2, "stop_after": 0, "timeout": 60, "patience": 60}
    url = server if isinstance(server, str) else server.url
    return RunSettings(
        provider="openai",
        base_url=url,
        samples=samples,
        output=output,
        **(defaults | options),
    )


def journal(output: Path) -> list[dict]:
    """What was said, in the order of the loop; each place is there once."""
    _, *lines = map(json.loads, (output / "journal.jsonl").read_text().splitlines())
    places = Counter((line["round"], line["phase"], line["index"]) for line in lines)
    assert set(places.values()) <= {1}
    return sorted(lines, key=lambda line: [*map(str, line.values())])


def playbook(output: Path) -> str:
    return (output / "playbook.json").read_text()


@pytest.fixture
def whole(server, samples, tmp_path) -> Path:
    """Folder of a run that nothing disturbs."""
    output = tmp_path / "whole"
    program.run(settings(server, samples, output))
    server.bodies.clear()
    return output


def command(url: str, samples: Path, output: Path, *options: str) -> list[str]:
    return [
        "run",
        "--provider=openai",
        f"--base-url={url}",
        f"--samples={samples}",
        f"--output={output}",
        *options,
    ]
