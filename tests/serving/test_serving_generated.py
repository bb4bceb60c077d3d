# SPDX-License-Identifier: Apache-2.0
"""`target_generated` over HTTP: scores of what a server generates."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scoring import assert_options
from scoring_server import COMPLETIONS, GENERATE, MODEL, VOCABULARY, decode
from scoring_texts import LONG, SHORT

CHAT = "/v1/chat/completions"
EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from common import Client, ClientError

ASKED = [
    {},
    {"token_ids": [5, 9]},
    {"token_ids": [5], "top_k": 4, "temperature": 0.7},
    {"top_k": 20, "temperature": 2.5},
]
MESSAGES = [{"role": "user", "content": "def f(x):"}]
SAMPLED = {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 5}


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


def stream(server, path: str = COMPLETIONS, **fields) -> list[dict]:
    """The choices of a stream: the fields of all chunks of each, in one."""
    response = server.post(path, {"model": MODEL, "stream": True} | fields)
    assert response.status_code == 200, response.text
    *events, done = response.text.rstrip().split("\n\n")
    assert done == "data: [DONE]"
    found: dict[int, dict] = {}
    for event in events:
        chunk = json.loads(event.removeprefix("data: "))
        assert "error" not in chunk, chunk
        for part in chunk["choices"]:
            new = {"token_ids": [], "text": "", "logprobs": [], "chunks": []}
            choice = found.setdefault(part["index"], new)
            assert choice.get("finish_reason") is None
            choice["chunks"].append(part)
            choice["text"] += part.get("text") or part.get("delta", {}).get("content") or ""
            choice["token_ids"] += part.get("token_ids") or []
            choice["logprobs"] += sampled_logprobs(part)
            for name in ("prompt_token_ids", "finish_reason", "generated_logprobs"):
                if name in part or name in chunk:
                    choice[name] = part.get(name, chunk.get(name))
            is_last = part.get("finish_reason") is not None
            assert (part.get("generated_logprobs") is not None) == is_last
    assert all(choice["finish_reason"] for choice in found.values())
    return [found[index] for index in sorted(found)]


def sampled_logprobs(choice: dict) -> list[float]:
    """What `logprobs` says of a choice's tokens."""
    logprobs = choice.get("logprobs") or {}
    content = logprobs.get("content") or []
    return logprobs.get("token_logprobs") or [token["logprob"] for token in content]


def assert_same(left: dict, right: dict) -> None:
    """Asserts that two choices have the same tokens and, but for rounding, scores."""
    assert left["token_ids"] == right["token_ids"]
    left, right = left["generated_logprobs"], right["generated_logprobs"]
    assert set(left) == set(right) and left["start"] == right["start"]
    for name in set(left) - {"start"}:
        field = name.replace("top_", "")
        mine, other = decode(field, left[name]), decode(field, right[name])
        assert mine.dtype == other.dtype
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("encoding", ["json", "npy"])
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_ids(server, llama, asked, encoding):
    """By both endpoints that take them, of several prompts and choices."""
    answer = server.ask(
        prompt=[SHORT, LONG],
        target_generated=asked,
        encoding=encoding,
        return_token_ids=True,
        **SAMPLED,
    )
    choices = answer["choices"]
    for ids, choice in zip((SHORT, SHORT, LONG, LONG), choices, strict=True):
        assert_choice_generated(choice, llama, ids, asked)
        assert "target_logprobs" not in choice
    answer = server.ask(
        GENERATE,
        token_ids=SHORT,
        sampling_params=SAMPLED | {"target_generated": asked},
        target_logprobs_encoding=encoding,
    )
    for choice in answer["choices"]:
        assert_choice_generated(choice, llama, SHORT, asked)


@pytest.mark.parametrize("encoding", ["json", "npy"])
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_chat(server, llama, asked, encoding):
    """The same as of a completion of what the template writes."""
    fields = SAMPLED | {"target_generated": asked, "encoding": encoding}
    answer = server.ask(CHAT, messages=MESSAGES, return_token_ids=True, **fields)
    ids = answer["prompt_token_ids"]
    same = server.ask(prompt=ids, return_token_ids=True, **fields)
    streamed = stream(server, CHAT, messages=MESSAGES, return_token_ids=True, **fields)
    for choice, completion, whole in zip(answer["choices"], same["choices"], streamed, strict=True):
        assert_choice_generated(choice, llama, ids, asked)
        assert_same(choice, completion)
        assert_same(whole, choice)
        assert whole["text"] == choice["message"]["content"] == completion["text"]


