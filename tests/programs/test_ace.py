# SPDX-License-Identifier: Apache-2.0
"""`examples/applications/ace` without a model: the playbook, what is read of replies,
the journal, and the client and the loop against a server that fails on purpose."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import runners
from failing_server import SLOW, FailingServer

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "applications"), str(EXAMPLES)]

from ace import ClientError, Completion, LLMClient, Playbook, Sampling
from ace import __main__ as program
from ace import bench, make_samples, prompts
from ace.chat import is_continued
from ace.client import REFERENCE_MODEL, TEMPLATE
from ace.playbook import (
    Add,
    Bullet,
    PlaybookError,
    Remove,
    Update,
    read_json,
    read_operations,
    read_reflection,
)
from ace.replies import Replies
from ace.settings import RunSettings
from common import Journal, JournalError

SAMPLES = 12
HELLO = [{"role": "system", "content": ""}, {"role": "user", "content": "hello"}]


def says(messages: list[dict]) -> str:
    """Right for about half of the samples at first, for more with a longer playbook."""
    system, user = messages[0]["content"], messages[1]["content"]
    number = hashlib.sha256(user.encode()).digest()[0]
    if system.startswith("Answer"):
        truth = "int" if "name_0" in user or "name_2" in user else "str"
        bullets = user.count("helpful")
        wrong = {"int": "str", "str": "int"}[truth]
        return f"Hm.\nAnswer: {truth if number % 8 < 4 + bullets else wrong}"
    if '"lesson"' in system:
        name = re.search(r"name_\d+", user)[0]
        return json.dumps({"lesson": f"look at {name}", "tags": {"b1": "helpful"}})[12:]
    if system.startswith("Keep"):
        lesson = re.search(r"look at name_\d+", user)[0]
        return f'{lesson}"}}]}}'
    return "Hello"


@pytest.fixture
def server():
    with FailingServer() as server:
        server.says = says
        yield server


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> Path:
    rows = [
        {
            "question": f"Is name_{n}x an int or a str?",
            "answer": "int" if n in (0, 2) else "str",
            "choices": ["int", "str"],
            "split": "validation" if n % 3 == 2 else "train",
        }
        for n in range(SAMPLES)
    ]
    path = tmp_path_factory.mktemp("samples") / "samples.json"
    path.write_text(json.dumps(rows))
    return path


def settings(server, samples, output, **options) -> RunSettings:
    defaults = {"rounds": 2, "stop_after": 0, "timeout": 60, "patience": 60}
    url = server if isinstance(server, str) else server.url
    return RunSettings(
        provider="openai",
        base_url=url,
        samples=samples,
        output=output,
        **(defaults | options),
    )


def journal(output: Path) -> list[dict]:
    """What was said, in the order of the loop; each place is there once."""
    _, *lines = map(json.loads, (output / "journal.jsonl").read_text().splitlines())
    places = Counter((line["round"], line["phase"], line["index"]) for line in lines)
    assert set(places.values()) <= {1}
    return sorted(lines, key=lambda line: [*map(str, line.values())])


def playbook(output: Path) -> str:
    return (output / "playbook.json").read_text()


@pytest.fixture
def whole(server, samples, tmp_path) -> Path:
    """Folder of a run that nothing disturbs."""
    output = tmp_path / "whole"
    program.run(settings(server, samples, output))
    server.bodies.clear()
    return output


# The playbook


def with_bullets(count: int, **fields) -> Playbook:
    book = Playbook(**fields)
    book.apply([Add(type="ADD", content=f"advice number {n}") for n in range(count)])
    return book


def test_operations():
    book = with_bullets(3)
    changed = book.apply(
        [
            Update(type="UPDATE", id="b2", content=" better\nadvice "),
            Remove(type="REMOVE", id="b1"),
            Remove(type="REMOVE", id="b1"),
            Update(type="UPDATE", id="b9", content="nobody"),
            Add(type="ADD", content="something else"),
        ]
    )
    assert changed == 3
    assert [(b.id, b.content) for b in book.bullets] == [
        ("b2", "better advice"),
        ("b3", "advice number 2"),
        ("b4", "something else"),
    ]


def test_an_id_is_never_used_again():
    book = with_bullets(2)
    book.apply([Remove(type="REMOVE", id="b2"), Add(type="ADD", content="new")])
    assert [b.id for b in book.bullets] == ["b1", "b3"]


def test_what_is_there_is_not_added():
    book = Playbook()
    text = "Prefer the plural for a list and the singular for one of its entries"
    assert book.apply([Add(type="ADD", content=text)]) == 1
    assert book.apply([Add(type="ADD", content=text.upper() + "  ")]) == 0
    assert book.apply([Add(type="ADD", content=text.replace("its", "the"))]) == 0
    assert book.apply([Add(type="ADD", content="Prefer the singular")]) == 1


def test_an_update_to_what_another_one_says_joins_the_two():
    book = with_bullets(2)
    book.tag({"b1": "helpful", "b2": "harmful"})
    book.apply([Update(type="UPDATE", id="b2", content="Advice number 0")])
    assert book.bullets == [
        Bullet(id="b1", content="advice number 0", helpful=1, harmful=1)
    ]


def test_the_size_is_bounded():
    """The bullet of least worth goes, of equals the oldest; what is new stays."""
    book = with_bullets(3, max_bullets=3, max_chars=15, alike=1)
    book.tag({"b1": "helpful", "b3": "harmful", "b9": "helpful"})
    book.apply([Add(type="ADD", content="a" * 20)])
    assert [b.id for b in book.bullets] == ["b1", "b2", "b4"]
    assert book.bullets[-1].content == "a" * 15
    book.apply([Add(type="ADD", content="c")])
    assert [b.id for b in book.bullets] == ["b1", "b4", "b5"]


def test_a_playbook_that_is_loaded_is_bounded(tmp_path):
    """Before a run begins, and when it grows; the last bullet is not spared."""
    path = tmp_path / "playbook.json"
    book = with_bullets(5)
    book.tag({"b1": "helpful", "b3": "helpful", "b5": "harmful"})
    book.save(path)
    start = RunSettings(playbook=path, max_bullets=3).begin()
    assert [b.id for b in start.bullets] == ["b1", "b3", "b4"]
    assert start.max_bullets == 3
    book.max_bullets = 2
    book.apply([Add(type="ADD", content="new")])
    assert [b.id for b in book.bullets] == ["b3", "b6"]


def test_an_id_of_a_loaded_playbook_is_not_used_again(tmp_path):
    """Also by a playbook that somebody wrote, without `next_number`."""
    path = tmp_path / "playbook.json"
    bullets = [{"id": i, "content": i} for i in ("b2", "mine", "b7")]
    path.write_text(json.dumps({"bullets": bullets}))
    book = Playbook.load(path)
    book.apply([Add(type="ADD", content="something new")])
    assert [bullet.id for bullet in book.bullets] == ["b2", "mine", "b7", "b8"]
    path.write_text(json.dumps({"bullets": [bullets[0]] * 2}))
    with pytest.raises(PlaybookError, match="the same id"):
        Playbook.load(path)


def test_a_playbook_is_kept(tmp_path, monkeypatch):
    book, path = with_bullets(2), tmp_path / "playbook.json"
    book.tag({"b1": "helpful"})
    book.save(path)
    assert Playbook.load(path) == book
    assert json.loads(path.read_text())["bullets"][0]["helpful"] == 1
    path.write_text(path.read_text(), "utf-8-sig")
    assert Playbook.load(path) == book

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        with_bullets(5).save(path)
    assert Playbook.load(path) == book
    for content in (b"nonsense", b'{"bullets": [{"id": 1}]}', b'{"": "\xe9"}'):
        path.write_bytes(content)
        with pytest.raises(PlaybookError, match="is no playbook"):
            Playbook.load(path)


# What is read of replies


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        ('Sure!\n```json\n{"a": 1}\n```\nDone {ok}', {"a": 1}),
        ('see [b1] and [2]: {"a": [1]}', {"a": [1]}),
        ('{not json} {"a": 1}', {"a": 1}),
        ('{"a": "two\nlines"}', {"a": "two\nlines"}),
        ('{"a": "cut in the mid', {"a": "cut in the mid"}),
        ('[{"a": 1}, {"a": 2}, {"a', [{"a": 1}, {"a": 2}, {}]),
        ('{"a": "cut\tin a li\nne', {"a": "cut in a li ne"}),
        ('{} {"a": 1}', {"a": 1}),
        ('{"a": {"b": 1', {"a": {"b": 1}}),
        ('{"a": [{"b": 1}, {"c": "x,}"},]} and so on', {"a": [{"b": 1}, {"c": "x,}"}]}),
        ('[{"a": "\\\\",\n},{"b": ", ]', [{"a": "\\"}, {"b": ", ]"}]),
        ("[" * 1500 + '{"a": 1}]', [{"a": 1}]),
        ('{"a": 1} {"a": 2}', {"a": 1}),
        ('<think>{"a": 1}</think>{"a": 2}</think>{"a": 3}', {"a": 3}),
        ('<think>{"a": 1}</think>', None),
        ("[]", []),
        ("none at all", None),
        ("", None),
    ],
)
def test_json_in_a_reply(text, value):
    assert read_json(text) == value


def test_the_json_that_is_wanted():
    """Has the key, and is the last one that has it."""
    one, two, other = '{"a": 1}', '{"a": 2}', '{"b": {"a": 3}}'
    for text in (f"{one} so {two}", f"{other}{one}{two} [{one}] {other}", two[:-1]):
        assert read_json(text, "a") == {"a": 2}
    assert read_json(f"{other} {one} {other} {two[:-1]}", "a") == {"a": 2}
    assert read_json(f"[{one}] {other}", "c") == [{"a": 1}]
    assert read_json("{}", "c") == {}


def test_reflections():
    found = read_reflection('{"lesson": " x ", "tags": {"b1": "helpful", "b2": "so"}}')
    assert (found.lesson, found.tags) == ("x", {"b1": "helpful"})
    assert read_reflection('{"lesson": "x", "tags": ["b1"]}').tags == {}
    found = read_reflection(
        '<think>{"lesson": "draft"}</think> {"b2": "neutral"} {"lesson": "first"} '
        '{"lesson": "last", "tags": {"[b3]": "harmful",},}'
    )
    assert (found.lesson, found.tags) == ("last", {"b3": "harmful"})
    for text in ("no", "{}", '{"lesson": ""}', '{"lesson": 5}', '[{"lesson": "x"}]'):
        assert read_reflection(text) is None


@pytest.mark.parametrize(
    ("text", "kinds", "malformed"),
    [
        ('{"operations": [{"type": "add", "content": "x"}]}', ["ADD"], 0),
        ('{"operations": []}', [], 0),
        ("[]", [], 0),
        ('{"type": "REMOVE", "id": "b1"}', ["REMOVE"], 0),
        (
            '[{"type": "UPDATE", "id": "b1", "content": "y"}, {"type": "UPDATE"}, 7]',
            ["UPDATE"],
            2,
        ),
        ('{"operations": [{"type": "ADD", "content": "cut of', ["ADD"], 0),
        ('{"operations": [{"type": "MOVE", "id": "b1"}]}', [], 1),
        ('{"operations": "none"}', [], 1),
        (
            '{"operations": [{"type": "ADD", "content": "x"}, '
            '{"type": "REMOVE", "id": "b1"},]}',
            ["ADD", "REMOVE"],
            0,
        ),
        ('{"type": "REMOVE", "id": "b1"} {"operations": []}', [], 0),
        (
            '<think>{"operations": []}</think>Like {"operations": [7]}: '
            '{"operations": [{"type": "ADD", "content": "cut of',
            ["ADD"],
            0,
        ),
        ("I would add nothing.", [], 1),
    ],
)
def test_operations_in_a_reply(text, kinds, malformed):
    operations, wrong = read_operations(text)
    assert ([o.type for o in operations], wrong) == (kinds, malformed)


def test_operations_name_bullets_as_the_prompt_does():
    book = with_bullets(3)
    operations, _ = read_operations(
        '[{"type": "REMOVE", "id": "[b1]"}, '
        '{"type": "UPDATE", "id": " [b3]", "content": "better"}]'
    )
    assert book.apply(operations) == 2
    assert [(b.id, b.content) for b in book.bullets] == [
        ("b2", "advice number 1"),
        ("b3", "better"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Answer: int", "int"),
        ("A str. **Answer**: int", "int"),
        ("A str. __Answer__ : int", "int"),
        ("A str. **Answer:** int", "int"),
        ("A str. ANSWER\uff1aint", "int"),
        ("int my_answer: str", "int"),
        ("Answer: `Str`", "str"),
        ("Is it a str? Answer: str.\nanswer : int", "int"),
        ("    name_int: str = 'int'", "str"),
        ("print(strint)", None),
        ("", None),
    ],
)
def test_answers_with_choices(text, said):
    sample = prompts.Sample(
        question="?", answer="int", choices=["int", "str"], prefix="    name_int:"
    )
    judged = prompts.judge(sample, text)
    assert (judged.said, judged.right) == (said, said == "int")


@pytest.mark.parametrize(
    ("choices", "text", "said"),
    [
        (["yes", "no"], "Answer: Yes", "yes"),
        (["yes", "no"], "Answer: NO, not yes", "no"),
        (["ma", "Ma"], "Answer: Ma", "Ma"),
        (["ma", "Ma"], "Answer: MA", None),
        (["1", "1.5"], "Answer: 1.5", "1.5"),
        (["1", "1.5"], "Answer: 1.", "1"),
        (["C++", "C"], "Answer: C++.", "C++"),
        (["C", "C++"], "Answer: c, not C++", "C"),
        (["a", "a"], "Answer: A", "a"),
    ],
)
def test_which_choice(choices, text, said):
    sample = prompts.Sample(question="?", answer=choices[0], choices=choices)
    assert prompts.judge(sample, text).said == said


def test_an_article_is_no_choice():
    sample = prompts.Sample(question="?", answer="B", choices=["A", "B"])
    assert prompts.judge(sample, "It is a string, so B.").right
    assert prompts.judge(sample, "Answer: b").right


def test_answers_without_choices():
    sample = prompts.Sample(question="?", answer="Forty-two")
    for text in ("forty-two", "Hm. Answer:\n\n **forty-TWO**. \nyes", "`Forty-two`"):
        assert prompts.judge(sample, text).right
    for text in ("43", "", "forty-two or three"):
        assert not prompts.judge(sample, text).right
    sample = prompts.Sample(question="?", answer="U.S.")
    for text in ("U.S.", "**Answer**: u.s", "Answer: 'U.S.'"):
        assert prompts.judge(sample, text).right


def reflection_on(answer: str, **fields) -> str:
    """What the reflector is asked."""
    sample = prompts.Sample(question="?", answer="yes", **fields)
    judged = prompts.judge(sample, answer)
    return prompts.reflector(sample, answer, judged, Playbook(), False)[1]["content"]


def test_the_reflector_sees_the_whole_answer_and_what_was_read():
    answer = "Well, " * 500 + "Answer: Yes"
    choices = ["yes", "no"]
    asked = reflection_on(answer, choices=choices)
    assert f"Answer: {answer}\nIt was read as: yes\nIt is right." in asked
    asked = reflection_on(" no\n", choices=choices)
    assert "Answer: no\nIt is wrong. The truth: yes" in asked
    assert "read as" not in reflection_on("maybe", choices=choices)
    assert "It was read as: maybe\nIt is wrong" in reflection_on("Answer: maybe.")


def test_the_prompts_fit_the_reference_model():
    """With all of a full playbook and of the longest answer."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REFERENCE_MODEL)
    context = AutoConfig.from_pretrained(REFERENCE_MODEL).max_position_embeddings
    defaults = RunSettings()
    advice = "Prefer the plural for names of lists, the singular for an entry. " * 9
    bullets = [
        Bullet(id=f"b{10 + n}", content=advice[: defaults.max_chars])
        for n in range(defaults.max_bullets)
    ]
    book = Playbook(bullets=bullets)
    for sample in prompts.load_samples(prompts.SHIPPED):
        answer = sample.prefix + "Aq\ufffd" * defaults.generator_tokens
        judged = prompts.Judgement(said="str", right=False)
        for phase, asked in {
            "generator": prompts.generator(sample, book, True),
            "reflector": prompts.reflector(sample, answer, judged, book, True),
        }.items():
            ids = tokenizer.apply_chat_template(
                asked,
                chat_template=TEMPLATE.read_text(),
                continue_final_message=is_continued(asked),
                return_dict=False,
            )
            assert len(ids) + defaults.sampling()[phase].max_tokens <= context


