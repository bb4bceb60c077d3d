# SPDX-License-Identifier: Apache-2.0
"""`examples/applications/ace` without a model: the client and the command against a server
that fails on purpose."""

import sys
import threading
from pathlib import Path

import pytest
from ace_runs import (
    HELLO,
    SAMPLES,
    command,
    journal,
    playbook,
    samples,  # noqa: F401
    says,
    server,  # noqa: F401
    settings,
    whole,  # noqa: F401
)
from failing_server import SLOW

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "applications"), str(EXAMPLES)]

from ace import ClientError, LLMClient, Sampling
from ace import __main__ as program

# The client


FAULTS = [
    "500",
    "429",
    "gone",
    "slow",
    "half an answer",
    "cut JSON",
    "no choice",
    "no message",
    "no reason to end",
    "wrong content type",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_nothing(server, samples, whole, tmp_path, fault):
    server.faults = [None, fault] * 2
    output = tmp_path / "out"
    timeout = SLOW if fault == "slow" else 60
    program.run(settings(server, samples, output, timeout=timeout))
    assert not server.faults
    assert journal(output) == journal(whole)
    assert playbook(output) == playbook(whole)


def test_retries_are_counted(server):
    with LLMClient("openai", base_url=server.url + "/v1/") as client:
        server.faults = ["500", "wrong content type", "gone"]
        [found] = client.chat([HELLO], Sampling())
        assert client.retries == 3 and len(server.bodies) == 1
        assert found.token_ids == [ord(c) for c in found.text]


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("", "/v1/models"),
        ("/v1/", "/v1/models"),
        ("/v1beta/openai", "/v1beta/openai/models"),
    ],
)
def test_the_path_of_an_address(server, given, asked):
    with LLMClient("openai", base_url=server.url + given):
        assert server.got == [asked]


@pytest.mark.parametrize("omitted", [False, True])
def test_a_model_that_thinks_until_its_tokens_are_used_up(server, omitted):
    """Says nothing, which is an answer."""
    chat = server.chat

    def think(body):
        answer = chat(body)
        (choice,) = answer["choices"]
        choice["message"] |= {"content": None, "reasoning_content": "Hm."}
        choice["finish_reason"] = "length"
        if omitted:
            del choice["message"]["content"]
        return answer

    server.chat = think
    with LLMClient("openai", base_url=server.url, patience=0) as client:
        [found] = client.chat([HELLO], Sampling())
    assert (found.text, found.finish_reason) == ("", "length")
    assert len(server.bodies) == 1


def test_without_a_system_role(server):
    """Its words are at the head of the user's; what has none stays as it is."""
    asked = [{"role": "system", "content": "Be kind."}, HELLO[1]]
    begun = {"role": "assistant", "content": "Well"}
    with LLMClient("openai", base_url=server.url, system_role=False) as client:
        server.says = lambda messages: "Hello"
        client.chat([[*asked, begun], HELLO[1:]], Sampling())
    joined = {"role": "user", "content": "Be kind.\n\nhello"}
    messages = [body["messages"] for body in server.bodies]
    assert sorted(messages, key=len) == [HELLO[1:], [joined, begun]]


def test_a_server_whose_template_has_no_system_role(server):
    """The error names the option."""
    with LLMClient("openai", base_url=server.url) as client:
        server.faults = ["400"]
        with pytest.raises(ClientError, match="too long") as error:
            client.chat([HELLO], Sampling())
        assert "--no-system-role" not in str(error.value)
        server.faults = ["no system role"]
        with pytest.raises(ClientError, match="not supported.*--no-system-role"):
            client.chat([HELLO], Sampling())


def test_two_clients_at_once(server):
    asked = [
        [{"role": "system", "content": "Answer"}, {"role": "user", "content": f"{n}"}]
        for n in range(30)
    ]
    expected = [says(messages) for messages in asked]
    assert len(set(expected)) == 2
    wrong = []

    def work() -> None:
        with LLMClient("openai", base_url=server.url, concurrency=8) as client:
            for _ in range(5):
                texts = [c.text for c in client.chat(asked, Sampling())]
                wrong.extend([texts] if texts != expected else [])

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(server.bodies) == 2 * 5 * 30


def test_no_more_requests_than_allowed_are_under_way(server):
    """And no fewer: each answer waits for two others."""
    under_way, most = 0, 0
    chat = server.chat
    three = threading.Barrier(3)

    def count(body):
        nonlocal under_way, most
        with server.lock:
            under_way += 1
            most = max(most, under_way)
        three.wait(60)
        with server.lock:
            under_way -= 1
        return chat(body)

    server.chat = count
    with LLMClient("openai", base_url=server.url, concurrency=3) as client:
        client.chat([HELLO] * 12, Sampling())
    assert most == 3


