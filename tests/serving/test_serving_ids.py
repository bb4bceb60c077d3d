# SPDX-License-Identifier: Apache-2.0
"""Token ids that are scored over HTTP: a live `vllm serve` on the loopback interface."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scoring import FLOAT32_TOLERANCE, assert_options, random_ids
from scoring_server import COMPLETIONS, GENERATE, MODEL, VOCABULARY, assert_choice, decode
from scoring_texts import LONG, RAGGED, SHORT
from tiny_models import make_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from common import Client


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
        assert (choice.get("target_logprobs") is None) == (not fields)
    assert_choice(choice, llama, SHORT, [5])


@pytest.mark.parametrize(
    "fields",
    [
        dict(max_tokens=0, target_token_ids=LONG[1:]),
        dict(max_tokens=1, prompt_logprobs=1),
        dict(max_tokens=1, echo=True, logprobs=1),
    ],
    ids=["named", "prompt_logprobs", "echo"],
)
def test_tenants_with_salts_read_nothing_of_each_other(server, fields):
    """Neither keys and values nor kept scores: else the time of an answer told what
    somebody else sent."""

    def cached(salt: str) -> int:
        answer = server.ask(prompt=LONG, cache_salt=f"{salt} {[*fields]}", **fields)
        details = answer["usage"]["prompt_tokens_details"]
        return (details or {}).get("cached_tokens") or 0

    counts = [cached(salt) for salt in ("one", "other", "one")]
    assert counts[:2] == [0, 0] and counts[2] > 0