def test_the_shipped_samples(tmp_path, monkeypatch):
    found = prompts.load_samples(prompts.SHIPPED)
    counts = Counter((sample.split, sample.answer) for sample in found)
    assert counts == {
        ("train", "int"): 25,
        ("train", "str"): 25,
        ("validation", "int"): 15,
        ("validation", "str"): 15,
    }
    assert len({sample.question for sample in found}) == 80
    monkeypatch.setattr(make_samples, "FOLDER", tmp_path)
    make_samples.main()
    assert (tmp_path / "samples.json").read_text() == prompts.SHIPPED.read_text()


def test_samples_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "samples.json"
    path.write_text(prompts.SHIPPED.read_text("utf-8"), "utf-8-sig")
    assert prompts.load_samples(path) == prompts.load_samples(prompts.SHIPPED)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nonsense", "JSON"),
        (b'[{"question": "?"}]', "answer"),
        (b'[{"question": "\xe9", "answer": "a"}]', "--samples: .*unicode"),
        (
            b'[{"question": "?", "answer": "a", "choices": ["b"]}]',
            "none of its choices",
        ),
        (b'[{"question": "?", "answer": "a", "split": "validation"}]', "split: train"),
        (b"[]", "split: train"),
    ],
)
def test_bad_samples(tmp_path, content, message):
    path = tmp_path / "samples.json"
    path.write_bytes(content)
    with pytest.raises(prompts.SampleError, match=f"(?s){message}"):
        prompts.load_samples(path)


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


