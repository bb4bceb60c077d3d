# SPDX-License-Identifier: Apache-2.0
"""Other ways to the same scores, and the limits of a request that scores over HTTP."""

import json

import numpy as np
import pytest
import requests
from scoring import FLOAT32_TOLERANCE, random_ids
from scoring_server import (
    COMPLETIONS,
    GENERATE,
    MAX_MODEL_LEN,
    MODEL,
    REQUEST_SECONDS,
    VOCABULARY,
    assert_choice,
)
from scoring_texts import LONG, RAGGED, SHORT


def test_openai_client(server, llama):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
    for encoding in ("json", "npy"):
        completion = client.completions.create(
            model=MODEL,
            prompt=[SHORT, LONG],
            max_tokens=0,
            extra_body={
                "target_token_ids": [SHORT[1:], RAGGED],
                "target_logprobs_encoding": encoding,
            },
        )
        first, second = completion.to_dict()["choices"]
        assert_choice(first, llama, SHORT, SHORT[1:])
        assert_choice(second, llama, LONG, RAGGED)
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(
            model=MODEL, prompt=SHORT, extra_body={"target_token_ids": [VOCABULARY]}
        )
    assert error.value.param == "target_token_ids"


def test_render_generate_derender(server):
    """The three steps give what the one request gives."""
    body = dict(model=MODEL, prompt=["def f", "x = "], target_text="(y)", max_tokens=0)
    rendered = server.post(COMPLETIONS + "/render", body)
    answers = [server.post(GENERATE, request).json() for request in rendered.json()]
    whole = server.post(
        COMPLETIONS + "/derender", {"model": MODEL, "generate_responses": answers}
    )
    scores = [choice["target_logprobs"] for choice in whole.json()["choices"]]
    at_once = server.ask(**body)["choices"]
    assert scores == [choice["target_logprobs"] for choice in at_once]


@pytest.mark.any_runner
def test_schema(server):
    schema = requests.get(server.url + "/openapi.json", timeout=REQUEST_SECONDS).json()
    schemas = schema["components"]["schemas"]
    for name in (
        "target_token_ids",
        "target_text",
        "continuations",
        "target_logprobs_encoding",
    ):
        assert schemas["CompletionRequest"]["properties"][name]["description"]
    answer = schema["paths"][COMPLETIONS]["post"]["responses"]["200"]
    assert "CompletionResponse" in json.dumps(answer)
    assert "entropy" in schemas["ChoiceTargetLogprobs"]["properties"]
    assert "is_greedy" in schemas["ContinuationLogprobs"]["properties"]


@pytest.mark.any_runner
def test_max_tokens_zero_is_for_scores(server):
    bodies = {
        COMPLETIONS: {"model": MODEL, "prompt": SHORT, "max_tokens": 0},
        GENERATE: {"token_ids": SHORT, "sampling_params": {"max_tokens": 0}},
    }
    for path, body in bodies.items():
        for stream in (False, True):
            error = server.refusal(path, body | {"stream": stream})
            assert error["param"] == "max_tokens"


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_may_fill_the_context(server, llama, length, max_tokens):
    """If nothing is to be generated."""
    ids = random_ids(1, VOCABULARY, length)
    targets = {"target_token_ids": ids[1:]}
    sampling = {"sampling_params": {"max_tokens": max_tokens}}
    fields = {"model": MODEL, "prompt": ids, "max_tokens": max_tokens}
    joined = {"prompt": ids[:-3], "continuations": [ids[-3:]]}
    # Upstream's name for what no request may have.
    whole = "prompt" if length == MAX_MODEL_LEN else "input_tokens"
    requests = [
        (COMPLETIONS, fields | targets, whole, ids[1:]),
        (COMPLETIONS, fields | joined, "continuations", ids[-3:]),
        (GENERATE, {"token_ids": ids} | sampling | targets, "token_ids", ids[1:]),
    ]
    for path, body, parameter, scored in requests:
        if length > MAX_MODEL_LEN or max_tokens:
            assert server.refusal(path, body)["param"] == parameter
            continue
        (choice,) = server.ask(path, **body)["choices"]
        found = choice["target_logprobs"]["logprobs"]
        expected = llama.scores(ids, scored).logprobs
        np.testing.assert_allclose(found, expected, rtol=0, atol=FLOAT32_TOLERANCE)


@pytest.mark.any_runner
def test_a_prompt_that_leaves_no_room_is_too_long(server):
    """Not a request that only scores, which has to say so."""
    body = {"token_ids": [5] * MAX_MODEL_LEN}
    rows = {"prompt_logprob_token_ids": [[5]] * (MAX_MODEL_LEN - 1)}
    for sampling_params in ({}, rows):
        error = server.refusal(GENERATE, body | {"sampling_params": sampling_params})
        assert "longer than" in error["message"] and error["param"] != "max_tokens"


@pytest.mark.any_runner
@pytest.mark.parametrize("name", ["target_token_ids", "target_text", "continuations"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
    ],
)
def test_endpoints_that_do_not_score(server, path, body, name):
    error = server.refusal(path, {"model": MODEL} | body | {name: [5]})
    assert error["param"] == name
