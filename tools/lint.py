# SPDX-License-Identifier: Apache-2.0
"""Check the patches with upstream's own linters, and our own code with some of them.

``./build.sh lint`` runs the hooks of the release's ``.pre-commit-config.yaml``, with
the release's own settings and versions, on the files that the patches change: the
quick ones at each patch, all of them, mypy too, on the stacks. The release itself
passes them, so each complaint is a patch's. Nothing but the package index is needed.

A hook is run as pre-commit runs it. Of those that need something else, ``_LEFT_OUT``
says why; a new release's new hook is run, or named as one that is not understood.
"""

import argparse
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import git
import yaml

from tools import bases, lock as locks, stacks
from tools.common import HERE, Checkout, ToolError, run_main
from tools.hermetic import hermetic_git
from tools.series import import_base
from tools.stacks import ALL, DEPTH, FIXES, SCORING, STACKS, Contents

_LINTERS = {
    "ruff-check": ["ruff", "check", "--quiet", "--output-format=concise"],
    "ruff-format": ["ruff", "format", "--check", "--quiet", "--diff"],
    "typos": ["typos", "--force-exclude", "--format=brief"],
    "shellcheck": ["shellcheck"],
}
"""Hooks of other repositories: the package of the same name, and how it is called."""
_AT_EACH_PATCH = ("ruff-check", "ruff-format", "typos", "check-spdx-header")
_LEFT_OUT = {
    "markdownlint-cli2": "a Node program",
    "signoff-commit": "of the person who sends a patch",
    "suggestion": "prints a hint",
    "test-nonroot-entrypoint": "of Docker",
    "update-dockerfile-graph": "of Docker",
}
_TYPES = {
    "python": (".py",),
    "pyi": (".pyi",),
    "rust": (".rs",),
    "proto": (".proto",),
    "png": (".png",),
    "c++": (".cpp", ".h", ".hpp"),
    "cuda": (".cu", ".cuh"),
}
"""Endings of the types of files that hooks name."""
_FILES = {
    "actionlint": r"^\.github/workflows/",
    "ruff-check": r"\.pyi?$",
    "ruff-format": r"\.pyi?$",
    "shellcheck": r"\.sh$",
}
"""What a hook of another repository is for, which that repository says."""

REASONS = {
    FIXES: "a defect of upstream's",
    SCORING: "the feature of scoring named tokens",
    DEPTH: "the feature of routing by depth",
}
"""Why a patch exists: there is no other reason, and its stack is the reason."""

OWN = ("tools", "tests", "benchmarks", "examples")


@dataclass(frozen=True)
class Hook:
    """One hook of upstream's.

    Attributes:
        name: its id.
        command: words to which the files are added.
        files: regular expression of the files it is for; all if empty.
        excluded: regular expression of those it is not for; none if empty.
        types: of files, of which a file has one; any if empty.
        takes_files: whether it is given the files.
    """

    name: str
    command: tuple[str, ...]
    files: str
    excluded: tuple[str, ...]
    types: tuple[str, ...]
    takes_files: bool

    def of(self, paths: list[str]) -> list[str]:
        """Those of some files that the hook is for."""
        endings = tuple(end for name in self.types for end in _TYPES[name])
        return [
            path
            for path in paths
            if re.search(self.files, path)
            and not any(re.search(one, path) for one in self.excluded)
            and (not endings or path.endswith(endings))
        ]

    def run(self, folder: Path, paths: list[str]) -> str:
        """Run it on some files; what it complains of, empty if of nothing."""
        command = [*self.command, *(paths if self.takes_files else [])]
        result = subprocess.run(
            command,
            cwd=folder,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said = f"{self.name}: exit status {result.returncode}\n"
        return said + result.stdout if result.returncode else ""


def _environment() -> dict[str, str]:
    """The linters of this environment come first."""
    programs = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "NO_COLOR": "1"}


# ---------------------------------------------------------------- upstream's hooks


def hooks(configuration: str) -> list[Hook]:
    """The hooks of a ``.pre-commit-config.yaml`` that can be run here.

    Raises:
        ToolError: a linter is installed in another version than it names.
    """
    table = yaml.safe_load(configuration)
    found = []
    for repository in table["repos"]:
        for row in repository["hooks"]:
            if row["id"] in _LEFT_OUT or "manual" in row.get("stages", ()):
                continue
            _same_version(repository, row)
            found.append(_hook(row, table.get("exclude", "")))
    return found


def _hook(row: dict, everywhere: str) -> Hook:
    words = _LINTERS.get(row["id"]) or shlex.split(row.get("entry", ""))
    if "language" in row or row["id"] == "shellcheck":
        words = words + row.get("args", [])
    excluded = tuple(filter(None, [everywhere, row.get("exclude", "")]))
    return Hook(
        row["id"],
        tuple(words),
        row.get("files", _FILES.get(row["id"], "")),
        excluded,
        tuple(row.get("types_or", row.get("types", []))),
        row.get("pass_filenames", True),
    )


def _same_version(repository: dict, row: dict) -> None:
    wanted = [
        text.replace(" ", "").split("==")
        for text in row.get("additional_dependencies", [])
        if "==" in text
    ]
    if row["id"] in _LINTERS and re.fullmatch(r"v[\d.]+", repository["rev"]):
        wanted.append([row["id"].split("-")[0], repository["rev"][1:]])
    for package, version in wanted:
        there = importlib.metadata.version(package)
        if there != version:
            raise ToolError(
                f"upstream's hook {row['id']} is of {package} {version}, and "
                f"requirements/lint.lock has {there}: change lint.in, lock it anew"
            )