def test_settings_reach_the_server(server):
    sampling = Sampling(
        max_tokens=7, temperature=0.5, top_p=0.9, top_k=5, seed=3, stop=("\n",)
    )
    begun = [*HELLO, {"role": "assistant", "content": "Well"}]
    with LLMClient("openai", base_url=server.url) as client:
        client.chat([begun], sampling)
    (body,) = server.bodies
    expected = {
        "model": "m",
        "messages": begun,
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 3,
        "stop": ["\n"],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    assert {name: body[name] for name in expected} == expected


def test_a_server_that_is_not_vllm(server):
    """Is sent what every server knows, and is not asked for what it cannot."""
    server.owner = "someone"
    with LLMClient("openai", base_url=server.url) as client:
        [found] = client.chat([HELLO], Sampling())
        assert found.token_ids is None
        for options, message in (({}, "--no-prefill"), ({"top_k": 3}, "top_k")):
            begun = [{"role": "assistant", "content": "Well"}] if not options else []
            with pytest.raises(ClientError, match=message):
                client.chat([HELLO + begun], Sampling(**options))
    (body,) = server.bodies
    assert set(body) == {"model", "messages", "max_tokens", "temperature", "top_p"}


def test_a_server_without_logprobs(server):
    with (
        LLMClient("openai", base_url=server.url) as client,
        pytest.raises(ClientError, match="no log-probabilities"),
    ):
        client.chat([HELLO], Sampling(), top=2)


def test_a_server_that_is_none(server):
    with LLMClient("openai", base_url=server.url) as client:
        server.faults = ["wrong content type"] * 10
        with pytest.raises(ClientError, match="Is base_url right"):
            client.chat([HELLO], Sampling())
        assert len(server.faults) == 5


def test_a_refusal_is_shown_and_not_repeated(server, samples, tmp_path, capsys):
    server.faults = ["400"] * SAMPLES
    arguments = command(server.url, samples, tmp_path, "--concurrency=1")
    with pytest.raises(SystemExit) as error:
        program.main(arguments)
    assert error.value.code == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "refuses: 400: " in shown and "prompt: too long" in shown
    assert "the same command goes on" in shown
    assert len(server.faults) == SAMPLES - 1 and not server.bodies


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ([], 1, "Is `vllm serve` running?"),
        (["--base-url=localhost"], 1, "--base-url is like http://"),
        (["--base-url=http://host:abc"], 1, "--base-url is like"),
        (["--base-url=http://host:99999"], 1, "--base-url is like"),
        (["--base-url=http://"], 1, "--base-url is like"),
        (["--rounds=-1"], 2, "--rounds"),
        (["--no-such-option=1"], 2, "--no-such-option"),
        (["--speculative-config=ngram"], 2, "speculative_config"),
        (["--playbook=nowhere"], 1, "nowhere is no playbook"),
        (["--samples=nowhere"], 1, "nowhere"),
        ([f"--output={__file__}"], 1, "--output"),
        (["--provider=vllm", "--chat-template=nowhere"], 1, "--chat-template"),
        (["--provider=transformers", "--dtype=foo"], 1, "--dtype foo"),
        (["--api-key=ключ"], 1, "--api-key"),
        (["--timeout=inf"], 2, "--timeout"),
    ],
)
def test_errors_of_the_command(options, status, message, samples, tmp_path, capsys):
    nobody = command("http://127.0.0.1:9", samples, tmp_path, "--patience=0", *options)
    with pytest.raises(SystemExit) as error:
        program.main(nobody)
    assert error.value.code == status
    shown = " ".join("".join(capsys.readouterr()).split())
    assert message in shown and "Traceback" not in shown


def test_a_bench_whose_figures_cannot_be_kept(capsys):
    with pytest.raises(SystemExit):
        program.main(["bench", "--output=/nowhere/figures.json"])
    assert "--output: " in capsys.readouterr().err


def test_wrong_model(server):
    with pytest.raises(ClientError, match=r"does not serve 'other', but \['m'\]"):
        LLMClient("openai", "other", base_url=server.url)


@pytest.mark.parametrize(("arguments", "word"), [([], "bench"), (["run"], "--rounds")])
def test_help(arguments, word, capsys):
    with pytest.raises(SystemExit) as error:
        program.main([*arguments, "--help"])
    assert error.value.code == 0 and word in capsys.readouterr().out
    with pytest.raises(SystemExit) as error:
        program.main(["walk"])
    assert error.value.code == 2
