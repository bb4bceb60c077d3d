# SPDX-License-Identifier: Apache-2.0
"""The series moves to another release, or stops at the patch that conflicts."""

import pytest
from conftest import FILES, exported, pack

from tools import lock as locks, rebase, series
from tools.common import Checkout, ToolError
from tools.hermetic import hermetic_git

NEWER = "1.1.0"


def release(checkout: Checkout, engine: bytes) -> None:
    """Put a newer release, with this ``vllm/engine.py``, among the downloads."""
    files = {**FILES, "vllm/engine.py": engine}
    pack(checkout.downloads / f"vllm-{NEWER}.tar.gz", NEWER, files)


def conflicting(checkout: Checkout) -> None:
    engine = FILES["vllm/engine.py"].replace(b"line_20 = 20", b"line_20 = 200")
    release(checkout, engine)
    with pytest.raises(ToolError) as error:
        rebase.start(checkout, NEWER)
    assert "[Core][Frontend] Change a line" in str(error.value)
    assert "vllm/engine.py" in str(error.value)
    assert "--continue" in str(error.value)


def test_a_series_that_fits_is_moved_and_exported(forked, capsys):
    release(forked, b"new = 0\n" + FILES["vllm/engine.py"])
    rebase.start(forked, NEWER)
    said = capsys.readouterr().out
    assert "1:" in said and "2:" in said  # range-diff
    lock = locks.read(forked)
    assert (lock.release, lock.commit, lock.wheels) == (NEWER, "0123abcde", {})
    assert series.check(forked).tree == lock.tree
    engine = (forked.source / "vllm/engine.py").read_bytes()
    assert engine.startswith(b"new = 0\n") and b"line_20 = 21\n" in engine


def test_a_conflict_is_named_and_can_be_resolved(forked):
    conflicting(forked)
    engine = FILES["vllm/engine.py"].replace(b"line_20 = 20", b"line_20 = 201")
    (forked.source / "vllm/engine.py").write_bytes(engine)
    hermetic_git(forked.source).add("vllm/engine.py")
    rebase.go_on(forked)
    assert locks.read(forked).release == NEWER
    assert len(series.check(forked).patches) == 2


def test_a_conflict_left_alone_is_named_again(forked):
    conflicting(forked)
    with pytest.raises(ToolError, match="vllm/engine.py"):
        rebase.go_on(forked)


def test_a_rebase_that_a_person_finished_with_git_is_taken_up(forked):
    conflicting(forked)
    repository = hermetic_git(forked.source)
    repository.checkout("--quiet", "--theirs", "vllm/engine.py")
    repository.add("vllm/engine.py")
    repository.rebase("--continue")
    rebase.go_on(forked)
    assert locks.read(forked).release == NEWER


def test_a_rebase_can_be_given_up(forked):
    before = exported(forked)
    conflicting(forked)
    rebase.abort(forked)
    series.open_series(forked)
    assert series.check(forked)
    assert exported(forked) == before


def broken(checkout: Checkout) -> None:
    """A rebase whose result may not be exported: a patch does not say its status."""
    conflicting(checkout)
    repository = hermetic_git(checkout.source)
    repository.checkout("--quiet", "--theirs", "vllm/engine.py")
    repository.add("vllm/engine.py")
    repository.rebase("--continue")
    repository.commit("--quiet", "--amend", "--message", "[Core] Say nothing more")
    with pytest.raises(ToolError, match="(?s)0002.*--continue.*--abort"):
        rebase.go_on(checkout)


def test_a_series_that_breaks_the_rules_can_be_mended(forked):
    broken(forked)
    message = "[Core] Say why\n\nWhy: a test.\n\nUpstream-Status: Pending"
    hermetic_git(forked.source).commit("--quiet", "--amend", "--message", message)
    rebase.go_on(forked)
    assert locks.read(forked).release == NEWER
    assert len(series.check(forked).patches) == 2


def test_a_series_that_breaks_the_rules_can_be_given_up(forked):
    before = exported(forked)
    lock = locks.read(forked)
    broken(forked)
    rebase.abort(forked)
    assert locks.read(forked) == lock and exported(forked) == before
    assert series.check(forked)


def test_a_second_rebase_waits_for_the_first(forked):
    conflicting(forked)
    with pytest.raises(ToolError, match="--continue or --abort"):
        rebase.start(forked, NEWER)


def test_there_is_nothing_to_continue_without_a_rebase(forked):
    with pytest.raises(ToolError, match="no rebase is in progress"):
        rebase.go_on(forked)