@pytest.mark.parametrize("encoding", ["json", "npy"])
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_streams(server, llama, asked, encoding):
    """Of several prompts and choices: what is answered at once, in the last chunk."""
    fields = {"target_generated": asked, "encoding": encoding, "return_token_ids": True}
    body = fields | SAMPLED | {"prompt": [SHORT, LONG]}
    choices = stream(server, **body)
    for choice, other in zip(choices, server.ask(**body)["choices"], strict=True):
        assert_same(choice, other)
        assert choice["text"] == other["text"]
    for ids, choice in zip((SHORT, SHORT, LONG, LONG), choices, strict=True):
        assert_choice_generated(choice, llama, ids, asked)
    sampling = SAMPLED | {"target_generated": asked}
    body = {"token_ids": SHORT, "sampling_params": sampling, "encoding": encoding}
    for choice, other in zip(stream(server, GENERATE, **body), choices[:2], strict=True):
        assert_same(choice, other)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream_interval": 3},
        {"stop": [" ", "e"], "temperature": 1.0},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"echo": True},
        {"logit_bias": {"7": 5.0}, "temperature": 0.8},
    ],
    ids=str,
)
def test_streams_with_other_fields(server, llama, path, options):
    body = {"target_generated": {"top_k": 1}, "seed": 5, "return_token_ids": True}
    body |= {"max_tokens": 12, "temperature": 0.0} | options
    body |= {"messages": MESSAGES} if path == CHAT else {"prompt": "def f(x):"}
    (choice,) = stream(server, path, **body)
    body.pop("stream_options", None)
    answer = server.ask(path, **body)
    (other,) = answer["choices"]
    assert_same(choice, other)
    ids = answer.get("prompt_token_ids") or other["prompt_token_ids"]
    assert_choice_generated(choice, llama, ids, {"top_k": 1})
    assert choice["finish_reason"] == other["finish_reason"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_they_are_what_logprobs_says(server, path):
    body: dict = {"target_generated": {"token_ids": [5]}, "max_tokens": 12, "n": 2}
    body |= {"temperature": 1.0, "seed": 5, "return_token_ids": True}
    body |= {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    if path == COMPLETIONS:
        body |= {"prompt": SHORT, "logprobs": 2, "top_logprobs": None}
    streamed, answer = stream(server, path, **body), server.ask(path, **body)
    for choice, other in zip(streamed, answer["choices"], strict=True):
        for one, logprobs in ((choice, choice["logprobs"]), (other, sampled_logprobs(other))):
            scores = decode("logprobs", one["generated_logprobs"]["logprobs"])
            np.testing.assert_allclose(scores[:, 0], logprobs, rtol=0, atol=1e-5)


@pytest.mark.any_runner
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("encoding", ["json", "npy"])
def test_large_chunks(server, path, encoding):
    """They are written in pieces."""
    asked = {"token_ids": list(range(5, 25)), "top_k": 20}
    body = {"target_generated": asked, "encoding": encoding, "max_tokens": 220, "n": 3}
    body |= {"temperature": 1.0, "seed": 1, "ignore_eos": True, "return_token_ids": True}
    body |= {"messages": MESSAGES, "prompt": SHORT}
    answer = server.ask(path, **body)
    for choice, other in zip(stream(server, path, **body), answer["choices"], strict=True):
        # Tokens that are there before the last were sent go in one chunk.
        assert len(choice["token_ids"]) == 220 and len(choice["chunks"]) > 1
        assert_same(choice, other)


@pytest.mark.any_runner
def test_other_answers_have_none(server):
    body = {"max_tokens": 2, "messages": MESSAGES, "prompt": SHORT, "stream": True}
    for path in (COMPLETIONS, CHAT):
        response = server.post(path, {"model": MODEL} | body)
        assert response.status_code == 200
        assert "generated_logprobs" not in response.text


def test_text_and_prompt_scores_beside(server, llama):
    fields = {"target_text": " return x", "target_generated": {"top_k": 2}}
    answer = server.ask(prompt="def f(x):", max_tokens=4, return_token_ids=True, **fields)
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


@pytest.mark.parametrize("encoding", ["json", "npy"])
def test_chat_rendered_elsewhere(server, llama, encoding):
    """At once and in a stream, and made a chat's answer again."""
    body = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0.0}
    body |= {"target_generated": {"top_k": 2}, "encoding": encoding}
    expected = server.ask(CHAT, return_token_ids=True, **body)["choices"][0]
    request = server.ask(CHAT + "/render", **body)
    answer = server.ask(GENERATE, **request)
    (choice,) = answer["choices"]
    assert_same(choice, expected)
    derendered = server.ask(CHAT + "/derender", generate_response=answer)
    (again,) = derendered["choices"]
    assert again["generated_logprobs"] == choice["generated_logprobs"]
    request = server.ask(CHAT + "/render", stream=True, **body)
    (choice,) = stream(server, GENERATE, **request)
    assert_same(choice, expected)
    state, last = None, {}
    for part in choice["chunks"]:
        chunk = {"request_id": "r", "choices": [part]}
        found = server.ask(
            CHAT + "/derender",
            stream=True,
            generate_chunk=chunk,
            stream_state=state,
            prompt_tokens=len(request["token_ids"]),
        )
        state, (last,) = found["stream_state"], found["chunk"]["choices"]
    assert last["generated_logprobs"] == choice["generated_logprobs"]


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("encoding", ["json", "npy"])
def test_the_client_reads_them(server, llama, asked, encoding):
    fields = {"max_tokens": 4, "target_logprobs_encoding": encoding}
    with Client(server.url) as client:
        found = client.complete([SHORT, LONG], target_generated=asked, **fields).choices
        chat = client.chat(
            MESSAGES, target_generated=asked, temperature=0, return_token_ids=True, **fields
        ).choices
    prompts = [SHORT, LONG, chat[0].prompt_token_ids]
    for ids, choice in zip(prompts, [*found, *chat], strict=True):
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
    ({"stream": True, "target_generated": {"top_k": 0}}, "target_generated.top_k", "top_k"),
    (
        {"stream": True, "max_tokens": 0, "echo": True},
        "target_generated",
        "generates nothing",
    ),
    ({"use_beam_search": True}, "use_beam_search", "`target_generated`"),
    ({"max_tokens": 0}, "target_generated", "generates nothing"),
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
@pytest.mark.parametrize(
    "value", [{"topk": 2}, {"top_k": True}, {"top_k": "2"}, {"token_ids": [10**40]}, 5, "x"]
)
def test_refusals_of_generate(server, value):
    sampling = {"max_tokens": 2, "target_generated": value}
    body = {"token_ids": SHORT, "sampling_params": sampling}
    error = server.refusal(GENERATE, {"model": MODEL} | body)
    assert "target_generated" in error["message"], error
    error = server.refusal(GENERATE, {"model": MODEL, "stream": True} | body)
    assert "target_generated" in error["message"], error


@pytest.mark.any_runner
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "parameter", "problem"),
    [
        ({"target_generated": {"topk": 2}}, "target_generated", "token_ids, top_k"),
        ({"target_generated": {"top_k": 21}}, "target_generated.top_k", "--max-logprobs"),
        ({"include_reasoning": False}, "include_reasoning", "`target_generated`"),
        ({"use_beam_search": True}, "use_beam_search", "`target_generated`"),
        ({"max_tokens": 0}, "target_generated", "generates nothing"),
        ({"max_completion_tokens": 0}, "max_tokens", "at least 1"),
        ({"target_generate": {}, "target_generated": None}, "target_generate", "did you mean"),
    ],
    ids=str,
)
def test_refusals_of_chat(server, fields, parameter, problem, is_stream):
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2, "stream": is_stream}
    error = server.refusal(CHAT, body | {"target_generated": {}} | fields)
    assert error["param"] == parameter, error
    assert problem in error["message"], error


@pytest.mark.any_runner
def test_messages_are_scored_without(server):
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 0, "target_generated": {}}
    error = server.refusal(CHAT, body | {"score_messages": "last"})
    assert error["param"] == "target_generated"


@pytest.mark.any_runner
def test_batches_of_chats_say_that_they_take_none(server):
    body = {"model": MODEL, "messages": [MESSAGES], "target_generated": {}}
    error = server.refusal(CHAT + "/batch", body)
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
    chat = {"messages": MESSAGES, "target_generated": asked, "n": 2000}
    for is_stream in (False, True):
        several = {"prompt": [SHORT] * 128, "target_generated": asked, "n": 8}
        for path, more in ((COMPLETIONS, several), (CHAT, chat)):
            error = server.refusal(path, body | more | {"stream": is_stream})
            assert error["param"] == "n" and "bytes" in error["message"], error