def command(url: str, samples: Path, output: Path, *options: str) -> list[str]:
    return [
        "run",
        "--provider=openai",
        f"--base-url={url}",
        f"--samples={samples}",
        f"--output={output}",
        *options,
    ]


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


# The loop


def test_all_samples_of_a_phase_at_once(server, samples, whole):
    """What a run asks, and what it makes of the replies."""
    train = prompts.load_samples(samples)
    train = sum(sample.split == "train" for sample in train)
    counts = Counter((line["round"], line["phase"]) for line in journal(whole))
    assert counts == {
        (0, "generator"): SAMPLES,
        (0, "reflector"): train,
        (0, "curator"): train,
        (1, "generator"): SAMPLES,
        (1, "reflector"): train,
        (1, "curator"): train,
        (2, "generator"): SAMPLES,
    }
    report = json.loads((whole / "report.json").read_text())
    rounds = report["rounds"]
    assert [len(r["playbook"]["bullets"]) for r in rounds] == [0, train, train]
    assert [r["reflections"] for r in rounds] == [train, train, 0]
    assert [r["operations"] for r in rounds] == [train, 0, 0]
    assert [r["without_effect"] for r in rounds] == [0, train, 0]
    # b1 is tagged by all reflections of the second round: it was not there before.
    assert rounds[2]["playbook"]["bullets"][0]["helpful"] == train
    best = max(rounds, key=lambda r: r["accuracy"]["validation"])
    assert report["best"] == best["number"]
    assert Playbook.load(whole / "playbook.json").model_dump() == best["playbook"]
    for entry in rounds:
        assert entry["accuracy"] == accuracy(samples, whole, entry["number"])


