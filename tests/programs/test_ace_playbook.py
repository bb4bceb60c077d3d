# SPDX-License-Identifier: Apache-2.0
"""`examples/applications/ace` without a model: the playbook, the prompts, the samples, and
what is read of replies."""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "applications"), str(EXAMPLES)]

from ace import Playbook, make_samples, prompts
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
from ace.settings import RunSettings

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
