# SPDX-License-Identifier: Apache-2.0
"""Scoring over HTTP: a live `vllm serve` on the loopback interface.

SERVING_REQUESTS=2000 python -m pytest tests/serving/test_serving.py   # the long random run
"""

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest
import requests
from scoring import FLOAT32_TOLERANCE, assert_options, random_ids
from scoring_server import (
    COMPLETIONS,
    GENERATE,
    MAX_LOGPROBS,
    MAX_MODEL_LEN,
    MODEL,
    REQUEST_SECONDS,
    VOCABULARY,
    Server,
    assert_choice,
    decode,
    server,  # noqa: F401
)
from tiny_models import make_tokenizer
from waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from common import Client

REQUESTS = int(os.environ.get("SERVING_REQUESTS", 300))
"""Requests of the random run."""
MIB = 2**20
LONG = random_ids(1, VOCABULARY, 150)
SHORT = random_ids(2, VOCABULARY, 12)
RAGGED = [[5, 6, 7], [], [-1, 8], [9, 9, 9]]


@pytest.mark.parametrize(
    ("prompt", "targets"),
    [
        pytest.param(SHORT, SHORT[1:], id="all"),
        pytest.param(SHORT, [5, -1, 7], id="unscored-in-the-middle"),
        pytest.param(SHORT, [[5]], id="row-of-one"),
        pytest.param(SHORT, RAGGED, id="ragged"),
        pytest.param(SHORT, [-1, -1], id="nothing-scored"),
        pytest.param(LONG, LONG[1:], id="chunks"),
        pytest.param(LONG, random_ids(3, VOCABULARY, 100, 20), id="wide"),
    ],
)
@pytest.mark.parametrize("encoding", ["json", "npy"])
def test_one_prompt(server, llama, prompt, targets, encoding):
    fields = dict(target_token_ids=targets, target_logprobs_encoding=encoding)
    answer = server.ask(prompt=prompt, max_tokens=0, **fields)
    (choice,) = answer["choices"]
    assert_choice(choice, llama, prompt, targets)
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == 0

    sampling = {"max_tokens": 0}
    answer = server.ask(GENERATE, token_ids=prompt, sampling_params=sampling, **fields)
    assert answer["choices"][0]["target_logprobs"] == choice["target_logprobs"]
    assert answer["choices"][0]["token_ids"] == []
    assert answer["prompt_token_id_logprobs"] is None


def test_json_has_null_for_what_is_not_scored(server):
    answer = server.ask(prompt=SHORT, target_token_ids=[[5, -1], []], max_tokens=0)
    scores = answer["choices"][0]["target_logprobs"]
    assert scores["token_ids"] == [[5, -1], [-1, -1]]
    assert scores["logprobs"][0][1] is None and scores["logprobs"][1] == [None, None]
    assert scores["ranks"][1] == [0, 0] and scores["entropy"][1] is None


@pytest.mark.parametrize("encoding", ["json", "npy"])
@pytest.mark.parametrize("path", ["completions", "text", "generate"])
@pytest.mark.parametrize("targets", [None, [[5, 6], [7]]])
def test_temperature_and_top_k(server, llama, path, targets, encoding):
    """With and without named tokens, and as offline."""
    options = {"target_temperature": 0.7, "target_top_k": 4, "encoding": encoding}
    ids = SHORT
    if path == "text":
        text = "def f(x):"
        options |= {"max_tokens": 0} | ({"target_text": "\n"} if targets else {})
        answer = server.ask(prompt=text, return_token_ids=True, **options)
        ids = answer["choices"][0]["prompt_token_ids"]
        targets = targets and ids[len(ids) - 1 :]
    else:
        options |= {} if targets is None else {"target_token_ids": targets}
        if path == "completions":
            answer = server.ask(prompt=ids, max_tokens=0, **options)
        else:
            sampling = {"max_tokens": 0}
            answer = server.ask(
                GENERATE, token_ids=ids, sampling_params=sampling, **options
            )
    body = answer["choices"][0]["target_logprobs"]
    arrays = {
        name: decode(name.replace("top_", ""), value)
        for name, value in body.items()
        if name != "start"
    }
    assert arrays.pop("token_ids").shape == arrays["logprobs"].shape
    rows = [[]] * (len(ids) - 1) if targets is None else targets
    assert arrays["top_logprobs"].shape == (len(rows), 4)
    scores = SimpleNamespace(start=body["start"], **arrays)
    assert_options(scores, llama, ids, targets, temperature=0.7, top_k=4)


