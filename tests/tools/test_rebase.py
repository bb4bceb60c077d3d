# SPDX-License-Identifier: Apache-2.0
"""The stacks move to another release, or stop at the patch that conflicts."""

import pytest
from conftest import FILES, engine, exported, pack, person

from tools import lock as locks, rebase, source
from tools.common import Checkout, ToolError
from tools.export import check, export
from tools.hermetic import hermetic_git
from tools.stacks import ALL, DEPTH, FIXES, SCORING, STACKS

NEWER = "1.1.0"


def release(checkout: Checkout, text: bytes) -> None:
    """Put a newer release, with this ``vllm/engine.py``, among the downloads."""
    files = {**FILES, "vllm/engine.py": text}
    pack(checkout.downloads / f"vllm-{NEWER}.tar.gz", NEWER, files)


def conflicting(checkout: Checkout, **lines: str) -> None:
    """Start a move to a release in which upstream changed what the first fix does."""
    release(checkout, engine(line_20="200", **lines))
    with pytest.raises(ToolError) as error:
        rebase.start(checkout, NEWER)
    assert "[Core][Frontend] Change a line" in str(error.value)
    assert "vllm/engine.py" in str(error.value)
    assert "--continue" in str(error.value)


def resolve(checkout: Checkout, **lines: str) -> None:
    (checkout.source / "vllm/engine.py").write_bytes(engine(**lines))
    hermetic_git(checkout.source).add("vllm/engine.py")


def test_stacks_that_fit_are_moved_and_exported(forked, capsys):
    release(forked, b"new = 0\n" + FILES["vllm/engine.py"])
    rebase.start(forked, NEWER)
    said = capsys.readouterr().out
    compared = (forked.build / "rebase.diff").read_text()
    assert all(f"{stack}:\n1:" in compared for stack in STACKS)  # range-diff
    assert "stopped at 0 patches, in 0 places" in said
    lock = locks.read(forked)
    assert (lock.release, lock.commit, lock.wheels) == (NEWER, "0123abcde", {})
    assert check(forked).trees == lock.trees
    text = (forked.source / "vllm/engine.py").read_bytes()
    assert text.startswith(b"new = 0\n") and b"line_20 = 21\n" in text
    # A newcomer's loop works on it.
    repository = person(forked)
    repository.checkout("--quiet", FIXES)
    repository.rebase("--quiet", "--interactive", "--autosquash")
    assert export(forked).trees == lock.trees


def test_a_stop_in_each_stack_is_named_counted_and_resolved(forked, capsys):
    conflicting(forked, line_5="50", line_35="350")
    resolve(forked, line_20="21", line_5="50", line_35="350")
    stop = "Add scoring' conflicts in\n  vllm/engine.py, places: 1\n"
    with pytest.raises(ToolError, match=stop):
        rebase.go_on(forked)
    resolve(forked, line_20="21", line_5="55", line_35="350")
    with pytest.raises(ToolError, match="Add depth' conflicts"):
        rebase.go_on(forked)
    resolve(forked, line_20="21", line_5="50", line_35="36")
    rebase.go_on(forked)
    assert "stopped at 3 patches, in 3 places" in capsys.readouterr().out
    assert locks.read(forked).release == NEWER
    counts = [len(check(forked).patches[stack]) for stack in STACKS]
    assert counts == [2, 1, 1]
    hermetic_git(forked.source).checkout("--quiet", ALL)
    text = (forked.source / "vllm/engine.py").read_bytes()
    assert text == engine(line_20="21", line_5="55", line_35="36")


def test_a_conflict_shows_the_lines_of_the_old_release_too(forked):
    conflicting(forked)
    assert "\n||||||| " in (forked.source / "vllm/engine.py").read_text()


def test_a_move_that_was_interrupted_between_two_stacks_goes_on(forked):
    conflicting(forked)
    resolve(forked, line_20="21")
    person(forked).rebase("--continue")  # of the fixes alone
    rebase.go_on(forked)
    assert [len(check(forked).patches[stack]) for stack in STACKS] == [2, 1, 1]


def test_a_conflict_left_alone_is_named_again(forked):
    conflicting(forked)
    with pytest.raises(ToolError, match="vllm/engine.py"):
        rebase.go_on(forked)


@pytest.mark.parametrize("stops", [1, 2])
def test_a_rebase_can_be_given_up(forked, stops):
    before = exported(forked)
    conflicting(forked, line_5="50")
    if stops == 2:
        resolve(forked, line_20="21", line_5="50")
        with pytest.raises(ToolError, match="Add scoring"):
            rebase.go_on(forked)
    rebase.abort(forked)
    source.open_source(forked, DEPTH)
    assert check(forked)
    assert exported(forked) == before
    export(forked)
    assert exported(forked) == before


def broken(checkout: Checkout) -> None:
    """A rebase whose result may not be exported: a patch does not say its status."""
    conflicting(checkout)
    resolve(checkout, line_20="21")
    repository = person(checkout)
    repository.rebase("--continue")
    repository.commit("--quiet", "--amend", "--message", "[Core] Say nothing more")
    with pytest.raises(ToolError, match="(?s)fixes/say-nothing.*--continue.*--abort"):
        rebase.go_on(checkout)


def test_stacks_that_break_the_rules_can_be_mended(forked):
    broken(forked)
    message = "[Core] Say why\n\nWhy: a test.\n\nUpstream-Status: Pending"
    repository = person(forked)
    repository.checkout("--quiet", FIXES)
    repository.commit("--quiet", "--amend", "--message", message)
    rebase.go_on(forked)
    assert locks.read(forked).release == NEWER
    assert len(check(forked).patches[SCORING]) == 1


def test_stacks_that_break_the_rules_can_be_given_up(forked):
    before = exported(forked)
    lock = locks.read(forked)
    broken(forked)
    rebase.abort(forked)
    assert locks.read(forked) == lock and exported(forked) == before
    assert check(forked)


def test_an_export_that_was_interrupted_can_be_given_up(forked, monkeypatch):
    before, lock = exported(forked), locks.read(forked)
    conflicting(forked)
    resolve(forked, line_20="21")

    def stopped(checkout):
        raise KeyboardInterrupt

    monkeypatch.setattr(rebase, "export", stopped)
    with pytest.raises(KeyboardInterrupt):
        rebase.go_on(forked)
    assert locks.read(forked).release == NEWER
    rebase.abort(forked)
    assert locks.read(forked) == lock and exported(forked) == before
    assert check(forked)


def test_a_second_rebase_waits_for_the_first(forked):
    conflicting(forked)
    with pytest.raises(ToolError, match="--continue or --abort"):
        rebase.start(forked, NEWER)


def test_there_is_nothing_to_continue_without_a_rebase(forked):
    with pytest.raises(ToolError, match="no rebase is in progress"):
        rebase.go_on(forked)
