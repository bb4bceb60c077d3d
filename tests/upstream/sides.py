# SPDX-License-Identifier: Apache-2.0
"""The two sides of the comparison: upstream's release, and this fork.

A side is an interpreter whose ``vllm`` is that side's, and a folder with that side's
test files. All of it lies in ``build/upstream``, made from what ``./build.sh`` left:
the two archives in ``build/downloads``, the wheel installed in ``.venv``, ``patches``.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "upstream"
CPU = f"cpu-{platform.machine()}"
"""What upstream.lock calls the CPU libraries of this machine."""
STACKS = ("fixes", "scoring", "depth")
"""The folders of patches, in the order in which they apply."""


@dataclass(frozen=True)
class Side:
    """Where the tests of one side run.

    Attributes:
        name: ``unpatched`` or ``patched``.
        python: the interpreter.
        tests: the folder to run in; ``tests/`` lies in it and ``vllm/`` does not.
        key: digest of the ``vllm`` that is imported and of the test files.
        version: the version of ``vllm`` that the tests see.

    """

    name: str
    python: Path
    tests: Path
    key: str
    version: str


def _lock() -> dict:
    return tomllib.loads((ROOT / "upstream.lock").read_text())


def _archive(name: str) -> Path:
    """An archive that ``./build.sh`` fetched, and whose hash it checked."""
    path = ROOT / "build" / "downloads" / _lock()["archive"][name]["file"]
    if not path.exists():
        raise SystemExit(f"error: no {path.name} in build/downloads: run ./build.sh")
    return path


def patch_files() -> list[Path]:
    """The patches in the order in which they apply."""
    folder = ROOT / "patches"
    numbered = sorted(folder.glob("*.patch"))
    if numbered:
        return numbered
    return [
        folder / stack / name
        for stack in STACKS
        for name in (folder / stack / "series").read_text().split("\n")
        if name and not name.startswith("#")
    ]


LOCKS = [ROOT / "requirements" / f"{name}.lock" for name in ("cpu", "torch")]


def _digest(*items: str | Path) -> str:
    total = hashlib.sha256()
    for item in items:
        data = item.read_bytes() if isinstance(item, Path) else item.encode()
        total.update(hashlib.sha256(data).digest())
    return total.hexdigest()


def _is_made(folder: Path, key: str) -> bool:
    """Whether a folder was made from what ``key`` digests; empties it if not."""
    stamp = folder / ".made-from"
    if stamp.exists() and stamp.read_text() == key:
        return True
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return False


def _extract_source(folder: Path, wanted) -> None:
    """Extract the files of the source archive whose name ``wanted`` accepts."""
    with tarfile.open(_archive("sdist")) as source:
        source.extraction_filter = getattr(tarfile, "data_filter", None)
        for member in source:
            member.name = member.name.partition("/")[2]
            if member.name and wanted(member.name):
                source.extract(member, folder)


def _make_tests(folder: Path, patches: list[Path]) -> None:
    """Upstream's tree without ``vllm``, and what the patches change of it."""
    _extract_source(folder, lambda name: not name.startswith(("vllm/", "vllm.egg")))
    # Without a ceiling git would take the names as below the checkout's root.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    for patch in patches:
        command = ["git", "apply", "--exclude=vllm/*", "--whitespace=nowarn"]
        subprocess.run([*command, str(patch)], cwd=folder, env=environment, check=True)


def _tests(name: str, patches: list[Path]) -> tuple[Path, str]:
    folder = BUILD / name / "tree"
    key = _digest(_archive("sdist").name, *patches)
    if not _is_made(folder, key):
        _make_tests(folder, patches)
        (folder / ".made-from").write_text(key)
    return folder, key


