# SPDX-License-Identifier: Apache-2.0
"""`target_generated` over HTTP: scores of what a server generates."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from scoring import assert_options
from scoring_server import COMPLETIONS, GENERATE, MODEL, VOCABULARY, decode
from scoring_texts import LONG, SHORT

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from common import Client, ClientError

ASKED = [
    {},
    {"token_ids": [5, 9]},
    {"token_ids": [5], "top_k": 4, "temperature": 0.7},
    {"top_k": 20, "temperature": 2.5},
]


def assert_choice_generated(choice: dict, llama, ids: list[int], asked: dict) -> None:
    """Asserts that a choice holds the scores of its tokens, and nothing else."""
    body, tokens = choice["generated_logprobs"], choice["token_ids"]
    fields = {"start", "token_ids", "logprobs", "ranks", "entropy"}
    if "top_k" in asked:
        fields |= {"top_token_ids", "top_logprobs", "tail_logprob"}
    assert set(body) == fields
    arrays = {
        name: decode(name.replace("top_", ""), value)
        for name, value in body.items()
        if name != "start"
    }
    rows = [[token, *asked.get("token_ids", ())] for token in tokens]
    assert arrays.pop("token_ids").tolist() == rows
    names = dict.fromkeys(("top_token_ids", "top_logprobs", "tail_logprob"))
    scores = SimpleNamespace(start=body["start"], **names | arrays)
    options = {name: asked[name] for name in ("temperature", "top_k") if name in asked}
    assert_options(scores, llama, ids + tokens, rows, **options)


@pytest.mark.parametrize("encoding", ["json", "npy"])
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_ids(server, llama, asked, encoding):
    """By both endpoints, several prompts and choices; sampled and greedy."""
    fields = {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 5}
    answer = server.ask(
        prompt=[SHORT, LONG],
        target_generated=asked,
        encoding=encoding,
        return_token_ids=True,
        **fields,
    )
    choices = answer["choices"]
    for ids, choice in zip((SHORT, SHORT, LONG, LONG), choices, strict=True):
        assert_choice_generated(choice, llama, ids, asked)
        assert choice["target_logprobs"] is None
    answer = server.ask(
        GENERATE,
        token_ids=SHORT,
        sampling_params=fields | {"target_generated": asked},
        target_logprobs_encoding=encoding,
    )
    for choice in answer["choices"]:
        assert_choice_generated(choice, llama, SHORT, asked)


def test_text_and_prompt_scores_beside(server, llama):
    fields = {"target_text": " return x", "target_generated": {"top_k": 2}}
    answer = server.ask(
        prompt="def f(x):", max_tokens=4, return_token_ids=True, **fields
    )
    (choice,) = answer["choices"]
    ids = choice["prompt_token_ids"]
    assert_choice_generated(choice, llama, ids, {"top_k": 2})
    assert choice["target_logprobs"]["start"] < len(ids)
    assert choice["generated_logprobs"]["start"] == len(ids)


def test_rendered_elsewhere(server, llama):
    """A rendered request asks for the same."""
    body = {"prompt": SHORT, "max_tokens": 3, "target_generated": {"top_k": 2}}
    rendered = server.ask("/v1/completions/render", **body)
    request = rendered[0] if isinstance(rendered, list) else rendered
    (choice,) = server.ask(GENERATE, **request)["choices"]
    assert_choice_generated(choice, llama, SHORT, {"top_k": 2})


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("encoding", ["json", "npy"])
def test_the_client_reads_them(server, llama, asked, encoding):
    with Client(server.url) as client:
        answer = client.complete(
            [SHORT, LONG], max_tokens=4, target_generated=asked, encoding=encoding
        )
    for ids, choice in zip((SHORT, LONG), answer.choices):
        scores = choice.generated
        tokens, others = scores.token_ids[:, 0].tolist(), asked.get("token_ids", [])
        assert scores.token_ids[:, 1:].tolist() == [others] * 4
        rows = [[token, *others] for token in tokens]
        options = {name: asked[name] for name in asked if name != "token_ids"}
        assert_options(scores, llama, ids + tokens, rows, **options)


@pytest.mark.any_runner
def test_the_client_tells_of_a_mistake(server):
    with Client(server.url) as client, pytest.raises(ClientError, match="top_k"):
        client.complete([SHORT], max_tokens=1, target_generated={"top_k": 0})


REFUSED = [
    ({"target_generated": {"topk": 2}}, "target_generated", "token_ids, top_k"),
    ({"target_generated": {"top_k": 21}}, "target_generated.top_k", "--max-logprobs"),
    (
        {"target_generated": {"token_ids": [VOCABULARY]}},
        "target_generated.token_ids",
        "must be from 0 to",
    ),
    ({"stream": True}, "stream", "`target_generated`"),
    ({"use_beam_search": True}, "use_beam_search", "`target_generated`"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    (
        {"max_tokens": 0, "prompt": SHORT, "target_token_ids": [5]},
        "target_generated",
        "generates nothing",
    ),
    ({"target_generate": {}, "target_generated": None}, "target_generate", "did you mean"),
]


@pytest.mark.any_runner
@pytest.mark.parametrize(("fields", "parameter", "problem"), REFUSED, ids=str)
def test_refusals(server, fields, parameter, problem):
    body = {"model": MODEL, "prompt": "def f(x):", "max_tokens": 2}
    error = server.refusal(COMPLETIONS, body | {"target_generated": {}} | fields)
    assert error["param"] == parameter, error
    assert problem in error["message"], error


@pytest.mark.any_runner
@pytest.mark.parametrize("value", [{"topk": 2}, {"top_k": True}, {"top_k": "2"}, 5, "x"])
def test_refusals_of_generate(server, value):
    sampling = {"max_tokens": 2, "target_generated": value}
    body = {"token_ids": SHORT, "sampling_params": sampling}
    error = server.refusal(GENERATE, {"model": MODEL} | body)
    assert "target_generated" in error["message"], error
    stream = sampling | {"target_generated": {}}
    body |= {"sampling_params": stream, "stream": True}
    error = server.refusal(GENERATE, {"model": MODEL} | body)
    assert error["param"] == "stream", error


@pytest.mark.any_runner
def test_chat_says_that_it_takes_none(server):
    body = {"messages": [{"role": "user", "content": "a"}], "target_generated": {}}
    error = server.refusal("/v1/chat/completions", {"model": MODEL} | body)
    assert error["param"] == "target_generated"


@pytest.mark.any_runner
def test_what_a_response_takes_is_bounded(server):
    body = {"model": MODEL, "prompt": SHORT, "max_tokens": 240, "n": 8}
    asked = {"token_ids": list(range(20)), "top_k": 20}
    answer = server.ask(**body | {"target_generated": asked, "max_tokens": 2})
    assert len(answer["choices"]) == 8
    error = server.refusal(
        COMPLETIONS,
        body | {"prompt": [SHORT] * 128, "target_generated": asked, "n": 8},
    )
    assert error["param"] == "n" and "bytes" in error["message"], error
