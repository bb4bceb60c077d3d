# SPDX-License-Identifier: Apache-2.0
"""Rewritten lines are counted right, against a count that knows every line by name."""

import random

import pytest
from conftest import MESSAGE, commit, engine

from tools.export import export
from tools.hermetic import hermetic_git
from tools.rewritten import parse, rewritten
from tools.stacks import DEPTH, FIXES, SCORING

FILES = ["a.txt", "b.txt", "c.txt"]


def edit(lines: list[str], draw: random.Random, name: str) -> list[str]:
    """Remove some lines and add some, each of which is like no other."""
    kept = [line for line in lines if draw.random() > 0.15]
    for number in range(draw.randrange(8)):
        kept.insert(draw.randint(0, len(kept)), f"{name}-{number}-{draw.random()}")
    return kept


@pytest.mark.parametrize("seed", range(4))
def test_the_count_is_that_of_lines_which_are_all_different(tmp_path, seed):
    draw = random.Random(seed)
    repository = hermetic_git(tmp_path)
    repository.init("--quiet")
    repository.update_environment(GIT_AUTHOR_NAME="A", GIT_AUTHOR_EMAIL="a@a.invalid")
    texts = {name: [f"base-{name}-{n}" for n in range(30)] for name in FILES[:2]}
    wanted: dict[tuple[str, str], int] = {}
    patches = []
    for number in range(9):
        name = f"p{number}"
        if number:
            before = {line for lines in texts.values() for line in lines}
            texts = {file: edit(lines, draw, name + file) for file, lines in texts.items()}
            if number in (3, 7):
                texts[FILES[2]] = [f"{name}-own-{n}" for n in range(5)]
            elif number == 5:
                del texts[FILES[2]]
            gone = before - {line for lines in texts.values() for line in lines}
            for line in gone:
                earlier = line[:2]
                if earlier != "ba":
                    pair = earlier, name
                    wanted[pair] = wanted.get(pair, 0) + 1
        for file in FILES:
            path = tmp_path / file
            path.unlink(missing_ok=True)
            if file in texts:
                end = "\n" * draw.choice([True, True, bool(not texts[file])])
                path.write_text("\n".join(texts[file]) + end)
        repository.add("--all")
        repository.commit("--quiet", "--message", name)
        if number:
            patch = repository.format_patch("--stdout", "--no-renames", "-1")
            patches.append((name, parse(patch.encode())))
    got = rewritten(patches)
    # A last line changes when it gains or loses its newline; more can not be said of it.
    slack = sum(abs(got[pair] - wanted.get(pair, 0)) for pair in {*got, *wanted})
    assert wanted and got.total() >= sum(wanted.values()) and slack <= 9 * len(FILES)


def test_lines_of_an_earlier_patch_count_and_upstreams_do_not(forked):
    changes = {
        "vllm/engine.py": engine(line_20="22", line_35="37", line_30="0"),
        "vllm/depth.py": b"depth = 2\n",
    }
    commit(forked, DEPTH, MESSAGE.format(what="Rewrite"), changes)
    done = export(forked)
    assert done.rewritten == {
        ("fixes/change-a-line", "depth/rewrite"): 1,
        ("depth/add-depth", "depth/rewrite"): 2,
    }
    counts = [done.rewritten_in(branch).total() for branch in (FIXES, SCORING, DEPTH, "all")]
    assert counts == [0, 0, 3, 3]
    overview = (forked.patches / "README.md").read_text()
    assert "| 2 | depth/add-depth | depth/rewrite |" in overview
