# SPDX-License-Identifier: Apache-2.0
"""Hostile requests to all routes and fields that score, on a live server.

    HOSTILE_REQUESTS=2000 python -m pytest tests/serving/test_hostile.py   # the long random run

Those to `score_messages` with one fault each are in test_score_messages.py.
"""

import math
import os
import random

import pytest
from scoring_server import (
    COMPLETIONS,
    GENERATE,
    MAX_LOGPROBS,
    MAX_MODEL_LEN,
    MODEL,
    VOCABULARY,
    Server,
)

pytestmark = pytest.mark.any_runner  # the frontend refuses, whatever runs behind it

CHAT = "/v1/chat/completions"
REQUESTS = int(os.environ.get("HOSTILE_REQUESTS", 200))
"""Of each random run."""
IDS = list(range(5, 25))
MESSAGES = [
    {"role": "user", "content": "def f(x):"},
    {"role": "assistant", "content": " return x"},
]


COMPLETION = {"prompt": IDS, "max_tokens": 0}
TEXTS = {"prompt": "def f(x):", "max_tokens": 0}
SAMPLING = {"max_tokens": 0}
GOOD = {
    "named": (COMPLETIONS, COMPLETION | {"target_token_ids": IDS[1:]}),
    "top-k": (COMPLETIONS, COMPLETION | {"target_top_k": 3}),
    "text": (COMPLETIONS, TEXTS | {"target_text": " return"}),
    "continuations": (COMPLETIONS, TEXTS | {"continuations": [" a", " b"]}),
    "prompt_logprobs": (
        COMPLETIONS,
        COMPLETION | {"max_tokens": 1, "prompt_logprobs": 2, "target_temperature": 2.0},
    ),
    "echo": (COMPLETIONS, TEXTS | {"echo": True, "logprobs": 1}),
    "generate": (
        GENERATE,
        {"token_ids": IDS, "sampling_params": SAMPLING, "target_token_ids": [6, 7]},
    ),
    "generated": (COMPLETIONS, TEXTS | {"max_tokens": 2, "target_generated": {"top_k": 1}}),
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": 0, "score_messages": "last"}),
    "generated chat": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 2, "target_generated": {"token_ids": [5]}},
    ),
    "chat prompt_logprobs": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 1, "prompt_logprobs": 2},
    ),
}
"""What is answered; each hostile request is one of these with a fault."""

BAD_TEMPERATURES = [0, 0.0, -1, math.nan, math.inf, -math.inf, "x", [1.0], {}, True, 1e-320]
BAD_COUNTS = [-2, "x", 1.5, [1], {}, MAX_LOGPROBS + 1, 10**30]
BAD_ROWS = [
    *("x", 5, {}, True, [], [1.5], ["x"], [True], [None], [[[5]]], [[5], 5]),
    *([VOCABULARY], [10**30], IDS, [[5] * (MAX_LOGPROBS + 1)], {"0": 5}),
]
BAD_TEXTS = [5, "", [5], [""], [], {}, True, "\ud800", [["x"]], [None]]
BAD_ENCODINGS = ["x", 5, ["npy"], {}, True]
BAD_GENERATED = [
    *("x", 5, True, [], [{}], {"topk": 1}, {"": 1}),
    *({"token_ids": ids} for ids in (5, "x", {}, [1.5], ["x"], [True], [[5]], [-1])),
    *({"token_ids": ids} for ids in ([VOCABULARY], [10**30], [5] * (MAX_LOGPROBS + 1))),
    *({"top_k": count} for count in [*BAD_COUNTS, 0, -1, True]),
    *({"temperature": value} for value in BAD_TEMPERATURES),
]
BAD_PROMPTS = [
    *([], [-1], [5, VOCABULARY], [5, 10**30], [1.5], {}, 5),
    IDS * MAX_MODEL_LEN,
]
FAULTS = {
    "named": {
        "target_token_ids": BAD_ROWS,
        "target_temperature": BAD_TEMPERATURES,
        "target_top_k": BAD_COUNTS,
        "target_logprobs_encoding": BAD_ENCODINGS,
        "encoding": BAD_ENCODINGS,
        "prompt": BAD_PROMPTS,
        "stream": [True],
        "best_of": [2],
    },
    "top-k": {
        "target_top_k": [*BAD_COUNTS, 0, -1],
        "target_temperature": BAD_TEMPERATURES,
        "prompt": BAD_PROMPTS,
    },
    "text": {"target_text": BAD_TEXTS, "target_temperature": BAD_TEMPERATURES},
    "continuations": {
        "continuations": [*BAD_TEXTS, "x", [" a"] * 1025],
        "target_temperature": BAD_TEMPERATURES,
        "target_top_k": [1],
    },
    "prompt_logprobs": {
        "target_temperature": BAD_TEMPERATURES,
        "prompt_logprobs": BAD_COUNTS,
        "prompt": BAD_PROMPTS,
    },
    "echo": {
        "echo": ["no bool", 5, [], {}],
        "logprobs": BAD_COUNTS,
        "target_temperature": BAD_TEMPERATURES,
    },
    "generate": {
        "target_token_ids": BAD_ROWS,
        "target_temperature": BAD_TEMPERATURES,
        "target_top_k": BAD_COUNTS,
        "encoding": BAD_ENCODINGS,
        "token_ids": [[-1], [VOCABULARY], [1.5], "x", {}],
    },
    "generated": {
        "target_generated": BAD_GENERATED,
        "use_beam_search": [True],
        "encoding": BAD_ENCODINGS,
    },
    "generated chat": {
        "target_generated": BAD_GENERATED,
        "use_beam_search": [True],
        "include_reasoning": [False],
        "encoding": BAD_ENCODINGS,
    },
    "chat": {
        "score_messages": ["all", 5, [], {}, True, ""],
        "target_temperature": BAD_TEMPERATURES,
        "encoding": BAD_ENCODINGS,
    },
    "chat prompt_logprobs": {
        "target_temperature": [2.0, *BAD_TEMPERATURES],  # of score_messages only
        "prompt_logprobs": BAD_COUNTS,
    },
}
"""By the request that they spoil: a field, and what it must not be."""

