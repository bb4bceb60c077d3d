# SPDX-License-Identifier: Apache-2.0
"""The stacks stand where they should, and nothing that a person commits is lost."""

import pytest
from conftest import MESSAGE, commit, engine, exported, person

from tools import series, source, stacks
from tools.common import ToolError
from tools.export import check, export
from tools.hermetic import hermetic_git
from tools.stacks import ALL, BRANCHES, DEPTH, FIXES, SCORING, STACKS


@pytest.mark.parametrize(
    "subject, name",
    [
        (
            "[Core][Frontend] Score target_token_ids over the end of a prompt",
            "score-target-token-ids-over-the-end-of-a-prompt",
        ),
        ("[Core] Read off a token's state (UTIO)", "read-off-a-tokens-state-utio"),
        ("[CPU] " + "word " * 20, "word-" * 11 + "word"),
        ("[CPU] " + "x" * 70, "x" * 60),
        ("Serve /v1/completions", "serve-v1-completions"),
    ],
)
def test_a_patch_is_named_by_its_subject(subject, name):
    assert stacks.file_name(subject) == f"{name}.patch"


def test_a_subject_without_words_is_refused():
    with pytest.raises(ToolError, match="no words"):
        stacks.file_name("[Core] ?")


def test_two_patches_of_one_name_are_refused(forked):
    commit(forked, DEPTH, MESSAGE.format(what="Add: depth"), {"vllm/new.py": b"n = 1\n"})
    with pytest.raises(ToolError, match="two patches of depth would be add-depth.patch"):
        export(forked)


def test_a_patch_that_moves_keeps_its_name(forked):
    commit(forked, FIXES, MESSAGE.format(what="New"), {"vllm/new.py": b"new = 1\n"})
    before = exported(forked)
    repository = person(forked)
    new, second = repository.rev_parse(FIXES), repository.rev_parse(f"{FIXES}~")
    repository.reset("--quiet", "--hard", f"{FIXES}~2")
    repository.cherry_pick(new, second)
    export(forked)
    kept = {name: data for name, data in exported(forked).items() if name in before}
    assert set(before) == set(kept)
    assert stacks.listed(forked, FIXES)[1] == "new.patch"


def amend_first_fix(forked) -> None:
    """A fixup of the first of two fixes, as a newcomer makes it."""
    repository = commit(forked, FIXES, "x", {"vllm/engine.py": engine(line_20="22")})
    repository.reset("--quiet", "--soft", "HEAD~")
    repository.commit("--quiet", "--fixup", "HEAD~")
    repository.rebase("--quiet", "--interactive", "--autosquash")


def test_a_changed_fix_is_put_below_the_other_stacks(forked):
    amend_first_fix(forked)
    export(forked)
    check(forked)
    for branch in (*BRANCHES, ALL):
        hermetic_git(forked.source).checkout("--quiet", branch)
        assert b"line_20 = 22\n" in (forked.source / "vllm/engine.py").read_bytes()
    repository = hermetic_git(forked.source)
    for stack in (SCORING, DEPTH):
        assert len(repository.rev_list(f"{FIXES}..{stack}").split()) == 1
    assert source.unexported(forked) == ""


def test_a_stack_that_was_put_on_the_new_fixes_by_hand_stays_there(forked):
    amend_first_fix(forked)
    repository = person(forked)
    repository.checkout("--quiet", SCORING)
    repository.rebase("--quiet")
    export(forked)
    assert [len(stacks.listed(forked, s)) for s in STACKS] == [2, 1, 1]


def test_a_patch_that_moved_to_the_fixes_leaves_its_stack(forked):
    repository = person(forked)
    repository.checkout("--quiet", FIXES)
    repository.cherry_pick(DEPTH)
    export(forked)
    assert stacks.listed(forked, FIXES)[2] == "add-depth.patch"
    assert stacks.listed(forked, DEPTH) == []
    check(forked)


def test_a_stack_that_conflicts_with_the_new_fixes_is_named(forked):
    before = exported(forked)
    changes = {"vllm/engine.py": engine(line_20="21", line_5="500")}
    commit(forked, FIXES, MESSAGE.format(what="New"), changes)
    with pytest.raises(ToolError) as error:
        export(forked)
    assert "'[Core][Frontend] Add scoring' conflicts in\n  vllm/engine.py" in str(error.value)
    assert exported(forked) == before
    # What it says can be done, and then it goes on.
    (command,) = [r for r in str(error.value).splitlines() if "git rebase --onto" in r]
    repository = person(forked)
    with pytest.raises(Exception, match="engine.py"):
        repository.rebase(*command.split()[2:])
    (forked.source / "vllm/engine.py").write_bytes(engine(line_20="21", line_5="55"))
    repository.add("--all")
    repository.rebase("--continue")
    export(forked)
    check(forked)


def test_hooks_of_two_stacks_at_one_place_are_named(forked):
    before = exported(forked)
    changes = {"vllm/engine.py": engine(line_20="21", line_35="36", line_7="77")}
    commit(forked, DEPTH, MESSAGE.format(what="Hook"), changes)
    with pytest.raises(ToolError) as error:
        export(forked)
    assert "patches/depth/hook.patch does not apply\n  vllm/engine.py (line" in str(error.value)
    assert "lines away from scoring's" in str(error.value)
    assert exported(forked) == before


