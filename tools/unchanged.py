# SPDX-License-Identifier: Apache-2.0
"""Compare what trees of the series generate, features off, with the unpatched release.

    .venv/bin/python -m tools.unchanged                 # the four branches
    .venv/bin/python -m tools.unchanged --each-patch    # the prefixes of the series

A fixed set of prompts is answered greedily, and with seeded samples, by three tiny
models in a process of the release and in one of each tree. Tokens, log-probabilities,
ranks and texts must be the same to the last bit. The release runs twice: the table
shows CPU seconds as a part of its first run, so the second run shows the noise.

A tree is the source as the patches leave it, with the wheel's compiled libraries; a
prefix of scoring or depth stands on all fixes.

Prefixes that said the same are recorded in ``tests/upstream/unchanged.json``, and only
those that a patch has changed since are run: that patch and what follows it, and for a
fix the other stacks as well. ``--all`` runs every one.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import runners
from tools import bases, fetch, lock as locks, stacks, stamp
from tools.common import HERE, Checkout, ToolError, run_main, write_atomically
from tools.lock import Target
from tools.stacks import ALL, BRANCHES, DEPTH, FIXES, SCORING
from tools.upstream_tests import add_compiled

FAMILIES = ("llama", "qwen3", "opt")
PROGRAM = Path("tests") / "upstream" / "generate.py"
RECORD = Path("tests") / "upstream" / "unchanged.json"
RELEASE, AGAIN = "the release", "the release, again"


@dataclass(frozen=True)
class Row:
    """What one tree said.

    Attributes:
        name: of the tree.
        seconds: CPU time of generating, engines not counted.
        answers: by model: tokens, log-probabilities, texts.
    """

    name: str
    seconds: float
    answers: dict


def unpack(checkout: Checkout, folder: Path) -> Path:
    """The release's ``vllm`` out of the wheel of its CPU libraries.

    Raises:
        ToolError: the wheel was not fetched.
    """
    wheel = fetch.archive_path(checkout, locks.read(checkout).wheel(Target("cpu")))
    if not wheel.exists():
        raise ToolError(f"no {wheel.name} in build/downloads: run ./build.sh first")
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith("vllm/")]
        archive.extractall(folder, names)
    return folder


def make_models(checkout: Checkout, folder: Path) -> list[str]:
    """The tiny models of the tests, in folders of their names."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from tiny_models import save_model\n"
        "for name in sys.argv[3:]: save_model(name, Path(sys.argv[2]) / name)\n"
    )
    command = [sys.executable, "-s", "-c", code, str(checkout.root / "tests"), str(folder)]
    subprocess.run([*command, *FAMILIES], check=True)
    return [str(folder / name) for name in FAMILIES]


def generate(
    checkout: Checkout, name: str, tree: Path, models: list[str], runner: str
) -> Row:
    """Let the ``vllm`` of a tree answer the prompts, in a process of its own.

    Raises:
        ToolError: it fails, or imports another ``vllm`` than the tree's.
    """
    environment = runners.environment(runner, [tree])
    environment |= {
        "PYTHONDONTWRITEBYTECODE": "1",
        # A class is inspected once and the result kept: here each tree is a new one.
        "VLLM_CACHE_ROOT": str(tree / ".cache"),
    }
    job = json.dumps({"models": models, "runner": runner})
    command = [sys.executable, "-s", str(checkout.root / PROGRAM)]
    found = subprocess.run(
        command, input=job, env=environment, cwd=tree, capture_output=True, text=True
    )
    if found.returncode:
        raise ToolError(f"{name}: generating failed\n{found.stderr[-3000:]}")
    said = json.loads(found.stdout.splitlines()[-1])
    if not Path(said["file"]).is_relative_to(tree):
        raise ToolError(f"{name}: imported {said['file']}, not the tree in {tree}")
    return Row(name, said["seconds"], said["answers"])


def branch_trees(checkout: Checkout, folder: Path) -> Iterator[tuple[str, Path]]:
    """The tree of each branch, one after the other."""
    lock = locks.read(checkout)
    for branch in BRANCHES:
        stacks.applied(checkout, lock, folder / branch, branch)
        yield "+".join(stacks.layers(branch)), folder / branch


def code_digest(patch: bytes) -> str:
    """Of what a patch does to files outside ``tests/`` and ``docs/``."""
    _, *files = re.split(rb"^(?=diff --git a/)", patch, flags=re.MULTILINE)
    others = b"diff --git a/tests/", b"diff --git a/docs/"
    code = [file for file in files if not file.startswith(others)]
    return hashlib.sha256(b"".join(code)).hexdigest()


