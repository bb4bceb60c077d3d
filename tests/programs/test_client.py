# SPDX-License-Identifier: Apache-2.0
"""`examples/common`'s client against a server without a model that fails on purpose."""

import asyncio
import math
import re
import socket
import sys
import threading
import time
from email.utils import formatdate
from pathlib import Path

import numpy as np
import pytest
from failing_server import SLOW, FailingServer, Reply

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from common import AsyncClient, Client, ClientError, Model, ServerGone, top_ids
from common.async_client import MAX_PROMPTS, NPY_VALUES

HELLO = [{"role": "user", "content": "hello"}]
CARDS = b'{"data": [{"id": "m", "root": "/m", "max_model_len": 9}]}'


@pytest.fixture
def server():
    with FailingServer() as server:
        yield server


@pytest.fixture
def client(server):
    with Client(server.url) as client:
        yield client


@pytest.fixture
def slept(client) -> list[float]:
    """Seconds that the client would have slept; it does not."""
    seconds: list[float] = []

    async def sleep(duration: float) -> None:
        seconds.append(duration)

    client.aio._sleep = sleep
    return seconds


# What it asks


def test_scores_of_ids(server, client):
    prompts, targets = [[65, 66, 67], [68, 69]], [[[66, 70], [-1]], [71]]
    first, second = client.score_ids(prompts, targets)
    assert (first.start, second.start) == (1, 1)
    assert first.token_ids.tolist() == [[66, 70], [-1, -1]]
    expected = [[server.logprob([65], i) for i in (66, 70)], [-math.inf] * 2]
    np.testing.assert_array_equal(first.logprobs, np.float32(expected))
    assert second.logprobs == np.float32(server.logprob([68], 71))
    assert first.ranks.tolist() == [[1, 1], [0, 0]] and math.isnan(first.entropy[1])
    kinds = [a.dtype for a in first[1:5]]
    assert kinds == [np.int32, np.float32, np.int32, np.float32]
    assert first.top_token_ids is first.top_logprobs is first.tail_logprob is None


def test_a_server_that_knows_no_top_k(server, client):
    with pytest.raises(ClientError, match="knows no target_top_k"):
        client.score_ids([[65, 66, 67]], [[66, 67]], top_k=3)
    assert server.bodies[-1]["target_top_k"] == 3


def test_a_server_that_knows_no_target_generated(server, client):
    with pytest.raises(ClientError, match="knows no target_generated"):
        client.complete(["ab"], max_tokens=1, target_generated={})
    assert server.bodies[-1]["target_generated"] == {}
    with pytest.raises(ClientError, match="knows no target_generated"):
        client.chat([{"role": "user", "content": "ab"}], max_tokens=1, target_generated={})


def test_nothing_to_score_is_refused(server, client):
    with pytest.raises(ValueError, match="targets or a top_k"):
        client.score_ids([[65, 66, 67]], None, temperature=2.0)
    assert not server.bodies


