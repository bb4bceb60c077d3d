# SPDX-License-Identifier: Apache-2.0
"""The stacks come back the same, or the tools say what is wrong with them."""

import shutil
from pathlib import Path

import pytest
from conftest import FILES, MESSAGE, RELEASE, commit, engine, exported, make_checkout, person

from tools import bases, lock as locks, series, source, stacks
from tools.common import ToolError
from tools.export import check, export
from tools.hermetic import hermetic_git
from tools.stacks import ALL, BRANCHES, DEPTH, FIXES, SCORING

FIRST = "fixes/change-a-line.patch"
# The files that the two fixes touch, beside those named below.
TESTED = {"tests/test_engine.py", "vllm/windows.py"}


def test_open_then_export_writes_the_same_bytes(forked):
    before = exported(forked)
    source.open_source(forked, discard=True)
    export(forked)
    assert exported(forked) == before


def test_a_hostile_git_configuration_changes_nothing(forked, hostile):
    before = exported(forked)
    hostile()
    source.open_source(forked, discard=True)
    export(forked)
    assert exported(forked) == before
    assert check(forked).trees == locks.read(forked).trees


def test_the_base_is_the_same_commit_under_a_hostile_configuration(
    checkout, tmp_path, hostile
):
    hostile()
    other = make_checkout(tmp_path / "other")
    assert bases.commit(checkout, RELEASE) == bases.commit(other, RELEASE)


def test_the_base_holds_what_the_archive_does_except_generated_files(checkout):
    files = hermetic_git(checkout.bases).ls_tree(
        "-r", "--name-only", bases.branch(RELEASE)
    )
    generated = {"PKG-INFO", "setup.cfg", "vllm.egg-info/SOURCES.txt"}
    assert set(files.split()) == set(FILES) - generated - {"vllm/_version.py"}


def test_a_tree_opened_for_work_holds_the_patched_bytes(forked):
    source.open_source(forked, SCORING, discard=True)
    assert (forked.source / "vllm/windows.py").read_bytes().endswith(b"3 \r\n")
    assert (forked.source / "vllm/data.bin").read_bytes() == bytes(range(256))
    repository = hermetic_git(forked.source)
    assert repository.branch("--show-current") == SCORING
    subjects = repository.log("--format=%s %an %aI").splitlines()
    assert subjects[2].startswith("[Core][Frontend] Change a line Zoë Müller 2026-01")


def test_all_is_fixes_then_scoring_then_depth(forked):
    source.open_source(forked, discard=True)
    text = (forked.source / "vllm/engine.py").read_bytes()
    assert text == engine(line_5="55", line_20="21", line_35="36")
    subjects = hermetic_git(forked.source).log("--format=%s", "-2", ALL)
    assert subjects.splitlines() == [
        "[Core][Frontend] Add depth",
        "[Core][Frontend] Add scoring",
    ]


def test_an_open_tree_only_changes_branches(forked):
    source.open_source(forked, DEPTH)
    (forked.source / "ignored").mkdir(exist_ok=True)
    source.open_source(forked, SCORING)
    assert (forked.source / "ignored").exists()
    assert (forked.source / "vllm/scoring.py").exists()
    assert not (forked.source / "vllm/depth.py").exists()


def test_the_table_counts_code_tests_docs_and_hunks_apart(forked):
    table = (forked.patches / "fixes/README.md").read_text()
    (row,) = [line for line in table.splitlines() if "Change a line" in line]
    assert row.endswith("| Pending | 3 | +1 −1 | +1 −1 | +2 −0 | 1 |")
    overview = (forked.patches / "README.md").read_text()
    (row,) = [line for line in overview.splitlines() if "[scoring]" in line]
    tree = locks.read(forked).trees[SCORING]
    # Of its two hunks in code, one is in a file of its own.
    assert row.endswith(f"| fixes | 1 | +2 −1 |  |  | 1 | 0 | `{tree[:12]}` |")


@pytest.mark.parametrize("branch", BRANCHES)
def test_each_branch_gives_its_locked_tree_only(forked, branch):
    text = forked.lock_file.read_text()
    tree = locks.read(forked).trees[branch]
    forked.lock_file.write_text(text.replace(tree, "0" * 40))
    with pytest.raises(ToolError, match=f"{branch}: expected 0{{40}}, actual {tree}"):
        check(forked)


def test_a_patch_that_does_not_apply_is_named_with_its_file(forked):
    first = forked.patches / FIRST
    first.write_bytes(first.read_bytes().replace(b"-line_20 = 20", b"-line_20 = 99"))
    for attempt in (check, lambda c: source.open_source(c, discard=True)):
        with pytest.raises(ToolError) as error:
            attempt(forked)
        assert FIRST in str(error.value)
        assert "vllm/engine.py (line " in str(error.value)
    assert not list((forked.build / "tmp").glob("*/work-*"))


