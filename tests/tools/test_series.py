# SPDX-License-Identifier: Apache-2.0
"""The series comes back the same, or the tools say what is wrong with it."""

from pathlib import Path

import pytest
from conftest import FILES, MESSAGE, RELEASE, commit, exported, make_checkout

from tools import bases, lock as locks, series
from tools.common import ToolError
from tools.hermetic import hermetic_git

# The files that the two patches of `forked` touch, beside those named below.
TESTED = {"tests/test_engine.py", "vllm/windows.py"}


def test_open_then_export_writes_the_same_bytes(forked):
    before = exported(forked)
    series.open_series(forked)
    series.export(forked)
    assert exported(forked) == before


def test_a_hostile_git_configuration_changes_nothing(forked, hostile):
    before = exported(forked)
    hostile()
    series.open_series(forked)
    series.export(forked)
    assert exported(forked) == before
    assert series.check(forked).tree == locks.read(forked).tree


def test_the_base_is_the_same_commit_under_a_hostile_configuration(
    checkout, tmp_path, hostile
):
    hostile()
    other = make_checkout(tmp_path / "other")
    first, second = (
        hermetic_git(c.bases).rev_parse(bases.branch(RELEASE))
        for c in (checkout, other)
    )
    assert first == second


def test_the_base_holds_what_the_archive_does_except_generated_files(checkout):
    files = hermetic_git(checkout.bases).ls_tree(
        "-r", "--name-only", bases.branch(RELEASE)
    )
    generated = {"PKG-INFO", "setup.cfg", "vllm.egg-info/SOURCES.txt"}
    assert set(files.split()) == set(FILES) - generated - {"vllm/_version.py"}


def test_a_tree_opened_for_work_holds_the_patched_bytes(forked):
    series.open_series(forked)
    assert (forked.source / "vllm/windows.py").read_bytes().endswith(b"3 \r\n")
    assert (forked.source / "vllm/data.bin").read_bytes() == bytes(range(256))
    subjects = hermetic_git(forked.source).log("--format=%s %an %aI").splitlines()
    assert subjects[1].startswith("[Core][Frontend] Change a line Zoë Müller 2026-01")


def test_the_table_counts_code_tests_and_docs_apart(forked):
    table = (forked.patches / "README.md").read_text()
    (row,) = [line for line in table.splitlines() if "Change a line" in line]
    assert row.endswith("| Pending | 3 | +1 −1 | +1 −1 | +2 −0 |")


def test_the_series_applies_to_the_locked_tree_only(forked):
    text = forked.lock_file.read_text()
    tree = locks.read(forked).tree
    forked.lock_file.write_text(text.replace(tree, "0" * 40))
    with pytest.raises(ToolError) as error:
        series.check(forked)
    assert "0" * 40 in str(error.value) and tree in str(error.value)


def test_a_patch_that_does_not_apply_is_named_with_its_file(forked):
    (first, _) = series.patch_files(forked.patches)
    first.write_bytes(first.read_bytes().replace(b"-line_20 = 20", b"-line_20 = 99"))
    for attempt in (series.check, lambda c: series.open_series(c, discard=True)):
        with pytest.raises(ToolError) as error:
            attempt(forked)
        assert first.name in str(error.value)
        assert "vllm/engine.py (line " in str(error.value)
    assert not list((forked.build / "tmp").glob("*/work-*"))


def test_a_patch_for_a_file_that_upstream_removed_is_named_with_it(forked):
    (first, _) = series.patch_files(forked.patches)
    first.write_bytes(first.read_bytes().replace(b"vllm/engine.py", b"vllm/gone.py"))
    with pytest.raises(ToolError, match=r"vllm/gone.py \(does not exist in index\)"):
        series.check(forked)


def test_open_keeps_commits_that_were_not_exported(forked):
    commit(forked, MESSAGE.format(what="New"), {"vllm/new.py": b"new = 1\n"})
    with pytest.raises(ToolError, match="commits that were not exported"):
        series.open_series(forked)
    series.open_series(forked, discard=True)
    assert not (forked.source / "vllm/new.py").exists()


def test_open_keeps_changes_that_were_not_committed(forked):
    (forked.source / "vllm/engine.py").write_text("changed = 1\n")
    with pytest.raises(ToolError, match="uncommitted changes"):
        series.open_series(forked)


def test_open_keeps_changes_that_were_stashed(forked):
    series.open_series(forked)
    (forked.source / "vllm/engine.py").write_text("work\n")
    hermetic_git(forked.source).stash()
    with pytest.raises(ToolError, match="stashed"):
        series.open_series(forked)


def test_export_does_not_undo_patches_that_came_from_elsewhere(forked):
    series.open_series(forked)
    commit(forked, MESSAGE.format(what="Work"), {"vllm/new.py": b"new = 1\n"})
    patch = sorted(forked.patches.glob("*.patch"))[-1]
    patch.unlink()
    before = exported(forked)
    with pytest.raises(ToolError, match="patches/.*git format-patch"):
        series.export(forked)
    assert exported(forked) == before