@pytest.mark.parametrize("kind", [list, np.array], ids=["lists", "arrays"])
def test_large_scores_come_as_arrays(server, client, kind):
    """And are the same as those that come as lists."""
    ids = [*range(65, 91)] * (NPY_VALUES // 26 + 2)
    [scores] = client.score_ids([kind(ids)], [kind(ids[1:])])
    assert server.bodies[-1]["target_logprobs_encoding"] == "npy"
    answer = client.complete([ids], target_token_ids=[ids[1:]], max_tokens=0)
    assert "target_logprobs_encoding" not in server.bodies[-1]
    for ours, theirs in zip(scores, answer.choices[0].scores, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_scores_of_text(server, client):
    first, second = client.score_text(["ab", "c"], ["c", "de"])
    assert first.logprobs == np.float32(server.logprob("ab", "c"))
    expected = [[server.logprob("c", "d")], [server.logprob("cd", "e")]]
    np.testing.assert_array_equal(second.logprobs, np.float32(expected))


@pytest.mark.parametrize(
    ("context", "continuations"), [("ab", ["c", "de"]), ([97, 98], [[99], [100, 101]])]
)
def test_scores_of_continuations(server, client, context, continuations):
    first, second = client.score_continuations(context, continuations)
    assert first.logprob_sum == server.logprob("ab", "c")
    assert second.logprob_sum == pytest.approx(second.target_logprobs.logprobs.sum())
    assert second.token_ids.tolist() == [100, 101] and second.num_tokens == 2
    assert first.is_greedy is True


def test_a_server_that_does_not_score(server, client):
    server.by_name = False
    for ask in (
        lambda: client.score_ids([[1, 2]], [[2]]),
        lambda: client.score_text(["a"], ["b"]),
        lambda: client.score_continuations("a", ["b"]),
    ):
        with pytest.raises(ClientError, match="does not score named tokens"):
            ask()


def test_completions(server, client):
    answer = client.complete(["x", "y"], max_tokens=1, logprobs=4)
    assert answer.text == "#### 7" and answer.cached_tokens == 0
    for prompt, choice in zip("xy", answer.choices, strict=True):
        expected = {name: server.logprob(prompt, name) for name in "abcd"}
        assert choice.top == [expected] and choice.scores is None
    expected = {"model": "m", "prompt": ["x", "y"], "max_tokens": 1, "logprobs": 4}
    assert server.bodies == [expected]


def test_more_prompts_than_a_request_takes(server, client):
    prompts = [[65, n] for n in range(MAX_PROMPTS + 3)]
    targets = [[[n % 7, 70]] for n in range(len(prompts))]
    answer = client.complete(prompts, target_token_ids=targets, max_tokens=0)
    assert [len(body["prompt"]) for body in server.bodies] == [MAX_PROMPTS, 3]
    for prompt, row, choice in zip(prompts, targets, answer.choices, strict=True):
        expected = [server.logprob(prompt[:1], token) for token in row[0]]
        np.testing.assert_array_equal(choice.scores.logprobs[0], np.float32(expected))
    assert answer.cached_tokens == 0
    texts = [f"{n}" for n in range(MAX_PROMPTS + 1)]
    answer = client.complete(texts, max_tokens=1, logprobs=1)
    for text, choice in zip(texts, answer.choices, strict=True):
        assert choice.top[0]["a"] == server.logprob(text, "a")


def test_chat(server, client):
    answer = client.chat(HELLO, max_tokens=5, return_token_ids=True)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == ("Hello", "stop")
    assert choice.token_ids == [ord(c) for c in "Hello"] and choice.top is None
    assert server.bodies[0]["messages"] == HELLO and server.bodies[0]["max_tokens"] == 5


def test_likeliest_tokens_of_a_chat(server, client):
    entries = [{"token": f"token_id:{i}", "logprob": -i / 2} for i in (3, 7)]
    chat = server.chat

    def with_logprobs(body):
        answer = chat(body)
        answer["choices"][0]["logprobs"] = {"content": [{"top_logprobs": entries}]}
        return answer

    server.chat = with_logprobs
    [top] = client.chat(HELLO, logprobs=True, top_logprobs=2).choices[0].top
    assert top_ids(top) == {3: -1.5, 7: -3.5}
    with pytest.raises(ClientError, match="as text"):
        top_ids({"a": -1.0})


def test_tokens_and_text(client):
    assert client.tokenize("ab") == [97, 98] and client.detokenize([97, 98]) == "ab"


def test_what_is_served(server, client):
    assert client.models() == [Model("m", None, 4000, "vllm")]
    assert client.connect() == client.model == Model("m", None, 4000, "vllm")
    assert "block_size" in client.metrics()


def test_the_model_is_looked_for_once(server, client):
    found = client.as_completed(client.aio.tokenize("x") for _ in range(8))
    assert [tokens for _, tokens in found] == [[120]] * 8
    assert server.got == ["/v1/models"]


def test_several_models(server):
    server.models = lambda: {"data": [{"id": "b"}, {"id": "a"}]}
    with Client(server.url) as client, pytest.raises(ClientError, match="'a', 'b'"):
        client.tokenize("x")
    with Client(server.url, "b") as client:
        assert client.connect().name == "b"
    with Client(server.url, "c") as client:
        with pytest.raises(ClientError, match=r"'c', but \['a', 'b'\]"):
            client.connect()


def test_no_model(server, client):
    server.models = lambda: {"data": []}
    with pytest.raises(ClientError, match="serves no model"):
        client.connect()


def test_both_faces_are_the_same(server, client):
    async def ask():
        async with AsyncClient(server.url) as client:
            scores = client.score_text(["ab"], ["c"])
            return await asyncio.gather(scores, client.chat(HELLO), client.models())

    scores, answer, models = asyncio.run(ask())
    assert scores == client.score_text(["ab"], ["c"])
    assert answer == client.chat(HELLO) and models == client.models()
    for name in ("score_ids", "complete", "chat", "request"):
        assert getattr(Client, name).__doc__ == getattr(AsyncClient, name).__doc__


# Addresses


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("", "/v1/models"),
        ("/", "/v1/models"),
        ("/v1/", "/v1/models"),
        ("/api/v1", "/api/v1/models"),
        ("/v1beta/openai", "/v1beta/openai/models"),
    ],
)
def test_the_path_of_an_address(server, given, asked):
    with Client(server.url + given) as client:
        client.connect()
    assert server.got == [asked]


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "", "http://", "http://h:abc", "http://h:99999", "ftp://h"],
)
def test_no_address(url):
    with pytest.raises(ClientError, match="base_url is like http") as error:
        AsyncClient(url)
    assert error.value.param == "base_url"


