# SPDX-License-Identifier: Apache-2.0
"""What a server says of common mistakes, and of what looks like one and is not."""

import re
import shutil

import pytest
from live_server import live_server
from scoring_server import COMPLETIONS, GENERATE, MODEL, OPTIONS, Server, assert_choice
from tiny_models import BOS
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

pytestmark = pytest.mark.any_runner  # the frontend refuses, whatever runs behind it
CHAT = "/v1/chat/completions"
IDS = [5, 6, 7]
TEXT = "def f(x):\n    return x\n"


@pytest.fixture(scope="module")
def server(runner, model_folder, tmp_path_factory):
    """A server whose tokenizer begins each text with its beginning-of-sequence token."""
    folder = shutil.copytree(model_folder("llama"), tmp_path_factory.mktemp("bos") / "m")
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = TemplateProcessing(f"{BOS} $A", special_tokens=[bos])
    tokenizer.save(file)
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    options += ["--enforce-eager", "--enable-scale-out", f"--chat-template={template}"]
    log = tmp_path_factory.mktemp("serve") / "log"
    with live_server(folder, options, runner, log) as started:
        yield Server(*started)


def completion(prompt=IDS, **fields) -> tuple[str, dict]:
    return COMPLETIONS, {"prompt": prompt, "max_tokens": 0} | fields


def generate(max_tokens=0, sampling=(), token_ids=IDS, **fields) -> tuple[str, dict]:
    sampling = dict(sampling, max_tokens=max_tokens)
    return GENERATE, {"token_ids": token_ids, "sampling_params": sampling} | fields


def chat(**fields) -> tuple[str, dict]:
    messages = [{"role": "user", "content": "a"}]
    return CHAT, {"messages": messages, "max_tokens": 0} | fields


MISSPELT = [
    (completion, "target_tokens_ids", [6, 7], "target_token_ids"),
    (completion, "target_tokens", [6, 7], "target_token_ids"),
    (completion, "targetTokenIds", [6, 7], "target_token_ids"),
    (completion, "target_texts", "x", "target_text"),
    (completion, "continuation", ["x"], "continuations"),
    (completion, "target_topk", 2, "target_top_k"),
    (completion, "target_temperatures", 2, "target_temperature"),
    (completion, "target_logprob_encoding", "npy", "target_logprobs_encoding"),
    (generate, "target_tokens_ids", [6, 7], "target_token_ids"),
    (generate, "target_topk", 2, "target_top_k"),
    (completion, "target_generate", {}, "target_generated"),
    (chat, "target_generate", {}, "target_generated"),
    (chat, "score_message", "last", "score_messages"),
    (chat, "target_topk", 2, "target_top_k"),
]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize(("make", "field", "value", "meant"), MISSPELT)
def test_misspelt_fields(server, make, field, value, meant, max_tokens):
    path, body = make(max_tokens=max_tokens, **{field: value})
    error = server.refusal(path, {"model": MODEL} | body)
    assert error["param"] == field
    assert f"`{meant}`" in error["message"], error


