# SPDX-License-Identifier: Apache-2.0
"""Prepare a pull request: a patch, and what it needs, on the upstream release.

What a patch needs is found by trying: it must apply, and the Python files it touches
must find their names and the modules of vLLM that they import.
"""

import re
import subprocess
from pathlib import Path

import git

from tools import bases, lock as locks, stacks
from tools.common import Checkout, ToolError, clean_environment
from tools.hermetic import hermetic_git
from tools.mistakes import Mistakes
from tools.rewritten import parse
from tools.stacks import DoesNotApply
from tools.upstream_tests import touched

_OURS = re.compile(
    r"^Upstream-Status:.*\n(?:[ \t].*\n)*"
    r"|^(?:Not a plugin: |Drop it ).*\n(?:.+\n)*\n?",
    re.MULTILINE,
)
_TABLE = re.compile(r"(?:^\s*\|.*\n)+", re.MULTILINE)
_TEMPLATE = "## Purpose\n\n## Test Plan\n\n## Test Result\n"
_TEMPLATE_FILE = ".github/PULL_REQUEST_TEMPLATE.md"
_LEFT_TO_DO = """\
Left to you, since upstream takes no change that no human has reviewed:
  - read it as if it were not yours, and run its tests (attributes that other patches
    add are not looked for, so a patch that it needs may be missing here)
  - put it on upstream's main, and run upstream's `pre-commit run`: git fetch origin main
    && git rebase --onto origin/main {base}
  - put your name on it: git commit --amend --reset-author --signoff
  - follow upstream's AGENTS.md and CONTRIBUTING.md"""


class _Line:
    """The patches that a patch may need: those before it in its stack and below."""

    def __init__(self, contents: stacks.Contents, stack: str, file: str) -> None:
        self.patches = {
            name: content
            for layer in stacks.layers(stack)
            for name, content in contents[layer].items()
        }
        self.names = list(self.patches)
        del self.names[self.names.index(file) + 1 :]
        self.paths = {
            name: {diff.path for diff in parse(self.patches[name])} for name in self.names
        }

    def before(self, name: str, paths: set[str], chosen: set[str]) -> str:
        """The nearest patch before one that touches a path; empty if there is none."""
        earlier = self.names[: self.names.index(name)]
        fitting = [n for n in earlier if n not in chosen and self.paths[n] & paths]
        return fitting[-1] if fitting else ""


def _put(repository: git.Git, base: str, line: _Line, chosen: set[str]) -> None:
    """Apply the chosen patches, in order, to the base."""
    repository.am("--abort", with_exceptions=False)
    repository.checkout("--quiet", "--detach", base)
    for name in line.names:
        if name in chosen:
            stacks.apply(repository, "", {name: line.patches[name]}, "")


def _lacks(mistakes: Mistakes, commit: str, path: str) -> set[str]:
    """Files of which something is missing, for one to be sound; empty if it is."""
    if mistakes.undefined(commit, path):
        return {path}
    stems = [
        (module.replace(".", "/"), name)
        for module, name, _ in mistakes.unknown(commit, path)
    ]
    return {
        f"{stem}{rest}"
        for stem, name in stems
        for rest in (".py", "/__init__.py", f"/{name}.py", f"/{name}/__init__.py")
    }


def needed(repository: git.Git, base: str, line: _Line) -> list[str]:
    """The last patch of a line, and those before it without which it is not sound.

    Raises:
        ToolError: it is not sound even with all of them.
    """
    target = line.names[-1]
    mistakes = Mistakes(repository, base)

    def wanting(chosen: set[str]) -> str | None:
        """A patch to add; empty if nothing helps, None if nothing is needed."""
        try:
            _put(repository, base, line, chosen)
        except DoesNotApply as error:
            return line.before(error.name, set(error.paths), chosen)
        commit = repository.rev_parse("HEAD")
        for name in line.names:
            for path in sorted(line.paths[name]) if name in chosen else ():
                if path.endswith(".py") and mistakes.has(commit, path):
                    lacking = _lacks(mistakes, commit, path)
                    if lacking:
                        return line.before(target, lacking, chosen)
        return None

    chosen = {target}
    while (found := wanting(chosen)) is not None:
        if not found:
            raise ToolError(f"{target} is not sound on the release, whatever is added")
        chosen.add(found)
    for name in line.names[:-1]:
        if name in chosen and wanting(chosen - {name}) is None:
            chosen.remove(name)
    return [name for name in line.names if name in chosen]


