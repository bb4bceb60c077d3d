# SPDX-License-Identifier: Apache-2.0
"""Texts and continuations that are scored over HTTP."""

import pytest
from scoring import random_ids
from scoring_server import COMPLETIONS, GENERATE, MODEL, VOCABULARY, assert_choice
from scoring_texts import LONG, SHORT, TEXTS, assert_continuation, continuation, straddling
from tiny_models import make_tokenizer


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