@pytest.mark.parametrize("key", ["ключ", "a\nb"])
def test_a_key_that_no_header_takes(key):
    with pytest.raises(ClientError, match="api_key"):
        AsyncClient(api_key=key)


def test_this_machine_is_behind_no_proxy(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nothing answers
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Client(server.url, patience=0) as client:
        assert client.connect().name == "m"


def test_a_proxy_without_a_scheme(server, monkeypatch):
    """The server, as a proxy, is asked for another machine's models."""
    monkeypatch.setenv("http_proxy", server.url.removeprefix("http://"))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with Client("http://elsewhere.invalid", patience=0) as client:
        assert client.connect().name == "m"


def test_the_key(server):
    for key in (None, "sesame"):
        with Client(server.url, api_key=key) as client:
            client.connect()
    assert server.keys == {None, "Bearer sesame"}


def test_a_password_is_sent_and_not_shown(server, caplog):
    url = server.url.replace("//", "//user:p%40ss@")
    server.replies = [Reply(b"no", 500), Reply(b"no", 403)]
    with Client(url) as client, pytest.raises(ClientError) as error:
        client.connect()
    assert server.keys == {"Basic dXNlcjpwQHNz"}
    shown = f"{error.value} {error.value.url} {client.url} {caplog.text}"
    assert server.url in shown and "ss@" not in shown and "user" not in shown


# Failures


def test_a_refusal(server, client):
    """Says all there is to say, and is not repeated."""
    content = b'{"error": {"message": "must be a list", "param": "target_text"}}'
    client.connect()
    server.replies = [Reply(content, 400)]
    with pytest.raises(ClientError) as error:
        client.score_text(["a"], ["b"])
    found = error.value
    assert (found.status, found.param, found.message) == (
        400, "target_text", "must be a list"
    )  # fmt: skip
    assert found.url == server.url + "/v1/completions"
    assert str(found) == f"{found.url} refuses: 400: must be a list (target_text)"
    assert client.retries == 0 and not isinstance(found, ServerGone)


def test_a_refusal_that_is_no_json(server, client):
    server.replies = [Reply(b"<html>go away</html>", 403)]
    with pytest.raises(ClientError, match="403: <html>go away"):
        client.connect()


def test_a_redirection_is_not_followed(server, client):
    """It would take the key along."""
    server.replies = [Reply(b"", 308, {"Location": "http://elsewhere/v1"})]
    with pytest.raises(ClientError, match="308: the server is at http://elsewhere/v1"):
        client.connect()


FAULTS = ["500", "429", "gone", "half an answer", "cut JSON", "wrong content type"]


@pytest.mark.parametrize("fault", [*FAULTS, "half of the choices", "no choice"])
def test_faults_that_pass(server, client, slept, fault):
    expected = client.complete(["x", "y"])
    server.faults = [fault] * 2
    assert client.complete(["x", "y"]) == expected
    assert client.retries == len(slept) == 2


@pytest.mark.parametrize("fault", ["no message", "no reason to end"])
def test_faults_of_chats_that_pass(server, client, slept, fault):
    server.faults = [fault]
    assert client.chat(HELLO).text == "Hello" and client.retries == 1


@pytest.mark.parametrize(
    "reply",
    [
        Reply(b'{"data": [{}]}'),
        Reply(b"[]"),
        Reply(b'{"data": [{"id": "\xff"}]}'),
        Reply(CARDS, 200, {"Content-Encoding": "gzip"}),  # which it is not
    ],
)
def test_broken_answers_are_asked_for_again(server, client, slept, reply):
    server.replies = [reply, Reply(CARDS)]
    assert client.connect() == Model("m", "/m", 9) and len(slept) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": [[-1.0, -2.0]]},
        {"logprobs": "bm8gZmlsZQ=="},
        {"entropy": [1.0, 2.0]},
        {"ranks": "%"},
    ],
    ids=str,
)
def test_broken_scores_are_asked_for_again(server, client, slept, change):
    score, changes = server.score, [change]
    server.score = lambda *args: score(*args) | (changes.pop() if changes else {})
    [scores] = client.score_ids([[65, 66]], [[66]])
    assert scores.logprobs.shape == (1, 1) and len(slept) == 1


