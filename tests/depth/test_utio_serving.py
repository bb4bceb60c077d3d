# SPDX-License-Identifier: Apache-2.0
"""`max_depth` and depth routing over HTTP: a live server on the loopback interface."""

import re

import pytest
import requests
from depth_routing import CUTOFFS
from scoring_server import GENERATE, OPTIONS
from tiny_models import make_tokenizer

pytestmark = pytest.mark.any_runner  # what is asked for is read in front of them
MODEL = OPTIONS["served-model-name"]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SAMPLING = dict(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture
def server(routing_server):
    """Of few sequences it routes none, other than to the depth that they ask for."""
    return routing_server


def body(path: str, **fields) -> dict:
    if path == CHAT:
        fields["messages"] = [{"role": "user", "content": "def f"}]
    else:
        fields["prompt"] = make_tokenizer()("def f").input_ids
    return SAMPLING | fields


def text(choice: dict) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_ceiling_is_taken_and_reported(server, path):
    answers = {d: server.ask(path, **body(path, max_depth=d)) for d in (*CUTOFFS, None)}
    depths = {d: a["usage"]["mean_decode_depth"] for d, a in answers.items()}
    assert depths == {2: 2, 4: 4, 6: 6, None: 6}
    texts = {d: text(a["choices"][0]) for d, a in answers.items()}
    assert texts[6] == texts[None]
    assert len({texts[d] for d in CUTOFFS}) == 3


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
def test_several_sequences_and_streams(server, path):
    fields = dict(max_depth=2, n=2, temperature=1.0)
    if path == GENERATE:
        ids = make_tokenizer()("def f").input_ids
        fields = dict(token_ids=ids, sampling_params=SAMPLING | fields)
    else:
        fields = body(path, **fields)
    assert server.ask(path, **fields)["usage"]["mean_decode_depth"] == 2
    fields |= dict(model=MODEL, stream=True, stream_options={"include_usage": True})
    streamed = server.post(path, fields)
    assert streamed.status_code == 200
    found = re.findall(r'"mean_decode_depth": ?([0-9.]+)', streamed.text)
    assert [float(depth) for depth in found] == [2]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("value", [0, 3, 7, -1, 2**70, "two", [2], 2.5])
def test_what_is_no_cutoff_is_a_400(server, path, value):
    fields = dict(model=MODEL) | body(path, max_depth=value)
    error = server.refusal(path, fields)
    assert "max_depth" in f"{error['param']} {error['message']}", error
    # The engine refuses after a stream has begun.
    streamed = server.post(path, fields | dict(stream=True))
    assert "max_depth" in streamed.text and re.search('"code": ?400', streamed.text)


def test_the_counters_are_served(server):
    def served() -> dict:
        page = requests.get(server.url + "/metrics", timeout=60).text
        lines = re.findall(
            r'^vllm:utio_decode_tokens_total{.*depth="(\d+)".*} (\S+)$', page, re.M
        )
        return {int(depth): float(value) for depth, value in lines}

    server.ask(**body(COMPLETIONS, max_depth=2))
    before = served()
    server.ask(**body(COMPLETIONS, max_depth=2))
    assert served()[2] - before[2] == SAMPLING["max_tokens"] - 1