REFUSED = [
    # An encoding, by the name that was given. Without targets, `encoding` may be another.
    (completion(target_token_ids=[6], encoding="x"), "encoding", "'json' or 'npy'"),
    (
        completion(target_token_ids=[6], target_logprobs_encoding="x"),
        "target_logprobs_encoding",
        "'json' or 'npy'",
    ),
    (completion(target_token_ids=[6], encodings="npy"), "encodings", "`encoding`"),
    (
        completion(max_tokens=1, target_logprobs_encoding=5),
        "target_logprobs_encoding",
        "'json' or 'npy'",
    ),
    (generate(target_token_ids=[6], encoding="x"), "encoding", "'json' or 'npy'"),
    (chat(score_messages="last", encoding="x"), "encoding", "'json' or 'npy'"),
    # What belongs beside the sampling parameters.
    (
        generate(max_tokens=1, sampling={"target_token_ids": [6]}),
        "target_token_ids",
        "beside",
    ),
    # What a field must be, and what it was.
    (completion("a", continuations=" np"), "continuations", "a list of texts.*got str"),
    (completion("a", continuations=[5]), "continuations", "hold texts.*got int"),
    (completion("a", continuations=[[5]]), "continuations", "hold texts.*got list"),
    (completion("a", continuations=[""]), "continuations", "not hold an empty text"),
    (completion("a", continuations=[]), "continuations", "not be empty"),
    (completion(continuations=5), "continuations", "list of lists of token ids.*got int"),
    (completion(continuations=[5]), "continuations", "lists of token ids.*got int"),
    (completion(continuations=[" np"]), "continuations", "lists of token ids.*got str"),
    (completion("a", target_text=5), "target_text", "a text, or a list.*got int"),
    (completion("a", target_text=[5]), "target_text", "hold texts.*got int"),
    (completion(["a", "b"], target_text=["c"]), "target_text", r"one .* prompt \(2\)"),
    (completion("a", target_text=""), "target_text", "not be empty"),
    (completion("a", target_text=["c", ""]), "target_text", r"one .* prompt \(1\)"),
    (completion(["a", "b"], target_text=["c", ""]), "target_text", "not hold an empty"),
    (completion([[5, 6], [5]], target_token_ids=6), "target_token_ids", r"prompt \(2\)"),
    # A prompt of one token has nothing before it.
    (completion([5], target_token_ids=[5]), "target_token_ids", "two tokens"),
    (completion([5], target_top_k=1), "target_top_k", "two tokens"),
    (
        generate(token_ids=[5], target_token_ids=[5]),
        "target_token_ids",
        "two tokens",
    ),
]


@pytest.mark.parametrize(
    ("request_", "param", "message"), REFUSED, ids=range(len(REFUSED))
)
def test_refused(server, request_, param, message):
    path, body = request_
    error = server.refusal(path, {"model": MODEL} | body)
    assert error["param"] == param, error
    assert re.search(message, error["message"]), error


TAKEN = [
    completion(max_tokens=1, user="x", message="x", target="x", encoding_format="x"),
    completion(max_tokens=1, encoding="npy"),
    completion(max_tokens=1, encoding="utf-8", encodings=["x"], decoding="greedy"),
    completion(max_tokens=1, continuation="x"),
    completion(max_tokens=1, encoding=None, target_logprobs_encoding=None),
    completion(max_tokens=1, target_tokens_ids=None),
    completion(target_token_ids=[6], target_logprobs_encoding=None),
    completion(max_tokens=1, **{f"target_text{n}" * 99: n for n in range(999)}),
    generate(max_tokens=1, target="x", encoding="utf-8"),
    chat(max_tokens=1, encoding=["npy"], continuations="x"),
]


@pytest.mark.parametrize("request_", TAKEN, ids=range(len(TAKEN)))
def test_taken(server, request_):
    path, body = request_
    server.ask(path, **body)


@pytest.mark.parametrize(
    ("fields", "others"),
    [
        ({"prompt": "", "target_text": TEXT}, ()),
        ({"prompt": [""], "target_text": [TEXT]}, ()),
        ({"prompt": "", "continuations": [TEXT]}, ("logprob_sum", "is_greedy")),
    ],
)
def test_a_whole_text_after_the_beginning_of_sequence_token(server, llama, fields, others):
    """An empty prompt: every token of the text is scored."""
    answer = server.ask(**fields, max_tokens=0, return_token_ids=True)
    (choice,) = answer["choices"]
    ids = choice["prompt_token_ids"]
    assert len(ids) > 2
    assert_choice(choice, llama, ids, ids[1:], others)


@pytest.mark.parametrize("fields", [{"target_text": TEXT}, {"continuations": [TEXT]}])
def test_an_empty_prompt_without_special_tokens(server, fields):
    """The prompt is what has to change, so the error names it."""
    body = {"model": MODEL, "max_tokens": 0, "add_special_tokens": False} | fields
    error = server.refusal(COMPLETIONS, body | {"prompt": ""})
    assert error["param"] == "prompt", error
    assert "must not be empty" in error["message"], error
    server.ask(**body | {"prompt": "a a a"})