def test_too_few_rows(server, client):
    server.named = lambda *_: ([65, 66], [[66]])
    with pytest.raises(ClientError, match="1 rows of scores for 2"):
        client.score_ids([[65, 66, 67]], [[66, 67]])


def test_a_server_that_is_none(server, client, slept):
    """Is given up after five answers."""
    server.faults = ["wrong content type"] * 10
    with pytest.raises(ClientError, match="malformed.*text/html.*Is base_url right"):
        client.chat(HELLO)
    assert len(server.faults) == 5 and len(slept) == 4


def test_waits_grow(server, client, slept):
    server.faults = ["500"] * 12
    client.chat(HELLO)
    for n, wait in enumerate(slept[:6]):
        assert 0.1 * 2**n <= wait <= 0.1 * 2**n + 0.1
    assert max(slept) <= 10


@pytest.mark.parametrize("form", ["seconds", "fraction", "date"])
def test_retry_after(server, client, slept, form):
    server.faults = ["429"]
    date = formatdate(time.time() + 100, usegmt=True)
    forms = {"seconds": "100", "fraction": "99.5", "date": date}
    server.retry_after = forms[form]
    client.chat(HELLO)
    # A date is in whole seconds, and the answer takes a moment.
    assert len(slept) == 1 and 90 < slept[0] <= 100


@pytest.mark.parametrize(
    "value", [None, "", "soon", "inf", "-3", "Mon, 01 Jan 2001 00:00:00 GMT"]
)
def test_retry_after_that_says_nothing(server, client, slept, value):
    server.faults, server.retry_after = ["429"], value
    client.chat(HELLO)
    assert len(slept) == 1 and slept[0] <= 0.2