def prefixes(checkout: Checkout) -> dict[str, str]:
    """A digest of the code of each prefix, by its name; last that of all stacks."""
    release, contents = locks.read(checkout).release, stacks.read(checkout)
    digests = {
        stack: [code_digest(patch) for patch in patches.values()]
        for stack, patches in contents.items()
    }
    found = {}
    for stack, patches in contents.items():
        below = [] if stack == FIXES else digests[FIXES]
        for n, name in enumerate(patches, start=1):
            found[f"{stack}/{name}"] = stamp.key(release, *below, *digests[stack][:n])
    found[ALL] = stamp.key(release, *(one for stack in digests.values() for one in stack))
    return found


@dataclass
class Record:
    """The prefixes that were seen to generate what the release does.

    Attributes:
        file: it is kept in, as digests by runner and name of the prefix.
        runner: the one that is asked about.
        wanted: the digests of the prefixes as they are.
    """

    file: Path
    runner: str
    wanted: dict[str, str]

    def _read(self) -> dict[str, dict[str, str]]:
        return json.loads(self.file.read_text()) if self.file.exists() else {}

    def missing(self) -> list[str]:
        """The prefixes that were not seen as they are now."""
        seen = self._read().get(self.runner, {})
        return [name for name, made_of in self.wanted.items() if seen.get(name) != made_of]

    def add(self, name: str) -> None:
        """Say that a prefix generates the same; forget those that are no more."""
        if name not in self.wanted:
            return
        kept = self._read()
        seen = {n: m for n, m in kept.get(self.runner, {}).items() if n in self.wanted}
        kept[self.runner] = seen | {name: self.wanted[name]}
        text = json.dumps(kept, indent=1, sort_keys=True) + "\n"
        write_atomically(self.file, text.encode())


def patch_trees(
    checkout: Checkout, folder: Path, chosen: Container[str]
) -> Iterator[tuple[str, Path]]:
    """The trees of the chosen prefixes, in one folder; last the one of all stacks."""
    release = locks.read(checkout).release
    source, contents = folder / "src", stacks.read(checkout)
    repository = bases.check_out(checkout, release, source)
    for stack, patches in contents.items():
        below = stacks.below(stack, bases.in_clone(release))
        repository.checkout("--quiet", "-b", stack, below)
        for name, content in patches.items():
            stacks.apply(repository, stack, {name: content})
            if f"{stack}/{name}" in chosen:
                yield f"{stack}/{name}", source
    if ALL in chosen:
        repository.checkout("--quiet", "-b", ALL, SCORING)
        stacks.apply(repository, DEPTH, contents[DEPTH])
        yield ALL, source


def differences(expected: dict, found: dict) -> list[str]:
    """The models whose answers are not the same, with the first prompt that differs."""
    rows = []
    for model, answers in expected.items():
        other = found.get(model, [])
        if other != answers:
            pairs = zip(answers, other, strict=False)
            at = next((n for n, (a, b) in enumerate(pairs) if a != b), len(other))
            rows.append(f"{Path(model).name}, prompt {at}")
    return rows


def compare(
    checkout: Checkout, trees: Iterator[tuple[str, Path]], models: list[str],
    release: Path, record: Record,
) -> list[str]:  # fmt: skip
    """Print a row for each tree, and record those that generate the same.

    Returns:
        the names of the others.
    """
    runner = record.runner
    first = generate(checkout, RELEASE, release, models, runner)
    print("| tree | tokens and log-probabilities | CPU time, of the release's |")
    print("| --- | --- | ---: |")
    changed = []

    def show(name: str, tree: Path) -> None:
        row = generate(checkout, name, tree, models, runner)
        wrong = differences(first.answers, row.answers)
        said = "differ: " + "; ".join(wrong) if wrong else "the same bits"
        print(f"| {name} | {said} | {row.seconds / first.seconds:.2f} |", flush=True)
        if wrong:
            changed.append(name)
        else:
            record.add(name)

    show(AGAIN, release)
    for name, tree in trees:
        add_compiled(tree)
        show(name, tree)
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.unchanged",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--each-patch", action="store_true", help="changed prefixes")
    parser.add_argument("--all", action="store_true", help="with it: every prefix")
    parser.add_argument("--runner", choices=runners.RUNNERS, default="v1")
    arguments = parser.parse_args()
    if arguments.all and not arguments.each_patch:
        parser.error("--all goes with --each-patch")
    record = Record(HERE.root / RECORD, arguments.runner, prefixes(HERE))
    chosen = list(record.wanted) if arguments.all else record.missing()
    if arguments.each_patch:
        print(f"{len(chosen)} of {len(record.wanted)} prefixes to run")
        if not chosen:
            return
    with HERE.scratch() as folder:
        release = unpack(HERE, folder / "release")
        models = make_models(HERE, folder / "models")
        below = folder / "trees"
        below.mkdir()
        trees = (
            patch_trees(HERE, below, chosen)
            if arguments.each_patch
            else branch_trees(HERE, below)
        )
        changed = compare(HERE, trees, models, release, record)
    if changed:
        raise ToolError("not what the release generates:\n  " + "\n  ".join(changed))


if __name__ == "__main__":
    run_main(main)
