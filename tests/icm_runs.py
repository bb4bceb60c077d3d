# SPDX-License-Identifier: Apache-2.0
"""A server that answers for ICM's model, a testbed, and what a run of
`examples/applications/icm` keeps."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from failing_server import FailingServer

FOLDER = Path(__file__).parents[1] / "examples" / "applications" / "icm"
sys.path.insert(0, str(FOLDER))

import icm
from scorer import Scorer


@pytest.fixture
def server():
    with FailingServer() as server:
        yield server


@pytest.fixture
def connect(server):
    """Makes scorers; closes them."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(
            Scorer(server.url, *args, **options)
        )


@pytest.fixture
def testbed(tmp_path) -> Path:
    examples = [
        {"text": f"example {n}:", "truth": n % 2, "group": str(n // 2), "key": str(n)}
        for n in range(16)
    ]
    file = tmp_path / "pool.json"
    content = {"labels": ["a", "b"], "rule": "claims", "examples": examples}
    file.write_text(json.dumps(content))
    return file


def settings(server, testbed, output, **options) -> icm.Settings:
    defaults = dict(iterations=16, seeds=4, timeout=60, patience=60)
    return icm.Settings(
        base_url=server.url,
        testbed=str(testbed),
        output=output,
        **(defaults | options),
    )


def saved(output: Path) -> dict:
    """What the journal says: a line has what changed."""
    _, *lines = map(json.loads, (output / icm.JOURNAL).read_text().splitlines())
    fields: dict = {}
    for line in lines:
        fields |= line
    steps = [line for line in lines if "step" in line]
    assert [line["step"][0] for line in steps] == [*range(1, len(steps) + 1)]
    usage = [line["usage"] for line in steps]
    state = {k: fields[k] for k in fields.keys() - {"step", "usage", "seconds"}}
    return {"state": state | {"history": [x["step"] for x in steps]}, "usage": usage}