def test_a_pause_longer_than_our_patience(server):
    """Ends at once."""
    server.faults, server.retry_after = ["429"] * 9, "3600"
    with Client(server.url, patience=60) as client:
        with pytest.raises(ServerGone, match="3600 s of pause, .* patience, 60 s"):
            client.chat(HELLO)
    assert client.retries == 0 and len(server.faults) == 8


def test_patience_ends(server):
    server.faults = ["500"] * 100
    with Client(server.url, patience=0.5) as client:
        begin = time.monotonic()
        with pytest.raises(ServerGone, match="no good answer for 0.5 s .*out of luck"):
            client.chat(HELLO)
        assert time.monotonic() - begin < 30
    assert client.retries > 0


@pytest.mark.parametrize("patience", [0.3, 2])
def test_patience_begins_with_the_first_failure(patience):
    """However long that took: a server that never answers is asked again."""
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def accept() -> None:
            try:
                while True:
                    connections.append(silent.accept()[0])
            except OSError:  # closed
                pass

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(url, timeout=0.3, patience=patience) as client:
            with pytest.raises(ServerGone, match=f"no good answer for {patience:g} s"):
                client.connect()
        silent.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in connections:
        connection.close()
    assert len(connections) > 1


def test_no_server():
    with Client("http://127.0.0.1:9", patience=0) as client:
        with pytest.raises(ServerGone, match="ClientConnectorError.* `vllm serve`"):
            client.connect()


@pytest.mark.parametrize("fault", ["slow", "drip"])
def test_timeout_is_for_the_whole_answer(server, fault):
    server.faults = [fault]
    with Client(server.url, timeout=SLOW) as client:
        assert client.chat(HELLO).text == "Hello" and client.retries == 1


@pytest.mark.parametrize("change", [{"root": "/other"}, {"id": "other"}], ids=str)
def test_another_server_at_the_address(server, client, slept, change):
    """Is seen when the connection was lost, before it is asked anything."""
    client.chat(HELLO)
    (card,) = server.models()["data"]
    server.models = lambda: {"data": [card | change]}
    client.chat(HELLO)
    server.faults = ["gone"]
    with pytest.raises(ClientError, match="now serves|does not serve 'm'"):
        client.chat(HELLO)
    assert len(server.bodies) == 2


# Many at once


def test_threads_share_the_pace(server, client, slept):
    """Sixteen requests at once get sixteen different times."""
    client.connect()
    client.aio.requests_per_minute = 60
    barrier = threading.Barrier(16)

    def work() -> None:
        barrier.wait()
        client.tokenize("x")

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(round(seconds) for seconds in slept) == [*range(16)]


def test_results_come_as_they_are_there(server, client):
    """The first answer waits until the second one has been read."""
    client.connect()
    read = threading.Event()
    tokenize = server.tokenize
    server.tokenize = lambda text: (text != "0" or read.wait(60)) and tokenize(text)
    found = client.as_completed(client.aio.tokenize(str(n)) for n in range(2))
    assert next(found) == (1, [49])
    read.set()
    assert [*found] == [(0, [48])]


def test_what_is_left_is_given_up(server, client):
    server.hold_after = 1
    found = client.as_completed(client.aio.chat(HELLO) for _ in range(8))
    next(found)
    found.close()
    server.hold_after = None
    server.go.set()
    assert client.chat(HELLO).text == "Hello"


def test_one_that_fails_ends_the_others(server, client):
    server.hold_after = 0
    server.faults = ["400"]
    with pytest.raises(ClientError, match="too long"):
        for _ in client.as_completed(client.aio.chat(HELLO) for _ in range(8)):
            pass
    assert not server.bodies


def test_a_client_can_be_closed_twice(server):
    client = Client(server.url)
    client.close()
    client.close()


# The documentation


def test_the_snippet_of_the_readme(server, capsys):
    text = (EXAMPLES / "common" / "README.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) == 3
    for snippet in snippets:
        exec(snippet.replace("http://localhost:8000", server.url), {})
    assert capsys.readouterr().out.strip()
