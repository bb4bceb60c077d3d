# SPDX-License-Identifier: Apache-2.0
"""A tiny upstream release in the form of a source archive, and a fork of it."""

import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import git
import pytest

from tools import bases, lock as locks, source
from tools.common import Checkout
from tools.export import export
from tools.hermetic import hermetic_git
from tools.lock import Archive, Lock
from tools.stacks import BRANCHES, DEPTH, FIXES, SCORING, STACKS

RELEASE = "1.0.0"
FILES = {
    "setup.py": b"# how it is built\n",
    "PKG-INFO": b"generated\n",
    "setup.cfg": b"[egg_info]\n",
    "vllm.egg-info/SOURCES.txt": b"generated\n",
    ".gitignore": b"ignored/\n",
    "ignored/kept.txt": b"in the archive although an ignore file names it\n",
    "vllm/_version.py": b"commit_id = 'g0123abcde'\n",
    "vllm/engine.py": b"".join(b"line_%d = %d\n" % (i, i) for i in range(40)),
    "vllm/windows.py": b"first = 1\r\nsecond = 2\r\n",
    "tests/test_engine.py": b"def test_engine():\n    pass\n",
    "docs/engine.md": b"# The engine\n",
}
MESSAGE = """[Core][Frontend] {what}

Why: a test.

Upstream-Status: Pending
"""


def pack(path: Path, release: str, files: dict[str, bytes]) -> str:
    """Write a source archive and return its SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"vllm-{release}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_checkout(root: Path, files: dict[str, bytes] = FILES) -> Checkout:
    """A fork of the tiny release: base imported, no patch yet."""
    checkout = Checkout(root)
    archive = checkout.downloads / f"vllm-{RELEASE}.tar.gz"
    digest = pack(archive, RELEASE, files)
    tree = bases.import_sdist(checkout, archive, RELEASE)
    locks.write(
        checkout,
        Lock(
            release=RELEASE,
            commit="0123abcde",
            label="utio",
            revision=1,
            base_tree=tree,
            trees=dict.fromkeys(BRANCHES, tree),
            sdist=Archive(f"vllm=={RELEASE}", archive.name, digest),
            wheels={},
        ),
    )
    for stack in STACKS:
        (checkout.patches / stack).mkdir(parents=True)
        (checkout.patches / stack / "series").touch()
    return checkout


def engine(**lines: str) -> bytes:
    """``vllm/engine.py`` with other lines; ``line_20="21"`` for ``line_20 = 21``."""
    text = FILES["vllm/engine.py"].decode()
    for name, value in lines.items():
        number = name.rpartition("_")[2]
        text = text.replace(f"{name} = {number}\n", f"{name} = {value}\n")
    return text.encode()


def commit(
    checkout: Checkout, branch: str, message: str, changes: dict[str, bytes]
) -> git.Git:
    """Commit files on a branch of ``build/src`` as a person would."""
    repository = person(checkout)
    repository.checkout("--quiet", branch)
    for name, data in changes.items():
        path = checkout.source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    repository.add("--all", "--force")
    repository.commit("--quiet", "--allow-empty", "--message", message)
    return repository


def person(checkout: Checkout) -> git.Git:
    """Git in ``build/src``, with an author."""
    repository = hermetic_git(checkout.source)
    repository.update_environment(
        GIT_AUTHOR_NAME="Zoë Müller",
        GIT_AUTHOR_EMAIL="zoe@example.invalid",
        GIT_AUTHOR_DATE="2026-01-02T03:04:05+0100",
    )
    return repository


def exported(checkout: Checkout) -> dict[str, bytes]:
    """Everything that export writes."""
    files = [f for f in checkout.patches.rglob("*") if f.is_file()]
    return {str(f.relative_to(checkout.root)): f.read_bytes() for f in files} | {
        "upstream.lock": checkout.lock_file.read_bytes()
    }


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return make_checkout(tmp_path / "fork")


LONG = "Say in a subject that is far longer than a mail header what this is about"


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fork with two fixes, and a patch each of scoring and depth, exported."""
    checkout = make_checkout(tmp_path_factory.mktemp("template") / "fork")
    source.open_source(checkout)
    changes = {
        "vllm/engine.py": engine(line_20="21"),
        "tests/test_engine.py": b"def test_engine():\n    assert True\n",
        "docs/engine.md": b"# The engine\n\nLine 20 is 21.\n",
    }
    commit(checkout, FIXES, MESSAGE.format(what="Change a line"), changes)
    changes = {
        "vllm/windows.py": b"first = 1\r\nsecond = 3 \r\n",
        "vllm/data.bin": bytes(range(256)),
    }
    message = MESSAGE.format(what=LONG) + "Reviewed-by: Zoë Müller\n"
    commit(checkout, FIXES, message, changes)
    for stack, line in ((SCORING, {"line_5": "55"}), (DEPTH, {"line_35": "36"})):
        hermetic_git(checkout.source).branch("--quiet", "--force", stack, FIXES)
        changes = {
            "vllm/engine.py": engine(line_20="21", **line),
            f"vllm/{stack}.py": f"{stack} = 1\n".encode(),
        }
        commit(checkout, stack, MESSAGE.format(what=f"Add {stack}"), changes)
    export(checkout)
    return checkout.root


