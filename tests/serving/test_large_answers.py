# SPDX-License-Identifier: Apache-2.0
"""Big answers: in pieces, so that the server goes on with others, and bounded."""

import asyncio
import time
from contextlib import suppress

import aiohttp
import numpy as np
import pytest
from openai import OpenAI
from scoring import random_ids
from scoring_server import (
    COMPLETIONS,
    MAX_LOGPROBS,
    MAX_MODEL_LEN,
    MODEL,
    REQUEST_SECONDS,
    VOCABULARY,
    decode,
)

PROMPT = random_ids(0, VOCABULARY, MAX_MODEL_LEN - 1)
SCORED = dict(prompt=PROMPT, target_token_ids=PROMPT[1:], max_tokens=1)
BATCH = [random_ids(seed, VOCABULARY, MAX_MODEL_LEN - 1) for seed in range(64)]
LARGE = {
    "prompt_logprobs": dict(prompt=BATCH, prompt_logprobs=MAX_LOGPROBS, max_tokens=1),
    "target_top_k": dict(prompt=BATCH, target_top_k=MAX_LOGPROBS, max_tokens=0),
    "npy": dict(
        prompt=BATCH,
        target_top_k=MAX_LOGPROBS,
        target_logprobs_encoding="npy",
        max_tokens=0,
    ),
    "echo": dict(prompt=BATCH, echo=True, logprobs=5, max_tokens=1),
    "n": SCORED | {"n": 200},
}

pytestmark = pytest.mark.any_runner


async def ask_meanwhile(url: str, body: dict) -> tuple[bytes, float, float]:
    """The answer, its seconds, and the longest of requests for `/health` meanwhile."""
    timeout = aiohttp.ClientTimeout(REQUEST_SECONDS)
    longest = 0.0

    async def probe(session: aiohttp.ClientSession) -> None:
        nonlocal longest
        while True:
            start = time.monotonic()
            try:
                async with session.get("/health") as response:
                    assert response.status == 200
            finally:  # of one that the end cuts off, its time until then
                longest = max(longest, time.monotonic() - start)
            await asyncio.sleep(0.005)

    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        probing = asyncio.create_task(probe(session))
        start = time.monotonic()
        async with session.post(COMPLETIONS, json={"model": MODEL} | body) as response:
            data = await response.read()
            assert response.status == 200, data[:1000]
            assert response.headers["Content-Length"] == str(len(data))
            assert response.headers["Content-Type"] == "application/json"
        seconds = time.monotonic() - start
        probing.cancel()
        with suppress(asyncio.CancelledError):
            await probing
    return data, seconds, longest


@pytest.mark.parametrize("name", LARGE)
def test_health_answers_while_a_big_answer_is_made(server, name):
    for _ in range(3):
        data, seconds, longest = asyncio.run(ask_meanwhile(server.url, LARGE[name]))
        assert len(data) > 2**20
        print(f"{name}: {len(data)} bytes, {seconds:.2f} s, /health {longest:.3f} s")
        # At once, it took most of the time; other work of the machine is in it too.
        if longest < 0.25 + seconds / 10:
            return
    raise AssertionError(f"/health took {longest:.2f} s of {seconds:.2f} s")


def without(answer: dict) -> list:
    """Its choices, but for what is another's in each answer."""
    return [choice | {"index": 0} for choice in answer["choices"]]


def test_big_answers_say_what_small_ones_do(server):
    """A batch, in pieces, and each of its prompts alone, at once."""
    for fields in (
        dict(target_token_ids=[p[1:] for p in BATCH], max_tokens=0),
        dict(prompt_logprobs=2, temperature=0, max_tokens=1),
        dict(echo=True, logprobs=1, temperature=0, max_tokens=1),
    ):
        whole = without(server.ask(prompt=BATCH, **fields))
        for prompt, choice in [*zip(BATCH, whole)][::16]:
            alone = fields | {"prompt": prompt}
            if "target_token_ids" in fields:
                alone["target_token_ids"] = prompt[1:]
            (expected,) = without(server.ask(**alone))
            assert_near(choice, expected)


def assert_near(found, expected) -> None:
    """Asserts that all is equal, but for the last digits of numbers."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_near(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected):
            assert_near(*pair)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-4)
    else:
        assert found == expected


def test_choices_of_a_prompt_have_the_same_scores(server):
    answer = server.ask(**LARGE["n"])
    assert len(answer["choices"]) == 200
    first = answer["choices"][0]["target_logprobs"]
    assert np.isfinite(decode("logprobs", first["logprobs"])).all()
    for choice in answer["choices"]:
        assert choice["target_logprobs"] == first


def test_clients_take_big_answers_as_any(server):
    client = OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY")
    targets = [prompt[1:] for prompt in BATCH]
    completion = client.completions.create(
        model=MODEL, prompt=BATCH, max_tokens=0, extra_body={"target_token_ids": targets}
    )
    for choice, rows in zip(completion.choices, targets, strict=True):
        assert choice.target_logprobs["token_ids"] == [[i] for i in rows]


N = {"n": 16384, "temperature": 1}
REFUSED = {
    "target_token_ids": SCORED | N,
    "prompt_logprobs": dict(prompt=PROMPT, prompt_logprobs=MAX_LOGPROBS) | N,
    "echo": dict(prompt=PROMPT, echo=True, logprobs=5) | N,
}
"""7 kB that ask for much: the choices repeat the prompt's scores."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_too_big_is_refused(server, name):
    start = time.monotonic()
    error = server.refusal(COMPLETIONS, {"model": MODEL} | REFUSED[name])
    assert error["param"] == "n", error
    assert str(2**28) in error["message"]
    assert time.monotonic() - start < 20
    assert server.gauges() == {"running": 0, "waiting": 0}


def test_less_is_answered(server):
    """As many choices without scores; scores of few choices."""
    answer = server.ask(prompt=PROMPT, max_tokens=1, temperature=1, n=1000)
    assert len(answer["choices"]) == 1000
    answer = server.ask(**SCORED, n=2)
    assert len(answer["choices"]) == 2