def test_a_later_patch_that_does_not_apply_is_the_one_that_is_named(forked):
    name = "say-in-a-subject-that-is-far-longer-than-a-mail-header-what.patch"
    file = forked.patches / FIXES / name
    file.write_bytes(file.read_bytes().replace(b"-second = 2", b"-second = 9"))
    with pytest.raises(ToolError, match=rf"fixes/{name} does not apply\n  vllm/windows"):
        check(forked)


def test_a_patch_for_a_file_that_upstream_removed_is_named_with_it(forked):
    first = forked.patches / FIRST
    first.write_bytes(first.read_bytes().replace(b"vllm/engine.py", b"vllm/gone.py"))
    with pytest.raises(ToolError, match=r"vllm/gone.py \(does not exist in index\)"):
        check(forked)


def test_open_keeps_commits_that_were_not_exported(forked):
    commit(forked, DEPTH, MESSAGE.format(what="New"), {"vllm/new.py": b"new = 1\n"})
    with pytest.raises(ToolError, match="commits that were not exported"):
        source.open_source(forked)
    source.open_source(forked, DEPTH, discard=True)
    assert not (forked.source / "vllm/new.py").exists()


def test_open_keeps_a_branch_of_a_persons_own(forked):
    hermetic_git(forked.source).checkout("--quiet", "-b", "mine", SCORING)
    commit(forked, "mine", MESSAGE.format(what="New"), {"vllm/new.py": b"new = 1\n"})
    hermetic_git(forked.source).checkout("--quiet", ALL)
    with pytest.raises(ToolError, match="commits that were not exported"):
        source.open_source(forked)


def test_open_keeps_changes_that_were_not_committed(forked):
    (forked.source / "vllm/engine.py").write_text("changed = 1\n")
    with pytest.raises(ToolError, match="uncommitted changes"):
        source.open_source(forked)


def test_open_keeps_changes_that_were_stashed(forked):
    (forked.source / "vllm/engine.py").write_text("work\n")
    person(forked).stash()
    with pytest.raises(ToolError, match="stashed"):
        source.open_source(forked)


def test_export_does_not_undo_patches_that_came_from_elsewhere(forked):
    commit(forked, DEPTH, MESSAGE.format(what="Work"), {"vllm/new.py": b"new = 1\n"})
    (forked.patches / "scoring/series").write_text("")
    before = exported(forked)
    with pytest.raises(ToolError, match="patches/.*git format-patch"):
        export(forked)
    assert exported(forked) == before


@pytest.mark.parametrize("stack, count", [(FIXES, 2), (SCORING, 1), (DEPTH, 1)])
def test_git_rebase_needs_no_name_of_what_a_stack_stands_on(forked, stack, count):
    repository = person(forked)
    repository.checkout("--quiet", stack)
    repository.commit("--quiet", "--allow-empty", "--fixup", f"HEAD~{count - 1}")
    repository.rebase("--quiet", "--interactive", "--autosquash", "--keep-empty")
    assert len(repository.rev_list("@{upstream}..HEAD").split()) == count


def test_export_takes_branches_from_a_linked_working_tree(forked, tmp_path):
    before = exported(forked)
    tree = tmp_path / "linked"
    repository = hermetic_git(forked.source)
    repository.worktree("add", "--quiet", "--detach", str(tree), "HEAD")
    export(forked, tree)
    assert exported(forked) == before


def test_export_takes_branches_from_another_tree_over_a_flat_layout(forked, tmp_path):
    before = exported(forked)
    tree = tmp_path / "elsewhere"
    hermetic_git(tmp_path).clone("--quiet", str(forked.source), str(tree))
    for stack in stacks.STACKS:
        hermetic_git(tree).checkout("--quiet", "-B", stack, f"origin/{stack}")
        shutil.rmtree(forked.patches / stack)
    (forked.patches / "0001-Core-Old.patch").write_text("of the flat layout\n")
    text = forked.lock_file.read_text().splitlines()
    old = [row for row in text if row.partition(" ")[0] not in BRANCHES]
    at = old.index("[series]") + 2
    forked.lock_file.write_text("\n".join([*old[:at], 'tree = "0"', *old[at:]]) + "\n")
    export(forked, tree)
    assert exported(forked) == before