def prepare(checkout: Checkout, name: str, run_tests: bool = False) -> str:
    """Make ``build/pr/NAME``: a branch NAME on the release, and ``PR.md``.

    Returns:
        what the person does next.

    Raises:
        ToolError: there is no such patch, the folder is there already, or there is no
            environment to run tests in.
    """
    contents = stacks.read(checkout)
    stack, file = stacks.find(contents, name)
    short = file.removesuffix(".patch")
    folder = checkout.build / "pr" / short
    if folder.exists():
        raise ToolError(f"{folder} is there: remove it, or work in it")
    if run_tests and not (checkout.venv / "bin" / "python").exists():
        raise ToolError("the tests need the whole environment: run ./build.sh first")
    release = locks.read(checkout).release
    base = bases.in_clone(release)
    line = _Line(contents, stack, file)
    with checkout.scratch() as scratch:
        trial = bases.check_out(checkout, release, scratch / "trial", files=False)
        chosen = needed(trial, base, line)
        repository = bases.check_out(checkout, release, scratch / "src")
        repository.checkout("--quiet", "-b", short)
        for one in chosen:
            stacks.apply(repository, stack, {one: line.patches[one]})
            message = _OURS.sub("", repository.log("-1", "--format=%B") + "\n").strip()
            repository.commit("--quiet", "--amend", "--message", message)
        repository.remote("set-url", "origin", bases.UPSTREAM_URL)
        (scratch / "src" / ".git" / "info").mkdir(exist_ok=True)
        (scratch / "src" / ".git" / "info" / "exclude").write_text("/PR.md\n")
        folder.parent.mkdir(exist_ok=True)
        (scratch / "src").rename(folder)
    tests = touched([line.patches[file]])
    result = _run_tests(checkout, folder, tests) if run_tests and tests else ""
    (folder / "PR.md").write_text(_text(folder, chosen, tests, result))
    rows = [f"{folder}: branch {short}, with PR.md"]
    if chosen[1:]:
        rows += ["It needs these first, each a pull request of its own:"]
        rows += [f"  {one.removesuffix('.patch')}" for one in chosen[:-1]]
    return "\n".join([*rows, _LEFT_TO_DO.format(base=base)])


def _run_tests(checkout: Checkout, folder: Path, tests: list[str]) -> str:
    """Run the tests against the branch; the lines of pytest that sum them up."""
    python = checkout.venv / "bin" / "python"
    command = [str(python), "-m", "tools.upstream_tests", "--tree", str(folder), *tests]
    result = subprocess.run(
        command,
        cwd=checkout.root,
        env=clean_environment(checkout),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(result.stdout)
    sums = [row for row in result.stdout.splitlines() if re.search(r" in [\d.]+s", row)]
    return "\n".join(sums or [f"exit status {result.returncode}"])


def _text(folder: Path, chosen: list[str], tests: list[str], result: str) -> str:
    """The text of the pull request, in upstream's template."""
    message = hermetic_git(folder).log("-1", "--format=%B")
    title, _, body = message.partition("\n")
    tables = _TABLE.findall(body + "\n")
    plan = "```bash\n" + "\n".join(f"pytest {test}" for test in tests) + "\n```"
    plan = plan if tests else "The patch touches no test."
    result = f"```\n{result}\n```" if result else "To be filled in: run the tests above."
    result = "\n\n".join([result, *(table.strip() for table in tables)])
    first = [f"- {name.removesuffix('.patch')}" for name in chosen[:-1]]
    body = body.strip() + "\n\nIt stands on:\n" * bool(first) + "\n".join(first)
    sections = {
        "Overview": re.sub(r"^(\[[^\]]*\])+ *", "", title) + ".",
        "Purpose": body,
        "Claims": "- To be filled in.",
        "Validation": f"{plan}\n\n{result}",
        "Test Plan": plan,
        "Test Result": result,
        "Details": body,
    }
    file = folder / _TEMPLATE_FILE
    template = file.read_text() if file.exists() else _TEMPLATE

    def fill(found: re.Match[str]) -> str:
        text = sections.get(found[1].strip())
        return found[0] if text is None else f"## {found[1].strip()}\n\n{text}\n"

    section = r"^## (.+)\n(?:\n<!--[\s\S]*?-->\n)?"
    filled = re.sub(section, fill, template, flags=re.MULTILINE)
    return f"<!-- Title: {title} -->\n{filled}"