def accuracy(samples: Path, output: Path, number: int) -> dict[str, float]:
    """Of a round, from the journal and the definition."""
    rows = json.loads(samples.read_text())
    right: dict[str, list[bool]] = {}
    for line in journal(output):
        if (line["round"], line["phase"]) == (number, "generator"):
            row = rows[line["index"]]
            said = line["text"].rpartition("Answer: ")[2] == row["answer"]
            right.setdefault(row["split"], []).append(said)
    return {split: sum(values) / len(values) for split, values in right.items()}


def test_early_stopping(server, samples, tmp_path):
    """A playbook that is no better is changed `stop_after` times and no more."""

    def never_better(messages):
        if messages[0]["content"].startswith("Answer"):
            return "Answer: int"
        return says(messages)

    server.says = never_better
    options = {"rounds": 9, "stop_after": 2}
    report = program.run(settings(server, samples, tmp_path, **options))
    assert report.stopped_early and [r.number for r in report.rounds] == [0, 1, 2]
    assert report.best == 0 and not Playbook.load(tmp_path / "playbook.json").bullets


def test_replies_that_are_no_json(server, samples, tmp_path):
    """Are counted and change nothing."""
    server.says = lambda messages: "I do not know."
    report = program.run(settings(server, samples, tmp_path, prefill=False, rounds=1))
    assert report.rounds[0].unreadable == SAMPLES
    assert report.rounds[0].malformed == 8 and not report.rounds[1].playbook.bullets