@pytest.mark.parametrize(
    "fields",
    [{"prompt_logprobs": 3}, {"echo": True, "logprobs": 3}],
    ids=["prompt", "echo"],
)
def test_prompt_logprobs_at_a_temperature(server, llama, fields):
    """The generated tokens' temperature says nothing of them, `target_temperature` does."""
    for temperature in (None, 0.5, 4.0):
        body = fields | {"prompt": [SHORT, LONG], "max_tokens": 1, "temperature": 0.7}
        if temperature is not None:
            body["target_temperature"] = temperature
        for ids, choice in zip(
            (SHORT, LONG), server.ask(**body)["choices"], strict=True
        ):
            expected = llama.logits(ids) / (temperature or 1.0)
            expected -= np.log(np.exp(expected).sum(axis=1, keepdims=True))
            if "echo" in fields:
                found = choice["logprobs"]["token_logprobs"][1 : len(ids)]
            else:
                rows = choice["prompt_logprobs"][1:]
                found = [row[str(i)]["logprob"] for row, i in zip(rows, ids[1:])]
            own = expected[range(len(ids) - 1), ids[1:]]
            atol = FLOAT32_TOLERANCE * max(1, 1 / (temperature or 1))
            np.testing.assert_allclose(found, own, rtol=0, atol=atol)


def test_the_client_reads_them(server, llama):
    with Client(server.url) as client:
        for targets in (None, [SHORT[-3:]]):
            [scores] = client.score_ids([SHORT], targets, temperature=2.0, top_k=5)
            rows = targets and targets[0]
            options = {"temperature": 2.0, "top_k": 5}
            assert_options(scores, llama, SHORT, rows, **options)


def test_options_without_tokens_to_score(server):
    for body in ({"target_temperature": 2}, {"target_temperature": 1, "echo": True}):
        error = server.refusal(COMPLETIONS, {"prompt": SHORT, "model": MODEL} | body)
        assert error["param"] == "target_temperature"


def test_the_short_name_of_the_encoding(server):
    answer = server.ask(
        prompt=SHORT, target_token_ids=[5], max_tokens=0, encoding="npy"
    )
    assert isinstance(answer["choices"][0]["target_logprobs"]["entropy"], str)


@pytest.mark.parametrize(
    ("prompts", "targets"),
    [
        pytest.param([SHORT], [SHORT[1:]], id="one"),
        pytest.param([SHORT, LONG], [SHORT[1:], LONG[-9:]], id="flat"),
        pytest.param([SHORT, SHORT, LONG], [RAGGED, [3], [[4]]], id="mixed"),
        # For one prompt of candidates this list would be two rows.
        pytest.param([SHORT, LONG], [[5, 6], [7]], id="could-be-rows"),
    ],
)
def test_batch(server, llama, prompts, targets):
    answer = server.ask(prompt=prompts, target_token_ids=targets, max_tokens=0)
    assert [choice["index"] for choice in answer["choices"]] == [*range(len(prompts))]
    for choice, prompt, rows in zip(answer["choices"], prompts, targets, strict=True):
        assert_choice(choice, llama, prompt, rows)


def test_a_batch_of_more_prompts_than_run_at_once(server, llama):
    prompts = [random_ids(10 + n, VOCABULARY, 3 + n) for n in range(40)]
    targets = [prompt[1:] for prompt in prompts]
    answer = server.ask(prompt=prompts, target_token_ids=targets, max_tokens=0)
    for choice, prompt, rows in zip(answer["choices"], prompts, targets, strict=True):
        assert_choice(choice, llama, prompt, rows)


