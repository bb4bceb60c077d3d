# SPDX-License-Identifier: Apache-2.0
"""Each malformed request is a 400 that names its parameter, and serving goes on."""

import random

import pytest
from malformed import BAD, LARGE, assert_names, large, spoil
from scoring_server import COMPLETIONS, GENERATE, assert_choice
from scoring_texts import SHORT


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


@pytest.mark.any_runner
@pytest.mark.parametrize("kind", LARGE)
def test_large_bodies(server, kind):
    path, param, body = large(kind)
    assert_names(server.refusal(path, body), param)


@pytest.mark.any_runner
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