@pytest.fixture
def forked(template: Path, tmp_path: Path) -> Checkout:
    """A copy of it, for a test of its own."""
    checkout = Checkout(tmp_path / "fork")
    shutil.copytree(template, checkout.root, symlinks=True)
    repository = hermetic_git(checkout.source)
    repository.remote("set-url", "origin", str(checkout.bases))
    return checkout


HOSTILE = """\
[user]
    name = Somebody Else
    email = else@example.invalid
[apply]
    whitespace = fix
[commit]
    gpgSign = true
[core]
    abbrev = 5
    attributesFile = {folder}/attributes
    autocrlf = true
    excludesFile = {folder}/ignore
    hooksPath = {folder}
    quotePath = false
[diff]
    algorithm = patience
    context = 1
    external = false
    interHunkContext = 9
    mnemonicPrefix = true
    noprefix = true
    renames = copies
[format]
    attach = true
    coverLetter = true
    headers = "X-Hostile: yes\\n"
    numbered = true
    outputDirectory = elsewhere
    signature = hostile
    signOff = true
    suffix = .txt
    thread = deep
    useAutoBase = true
[gpg]
    program = false
[am]
    keepcr = false
    threeWay = true
[mailinfo]
    scissors = true
[rebase]
    autoSquash = true
"""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to live in a home whose git configuration changes everything."""

    def enter() -> None:
        home = tmp_path / "home"
        home.mkdir()
        text = HOSTILE.format(folder=home)
        (home / ".gitconfig").write_text(text)
        (home / "attributes").write_text("*.py -diff eol=crlf\n*.md binary\n")
        (home / "ignore").write_text("*.bin\n*.py\n")
        hook = home / "pre-applypatch"
        hook.write_text("#!/bin/sh\nexit 1\n")
        hook.chmod(0o755)
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(home / ".gitconfig"))
        monkeypatch.setenv("GIT_CONFIG_SYSTEM", str(home / ".gitconfig"))
        monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
        monkeypatch.setenv("GIT_CONFIG_KEY_0", "diff.noprefix")
        monkeypatch.setenv("GIT_CONFIG_VALUE_0", "true")
        monkeypatch.setenv("GIT_DIFF_OPTS", "--unified=0")
        monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
        monkeypatch.setenv("GIT_DIR", str(home / "none"))
        monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody Else")
        monkeypatch.setenv("TZ", "Pacific/Auckland")
        assert os.environ["GIT_EXTERNAL_DIFF"] == "false"

    return enter
