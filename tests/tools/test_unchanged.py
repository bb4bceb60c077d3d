# SPDX-License-Identifier: Apache-2.0
"""What trees generate is compared with the release's, and a difference is named."""

import json

import pytest
from test_stacks import commit

from tools import unchanged
from tools.common import HERE, ToolError
from tools.export import export
from tools.stacks import ALL, DEPTH, FIXES
from tools.unchanged import Record, Row, code_digest, prefixes

ANSWERS = {"m/llama": [[1], [2]], "m/opt": [[3]]}


def test_equal_answers_have_no_difference():
    assert unchanged.differences(ANSWERS, json.loads(json.dumps(ANSWERS))) == []


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"m/llama": [[1], [9]], "m/opt": [[3]]}, ["llama, prompt 1"]),
        ({"m/llama": [[1]], "m/opt": [[3]]}, ["llama, prompt 1"]),
        ({"m/llama": [[1], [2]]}, ["opt, prompt 0"]),
    ],
)
def test_the_prompt_that_differs_is_named(found, said):
    assert unchanged.differences(ANSWERS, found) == said


@pytest.fixture
def added(forked):
    """A checkout with one more patch of depth, its last."""
    files = {"vllm/new.py": b"new = 1\n"}
    commit(forked, DEPTH, "[Core] Add\n\nUpstream-Status: Pending\n", files)
    export(forked)
    return forked


def test_every_prefix_has_its_own_tree(added, tmp_path):
    there = {
        name: (tree / "vllm" / "new.py").exists()
        for name, tree in unchanged.patch_trees(added, tmp_path, prefixes(added))
    }
    assert list(there) == list(prefixes(added))
    assert [name for name, found in there.items() if found] == ["depth/add.patch", ALL]


def test_only_chosen_prefixes_are_made(added, tmp_path):
    trees = unchanged.patch_trees(added, tmp_path, ["depth/add.patch"])
    assert [name for name, _ in trees] == ["depth/add.patch"]


def test_a_changed_patch_changes_what_stands_on_it(added):
    def change(stack: str, name: str, old: bytes, new: bytes) -> list[str]:
        before = prefixes(added)
        file = added.root / "patches" / stack / name
        content = file.read_bytes()
        assert old in content
        file.write_bytes(content.replace(old, new))
        after = prefixes(added)
        return [name for name in before if before[name] != after[name]]

    add = DEPTH, "add.patch"
    assert change(*add, b"new = 1", b"new = 2") == ["depth/add.patch", ALL]
    assert change(*add, b"Upstream-Status: Pending", b"Upstream-Status: Denied") == []
    first, *_ = (name for name in prefixes(added) if name.startswith(f"{FIXES}/"))
    assert change(*first.split("/"), b"\n+", b"\n+ ") == list(prefixes(added))


def test_tests_and_docs_are_no_code():
    code, test, doc = (
        b"diff --git a/%b b/%b\n@@ -0,0 +1 @@\n+a\n" % (name, name)
        for name in (b"vllm/a.py", b"tests/test_a.py", b"docs/a.md")
    )
    message = b"Subject: [PATCH] A\n\n---\n"
    assert code_digest(message + code) == code_digest(doc + code + test)
    assert code_digest(message + code) != code_digest(message)


def test_what_was_seen_is_not_run_again(tmp_path):
    file, wanted = tmp_path / "record.json", {"fixes/a.patch": "1", ALL: "2"}
    record = Record(file, "v1", wanted)
    assert record.missing() == list(wanted)
    record.add("fixes/a.patch")
    record.add("fixes+depth")  # no prefix
    assert record.missing() == [ALL]
    assert Record(file, "v2", wanted).missing() == list(wanted)
    changed = Record(file, "v1", {"fixes/b.patch": "3", ALL: "4"})
    changed.add(ALL)
    assert changed.missing() == ["fixes/b.patch"]
    assert json.loads(file.read_text()) == {"v1": {ALL: "4"}}


def test_the_tree_that_changes_something_is_returned(monkeypatch, tmp_path, capsys):
    said = iter([ANSWERS, ANSWERS, ANSWERS | {"m/opt": [[4]]}, ANSWERS])
    monkeypatch.setattr(unchanged, "add_compiled", lambda tree: None)
    monkeypatch.setattr(
        unchanged, "generate", lambda _, name, *rest: Row(name, 1.0, next(said))
    )
    record = Record(tmp_path / "record.json", "v1", {"fixes/a.patch": "1", ALL: "2"})
    trees = iter([("fixes/a.patch", tmp_path), (ALL, tmp_path)])
    changed = unchanged.compare(HERE, trees, [], tmp_path, record)
    assert changed == ["fixes/a.patch"] == record.missing()
    assert "| fixes/a.patch | differ: opt, prompt 0 | 1.00 |" in capsys.readouterr().out


def test_a_tree_that_generates_nothing_is_named(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('broken')\n")
    with pytest.raises(ToolError, match="(?s)the tree: generating failed.*broken"):
        unchanged.generate(HERE, "the tree", tmp_path, [], "v1")
