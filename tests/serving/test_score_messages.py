# SPDX-License-Identifier: Apache-2.0
"""`score_messages` of /v1/chat/completions, on a live server.

CHAT_REQUESTS=2000 python -m pytest tests/serving/test_score_messages.py   # the long random run
"""

import json
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
from chat_templates import FORGETFUL, MARKED, PLAIN, conversation, tokens_and_spans
from scoring import assert_options, assert_scores
from scoring_server import Server, decode
from tiny_models import EOS, make_tokenizer

CHAT = "/v1/chat/completions"
TOKENIZER = make_tokenizer()
REQUESTS = int(os.environ.get("CHAT_REQUESTS", 300))
"""Of the random run."""
MESSAGES = conversation(3)


def score(server: Server, messages: list[dict], which: str, **fields) -> dict:
    """The answer, whose choice has no text."""
    body = {"messages": messages, "score_messages": which, "max_tokens": 0} | fields
    answer = server.ask(CHAT, **body)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == ""
    assert answer["usage"]["completion_tokens"] == 0
    return answer


def as_scores(body: dict, names=("logprobs", "ranks", "entropy")) -> SimpleNamespace:
    arrays = {name: decode(name, body[name]) for name in names}
    return SimpleNamespace(start=body["start"], **arrays)


@pytest.mark.parametrize("encoding", ["json", "npy"])
@pytest.mark.parametrize("template", [None, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("which", ["last", "assistant"])
def test_messages(server, llama, which, template, encoding):
    fields = {"encoding": encoding} | ({"chat_template": template} if template else {})
    answer = score(server, MESSAGES, which, **fields)
    ids, spans = tokens_and_spans(TOKENIZER, MESSAGES)
    found = answer["choices"][0]["message_scores"]
    assert [one["message"] for one in found] == ([6] if which == "last" else [2, 4, 6])
    for one in found:
        span = spans[one["message"]]
        targets = ids[span.start : span.stop]
        assert decode("token_ids", one["token_ids"])[:, 0].tolist() == targets
        prompt = ids[: span.stop]
        assert_scores(as_scores(one), llama, prompt, targets)
        expected = llama.scores(prompt, targets)
        assert abs(one["logprob_sum"] - expected.logprobs.sum()) < 1e-4 * len(span)
        assert one["is_greedy"] == bool((expected.ranks == 1).all())
    assert answer["usage"]["prompt_tokens"] == spans[-1].stop


@pytest.mark.parametrize("text", ["np \N{GRINNING FACE}", "日本", "é"])
@pytest.mark.parametrize("which", ["last", "assistant"])
def test_a_last_character_of_several_tokens(server, which, text):
    """All of them are the message's, where the template's marks end with it."""
    template = MARKED.replace(EOS + "{% endgeneration %}", "{% endgeneration %}" + EOS)
    messages = [
        message | ({"content": text} if message["role"] == "assistant" else {})
        for message in MESSAGES
    ]
    answer = score(server, messages, which, chat_template=template)
    ids, spans = tokens_and_spans(TOKENIZER, messages)
    for one in answer["choices"][0]["message_scores"]:
        span = spans[one["message"]]
        found = decode("token_ids", one["token_ids"])[:, 0].tolist()
        assert found == ids[span.start : span.stop - 1]


def test_a_turn_without_a_stop_token(server):
    """All that the template writes of it is scored."""
    template = PLAIN.replace(EOS, "|")
    answer = score(server, MESSAGES, "last", chat_template=template)
    (one,) = answer["choices"][0]["message_scores"]
    tokens = decode("token_ids", one["token_ids"])[:, 0].tolist()
    assert TOKENIZER.decode(tokens) == MESSAGES[-1]["content"] + "|\n"


def test_temperature_and_top_k(server, llama):
    options = {"target_temperature": 0.5, "target_top_k": 4}
    answer = score(server, MESSAGES, "assistant", encoding="npy", **options)
    ids, spans = tokens_and_spans(TOKENIZER, MESSAGES)
    names = ("logprobs", "ranks", "entropy")
    names += ("top_token_ids", "top_logprobs", "tail_logprob")
    for one in answer["choices"][0]["message_scores"]:
        span = spans[one["message"]]
        prompt, targets = ids[: span.stop], ids[span.start : span.stop]
        assert_options(
            as_scores(one, names), llama, prompt, targets, temperature=0.5, top_k=4
        )


def test_a_growing_conversation(server):
    """Each turn is read from the prefix cache but for its own tokens and two blocks."""
    messages = conversation(7, ["a", "b", "x", "(", ")"])
    before = 0
    for turn in range(1, 8):
        usage = score(server, messages[: 1 + 2 * turn], "assistant")["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        assert usage["prompt_tokens"] - cached <= usage["prompt_tokens"] - before + 64
        before = usage["prompt_tokens"]


def test_salts_and_token_ids(server):
    salted = [score(server, MESSAGES, "last", cache_salt=salt) for salt in "abab"]
    cached = [answer["usage"]["prompt_tokens_details"] for answer in salted]
    counts = [(details or {}).get("cached_tokens") or 0 for details in cached]
    assert counts[:2] == [0, 0] and min(counts[2:]) > 0
    answer = score(server, MESSAGES, "last", return_token_ids=True)
    ids, spans = tokens_and_spans(TOKENIZER, MESSAGES)
    assert answer["prompt_token_ids"] == ids[: spans[-1].stop]


def test_tools_are_written(server):
    """Though the server can not parse calls of them."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    template = "{%- if tools -%}{{ tools[0].function.name }}{%- endif -%}" + PLAIN
    fields = {"chat_template": template, "return_token_ids": True}
    with_tools = score(server, MESSAGES, "last", tools=[tool], **fields)
    without = score(server, MESSAGES, "last", **fields)
    assert with_tools["prompt_token_ids"][1:] == without["prompt_token_ids"]


def test_openai_client(server):
    from openai import OpenAI

    client = OpenAI(base_url=server.url + "/v1", api_key="none")
    completion = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=0,
        extra_body={"score_messages": "last"},
    )
    (one,) = completion.choices[0].message_scores
    assert one["message"] == 6 and len(one["logprobs"]) == len(one["token_ids"])


def test_answers_are_as_before(server):
    """An ordinary answer has no field of this."""
    answer = server.ask(CHAT, messages=MESSAGES, max_tokens=2)
    assert "message_scores" not in answer["choices"][0]
    refused = server.refusal(CHAT, {"messages": MESSAGES, "max_tokens": 0})
    assert refused["param"] == "max_tokens"


USER, ASSISTANT = MESSAGES[1:3]
SPOILT: dict[str, list[dict]] = {
    "score_messages": [
        *({"score_messages": x} for x in ("first", 1, True, ["last"], {}, "", 0.5)),
        {"score_messages": "assistant", "chat_template": FORGETFUL}
        | {"messages": [USER, {"role": "assistant", "content": "a|b"}, *MESSAGES[1:]]},
    ],
    "max_tokens": [{"max_tokens": 1}, {"max_tokens": None}, {"max_tokens": -1}],
    "max_completion_tokens": [{"max_completion_tokens": 5}],
    "messages": [
        {"messages": []},
        {"messages": [USER]},
        {"messages": [ASSISTANT]},
        {"messages": [USER, USER], "score_messages": "assistant"},
        {"messages": [USER, ASSISTANT, USER], "score_messages": "last"},
        {"messages": [ASSISTANT, USER], "score_messages": "assistant"},
    ],
    "target_temperature": [
        *(
            {"target_temperature": x}
            for x in (0, -1, 1e99, "1", True, [1], float("nan"))
        ),
        {"target_temperature": 1.0, "score_messages": None, "max_tokens": 1},
    ],
    "target_top_k": [
        *({"target_top_k": x} for x in (0, -1, 21, 1.5, "1", True, [1], 2**70)),
        {"target_top_k": 1, "score_messages": None, "max_tokens": 1},
    ],
    "encoding": [{"encoding": x} for x in ("zip", 1, ["npy"], {})],
    "target_token_ids": [{"target_token_ids": [1]}],
    "target_text": [{"target_text": "x"}],
    "stream": [{"stream": True}],
    "n": [{"n": 2}, {"n": 0}],
    "best_of": [{"best_of": 2}],
    "use_beam_search": [{"use_beam_search": True}],
    "logprobs": [{"logprobs": True}],
    "prompt_logprobs": [{"prompt_logprobs": 1}],
    "echo": [{"echo": True}],
    "add_generation_prompt": [{"add_generation_prompt": True}],
    "continue_final_message": [
        {"continue_final_message": True, "add_generation_prompt": False}
    ],
    "truncate_prompt_tokens": [{"truncate_prompt_tokens": 5}],
    "kv_transfer_params": [{"kv_transfer_params": {"prompt_token_ids": [1, 2]}}],
}


@pytest.mark.any_runner
def test_refusals(server):
    """Random bodies, each with one fault: a 400 that names it, and good ones between."""
    rng = random.Random(0)
    faults = [(name, change) for name, changes in SPOILT.items() for change in changes]
    good = {"model": "tiny", "messages": MESSAGES, "max_tokens": 0}
    harmless = [
        {"temperature": 0.3},
        {"encoding": "npy"},
        {"stop": ["x"]},
        {"seed": 1},
        {"add_generation_prompt": False},
    ]
    for index in range(max(REQUESTS, len(faults))):
        name, change = faults[index] if index < len(faults) else rng.choice(faults)
        body = good | {"score_messages": rng.choice(["last", "assistant"])}
        for extra in rng.sample(harmless, rng.randint(0, 3)):
            body |= extra
        error = server.refusal(CHAT, body | change)
        assert error["param"] == name, (change, error)
        assert name in error["message"], error
        if index % 20 == 0:
            assert server.ask(CHAT, **body)["choices"][0]["message_scores"]


@pytest.mark.any_runner
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions/render", {"messages": MESSAGES}),
        ("/v1/chat/completions/batch", {"messages": [MESSAGES]}),
        ("/v1/responses", {"input": "x"}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}}),
        ("/tokenize", {"messages": MESSAGES}),
    ],
)
def test_other_endpoints(server, path, body):
    body = {"model": "tiny", "max_tokens": 0, "score_messages": "last"} | body
    error = server.refusal(path, body)
    assert error["param"] == "score_messages" and "not supported" in error["message"]


@pytest.mark.any_runner
def test_a_conversation_that_is_too_long(server):
    long = [{"role": "user", "content": "import " * 600}, ASSISTANT]
    error = server.refusal(
        CHAT, {"messages": long, "score_messages": "last", "max_tokens": 0}
    )
    assert error["param"] == "input_text" or error["param"] == "input_tokens"


@pytest.mark.any_runner
def test_junk(server):
    """Bodies of all shapes are answered by 400s, and the server goes on."""
    rng = random.Random(1)
    values = [
        None,
        True,
        0,
        -1,
        1.5,
        "",
        "x",
        [],
        [None],
        {},
        {"role": 1},
        [[]],
        "last",
    ]
    fields = ["messages", "score_messages", "max_tokens", "target_top_k", "encoding"]
    fields += ["target_temperature", "chat_template", "tools", "chat_template_kwargs"]
    for _ in range(REQUESTS // 2):
        body = {"messages": MESSAGES, "score_messages": "last", "max_tokens": 0}
        for name in rng.sample(fields, 2):
            body[name] = rng.choice(values)
        response = server.post(CHAT, body)
        assert response.status_code in (200, 400), (body, response.text)
        if response.status_code == 400:
            assert response.json()["error"]["message"]
    # Parts of messages.
    parts = ["role", "content", "tool_calls", "name", "reasoning"]
    for _ in range(REQUESTS // 2):
        messages = json.loads(json.dumps(MESSAGES))
        for _ in range(2):
            rng.choice(messages)[rng.choice(parts)] = rng.choice(values)
        body = {"messages": messages, "score_messages": "assistant", "max_tokens": 0}
        response = server.post(CHAT, body)
        assert response.status_code in (200, 400), (body, response.text)
    assert np.isfinite(
        score(server, MESSAGES, "last")["choices"][0]["message_scores"][0][
            "logprob_sum"
        ]
    )