def test_git_rebase_needs_no_name_of_the_base(forked):
    repository = hermetic_git(forked.source)
    repository.update_environment(GIT_AUTHOR_NAME="A", GIT_AUTHOR_EMAIL="a@a.invalid")
    repository.commit("--quiet", "--allow-empty", "--fixup", "HEAD~1")
    repository.rebase("--quiet", "--interactive", "--autosquash", "--keep-empty")
    assert len(repository.rev_list("@{upstream}..HEAD").split()) == 2


def test_export_removes_patches_that_are_gone(forked):
    hermetic_git(forked.source).reset("--quiet", "--hard", "HEAD~1")
    series.export(forked)
    assert len(series.patch_files(forked.patches)) == 1
    assert series.check(forked).patches[0].subject.endswith("Change a line")


def test_export_takes_commits_from_another_tree(forked, tmp_path):
    before = exported(forked)
    tree = tmp_path / "elsewhere"
    hermetic_git(tmp_path).clone("--quiet", str(forked.source), str(tree))
    series.export(forked, tree, "HEAD~2")
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
    commit(forked, message, {"vllm/new.py": b"new = 1\n"})
    with pytest.raises(ToolError) as error:
        series.export(forked)
    assert complaint in str(error.value) and "0003-" in str(error.value)
    assert exported(forked) == before


@pytest.mark.parametrize(
    "content, complaint",
    [
        (b"def f():\nreturn 1\n", "vllm/new.py:2: expected an indented block"),
        (b"def f():\n    return other\n", "vllm/new.py:2:12: undefined name 'other'"),
    ],
)
def test_each_patch_is_sound_by_itself(forked, content, complaint):
    """Though the next one mends it."""
    commit(forked, "[Core] X\n\nUpstream-Status: Pending\n", {"vllm/new.py": content})
    commit(forked, "[Core] Y\n\nUpstream-Status: Pending\n", {"vllm/new.py": b"f = 1\n"})
    with pytest.raises(ToolError) as error:
        series.export(forked)
    assert f"0003-Core-X.patch: {complaint}" in str(error.value)


@pytest.mark.parametrize(
    "status",
    [
        "Pending",
        "Submitted [pull request 1]",
        "Backport [1.1.0]",
        "Inappropriate [fork only]",
    ],
)
def test_every_word_of_the_vocabulary_is_taken(checkout, status):
    series.open_series(checkout)
    message = MESSAGE.format(what="New").replace("Pending", status)
    commit(checkout, message, {"vllm/new.py": b"new = 1\n"})
    series.export(checkout)
    assert series.check(checkout).patches[0].statuses == (status,)


def test_check_names_bytes_that_export_would_not_write(forked):
    (first, _) = series.patch_files(forked.patches)
    first.write_bytes(first.read_bytes() + b"-- \nsigned\n")
    with pytest.raises(ToolError, match=f"{first.name}: not the bytes"):
        series.check(forked)


def test_check_names_a_stale_table_and_a_stray_file(forked):
    (forked.patches / "README.md").write_text("by hand\n")
    (forked.patches / "notes.txt").write_text("stray\n")
    with pytest.raises(ToolError) as error:
        series.check(forked)
    assert "README.md: the table is not up to date" in str(error.value)
    assert "notes.txt: not part of the series" in str(error.value)


def test_a_gap_in_the_numbers_is_named(forked):
    (_, second) = series.patch_files(forked.patches)
    second.rename(second.with_name(second.name.replace("0002", "0003")))
    with pytest.raises(ToolError, match="0003-.*stands where 0002"):
        series.check(forked)


def test_an_empty_series_is_the_base(checkout):
    series.open_series(checkout)
    assert series.export(checkout).tree == locks.read(checkout).base_tree


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


def test_the_series_can_stand_on_upstreams_own_commit(forked, tmp_path):
    before = exported(forked)
    (tmp_path / "upstream").mkdir()
    commit_id = upstream_repository(tmp_path / "upstream")
    url = f"file://{tmp_path}/upstream"
    bases.import_tag(forked, RELEASE, commit_id[:9], url)
    series.open_series(forked)
    assert hermetic_git(forked.source).rev_parse("HEAD~2") == commit_id
    series.export(forked)
    # The lock as well: it describes the archive.
    assert exported(forked) == before


def test_a_tag_that_moved_is_refused_with_both_commits(forked, tmp_path):
    (tmp_path / "upstream").mkdir()
    commit_id = upstream_repository(tmp_path / "upstream")
    url = f"file://{tmp_path}/upstream"
    with pytest.raises(ToolError) as error:
        bases.import_tag(forked, RELEASE, "0123abcde", url)
    assert commit_id in str(error.value) and "0123abcde" in str(error.value)