@pytest.mark.parametrize("stop", [1, 10, 15, 24, 40])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(
    server, samples, whole, tmp_path, stop, monkeypatch, capsys
):
    """Ctrl-C in the middle of any phase: what was said is not asked for again."""
    output = tmp_path / "parts"
    append = Replies.append

    def interrupt(self, *args):
        reply = append(self, *args)
        if len(self) == stop:
            raise KeyboardInterrupt
        return reply

    arguments = command(server.url, samples, output, "--rounds=2", "--stop-after=0")
    arguments.append("--concurrency=1")
    with monkeypatch.context() as patch:
        patch.setattr(Replies, "append", interrupt)
        with pytest.raises(SystemExit) as error:
            program.main(arguments)
    assert error.value.code == 130 and len(journal(output)) == stop
    assert "interrupted. Nothing is lost" in capsys.readouterr().err
    # A request that was under way may yet be answered, and is not of the second run.
    server.key = "of the second run"
    server.bodies.clear()
    program.main([*arguments, f"--api-key={server.key}"])
    assert journal(output) == journal(whole)
    assert playbook(output) == playbook(whole)
    assert len(server.bodies) == len(journal(whole)) - stop


def test_ctrl_c(server, samples, whole, tmp_path):
    """The signal, to the program as it is run."""
    server.hold_after = 16
    output = tmp_path / "parts"
    arguments = command(server.url, samples, output, "--rounds=2", "--stop-after=0")
    program_and_arguments = [sys.executable, str(EXAMPLES / "applications" / "ace")]
    program_and_arguments += [*arguments, "--concurrency=2"]

    def start() -> subprocess.Popen:
        # What was started in the background ignores Ctrl-C, and so would its children.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(
            program_and_arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=runners.environment("v1"),
        )
        signal.signal(signal.SIGINT, before)
        return process

    process = start()
    assert server.holding.wait(60)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Nothing is lost" in shown
    (line,) = [line for line in shown.splitlines() if "interrupted" in line]
    assert "the same command goes on" in line and "Traceback" not in shown
    kept = journal(output)
    # All but what had been answered and not been read yet.
    assert 12 <= len(kept) <= 16 < len(journal(whole))
    server.hold_after = None
    server.go.set()
    process = start()
    shown, _ = process.communicate(timeout=120)
    assert process.returncode == 0, shown
    assert f"{len(kept)} completions are in" in shown
    assert journal(output) == journal(whole)
    assert playbook(output) == playbook(whole)


