# SPDX-License-Identifier: Apache-2.0
"""A pull request holds a patch and what it needs, in upstream's form."""

import pytest
from conftest import FILES, MESSAGE, commit, engine, make_checkout

from tools import pull_request, source
from tools.common import ToolError
from tools.export import export
from tools.hermetic import hermetic_git
from tools.stacks import DEPTH, FIXES, SCORING


def subjects(checkout, name: str) -> list[str]:
    repository = hermetic_git(checkout.build / "pr" / name)
    assert repository.branch("--show-current") == name
    rows = repository.log("--reverse", "--format=%s").splitlines()[1:]
    return [row.rpartition("]")[2].strip() for row in rows]


def add(checkout, stack: str, what: str, **files: bytes) -> None:
    changes = {f"vllm/{name}.py": text for name, text in files.items()}
    commit(checkout, stack, MESSAGE.format(what=what), changes)


def test_a_patch_that_needs_no_other_stands_alone(forked):
    said = pull_request.prepare(forked, "add-depth")
    assert subjects(forked, "add-depth") == ["Add depth"]
    repository = hermetic_git(forked.build / "pr" / "add-depth")
    message = repository.log("-1", "--format=%B")
    assert "Why: a test." in message and "Upstream-Status" not in message
    assert not repository.status("--porcelain")
    assert "no human has reviewed" in said and "needs these first" not in said
    text = (forked.build / "pr/add-depth/PR.md").read_text()
    assert text.startswith("<!-- Title: [Core][Frontend] Add depth -->\n## Purpose\n\nWhy")


def test_it_can_be_put_on_upstreams_main_by_the_command_that_is_named(forked):
    message = MESSAGE.format(what="Own").replace(
        "a test.", "a test.\n\nNot a plugin: it is\ntold here. Drop it when it is."
    )
    commit(forked, DEPTH, message, {"vllm/own.py": b"own = 1\n"})
    export(forked)
    said = pull_request.prepare(forked, "own")
    folder = forked.build / "pr" / "own"
    repository = hermetic_git(folder)
    assert "Not a plugin" not in repository.log("-1", "--format=%B")
    assert "Drop it" not in (folder / "PR.md").read_text()
    # Upstream's main goes on from another commit than the archive's.
    repository.checkout("--quiet", "--orphan", "main", "origin/base/1.0.0")
    (folder / "vllm/engine.py").write_bytes(engine(line_5="50"))
    repository.add("--all")
    repository.commit("--quiet", "--message", "main", author="A <a@b.invalid>")
    repository.update_ref("refs/remotes/origin/main", "HEAD")
    repository.checkout("--quiet", "own")
    (command,) = [row for row in said.splitlines() if "git rebase --onto" in row]
    repository.rebase(*command.partition("git rebase ")[2].split())
    assert (folder / "vllm/own.py").exists()
    assert (folder / "vllm/engine.py").read_bytes() == engine(line_5="50")


def test_earlier_patches_come_along_by_lines_modules_and_names(forked):
    add(forked, DEPTH, "Unrelated", other=b"other = 1\n")
    add(forked, DEPTH, "Make", made=b"made = 1\n")
    text = engine(line_20="21\nmore = 1", line_35="36")
    add(forked, DEPTH, "Grow", engine=text)
    add(forked, DEPTH, "Name", made=b"made = 1\nname = 1\n")
    code = b"import vllm.made\nfrom vllm.made import name\n"
    add(forked, DEPTH, "Last", last=code, engine=text.replace(b"more = 1", b"more = 2"))
    export(forked)
    said = pull_request.prepare(forked, "depth/last")
    wanted = ["Change a line", "Make", "Grow", "Name", "Last"]
    assert subjects(forked, "last") == wanted
    assert "needs these first" in said and "  change-a-line\n  make\n  grow\n  name\n" in said
    text = (forked.build / "pr/last/PR.md").read_text()
    assert "It stands on:\n- change-a-line\n- make" in text


def test_the_text_has_the_tests_and_the_table_of_the_message(forked):
    message = MESSAGE.format(what="Fast").replace(
        "a test.", "speed.\n\n| a | b |\n| - | - |\n| 1 | 2 |"
    )
    changes = {"tests/test_fast.py": b"def test_fast():\n    pass\n"}
    commit(forked, SCORING, message, changes)
    export(forked)
    pull_request.prepare(forked, "fast")
    text = (forked.build / "pr/fast/PR.md").read_text()
    assert "## Test Plan\n\n```bash\npytest tests/test_fast.py\n```" in text
    result = text.partition("## Test Result")[2]
    assert "run the tests above" in result and "| 1 | 2 |" in result


def test_upstreams_own_template_is_filled(tmp_path):
    template = b"""<!-- lint -->

## Overview

<!-- What
is it? -->

## Validation

## Other

<!-- kept -->
"""
    files = {**FILES, ".github/PULL_REQUEST_TEMPLATE.md": template}
    checkout = make_checkout(tmp_path / "fork", files)
    source.open_source(checkout)
    changes = {"tests/test_engine.py": b"def test_engine():\n    assert True\n"}
    commit(checkout, FIXES, MESSAGE.format(what="Fix it"), changes)
    for stack in (SCORING, DEPTH):
        hermetic_git(checkout.source).branch("--force", stack, FIXES)
    export(checkout)
    pull_request.prepare(checkout, "fix-it")
    text = (checkout.build / "pr/fix-it/PR.md").read_text()
    assert "<!-- lint -->\n\n## Overview\n\nFix it.\n\n## Validation\n\n```bash\n" in text
    assert text.endswith("## Other\n\n<!-- kept -->\n")


def test_a_folder_that_is_there_is_left_alone(forked):
    pull_request.prepare(forked, "change-a-line")
    with pytest.raises(ToolError, match="is there: remove it"):
        pull_request.prepare(forked, "change-a-line")
