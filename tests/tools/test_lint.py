# SPDX-License-Identifier: Apache-2.0
"""Which of upstream's hooks are run, on which files, and what is asked of a message."""

import pytest

yaml = pytest.importorskip("yaml")

from tools import lint  # noqa: E402
from tools.common import ToolError  # noqa: E402

CONFIGURATION = """\
exclude: 'third_party/.*'
repos:
- repo: https://example.invalid/elsewhere
  rev: v1.0
  hooks:
  - id: actionlint
- repo: local
  hooks:
  - id: says-no
    entry: python -c "import sys; sys.exit(' '.join(sys.argv[1:]))"
    language: python
    types: [python]
    files: ^vllm/
    exclude: ^vllm/old
  - id: suggestion
    entry: "false"
    language: system
- repo: https://example.invalid/new
  rev: v1.0
  hooks:
  - id: brand-new
    files: ^new/
"""


def test_a_hook_is_run_on_its_files_alone(tmp_path):
    hooks = lint.hooks(CONFIGURATION)
    assert [hook.name for hook in hooks] == ["actionlint", "says-no", "brand-new"]
    theirs = ["vllm/old.py", "vllm/a.md", "vllm/third_party/b.py", "tests/vllm/c.py"]
    assert lint.complaints(tmp_path, hooks, theirs) == []
    (said,) = lint.complaints(tmp_path, hooks, [*theirs, "vllm/d.py", "vllm/e.py"])
    assert said == "says-no: exit status 1\nvllm/d.py vllm/e.py\n"


def test_a_hook_that_nobody_can_run_is_named(tmp_path):
    with pytest.raises(ToolError, match="brand-new is for new/a.py"):
        lint.complaints(tmp_path, lint.hooks(CONFIGURATION), ["new/a.py"])


def test_another_version_than_upstreams_is_refused():
    repository = "repos:\n- repo: local\n  hooks:\n  - id: own\n    entry: own\n"
    repository += "    additional_dependencies: ['pytest == 0.1']\n"
    with pytest.raises(ToolError, match="own is of pytest 0.1"):
        lint.hooks(repository)


def test_a_message_says_what_ends_its_patch():
    text = b"Subject: [Core] A\n\nWhy.\n\n%s\n\nUpstream-Status: Pending\n\ndiff --git a b\n"
    plugin, end = b"Not a plugin: it is\nnot.", b"Drop\nit when it is old."
    assert lint.lint_messages({"fixes": {"a": text % end}}) == []
    assert lint.lint_messages({"depth": {"a": text % (plugin + b" " + end)}}) == []
    (said,) = lint.lint_messages({"depth": {"a": text % end}})
    assert said.startswith("--- depth/a: ") and "'Not a plugin:'" in said
    (said,) = lint.lint_messages({"fixes": {"a": text % plugin + b"+Drop it "}})
    assert "'Drop it'" in said