def test_more_rounds(server, samples, whole):
    """A run that is done goes on where it ended."""
    before = journal(whole)
    report = program.run(settings(server, samples, whole, rounds=3))
    assert report.kept == len(before) and report.asked == len(server.bodies) > 0
    assert [r.number for r in report.rounds] == [0, 1, 2, 3]
    assert [line for line in journal(whole) if line in before] == before


def test_a_line_that_was_cut(server, samples, whole):
    path = whole / "journal.jsonl"
    content = path.read_bytes()
    expected = journal(whole)
    path.write_bytes(content[:-5])
    program.run(settings(server, samples, whole))
    assert journal(whole) == expected and len(server.bodies) == 1


def test_another_run(server, samples, whole):
    with pytest.raises(JournalError, match="differs in lessons, sampling"):
        program.run(settings(server, samples, whole, lessons=2, temperature=1))
    report = program.run(settings(server, samples, whole, lessons=2, restart=True))
    assert report.kept == 0


def test_another_model(server, samples, tmp_path):
    """Two servers' only models are two runs, whatever name they are served by."""
    server.root = "a/b"
    program.run(settings(server, samples, tmp_path, rounds=0))
    server.root = "a/c"
    with pytest.raises(JournalError, match="differs in model"):
        program.run(settings(server, samples, tmp_path, rounds=0))
    server.root, server.owner = None, "someone"
    with pytest.raises(JournalError, match="differs in model"):
        program.run(settings(server, samples, tmp_path, rounds=0, prefill=False))