def _make_release(folder: Path, version: str) -> None:
    """An environment with upstream's Python files, unchanged, and its CPU libraries.

    The CPU libraries' wheel is not published by upstream and differs from the source
    archive in a few Python files, so that only what is compiled is taken from it.
    Everything but ``vllm`` is what ``.venv`` holds.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    shared = ROOT / ".venv" / packages.relative_to(folder)
    # Comes behind the packages of this environment.
    (packages / "shared.pth").write_text(
        f"import site; site.addsitedir({str(shared)!r})\n"
    )
    _extract_source(packages, lambda name: name.startswith("vllm/"))
    info = packages / f"vllm-{version}.dist-info"
    info.mkdir()
    with zipfile.ZipFile(_archive(CPU)) as binaries:
        for name in binaries.namelist():
            if name.endswith(".so") or name == "vllm/_version.py":
                binaries.extract(name, packages)
            elif name.endswith(".dist-info/entry_points.txt"):
                (info / "entry_points.txt").write_bytes(binaries.read(name))
    metadata = f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata)
    for script in (ROOT / ".venv" / "bin").iterdir():
        own = folder / "bin" / script.name
        if own.exists() or not script.is_file() or script.is_symlink():
            continue
        try:
            text = script.read_text()
        except UnicodeDecodeError:
            continue
        own.write_text(text.replace(str(ROOT / ".venv"), str(folder)))
        own.chmod(0o755)


def unpatched() -> Side:
    """Upstream's release on the CPU."""
    folder = BUILD / "unpatched" / "env"
    lock = _lock()
    # Upstream looks for the letters in the version of the package.
    version = f"{lock['upstream']['release']}+cpu"
    hashes = [lock["archive"][name]["sha256"] for name in ("sdist", CPU)]
    key = _digest(*hashes, *LOCKS, str(folder), "1")
    if not _is_made(folder, key):
        _make_release(folder, version)
        (folder / ".made-from").write_text(key)
    tests, tests_key = _tests("unpatched", [])
    python = folder / "bin" / "python"
    return Side("unpatched", python, tests, _digest(key, tests_key), version)


def patched() -> Side:
    """The wheel that is installed in ``.venv``."""
    found = list((ROOT / ".venv").glob("lib/python3*/site-packages/vllm-*.dist-info"))
    if len(found) != 1:
        raise SystemExit("error: no wheel is installed in .venv: run ./build.sh")
    (info,) = found
    tests, tests_key = _tests("patched", patch_files())
    key = _digest(info / "RECORD", *LOCKS, tests_key)
    version = info.name.removeprefix("vllm-").removesuffix(".dist-info")
    return Side("patched", ROOT / ".venv" / "bin" / "python", tests, key, version)


def touched_by_patches(file: str) -> bool:
    """Whether the two sides run different texts of a test file."""
    texts = [BUILD / name / "tree" / file for name in ("unpatched", "patched")]
    return len({text.read_bytes() if text.exists() else b"" for text in texts}) > 1


def environment(side: Side, fresh: bool = False) -> dict[str, str]:
    """The variables of the tests: offline, few threads, caches below ``build``.

    Args:
        side: whose.
        fresh: empty caches. What vLLM has stored of a model's class can hide that it
            can not be imported.

    """
    cache = BUILD / side.name / ("fresh-cache" if fresh else "cache")
    if fresh:
        shutil.rmtree(cache, ignore_errors=True)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VLLM_", "HF_", "VIRTUAL_ENV"))
    }
    return {
        **kept,
        "PATH": os.pathsep.join(
            [str(side.python.parent), str(ROOT / ".venv" / "bin"), kept["PATH"]]
        ),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "DO_NOT_TRACK": "1",
        "HF_HOME": str(BUILD / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "NUMBA_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_HOME": str(cache),
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "VLLM_CONFIG_ROOT": str(cache / "vllm-config"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "XDG_CACHE_HOME": str(cache),
    }


if __name__ == "__main__":
    for made in (unpatched(), patched()):
        print(json.dumps({"side": made.name, "vllm": made.version, "key": made.key}))
