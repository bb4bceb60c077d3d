# SPDX-License-Identifier: Apache-2.0
"""Malformed requests for scores, and the parameter that each answer must name.

Each table maps a parameter to changes that spoil a valid request; a callable makes the
value from a generator.
"""

import random
from collections.abc import Callable

from scoring_server import COMPLETIONS, GENERATE, MAX_LOGPROBS, MAX_MODEL_LEN, MODEL, VOCABULARY
from scoring_texts import LONG, SHORT

MIB = 2**20
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
    ("prompt", {"prompt": ["", "b"]}),
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