def test_depth_applies_over_scoring_with_other_line_numbers(forked):
    text = engine(line_20="21", line_5="5\nmore = 1")
    commit(forked, SCORING, MESSAGE.format(what="Move lines"), {"vllm/engine.py": text})
    export(forked)
    source.open_source(forked)
    text = (forked.source / "vllm/engine.py").read_bytes()
    assert b"more = 1\n" in text and b"line_35 = 36\n" in text


def test_work_on_all_is_refused_with_the_branch_where_it_belongs(forked):
    before = exported(forked)
    changes = {"vllm/scoring.py": b"scoring = 2\n"}
    repository = commit(forked, ALL, "fixup! [Core][Frontend] Add scoring", changes)
    fixup = repository.rev_parse("--short", "HEAD")
    commit(forked, ALL, MESSAGE.format(what="New"), {"vllm/new.py": b"new = 1\n"})
    with pytest.raises(ToolError) as error:
        export(forked)
    said = str(error.value)
    assert f"git checkout {SCORING} && git cherry-pick {fixup}" in said
    assert "[Core][Frontend] New\n    git checkout STACK" in said
    assert exported(forked) == before
    # What it says, done.
    repository.checkout("--quiet", SCORING)
    repository.cherry_pick(fixup)
    repository.rebase("--quiet", "--interactive", "--autosquash")
    repository.checkout("--quiet", "-B", ALL, "refs/series/all")
    export(forked)
    assert b"+scoring = 2" in (forked.patches / "scoring/add-scoring.patch").read_bytes()


@pytest.mark.parametrize("how", ["rewritten", "shortened", "own branch", "detached"])
def test_work_that_is_on_no_stack_is_refused(forked, how):
    repository = person(forked)
    repository.checkout("--quiet", ALL)
    if how == "rewritten":
        repository.commit("--quiet", "--amend", "--message", MESSAGE.format(what="Other"))
    elif how == "shortened":
        repository.reset("--quiet", "--hard", "HEAD~")
    else:
        target = ["-b", "mine"] if how == "own branch" else ["--detach"]
        repository.checkout("--quiet", *target, SCORING)
        commit(forked, "HEAD", MESSAGE.format(what="New"), {"vllm/new.py": b"n = 1\n"})
    with pytest.raises(ToolError, match="work on no stack's branch"):
        export(forked)


def test_a_merge_is_refused(forked):
    repository = person(forked)
    repository.checkout("--quiet", SCORING)
    repository.merge("--quiet", "--no-ff", "--no-edit", DEPTH)
    with pytest.raises(ToolError, match="branch scoring has a merge commit"):
        export(forked)


def test_a_branch_that_is_missing_is_named(forked, tmp_path):
    hermetic_git(tmp_path).clone("--quiet", "--branch", DEPTH, str(forked.source), "other")
    with pytest.raises(ToolError, match="has no branch fixes"):
        export(forked, tmp_path / "other")


def test_a_patch_can_be_dropped(forked):
    series.drop(forked, "fixes/change-a-line")
    assert not (forked.patches / "fixes/change-a-line.patch").exists()
    assert len(check(forked).patches[FIXES]) == 1
    series.drop(forked, "add-scoring.patch")
    assert check(forked).patches[SCORING] == []
    assert (forked.patches / "scoring/series").read_text() == ""


def test_the_last_fix_can_be_dropped(forked):
    # What is left of the fixes is an ancestor of what stands on the old ones.
    last = stacks.listed(forked, FIXES)[-1]
    series.drop(forked, last)
    assert [len(check(forked).patches[stack]) for stack in STACKS] == [1, 1, 1]


def test_the_last_fix_is_kept_where_a_stack_needs_it(forked):
    changes = {"vllm/last.py": b"last = 1\n"}
    commit(forked, FIXES, MESSAGE.format(what="Last"), changes)
    export(forked)
    commit(forked, DEPTH, MESSAGE.format(what="User"), {"vllm/last.py": b"last = 2\n"})
    export(forked)
    before = exported(forked)
    with pytest.raises(ToolError, match="(?s)depth can not do without last.*User'"):
        series.drop(forked, "last")
    assert exported(forked) == before
    assert source.unexported(forked) == ""


def test_fixes_that_were_elsewhere_for_a_while_empty_no_stack(forked):
    repository = person(forked)
    repository.checkout("--quiet", FIXES)
    repository.reset("--quiet", "--hard", DEPTH)
    repository.reset("--quiet", "--hard", "HEAD@{1}")
    before = exported(forked)
    export(forked)
    assert exported(forked) == before


def test_a_drop_that_conflicts_is_named_and_can_be_resolved(forked):
    changes = {"vllm/depth.py": b"depth = 2\n"}
    commit(forked, DEPTH, MESSAGE.format(what="More"), changes)
    export(forked)
    with pytest.raises(ToolError, match="(?s)without add-depth.*More' conflicts in.*continue"):
        series.drop(forked, "add-depth")
    (forked.source / "vllm/depth.py").write_bytes(b"depth = 2\n")
    repository = person(forked)
    repository.add("--all")
    repository.rebase("--continue")
    export(forked)
    assert stacks.listed(forked, DEPTH) == ["more.patch"]


def test_a_patch_of_no_name_is_refused(forked):
    with pytest.raises(ToolError, match="no patch is named none"):
        series.drop(forked, "none")