def test_scoring_beside_generating(server, llama):
    """The same text as without targets; each choice of `n` has the scores."""
    plain = server.ask(prompt=SHORT, max_tokens=5, temperature=0, ignore_eos=True)
    fields = dict(max_tokens=5, temperature=0, ignore_eos=True, logprobs=2)
    (choice,) = server.ask(prompt=SHORT, target_token_ids=[5], **fields)["choices"]
    assert choice["text"] == plain["choices"][0]["text"]
    assert len(choice["logprobs"]["tokens"]) == 5
    assert_choice(choice, llama, SHORT, [5])

    for max_tokens in (0, 3):
        answer = server.ask(
            prompt=[SHORT, LONG],
            target_token_ids=[[5], [6]],
            n=3,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        assert answer["usage"]["completion_tokens"] == 6 * max_tokens
        choices = answer["choices"]
        for choice in choices[:3]:
            assert_choice(choice, llama, SHORT, [5])
        for choice in choices[3:]:
            assert_choice(choice, llama, LONG, [6])


def test_prompt_logprobs_hold_the_named_tokens(server, llama):
    fields = dict(target_token_ids=[[5, 6], [7]], max_tokens=0, prompt_logprobs=0)
    (choice,) = server.ask(prompt=SHORT, **fields)["choices"]
    assert_choice(choice, llama, SHORT, [[5, 6], [7]])
    names = [row and set(row) for row in choice["prompt_logprobs"]]
    assert names == [None] * (len(SHORT) - 2) + [{"5", "6"}, {"7"}]


def test_echo(server, llama):
    text = make_tokenizer().decode(SHORT)
    for fields in ({}, {"target_token_ids": [5]}):
        (choice,) = server.ask(prompt=SHORT, echo=True, max_tokens=0, **fields)[
            "choices"
        ]
        assert choice["text"] == text
        assert (choice["target_logprobs"] is None) == (not fields)
    assert_choice(choice, llama, SHORT, [5])


def continuation(prompt: str, target: str) -> tuple[list[int], list[int]]:
    """Tokens of prompt + target, and of these the ones that reach into the target.

    Found by decoding ever more tokens, which for plain ASCII is one character a byte.
    """
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(prompt + target)
    inside = [
        n for n in range(len(ids)) if len(tokenizer.decode(ids[: n + 1])) <= len(prompt)
    ]
    return ids, ids[len(inside) :]


def straddling() -> tuple[str, str]:
    """A prompt and a target that share a token: the longest word, cut in two."""
    words = (token for token in make_tokenizer().get_vocab() if token[1:].isalpha())
    word = max((word for word in words if word[0] == "Ġ"), key=len)
    return f"x {word[1:3]}", f"{word[3:]} y"


TEXTS = [
    ("def test_a(server):", "\n    return server"),
    straddling(),
    ("assert x ", "== 3"),  # a space before the boundary
    ("self.assertEq", "ual"),
    ("x = [1, 2, 3", "]"),
]


@pytest.mark.parametrize(("prompt", "target"), TEXTS)
def test_text(server, llama, prompt, target):
    ids, targets = continuation(prompt, target)
    answer = server.ask(prompt=prompt, target_text=target, max_tokens=0)
    (choice,) = answer["choices"]
    assert_choice(choice, llama, ids, targets)
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_a_token_that_straddles_the_boundary_is_scored(server, llama):
    prompt, target = straddling()
    ids, targets = continuation(prompt, target)
    assert len(make_tokenizer().decode(targets)) > len(target)
    (choice,) = server.ask(prompt=prompt, target_text=target, max_tokens=0)["choices"]
    assert_choice(choice, llama, ids, targets)


def test_characters_of_several_tokens(server, llama):
    """Each byte of a character is a token here, and each is scored."""
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("naïve → ") + tokenizer.encode("日本")
    answer = server.ask(prompt="naïve → ", target_text="日本", max_tokens=0)
    assert_choice(answer["choices"][0], llama, ids, tokenizer.encode("日本"))


def test_text_batches(server, llama):
    prompts, targets = zip(*TEXTS)
    for target_text in (list(targets), " = 5"):
        answer = server.ask(prompt=prompts, target_text=target_text, max_tokens=0)
        given = (
            targets if isinstance(target_text, list) else [target_text] * len(prompts)
        )
        for choice, prompt, target in zip(
            answer["choices"], prompts, given, strict=True
        ):
            assert_choice(choice, llama, *continuation(prompt, target))


def test_generation_goes_on_after_the_target(server):
    prompt, target = TEXTS[0]
    fields = dict(max_tokens=6, temperature=0, ignore_eos=True, echo=True)
    joined = server.ask(prompt=prompt + target, **fields)["choices"][0]["text"]
    scored = server.ask(prompt=prompt, target_text=target, **fields)
    assert scored["choices"][0]["text"] == joined


def assert_continuation(choice: dict, oracle, prompt: list[int], targets) -> None:
    """Asserts the scores of one of `continuations`, with its sum and flag."""
    assert_choice(choice, oracle, prompt, targets, ("logprob_sum", "is_greedy"))
    body = choice["target_logprobs"]
    logprobs = decode("logprobs", body["logprobs"]).sum(dtype=np.float64)
    assert body["logprob_sum"] == logprobs
    assert body["is_greedy"] == (decode("ranks", body["ranks"]) == 1).all()


@pytest.mark.parametrize("encoding", ["json", "npy"])
def test_continuations(server, llama, encoding):
    """Of token ids and of a text, more of them than run at once."""
    continuations = [random_ids(n, VOCABULARY, 1 + n) for n in range(20)]
    best = int(llama.logits(LONG)[-1].argmax())
    for prompt, targets, expected in (
        (
            LONG,
            [[best], *continuations],
            [(LONG + ids, ids) for ids in [[best], *continuations]],
        ),
        (
            "assert x ",
            [target for _, target in TEXTS],
            [continuation("assert x ", target) for _, target in TEXTS],
        ),
    ):
        answer = server.ask(
            prompt=prompt, continuations=targets, max_tokens=0, encoding=encoding
        )
        choices = answer["choices"]
        assert [choice["index"] for choice in choices] == [*range(len(targets))]
        for choice, pair in zip(choices, expected, strict=True):
            assert_continuation(choice, llama, *pair)
        assert answer["usage"]["prompt_tokens"] == sum(len(ids) for ids, _ in expected)
        assert choices[0]["target_logprobs"]["is_greedy"] == (prompt is LONG)


def test_continuations_in_other_ways(server, llama):
    """Through the `openai` client, rendered first, and with tokens after them."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
    completion = client.completions.create(
        model=MODEL,
        prompt=SHORT,
        max_tokens=0,
        extra_body={"continuations": [[5], [6, 7]]},
    )
    for choice, ids in zip(completion.to_dict()["choices"], [[5], [6, 7]], strict=True):
        assert_continuation(choice, llama, SHORT + ids, ids)

    body = dict(model=MODEL, prompt=SHORT, continuations=[[5], [6, 7]], max_tokens=0)
    rendered = server.post(COMPLETIONS + "/render", body).json()
    for request, ids in zip(rendered, [[5], [6, 7]], strict=True):
        (choice,) = server.post(GENERATE, request).json()["choices"]
        assert_choice(choice, llama, SHORT + ids, ids)

    fields = dict(max_tokens=3, temperature=0, ignore_eos=True)
    (joined,) = server.ask(prompt=[*SHORT, 5], **fields)["choices"]
    (choice,) = server.ask(prompt=SHORT, continuations=[[5]], **fields)["choices"]
    assert choice["text"] == joined["text"]
    choices = server.ask(prompt=SHORT, continuations=[[5], [6]], max_tokens=0, n=2)
    for choice, token in zip(choices["choices"], (5, 5, 6, 6), strict=True):
        assert_continuation(choice, llama, [*SHORT, token], [token])


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


def test_a_prompt_that_leaves_no_room_is_too_long(server):
    """Not a request that only scores, which has to say so."""
    body = {"token_ids": [5] * MAX_MODEL_LEN}
    rows = {"prompt_logprob_token_ids": [[5]] * (MAX_MODEL_LEN - 1)}
    for sampling_params in ({}, rows):
        error = server.refusal(GENERATE, body | {"sampling_params": sampling_params})
        assert "longer than" in error["message"] and error["param"] != "max_tokens"


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


# Malformed requests. Each table maps the parameter that the answer must name to
# changes that spoil a valid request; a callable makes the value from a generator.

Maker = Callable[[random.Random], object]


def nested(depth: int) -> list:
    value: object = 5
    for _ in range(depth):
        value = [value]
    return value


def junk(rng: random.Random) -> list:
    """A list that holds at least one thing that is no token id."""
    good = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(5))]
    bad = rng.choice(
        [True, 1.5, float("nan"), float("inf"), None, "5", {}, {"a": 1}, -2, -(2**70)]
    )
    good.insert(rng.randrange(len(good) + 1), bad)
    return good


BAD_IDS: list[object | Maker] = [
    [],
    [[]],
    [[], []],
    5,
    "5",
    "",
    True,
    0.5,
    {"0": 5},
    [VOCABULARY],
    [[5, VOCABULARY]],
    [2**31 + 5],
    [2**64 + 5],
    [10**4000],
    [-2],
    [True],
    [[5, False]],
    [5.0],
    [float("nan")],
    [[float("inf")]],
    [None],
    [[None]],
    ["5"],
    [5, [6]],
    [[6], 5],
    [[[5]]],
    [[5] * (MAX_LOGPROBS + 1)],
    [[5] * 10_000],
    [5] * len(SHORT),
    [[5]] * 1000,
    lambda rng: nested(rng.randrange(3, 400)),
    lambda rng: junk(rng),
    lambda rng: [junk(rng) for _ in range(rng.randrange(1, 4))],
    lambda rng: [rng.randrange(VOCABULARY, 10**18)] * rng.randrange(1, 9),
]
BAD_OPTIONS: list[tuple[str, dict[str, object]]] = [
    *(
        ("target_temperature", {"target_temperature": value})
        for value in (0, -1, "1", True, [1], {}, float("nan"), float("inf"), 1e-45)
    ),
    *(
        ("target_top_k", {"target_top_k": value})
        for value in (0, -1, "1", True, [1], {}, 1.5, 2**70, MAX_LOGPROBS + 1)
    ),
    *(
        ("target_top_k", {"target_token_ids": None, "target_top_k": value})
        for value in (0, "1", MAX_LOGPROBS + 1)
    ),
]
BAD_COMPLETIONS: list[tuple[str, dict[str, object]]] = [
    *BAD_OPTIONS,
    *(("target_token_ids", {"target_token_ids": value}) for value in BAD_IDS),
    *(  # as entries of a batch
        ("target_token_ids", {"prompt": [SHORT, LONG], "target_token_ids": value})
        for value in ([5], [[5]], [5, 6], [[5], None], [[5], [6], [7]], [[5], [[[6]]]])
    ),
    ("target_token_ids", {"prompt": "text"}),
    ("target_token_ids", {"prompt": ["text"]}),
    ("target_token_ids", {"prompt": [5]}),
    ("target_text", {"target_text": "text"}),
    ("stream", {"stream": True}),
    ("stream", {"stream": True, "stream_options": {"include_usage": True}}),
    ("use_beam_search", {"use_beam_search": True, "n": 2}),
    ("best_of", {"best_of": 3}),
    ("suffix", {"suffix": "text"}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 4}),
    ("prompt_embeds", {"prompt_embeds": "AAAA"}),
    ("logprobs", {"echo": True, "logprobs": 1}),
    ("logprobs", {"logprobs": "x"}),
    ("target_logprobs_encoding", {"target_logprobs_encoding": "zip"}),
    ("encoding", {"encoding": {"a": 1}}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": "many"}),
    ("max_tokens", {"max_tokens": 10**9}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": [5, "6"]}),
    ("prompt", {"prompt": [5, float("nan")]}),
    ("prompt", {"prompt": [5, True]}),
    ("prompt", {"prompt": [5, -1]}),
    ("prompt", {"prompt": [5, VOCABULARY]}),
    ("prompt", {"prompt": [5, 2**70]}),
    ("prompt", {"prompt": {"a": 1}}),
    ("prompt", {"prompt": [[5, 6], ["7"]]}),
    ("input_tokens", {"prompt": [5] * (MAX_MODEL_LEN + 1)}),
    ("input_tokens", {"prompt": [5] * 5000}),  # upstream's name for a long prompt
    ("temperature", {"temperature": float("nan")}),
    ("n", {"n": "x"}),
    ("n", {"n": 0}),
    ("n", {"n": 2, "temperature": 0}),
    # Each choice would repeat the scores.
    (
        "n",
        {
            "prompt": LONG,
            "target_token_ids": [[5] * MAX_LOGPROBS] * (len(LONG) - 1),
            "n": 2**24 // (MAX_LOGPROBS * (len(LONG) - 1)) + 1,
        },
    ),
    ("top_k", {"top_k": -5}),
    ("min_p", {"min_p": 2}),
    ("min_tokens", {"min_tokens": 1}),
    ("min_tokens", {"min_tokens": -1}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("stop", {"stop": [""]}),
    ("seed", {"seed": "x"}),
]
BAD_TEXTS: list[tuple[str, dict[str, object]]] = [
    *BAD_OPTIONS[:-3],
    *(
        ("target_text", {"target_text": value})
        for value in ("", [], [""], 5, 0.5, True, {}, [5], ["a", "b"], "\ud8ff", [None])
    ),
    ("target_text", {"prompt": SHORT}),
    ("target_text", {"prompt": [SHORT, SHORT]}),
    ("target_text", {"prompt": ["a", "b"], "target_text": ["c"]}),
    ("target_text", {"prompt": ["", "b"]}),
    ("prompt", {"prompt": ["a", 5]}),
    ("prompt", {"prompt": None}),
    ("stream", {"stream": True}),
    ("input_text", {"target_text": "a" * 100_000}),  # upstream's name, as above
    ("input_tokens", {"target_text": "a b" * 500}),
]
BAD_CONTINUATIONS: list[tuple[str, dict[str, object]]] = [
    ("target_top_k", {"target_top_k": 1}),
    ("target_temperature", {"target_temperature": 0}),
    *(
        ("continuations", {"continuations": value})
        for value in (
            *([], [[]], [[5], []], 5, "5", "", True, 0.5, {}, [5], ["text"], [None]),
            *([[VOCABULARY]], [[5], [10**4000]], [[-1]], [[True]], [[5.0]], [["5"]]),
            *([[[5]]], [[5] * MAX_MODEL_LEN], [[5]] * 1025, nested(300)),
            lambda rng: [[5], junk(rng)],
        )
    ),
    *(
        ("continuations", {"prompt": "text", "continuations": value})
        for value in ([], [""], ["a", 5], [[5]], "a", {}, ["a", "\ud8ff"], ["a"] * 1025)
    ),
    ("continuations", {"target_token_ids": [5]}),
    ("continuations", {"target_text": "a"}),
    ("prompt", {"prompt": [SHORT]}),
    ("prompt", {"prompt": ["a"]}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [5, VOCABULARY]}),
    ("prompt", {"prompt": [5] * (MAX_MODEL_LEN + 1)}),
    ("stream", {"stream": True}),
    ("input_text", {"prompt": "a", "continuations": ["b", "c" * 100_000]}),
]
BAD_GENERATE: list[tuple[str, dict[str, object]]] = [
    *BAD_OPTIONS,
    *(("target_token_ids", {"target_token_ids": value}) for value in BAD_IDS),
    ("target_text", {"target_text": "text"}),
    ("stream", {"stream": True}),
    ("features", {"features": {"mm_hashes": {}, "mm_placeholders": {}}}),
    ("content_parts", {"content_parts": [{"type": "image_url", "url": "x"}]}),
    ("target_logprobs_encoding", {"target_logprobs_encoding": 5}),
    ("token_ids", {"token_ids": []}),
    ("token_ids", {"token_ids": "text"}),
    ("token_ids", {"token_ids": [[5, 6]]}),
    ("token_ids", {"token_ids": [5, 0.5]}),
    ("token_ids", {"token_ids": [5, VOCABULARY]}),
    ("token_ids", {"token_ids": [5] * (MAX_MODEL_LEN + 1)}),
    ("max_tokens", {"target_token_ids": None}),
    (
        "target_token_ids",
        {"sampling_params": {"prompt_logprob_token_ids": [[5]] * (len(SHORT) - 1)}},
    ),
    *(
        (name, {"sampling_params": {"max_tokens": 0, name: value}})
        for name, value in (
            *(("n", 0), ("n", 10**6), ("n", 9)),  # more than --max-num-seqs
            *(("top_k", -5), ("min_p", 2), ("min_tokens", 1), ("stop", [""])),
        )
    ),
]
VALID = {
    "ids": (
        COMPLETIONS,
        {"model": MODEL, "prompt": SHORT, "target_token_ids": [5], "max_tokens": 0},
    ),
    "text": (
        COMPLETIONS,
        {"model": MODEL, "prompt": "def f", "target_text": "(x)", "max_tokens": 0},
    ),
    "continuations": (
        COMPLETIONS,
        {"model": MODEL, "prompt": SHORT, "continuations": [[5]], "max_tokens": 0},
    ),
    "generate": (
        GENERATE,
        {
            "token_ids": SHORT,
            "target_token_ids": [5],
            "sampling_params": {"max_tokens": 0},
        },
    ),
}
BAD = [
    (name, param, change)
    for name, table in zip(
        VALID, (BAD_COMPLETIONS, BAD_TEXTS, BAD_CONTINUATIONS, BAD_GENERATE)
    )
    for param, change in table
]


def spoil(name: str, change: dict, rng: random.Random) -> tuple[str, dict]:
    path, body = VALID[name]
    made = {k: v(rng) if callable(v) else v for k, v in change.items()}
    return path, body | made


def assert_names(error: dict, param: str) -> None:
    """Asserts that an error names a parameter; pydantic's start with `body.`."""
    given = (error["param"] or "").removeprefix("body.").split(".")[0]
    assert given == param, error


def test_refusals(server, llama):
    """Each malformed request, one after the other, and a valid one in the end."""
    rng = random.Random(0)
    wrong = []
    for name, param, change in BAD:
        path, body = spoil(name, change, rng)
        try:
            assert_names(server.refusal(path, body), param)
        except AssertionError as error:
            wrong.append((name, param, str(change)[:200], str(error)[:300]))
    assert not wrong
    (choice,) = server.ask(prompt=SHORT, target_token_ids=[5], max_tokens=0)["choices"]
    assert_choice(choice, llama, SHORT, [5])


_TARGETS = '"prompt":[5,6,7],"target_token_ids":'
_PROMPT = '"target_token_ids":[5],"prompt":'
_LISTS = '"prompt":[5,6,7],"continuations":'
_TEXTS = '"continuations":[' + ",".join(['"a"'] * 1000) + '],"prompt":'
_IDS = '"target_token_ids":[5],"sampling_params":{},"token_ids":'
LARGE = {  # path, parameter to be named, and a body's start, repeated middle and end
    "rows": (COMPLETIONS, "target_token_ids", _TARGETS + "[5", ",5", "]}"),
    "lists": (COMPLETIONS, "target_token_ids", _TARGETS + "[[5]", ",[5]", "]}"),
    "candidates": (COMPLETIONS, "target_token_ids", _TARGETS + "[[5", ",5", "]]}"),
    "floats": (COMPLETIONS, "target_token_ids", _TARGETS + "[5", ",0.5", "]}"),
    "string": (COMPLETIONS, "target_token_ids", _TARGETS + '"5', "5", '"}'),
    "text": (COMPLETIONS, "input_text", '"prompt":"a","target_text":"b', " c", '"}'),
    "continuations": (COMPLETIONS, "continuations", _LISTS + "[[5]", ",[5]", "]}"),
    "long-continuation": (COMPLETIONS, "continuations", _LISTS + "[[5", ",5", "]]}"),
    "long-continuation-text": (
        *(COMPLETIONS, "input_text"),
        *('"prompt":"a","continuations":["b","', "c ", '"]}'),
    ),
    "long-context": (COMPLETIONS, "input_text", _TEXTS + '"5', "a b ", '"}'),
    "prompt": (COMPLETIONS, "input_tokens", _PROMPT + "[5", ",5", "]}"),
    "prompt-of-floats": (COMPLETIONS, "prompt", _PROMPT + "[5", ",0.5", "]}"),
    "prompts": (COMPLETIONS, "prompt", _PROMPT + "[[5]", ",[5]", "]}"),
    "token-ids": (GENERATE, "token_ids", _IDS + "[5", ",5", "]}"),
    "token-ids-in-lists": (GENERATE, "token_ids", _IDS + "[5", ",[5]", "]}"),
}


def large(kind: str) -> tuple[str, str, bytes]:
    """A path, the parameter that the answer must name, and a body of 10 MiB."""
    path, param, start, middle, end = LARGE[kind]
    start = '{"model":"tiny","max_tokens":0,' + start
    return path, param, (start + middle * (10 * MIB // len(middle)) + end).encode()


@pytest.mark.parametrize("kind", LARGE)
def test_large_bodies(server, kind):
    path, param, body = large(kind)
    assert_names(server.refusal(path, body), param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[",
        b"5",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt":[5,6],"target_token_ids":[5',
        b'{"prompt":[5,6],"target_token_ids":' + b"[" * 100_000,
        b'{"prompt":[5,6],"target_token_ids":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"prompt":[5,6],"target_token_ids":[' + b"9" * 10_000 + b"]}",
    ],
    ids=lambda body: repr(body[:40]),
)
def test_bodies_that_are_no_json_object(server, body):
    for path in (COMPLETIONS, GENERATE):
        assert 400 <= server.post(path, body).status_code < 500


class Clients:
    """Many clients at once. Some send valid requests and check the answers, most
    send malformed ones, some go away."""

    COUNT = 16
    SHARES = {
        "score_ids": 10,
        "score_batch": 6,
        "score_text": 6,
        "score_continuations": 6,
        "score_by_generate": 6,
        "complete": 4,
        "stream": 4,
        "send_malformed": 56,
        "go_away": 4,
        "go_away_in_the_body": 2,
        "go_away_in_the_stream": 2,
    }

    def __init__(self, server: Server, oracle, seed: int):
        self.server = server
        self.oracle = oracle
        self.rng = random.Random(seed)
        lengths = [2, 3, 5, 17, 40, 63, 64, 65, 100, 130, 200, 250]
        self.prompts = [random_ids(n, VOCABULARY, n) for n in lengths]
        self.texts = [
            server.ask(**self.ordinary(prompt))["choices"][0]["text"]
            for prompt in self.prompts
        ]
        self.done: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []

    async def run(self, count: int) -> None:
        """Sends `count` requests, `COUNT` at a time."""
        shares = self.SHARES
        kinds = self.rng.choices([*shares], [*shares.values()], k=count)
        # Ten MiB keep the server busy for seconds, so they are few.
        for number in self.rng.sample(range(count), max(count // 200, 1)):
            kinds[number] = "send_large"
        queue = iter(enumerate(kinds))
        timeout = aiohttp.ClientTimeout(REQUEST_SECONDS)
        async with aiohttp.ClientSession(self.server.url, timeout=timeout) as session:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.COUNT):
                    group.create_task(self.client(session, queue))

    async def client(self, session: aiohttp.ClientSession, queue) -> None:
        for number, kind in queue:
            try:
                await getattr(self, kind)(session)
                self.done[kind] += 1
            except (AssertionError, aiohttp.ClientError, TimeoutError) as error:
                self.wrong.append(f"{number} {kind}: {error!r:.500}")

    def ordinary(self, prompt: list[int], **fields) -> dict:
        sampling = dict(max_tokens=4, temperature=1, seed=7)
        return dict(model=MODEL, prompt=prompt) | sampling | fields

    def targets(self, prompt: list[int]) -> list:
        """Random targets, in either form, with unscored ids and empty rows."""
        rng = self.rng
        num_rows = rng.randint(1, min(len(prompt) - 1, rng.choice([3, 40, 249])))
        if rng.random() < 0.5:
            return [rng.randrange(-1, VOCABULARY) for _ in range(num_rows)]
        width = rng.randint(1, MAX_LOGPROBS)
        rows = [
            [rng.randrange(-1, VOCABULARY) for _ in range(rng.randint(0, width))]
            for _ in range(num_rows - 1)
        ]
        return [*rows, [5]]

    def sampling(self) -> dict:
        return {
            "max_tokens": self.rng.choice([0, 0, 1, 5]),
            "n": self.rng.choice([1, 1, 1, 2]),
            "seed": self.rng.choice([None, 5]),
        }

    async def send(self, session, path: str, body: dict | bytes) -> tuple[int, dict]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        async with session.post(path, data=data, headers=headers) as response:
            self.statuses[response.status] += 1
            return response.status, json.loads(await response.read())

    async def score(self, session, path: str, body: dict, expected: list) -> None:
        """Checks an answer against (prompt, targets) of each of its prompts."""
        encoding = {"target_logprobs_encoding": self.rng.choice(["json", "npy"])}
        status, answer = await self.send(session, path, body | encoding)
        assert status == 200, (status, answer)
        num_choices = len(answer["choices"]) // len(expected)
        repeated = [pair for pair in expected for _ in range(num_choices)]
        for choice, pair in zip(answer["choices"], repeated, strict=True):
            assert_choice(choice, self.oracle, *pair)

    async def score_ids(self, session) -> None:
        prompt = self.rng.choice(self.prompts)
        targets = self.targets(prompt)
        body = dict(model=MODEL, prompt=prompt, target_token_ids=targets)
        await self.score(
            session, COMPLETIONS, body | self.sampling(), [(prompt, targets)]
        )

    async def score_batch(self, session) -> None:
        prompts = self.rng.choices(self.prompts, k=self.rng.randint(1, 5))
        targets = [self.targets(prompt) for prompt in prompts]
        body = dict(model=MODEL, prompt=prompts, target_token_ids=targets)
        await self.score(
            session, COMPLETIONS, body | self.sampling(), [*zip(prompts, targets)]
        )

    async def score_text(self, session) -> None:
        pairs = self.rng.choices(TEXTS, k=self.rng.randint(1, 4))
        prompts, targets = zip(*pairs)
        body = dict(model=MODEL, prompt=prompts, target_text=targets)
        expected = [continuation(*pair) for pair in pairs]
        await self.score(session, COMPLETIONS, body | self.sampling(), expected)

    async def score_continuations(self, session) -> None:
        rng = self.rng
        prompt = rng.choice(self.prompts[:-1])
        room = MAX_MODEL_LEN - len(prompt)
        targets = [
            [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, min(room, 9)))]
            for _ in range(rng.randint(1, 8))
        ]
        body = dict(model=MODEL, prompt=prompt, continuations=targets, max_tokens=0)
        status, answer = await self.send(session, COMPLETIONS, body)
        assert status == 200, (status, answer)
        for choice, ids in zip(answer["choices"], targets, strict=True):
            assert_continuation(choice, self.oracle, prompt + ids, ids)

    async def score_by_generate(self, session) -> None:
        prompt = self.rng.choice(self.prompts)
        targets = self.targets(prompt)
        body = dict(
            token_ids=prompt, target_token_ids=targets, sampling_params=self.sampling()
        )
        await self.score(session, GENERATE, body, [(prompt, targets)])

    async def complete(self, session) -> None:
        number = self.rng.randrange(len(self.prompts))
        body = self.ordinary(self.prompts[number])
        status, answer = await self.send(session, COMPLETIONS, body)
        assert status == 200, (status, answer)
        assert answer["choices"][0]["text"] == self.texts[number]
        assert answer["choices"][0]["target_logprobs"] is None

    async def stream(self, session) -> None:
        number = self.rng.randrange(len(self.prompts))
        body = self.ordinary(self.prompts[number], stream=True)
        text = ""
        async with session.post(COMPLETIONS, json=body) as response:
            assert response.status == 200
            async for line in response.content:
                data = line.decode().removeprefix("data: ").strip()
                if data.startswith("{"):
                    text += json.loads(data)["choices"][0]["text"]
        assert text == self.texts[number]

    async def send_malformed(self, session) -> None:
        name, param, change = self.rng.choice(BAD)
        path, body = spoil(name, change, self.rng)
        status, answer = await self.send(session, path, body)
        assert status == 400, (str(body)[:200], status, answer)
        assert_names(answer["error"], param)

    async def send_large(self, session) -> None:
        path, param, body = large(self.rng.choice([*LARGE]))
        status, answer = await self.send(session, path, body)
        assert status == 400, (param, status, answer)
        assert_names(answer["error"], param)

    async def go_away(self, session) -> None:
        prompt = self.rng.choice(self.prompts[:-2])
        fields = dict(max_tokens=50, n=2, ignore_eos=True)
        body = self.ordinary(prompt, target_token_ids=self.targets(prompt), **fields)
        try:
            async with asyncio.timeout(self.rng.uniform(0, 0.2)):
                await self.send(session, COMPLETIONS, body)
        except TimeoutError:
            pass

    async def go_away_in_the_body(self, session) -> None:
        body = json.dumps(VALID["ids"][1]).encode()
        url = session._base_url
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {url.host}\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body[: self.rng.randrange(len(body))]
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def go_away_in_the_stream(self, session) -> None:
        prompt = self.rng.choice(self.prompts[:-2])
        body = self.ordinary(prompt, stream=True, max_tokens=50, ignore_eos=True)
        async with session.post(COMPLETIONS, json=body) as response:
            assert response.status == 200
            await response.content.readline()
            response.close()


def test_many_clients(server, llama):
    """No 5xx, no wrong answer, each refusal names its parameter, and in the end the
    server has nothing left to do and goes on scoring."""
    clients = Clients(server, llama, seed=REQUESTS)
    start = time.monotonic()
    asyncio.run(clients.run(REQUESTS))
    seconds = time.monotonic() - start
    print(f"\n{REQUESTS} requests in {seconds:.0f} s:", dict(clients.done))
    print("answers by status:", dict(clients.statuses))
    assert not clients.wrong, "\n".join(clients.wrong[:10])
    assert sum(clients.done.values()) == REQUESTS
    assert not [status for status in clients.statuses if status >= 500]
    # An abort reaches the engine a moment after its client has gone.
    until(lambda: not any(server.gauges().values()), 60, server.gauges)
    (choice,) = server.ask(prompt=LONG, target_token_ids=LONG[1:], max_tokens=0)[
        "choices"
    ]
    assert_choice(choice, llama, LONG, LONG[1:])
