# SPDX-License-Identifier: Apache-2.0
"""What trees generate is compared with the release's, and a difference is named."""

import json

import pytest
from test_stacks import commit

from tools import unchanged
from tools.common import HERE, ToolError
from tools.export import export
from tools.stacks import DEPTH
from tools.unchanged import Row

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


def test_every_prefix_has_its_own_tree(forked, tmp_path):
    files = {"vllm/new.py": b"new = 1\n"}
    commit(forked, DEPTH, "[Core] Add\n\nUpstream-Status: Pending\n", files)
    export(forked)
    there = [
        (name, (tree / "vllm" / "new.py").exists())
        for name, tree in unchanged.patch_trees(forked, tmp_path)
    ]
    assert there[-2:] == [("depth/add.patch", True), ("all", True)]
    assert [found for _, found in there[:-2]] == [False] * (len(there) - 2)


def test_the_tree_that_changes_something_is_returned(monkeypatch, tmp_path, capsys):
    said = iter([ANSWERS, ANSWERS, ANSWERS | {"m/opt": [[4]]}])
    monkeypatch.setattr(unchanged, "add_compiled", lambda tree: None)
    monkeypatch.setattr(
        unchanged, "generate", lambda _, name, *rest: Row(name, 1.0, next(said))
    )
    trees = iter([("fixes", tmp_path)])
    assert unchanged.compare(HERE, trees, [], "v1", tmp_path) == ["fixes"]
    assert "| fixes | differ: opt, prompt 0 | 1.00 |" in capsys.readouterr().out


def test_a_tree_that_generates_nothing_is_named(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('broken')\n")
    with pytest.raises(ToolError, match="(?s)the tree: generating failed.*broken"):
        unchanged.generate(HERE, "the tree", tmp_path, [], "v1")
