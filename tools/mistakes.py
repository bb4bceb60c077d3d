# SPDX-License-Identifier: Apache-2.0
"""What keeps Python files of a git tree from being imported, or names from being found.

A rebase can leave such a mistake in one patch and mend it in another; and a stack can
use a name of another one that it does not stand on.
"""

import ast
import functools
from collections.abc import Iterator

import git
from pyflakes import messages
from pyflakes.checker import Checker

_UNDEFINED = messages.UndefinedName, messages.UndefinedLocal, messages.UndefinedExport


class Mistakes:
    """Finds the mistakes that commits make over a base commit."""

    def __init__(self, repository: git.Git, base: str) -> None:
        self.repository = repository
        self.base = base
        # Most files are the same in most commits.
        self._blobs = functools.cache(self._list)
        self._source = functools.cache(repository.cat_file)
        self._imports = functools.cache(lambda blob: imports(self._text(blob)))
        self._defined = functools.cache(lambda blob: defined(self._text(blob)))

    def of(self, commit: str, paths: list[str]) -> list[str]:
        """What is wrong with those files of a commit, a line each."""
        found = []
        for path in paths:
            if path.endswith(".py") and self.has(commit, path):
                found += self.undefined(commit, path) or [
                    f"{path}:{line}: {module} has no {name}" if name
                    else f"{path}:{line}: there is no module {module}"
                    for module, name, line in self.unknown(commit, path)
                ]  # fmt: skip
        return found

    def has(self, commit: str, path: str) -> bool:
        """Whether a commit has a file."""
        return path in self._blobs(commit)

    def undefined(self, commit: str, path: str) -> list[str]:
        """A syntax error in a file of a commit, or names that are nowhere defined."""
        return undefined(self._text(self._blobs(commit)[path]), path)

    def unknown(self, commit: str, path: str) -> list[tuple[str, str, int]]:
        """Imports from vLLM of what the commit's tree does not have.

        Those that the base has too are left out: some modules are made by the build.

        Returns:
            module, name (or "") and line of each.
        """
        before = self._blobs(self.base).get(path)
        known = self._imports(before) if before else {}
        return [
            (module, name if self._has(commit, module, "") else "", line)
            for (module, name), line in self._imports(self._blobs(commit)[path]).items()
            if (module, name) not in known and not self._has(commit, module, name)
        ]

    def _has(self, commit: str, module: str, name: str) -> bool:
        blobs = self._blobs(commit)
        stem = module.replace(".", "/")
        file = next((f for f in (f"{stem}.py", f"{stem}/__init__.py") if f in blobs), "")
        if not name or not file:
            return bool(file) or any(path.startswith(f"{stem}/") for path in blobs)
        if f"{stem}/{name}.py" in blobs or f"{stem}/{name}/__init__.py" in blobs:
            return True
        names = self._defined(blobs[file])
        return name in names or not names.isdisjoint({"*", "__getattr__"})

    def _list(self, commit: str) -> dict[str, str]:
        rows = self.repository.ls_tree("-r", commit).splitlines()
        split = (row.partition("\t") for row in rows)
        return {path: about.split()[2] for about, _, path in split}

    def _text(self, blob: str) -> str:
        return self._source("blob", blob)


_parse = functools.lru_cache(2)(ast.parse)
"""Of a file first the names are looked up, then the imports, and those of the base's."""


def undefined(source: str, path: str) -> list[str]:
    """A syntax error, or names that are nowhere defined."""
    try:
        tree = _parse(source)
    except SyntaxError as error:
        return [f"{path}:{error.lineno}: {error.msg}"]
    lines = source.splitlines()
    return [
        str(found)
        for found in Checker(tree, path).messages
        if isinstance(found, _UNDEFINED) and "noqa" not in lines[found.lineno - 1]
    ]


def imports(source: str) -> dict[tuple[str, str], int]:
    """What a module imports from vLLM: module and name (or ""), and the line."""
    try:
        tree = _parse(source)
    except SyntaxError:
        return {}
    found: dict[tuple[str, str], int] = {}
    for node in _statements(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            pairs = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            pairs = [(alias.name, "") for alias in node.names]
        else:
            continue
        for module, name in pairs:
            if module.split(".")[0] == "vllm":
                found.setdefault((module, name.replace("*", "")), node.lineno)
    return found


def defined(source: str) -> frozenset[str]:
    """Every name that a module may define at its top level, roughly: too many."""
    found = set()
    for node in _statements(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        else:
            targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
            targets += [item.optional_vars for item in getattr(node, "items", ())]
            for target in filter(None, targets):
                names = (one for one in ast.walk(target) if isinstance(one, ast.Name))
                found |= {one.id for one in names}
    return frozenset(found)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements in a node: a fraction of its nodes, which `ast.walk` visits."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, field, ()):
            yield inner
            yield from _statements(inner)
