# SPDX-License-Identifier: Apache-2.0
"""What the tools' own code keeps to."""

import ast
import graphlib
import os
from pathlib import Path

import pytest

from tools.common import HERE
from tools.hermetic import hermetic_git

FOLDER = HERE.root / "tools"
NAMES = sorted(file.stem for file in FOLDER.glob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    """The modules of tools/ that a syntax tree imports."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "tools":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tools."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            parts = [alias.name.split(".") for alias in node.names]
            found |= {part[1] for part in parts if part[0] == "tools" and part[1:]}
    return found


def parsed(name: str) -> ast.Module:
    return ast.parse((FOLDER / f"{name}.py").read_text())


def test_no_module_imports_itself_by_way_of_others():
    graph = {name: imported(parsed(name)) for name in NAMES}
    assert graph["series"] and set().union(*graph.values()) <= set(NAMES)
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("common") < order.index("stacks") < order.index("series")


@pytest.mark.parametrize("name", NAMES)
def test_the_tools_are_imported_at_the_top_only_and_files_are_short(name):
    tree = parsed(name)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    assert not set().union(*map(imported, functions), set())
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 400


def test_the_build_starts_without_an_environment():
    """What build.sh runs with the system's Python is standard library only."""
    needed, waiting = set(), {"build"}
    while waiting:
        name = waiting.pop()
        needed.add(name)
        waiting |= imported(parsed(name)) - needed
    text = "".join((FOLDER / f"{name}.py").read_text() for name in needed)
    assert "import git" not in text and "pyflakes" not in text


def test_git_is_shielded_and_this_process_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody Else")
    monkeypatch.setenv("GIT_SSL_NO_VERIFY", "kept")
    before = dict(os.environ)
    repository = hermetic_git(tmp_path)
    repository.init("--quiet")
    assert (tmp_path / ".git").is_dir()
    repository.update_environment(GIT_AUTHOR_EMAIL="a@a.invalid")
    assert repository.var("GIT_AUTHOR_IDENT", with_exceptions=False)[:8] != "Somebody"
    shown = repository.execute(["env"])
    assert "GIT_SSL_NO_VERIFY=kept" in shown and "GIT_AUTHOR_EMAIL=a@a.invalid" in shown
    assert "GIT_DIR" not in shown
    assert dict(os.environ) == before


def test_what_is_pinned_for_the_patches_is_pinned_alike_for_the_build():
    def pins(name: str) -> dict[str, str]:
        rows = Path(HERE.root, "requirements", name).read_text().splitlines()
        split = [row.split()[0].partition("==") for row in rows if row[:1].isalnum()]
        return {package.lower(): version for package, _, version in split}

    assert pins("series.lock").items() <= pins("cpu.lock").items()