def test_who_is_asked(server, tmp_path, monkeypatch):
    """Is the served name, or what vLLM's server tells; a folder by its whole path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for root, model in ((None, "m"), ("a/b", "a/b"), ("model", f"{tmp_path}/model")):
        server.root = root
        with LLMClient("openai", base_url=server.url) as client:
            assert client.identity == {"model": model, "chat_template": None}
            assert client.model == "m"


def test_another_chat_template(tmp_path):
    """Is another run; where a server has it and does not tell it is not."""
    path = tmp_path / "journal.jsonl"
    for first, second in (("a", None), ("a", "a"), (None, "a")):
        path.unlink(missing_ok=True)
        for template in (first, second):
            with Journal(path) as journal:
                Replies(journal, {"model": "m", "chat_template": template})
    path.unlink()
    with Journal(path) as journal:
        Replies(journal, {"model": "m", "chat_template": "a"})
        with pytest.raises(JournalError, match="differs in chat_template"):
            Replies(journal, {"model": "m", "chat_template": "b"})
    path.write_text('{"model": null}\n')  # as it once was
    with Journal(path) as journal, pytest.raises(JournalError, match="chat_template"):
        Replies(journal, {"model": "m", "chat_template": None})


def test_restart_waits_for_the_server(server, samples, whole, capsys):
    """What was said is thrown away only when there is a model to say it again."""
    expected = journal(whole)
    arguments = ["--rounds=2", "--stop-after=0", "--patience=0", "--restart"]
    with pytest.raises(SystemExit):
        program.main(command("http://127.0.0.1:9", samples, whole, *arguments))
    shown = " ".join(capsys.readouterr().out.split())
    assert "the same command without --restart goes on" in shown
    assert journal(whole) == expected


def test_a_restart_that_is_stopped(server, samples, whole, capsys):
    """Goes on without the option, as is said."""
    arguments = command(server.url, samples, whole, "--rounds=2", "--stop-after=0")
    arguments.append("--concurrency=1")
    expected = journal(whole)
    server.faults = [None] * 5 + ["400"]
    with pytest.raises(SystemExit):
        program.main([*arguments, "--restart"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "the same command without --restart goes on" in shown
    kept = len(journal(whole))
    assert kept >= 5
    server.bodies.clear()
    program.main(arguments)
    assert journal(whole) == expected and len(server.bodies) == len(expected) - kept


def test_two_runs_in_one_folder(server, samples, whole):
    with (
        Journal(whole / "journal.jsonl"),
        pytest.raises(JournalError, match="Another run uses"),
    ):
        program.run(settings(server, samples, whole))


@pytest.mark.parametrize(
    "content",
    [
        "no json\n",
        "5\n",
        "null\n",
        '{"a": 1}\n[]\n',
        '{"a": 1}\n{}\n{"rou',
        '{"b": 1}\n{"rou',
        '{"b": 1}',
        "no line",
        '{"a": 1} ',
    ],
)
def test_no_journal(tmp_path, content):
    """A file that is none of ours stays as it is."""
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with Journal(path) as journal, pytest.raises(JournalError, match=str(path)):
        Replies(journal, {"a": 1})
    assert path.read_text() == content


@pytest.mark.parametrize("content", ["", '{"a"', '{"a": 1}', '{"a": 1}\n{"rou'])
def test_a_journal_that_has_just_begun(tmp_path, content):
    path = tmp_path / "journal.jsonl"
    path.write_text(content)
    with Journal(path) as journal:
        Replies(journal, {"a": 1})
    assert path.read_text() == '{"a": 1}\n'


# transformers in this process


BEGUN = [*HELLO, {"role": "assistant", "content": "Well"}]


@pytest.mark.parametrize(
    ("template", "asked", "option"),
    [
        ("{{ raise_exception('No system role') }}", HELLO, "--no-system-role"),
        ("{{ messages[1].content }}", BEGUN, "--no-prefill"),
        ("{% for %}", HELLO, ""),
    ],
)
def test_a_chat_template_that_refuses(tmp_path, template, asked, option):
    """Is an error that names the option that helps."""
    path = tmp_path / "template.jinja"
    path.write_text(template)
    with (
        LLMClient("transformers", chat_template=path) as client,
        pytest.raises(ClientError, match=f"(?s)the chat template: .*{option}"),
    ):
        client.chat([asked], Sampling(max_tokens=1))


def test_a_chat_template_without_a_system_role(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}"
        "{% endif %}{{ messages[0].content }}"
    )
    with LLMClient("transformers", chat_template=path, system_role=False) as client:
        [found] = client.chat(
            [[{"role": "system", "content": "import"}, HELLO[1]]],
            Sampling(max_tokens=1),
        )
        tokenizer = client._backend.tokenizer
        assert tokenizer.decode(found.prompt_token_ids) == "import\n\nhello"


def test_a_chat_template_that_is_no_text(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_bytes(b"\xe9")
    with pytest.raises(ClientError, match="--chat-template"):
        LLMClient("transformers", chat_template=path)


def test_a_chat_template_that_begins_with_bos(tmp_path):
    """As the README says, for models that want it; the shipped one does not."""
    path = tmp_path / "template.jinja"
    path.write_text("{{ bos_token }}" + TEMPLATE.read_text())
    prompt = {}
    for template in (TEMPLATE, path):
        with LLMClient("transformers", chat_template=template) as client:
            [found] = client.chat([HELLO], Sampling(max_tokens=1))
            prompt[template] = found.prompt_token_ids
            tokenizer = client._backend.tokenizer
    assert tokenizer("hello").input_ids[0] != tokenizer.bos_token_id
    assert prompt[TEMPLATE][0] != tokenizer.bos_token_id
    assert prompt[path] == [tokenizer.bos_token_id, *prompt[TEMPLATE]]


def test_the_chat_template_is_part_of_who_is_asked(tmp_path):
    path = tmp_path / "template.jinja"
    identities = []
    for template in ("a", "b", "a"):
        path.write_text(template)
        with LLMClient("transformers", chat_template=path) as client:
            identities.append(client.identity)
    assert identities[0] == identities[2] != identities[1]
    assert identities[0]["model"] == identities[1]["model"] == str(REFERENCE_MODEL)


def test_a_model_without_a_longest_context(tmp_path):
    """Whose positions are not numbered has no `max_position_embeddings`."""
    from transformers import AutoTokenizer, BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=4096, hidden_size=16, n_layer=1, n_head=2)
    assert not hasattr(config, "max_position_embeddings")
    BloomForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(REFERENCE_MODEL).save_pretrained(tmp_path)
    with LLMClient("transformers", str(tmp_path)) as client:
        [found] = client.chat([HELLO], Sampling(max_tokens=2))
    assert found.token_ids


def test_a_models_own_penalties_do_not_count(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(REFERENCE_MODEL)
    AutoTokenizer.from_pretrained(REFERENCE_MODEL).save_pretrained(tmp_path)
    found = []
    for penalty in (1.0, 5.0):
        model.generation_config.repetition_penalty = penalty
        model.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "generation_config.json").read_text())
        with LLMClient("transformers", str(tmp_path)) as client:
            [completion] = client.chat([HELLO], Sampling(max_tokens=24))
            found.append(completion.token_ids)
    assert len(set(found[0])) < len(found[0])  # some are repeated
    assert found[0] == found[1]


# The benchmark


def completion(ids: list[int], gaps: list[float]) -> Completion:
    top = [{token: -1.0, -1: -1.0 - gap} for token, gap in zip(ids, gaps, strict=True)]
    return Completion("", "length", [], ids, top)


def test_where_greedy_outputs_part():
    ours = [
        completion([1, 2, 3], [1, 1, 1]),
        completion([1, 2, 3], [1, 1e-5, 1]),
        completion([1, 2], [1, 1]),
    ]
    theirs = [
        completion([1, 2, 3], [1, 1, 1]),
        completion([1, 4, 3], [1, 2e-5, 1]),
        completion([1, 2, 3], [1, 1, 0.5]),
    ]
    none = {"reflector": [], "curator": []}
    tie, other = bench.compare({"generator": ours} | none, {"generator": theirs} | none)
    assert (tie.index, tie.position, tie.ours, tie.theirs) == (1, 1, 2, 4)
    assert tie.our_gap == pytest.approx(1e-5) and tie.is_tie
    assert (other.index, other.position, other.ours, other.theirs) == (2, 2, None, 3)
    assert other.our_gap is None and not other.is_tie