@pytest.mark.parametrize(
    "message, complaint",
    [
        ("No tags\n\nUpstream-Status: Pending\n", "must begin with tags"),
        ("[Core] No status\n", "0 Upstream-Status trailers"),
        ("[Core] X\n\nUpstream-Status: Soon\n", "'Soon', wanted Pending"),
        ("[Core] X\n\nUpstream-Status: Submitted\n", "'Submitted', wanted"),
        ("fixup! [Core] X\n\nUpstream-Status: Pending\n", "autosquash"),
        (
            "[Core] X\n\nUpstream-Status: Pending\nUpstream-Status: Pending\n",
            "2 Upstream-Status trailers",
        ),
        ("[Core] X\n\n---\nlost\n\nUpstream-Status: Pending\n", "exported again"),
    ],
)
def test_export_names_a_broken_rule_and_writes_nothing(forked, message, complaint):
    before = exported(forked)
    commit(forked, DEPTH, message, {"vllm/new.py": b"new = 1\n"})
    with pytest.raises(ToolError) as error:
        export(forked)
    assert complaint in str(error.value) and "depth/" in str(error.value)
    assert exported(forked) == before


@pytest.mark.parametrize(
    "content, complaint",
    [
        (b"def f():\nreturn 1\n", "vllm/new.py:2: expected an indented block"),
        (b"def f():\n    return other\n", "vllm/new.py:2:12: undefined name 'other'"),
        (b"import vllm.other\n", "vllm/new.py:1: there is no module vllm.other"),
        (b"from vllm.engine import x\n", "vllm/new.py:1: vllm.engine has no x"),
        (b"from vllm.scoring import x\n", "vllm/new.py:1: there is no module vllm.scoring"),
    ],
)
def test_each_patch_is_sound_by_itself(forked, content, complaint):
    """Though the next one mends it, and though scoring is there in `all`."""
    commit(forked, DEPTH, MESSAGE.format(what="X"), {"vllm/new.py": content})
    commit(forked, DEPTH, MESSAGE.format(what="Y"), {"vllm/new.py": b"f = 1\n"})
    with pytest.raises(ToolError) as error:
        export(forked)
    assert f"depth/x.patch: {complaint}" in str(error.value)


@pytest.mark.parametrize(
    "content",
    [b"from vllm.engine import line_1\n", b"import vllm.depth\n", b"from vllm import depth\n"],
)
def test_what_a_stack_has_can_be_imported(forked, content):
    commit(forked, DEPTH, MESSAGE.format(what="X"), {"vllm/new.py": content})
    export(forked)


@pytest.mark.parametrize(
    "status",
    [
        "Submitted [pull request 1]",
        "Backport [1.1.0]",
        "Inappropriate [fork only]",
    ],
)
def test_every_word_of_the_vocabulary_is_taken(forked, status):
    message = MESSAGE.format(what="New").replace("Pending", status)
    commit(forked, DEPTH, message, {"vllm/new.py": b"new = 1\n"})
    assert export(forked).patches[DEPTH][1].statuses == (status,)


def test_check_names_bytes_that_export_would_not_write(forked):
    first = forked.patches / FIRST
    first.write_bytes(first.read_bytes() + b"-- \nsigned\n")
    with pytest.raises(ToolError, match=f"{FIRST}: not the bytes"):
        check(forked)


def test_check_names_a_stale_table_and_a_stray_file(forked):
    (forked.patches / "depth/README.md").write_text("by hand\n")
    (forked.patches / "scoring/notes.txt").write_text("stray\n")
    with pytest.raises(ToolError) as error:
        check(forked)
    assert "depth/README.md: the table is not up to date" in str(error.value)
    assert "scoring/notes.txt: not part of any stack" in str(error.value)


def test_a_patch_that_is_listed_and_not_there_is_named(forked):
    (forked.patches / FIRST).unlink()
    with pytest.raises(ToolError, match="series names change-a-line.patch: no such file"):
        check(forked)


def test_a_renamed_patch_is_named(forked):
    first = forked.patches / FIRST
    first.rename(first.with_name("other.patch"))
    file = forked.patches / "fixes/series"
    file.write_text(file.read_text().replace("change-a-line", "other"))
    with pytest.raises(ToolError, match="fixes/other.patch: not the bytes"):
        check(forked)


def test_a_commit_that_changes_nothing_is_named(forked):
    commit(forked, DEPTH, MESSAGE.format(what="Nothing"), {})
    with pytest.raises(ToolError, match="Nothing' on branch depth changes nothing"):
        export(forked)