def complaints(folder: Path, chosen: list[Hook], paths: list[str]) -> list[str]:
    """What hooks say of some files of a tree.

    Raises:
        ToolError: a hook is for one of the files, and nobody knows how to run it.
    """
    found = []
    for hook in chosen:
        matched = hook.of(paths)
        if not matched:
            continue
        if not hook.command:
            raise ToolError(
                f"upstream's hook {hook.name} is for {matched[0]}, and tools/lint.py "
                "does not know how to run it"
            )
        found.append(hook.run(folder, matched))
    return [text for text in found if text]


# ---------------------------------------------------------------- the patches


def _steps(repository: git.Git, base: str) -> Iterator[tuple[str, str, str]]:
    """What is checked: a name, the commit before and the commit, for each patch."""
    for stack in STACKS:
        span = f"{stacks.below(stack, base)}..{stack}"
        for commit in repository.rev_list("--reverse", span).split():
            subject = repository.log("-1", "--format=%s", commit)
            yield f"{stack}/{stacks.file_name(subject)}", f"{commit}~", commit


def lint_messages(contents: Contents) -> list[str]:
    """Check that each message says what ends its patch and, of a feature, why it is one."""
    found = []
    for stack, patches in contents.items():
        for name, content in patches.items():
            message = " ".join(content.decode().partition("\ndiff --git ")[0].split())
            wanted = ["Drop it "]
            if stack != FIXES:
                wanted.append("Not a plugin: ")
            found += [
                f"--- {stack}/{name}: of {REASONS[stack]}, and its message has no "
                f"sentence that begins with {words.strip()!r}"
                for words in wanted
                if words not in message
            ]
    return found


def lint_patches(checkout: Checkout, each_patch: bool = False) -> list[str]:
    """Check the patches of ``patches/``.

    Args:
        checkout: whose.
        each_patch: run all hooks at each patch, mypy too.

    Returns:
        complaints, each with the patch or the stack that has it.
    """
    lock = locks.read(checkout)
    with checkout.scratch() as scratch:
        folder = scratch / "src"
        contents = stacks.read(checkout)
        repository = stacks.build(checkout, lock.release, contents, folder, files=True)
        base = bases.commit(checkout, lock.release)
        known = hooks((folder / ".pre-commit-config.yaml").read_text())
        quick = [hook for hook in known if hook.name in _AT_EACH_PATCH]
        done: list[tuple[str, str, str, list[Hook]]] = [
            (*step, known if each_patch else quick) for step in _steps(repository, base)
        ]
        done += [(f"stack {name}", base, name, known) for name in (SCORING, DEPTH, ALL)]
        found = []
        for name, before, commit, chosen in done:
            repository.checkout("--quiet", "--detach", commit)
            paths = repository.diff("--name-only", "--diff-filter=d", before, commit)
            said = complaints(folder, chosen, paths.splitlines())
            if "/" not in name or each_patch or said:
                print(f"{name}: {'FAILED' if said else 'ok'}", flush=True)
            found += [f"--- {name}: {text.rstrip()}" for text in said]
            repository.checkout("--quiet", "--force", "HEAD")  # some hooks mend files
    return found


# ---------------------------------------------------------------- our own code


def lint_own(checkout: Checkout) -> list[str]:
    """Check our own code: ruff with ruff.toml, shellcheck and typos as upstream has them."""
    lock = locks.read(checkout)
    upstream = hermetic_git(checkout.bases)
    base = bases.branch(lock.release)
    with checkout.scratch() as folder:
        settings = ".shellcheckrc", "pyproject.toml"
        for name, path in zip(settings, (f"tools/pre_commit/{settings[0]}", settings[1])):
            (folder / name).write_text(upstream.show(f"{base}:{path}"))
        scripts = [str(file.relative_to(checkout.root)) for file in _scripts(checkout)]
        commands = [
            [*_LINTERS["ruff-check"], *OWN],
            ["shellcheck", "-s", "bash", "--format=gcc",
             f"--rcfile={folder / settings[0]}", *scripts],
            [*_LINTERS["typos"], f"--config={folder / settings[1]}",
             "--exclude=*.patch", "--exclude=*.diff", "--exclude=*.lock",
             "--exclude=tokenizer.json",
             "--exclude=examples/applications/dual_vllm/README.md",  # samples of a model
             "README.md", "docs", *OWN],
        ]  # fmt: skip
        found = []
        for command in commands:
            name, *words = command
            hook = Hook(name, (name, *words), "", (), (), False)
            found.append(hook.run(checkout.root, []))
    return [f"--- our own code: {text.rstrip()}" for text in found if text]


def _scripts(checkout: Checkout) -> list[Path]:
    files = [checkout.root / "build.sh", checkout.root / ".ci" / "run"]
    for name in OWN:
        files += sorted((checkout.root / name).rglob("*.sh"))
    return files


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="./build.sh lint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--each-patch", action="store_true", help="all hooks at each patch, mypy too"
    )
    arguments = parser.parse_args()
    if not bases.has(HERE, locks.read(HERE).release):
        import_base(HERE, "archive")
    try:
        found = lint_messages(stacks.read(HERE)) + lint_own(HERE)
        found += lint_patches(HERE, arguments.each_patch)
    finally:
        HERE.sweep()
    if found:
        raise ToolError(f"{len(found)} complaints\n" + "\n".join(found))
    print("nothing to complain of")


if __name__ == "__main__":
    run_main(main)