CASES = [
    (kind, name, value)
    for kind, faults in FAULTS.items()
    for name, values in faults.items()
    for value in values
]


def assert_answers(server: Server) -> None:
    """Asserts that every kind of good request is answered, and none is left behind."""
    for path, body in GOOD.values():
        server.ask(path, **body)
    assert server.gauges() == {"running": 0, "waiting": 0}


def names(error: dict, field: str) -> bool:
    """Whether an error is of a field: ours say so, as `param`; of what is wrong in the
    form of its own fields upstream says where, of prompts that are too long what is."""
    param, message = error["param"], error["message"]
    if param is None:
        return field in message
    if param in ("input_tokens", "input_text"):
        return field in ("prompt", "token_ids")
    return param.removeprefix("body.").split(".")[0] == field


def short(value) -> str:
    text = repr(value)
    return text if len(text) < 100 else text[:100] + "…"


def test_each_fault_is_named(server):
    """All faults, then random ones among good requests: a 400 whose param is the field."""
    rng = random.Random(0)
    assert_answers(server)
    wrong = []
    for index in range(max(REQUESTS, len(CASES))):
        kind, name, value = CASES[index] if index < len(CASES) else rng.choice(CASES)
        path, good = GOOD[kind]
        response = server.post(path, {"model": MODEL} | good | {name: value})
        found = response.status_code
        if found == 400:
            error = response.json()["error"]
            if not names(error, name) or len(response.text) >= 10_000:
                found = (error["param"], error["message"][:200])
        if found != 400 and (kind, name, short(value), found) not in wrong:
            wrong.append((kind, name, short(value), found))
        if index % 20 == 0:
            path, body = rng.choice(list(GOOD.values()))
            server.ask(path, **body)
    assert not wrong, "\n".join(map(str, wrong))
    assert_answers(server)


def test_junk(server):
    """Any values in any fields: an answer or a 400 that names a field of the body."""
    rng = random.Random(1)
    values = [
        *(None, True, False, 0, -1, 1, 3, 1.5, 10**30, 1e300, math.nan, -math.inf),
        *("", "x", "npy", "\ud800", [], [5], [[5]], [[]], {}, {"a": 1}, ["x"], IDS),
    ]
    names = sorted({name for faults in FAULTS.values() for name in faults})
    names += ["n", "temperature", "logprob_token_ids", "return_token_ids", "stream"]
    wrong = []
    for _ in range(REQUESTS):
        path, good = rng.choice(list(GOOD.values()))
        change = {name: rng.choice(values) for name in rng.sample(names, 2)}
        if not change.get("stream"):
            change.pop("stream", None)
        body = {"model": MODEL} | good | change
        response = server.post(path, body)
        found = response.status_code
        if found == 400:
            error = response.json()["error"]
            param, message = error["param"], error["message"]
            known = param in body or param == "max_tokens"  # perhaps in sampling_params
            # What is no text at all is refused before its fields are looked at.
            if not known and not any(n in message for n in (*body, "surrogates")):
                found = (param, message[:200])
        if found not in (200, 400):
            wrong.append((path, short(good), short(change), found))
    assert not wrong, "\n".join(map(str, wrong))
    assert_answers(server)