def test_comments_stay_above_the_patch_that_they_stood_above(forked):
    file = forked.patches / "fixes/series"
    name = "say-in-a-subject-that-is-far-longer-than-a-mail-header-what.patch"
    text = f"change-a-line.patch\n\n# why this one\n{name}  # and more\n# the end\n"
    file.write_text(text)
    check(forked)
    export(forked)
    assert file.read_text() == text
    repository = hermetic_git(forked.source)
    base = bases.in_clone(RELEASE)
    repository.rebase("--quiet", "--onto", base, f"{FIXES}~", FIXES)
    export(forked)
    assert file.read_text() == text.partition("\n")[2]


def test_an_empty_series_is_the_base(checkout):
    source.open_source(checkout)
    tree = locks.read(checkout).base_tree
    assert export(checkout).trees == dict.fromkeys(BRANCHES, tree)
    check(checkout)


def test_the_lock_reads_back_as_written(forked):
    lock, text = locks.read(forked), forked.lock_file.read_bytes()
    locks.write(forked, lock)
    assert forked.lock_file.read_bytes() == text
    assert lock.version("cpu") == f"{RELEASE}+utio.1.cpu"


def test_a_lock_with_something_missing_is_refused(checkout: Path):
    text = checkout.lock_file.read_text()
    checkout.lock_file.write_text(text.replace("revision", "version"))
    with pytest.raises(ToolError, match="revision"):
        locks.read(checkout)


def upstream_repository(folder: Path) -> str:
    """A git repository with the tiny release at its tag; returns the commit."""
    folder.mkdir()
    repository = hermetic_git(folder)
    for name, data in FILES.items():
        if name in {"setup.py", "vllm/engine.py", "docs/engine.md"} | TESTED:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    repository.init("--quiet")
    repository.update_environment(GIT_AUTHOR_NAME="U", GIT_AUTHOR_EMAIL="u@u.invalid")
    repository.add("--all")
    repository.commit("--quiet", "--message", "release")
    repository.tag(f"v{RELEASE}")
    return repository.rev_parse("HEAD")


def test_the_stacks_can_stand_on_upstreams_own_commit(forked, tmp_path):
    before = exported(forked)
    commit_id = upstream_repository(tmp_path / "upstream")
    url = f"file://{tmp_path}/upstream"
    bases.import_tag(forked, RELEASE, commit_id[:9], url)
    source.open_source(forked, discard=True)
    assert hermetic_git(forked.source).rev_parse(f"{FIXES}~2") == commit_id
    export(forked)
    # The lock as well: it describes the archive. The overview shows the trees.
    after = exported(forked)
    assert after.pop("patches/README.md") != before.pop("patches/README.md")
    assert after == before


def test_a_tag_that_moved_is_refused_with_both_commits(forked, tmp_path):
    commit_id = upstream_repository(tmp_path / "upstream")
    url = f"file://{tmp_path}/upstream"
    with pytest.raises(ToolError) as error:
        bases.import_tag(forked, RELEASE, "0123abcde", url)
    assert commit_id in str(error.value) and "0123abcde" in str(error.value)


def test_pages_that_patches_add_are_copied_and_kept_fresh(forked):
    by_hand = forked.docs / "by_hand.md"
    by_hand.parent.mkdir()
    by_hand.write_text("# Ours\n")
    page = {"docs/features/fast.md": b"# Fast\n", "docs/engine.md": b"# Other\n"}
    commit(forked, DEPTH, MESSAGE.format(what="Explain it"), page)
    export(forked)
    copy = forked.docs / "features" / "fast.md"
    assert copy.read_text().endswith("\n\n# Fast\n")
    assert {f.name for f in forked.docs.rglob("*.md")} == {"by_hand.md", "fast.md"}
    check(forked)

    copy.write_text(copy.read_text() + "edited\n")
    with pytest.raises(ToolError, match="docs/features/fast.md: not what the patches"):
        check(forked)

    series.drop(forked, "explain-it")
    assert [f.name for f in forked.docs.rglob("*.md")] == ["by_hand.md"]


def test_links_of_pages_lead_to_upstreams_where_there_is_no_copy(forked):
    page = (
        b"[own](../faster.md#how) [theirs](slow.md) [above](../engine.md#a) "
        b"[web](https://example.org/x.md) [here](#fast)\n"
    )
    pages = {"docs/features/fast/fast.md": page, "docs/features/faster.md": b"# F\n"}
    commit(forked, DEPTH, MESSAGE.format(what="Explain it"), pages)
    export(forked)
    found = (forked.docs / "features" / "fast" / "fast.md").read_text().splitlines()[-1]
    release = f"https://github.com/vllm-project/vllm/blob/v{RELEASE}/docs/"
    assert found == (
        f"[own](../faster.md#how) [theirs]({release}features/fast/slow.md) "
        f"[above]({release}features/engine.md#a) [web](https://example.org/x.md) "
        "[here](#fast)"
    )
