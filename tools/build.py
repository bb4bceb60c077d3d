# SPDX-License-Identifier: Apache-2.0
"""What ``build.sh`` does, step by step. Standard library only.

Each step is one command in the environment's own Python.
"""

import argparse
import os
import sys
from pathlib import Path

from tools import fetch, lock as locks, stamp
from tools.common import (
    HERE, MACHINES, PYTHONS, Checkout, ToolError, clean_environment, python_version,
    run_main,
)  # fmt: skip
from tools.lock import DEVICES, Target
from tools.processes import Log
from tools.steps import Step, alone, run_steps, works
from tools.test import PARTS, QUICK, test

DEMO = "examples/demo"

# What decides a wheel's bytes, beside the patches.
_WHEEL_TOOLS = ("wheel.py", "backend.py", "stacks.py", "bases.py", "hermetic.py")


# ---------------------------------------------------------------- the steps


def _python(checkout: Checkout) -> str:
    return str(checkout.venv / "bin" / "python")


def _packages(checkout: Checkout) -> Path:
    return checkout.venv / "lib" / f"python{python_version()}" / "site-packages"


def _wheels(checkout: Checkout, target: Target) -> list[Path]:
    return locks.read(checkout).built(checkout, target)


def _installed(checkout: Checkout, target: Target) -> bool:
    version = locks.read(checkout).version(target.device)
    return (_packages(checkout) / f"vllm-{version}.dist-info" / "RECORD").is_file()


def _is_fetched(checkout: Checkout, target: Target) -> bool:
    """Whether both archives are there; checks their hashes, whatever a stamp says."""
    lock = locks.read(checkout)
    there = True
    for archive in (lock.sdist, lock.wheel(target)):
        path = checkout.downloads / archive.file
        if path.exists():
            fetch.verify(path, archive.sha256)
        else:
            there = False
    return there


def steps(checkout: Checkout, target: Target, source: str) -> list[Step]:
    """The steps to a wheel, in order, and to its installation if it runs here."""
    root, python = checkout.root, _python(checkout)
    pins, torch = (root / "requirements" / f"{name}.lock" for name in ("cpu", "torch"))
    # A moved environment does not work, hence its path.
    environment_key = stamp.key(sys.version, str(checkout.venv), pins, torch)
    venv = [[sys.executable, "-m", "venv", "--clear", str(checkout.venv)]]
    if works(python):
        venv = []
    pip = [python, "-m", "pip"]
    made = [
        Step(
            "environment",
            "environment (.venv)",
            lambda: environment_key,
            lambda: Path(python).exists(),
            [
                *venv,
                [*pip, "install", "--require-hashes", "--no-deps", f"-r{pins}"],
                [*pip, "install", f"-r{torch}"],
            ],
        ),
        Step(
            "downloads",
            "upstream's archives",
            lambda: stamp.key(checkout.lock_file, str(target)),
            lambda: _is_fetched(checkout, target),
            [[python, "-m", "tools.fetch", "sdist", str(target)]],
        ),
        Step(
            "tree",
            "upstream's tree",
            lambda: stamp.key(
                repr(locks.read(checkout).sdist), source, root / "tools" / "bases.py"
            ),
            lambda: checkout.bases.exists(),
            [[python, "-m", "tools.series", "base", "--source", source]],
        ),
        Step(
            f"wheel-{target}",
            "patches and wheel",
            lambda: stamp.key(
                checkout.lock_file,
                *sorted(checkout.patches.glob("*/series")),
                *sorted(checkout.patches.glob("*/*.patch")),
                *(root / "tools" / name for name in _WHEEL_TOOLS),
                environment_key,
                source,
            ),
            lambda: len(_wheels(checkout, target)) == 1,
            [[python, "-m", "tools.wheel", str(target)]],
        ),
    ]
    if target == Target("cpu"):
        made.append(
            Step(
                "install",
                "install",
                lambda: stamp.key(*_wheels(checkout, target), environment_key),
                lambda: _installed(checkout, target),
                [[python, "-m", "tools.install"]],
            )
        )
    return made


def tested_beside(checkout: Checkout) -> Step:
    """What the tests use and the programs do without, as TRL."""
    pins = [checkout.root / "requirements" / f"{one}.lock" for one in ("trl", "tests")]
    pip = [_python(checkout), "-m", "pip", "install", "--require-hashes", "--no-deps"]
    return Step(
        "tests",
        "what only tests need",
        lambda: stamp.key(sys.version, str(checkout.venv), *pins),
        lambda: all(
            (_packages(checkout) / name / "__init__.py").is_file()
            for name in ("trl", "libfaketime")
        ),
        [[*pip, "--only-binary=:all:", *(f"--requirement={file}" for file in pins)]],
    )


def offline_environment(checkout: Checkout) -> dict[str, str]:
    """Variables for running vLLM: offline, silent, caches in the checkout."""
    cache = checkout.build / "cache"
    kept = {
        key: value
        for key, value in os.environ.items()
        if key.startswith(("VLLM_CPU_", "VLLM_LOGGING_"))
    }
    built = clean_environment(checkout)
    # Sockets are made here, and their paths are short of a hundred bytes.
    del built["TMPDIR"]
    return {
        **built,
        **kept,
        "DO_NOT_TRACK": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(cache / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_HOME": str(cache),
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "VLLM_CONFIG_ROOT": str(cache / "vllm-config"),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        "XDG_CACHE_HOME": str(cache),
    }


def demo(checkout: Checkout) -> None:
    """Become the demo. It talks to the terminal itself, and keeps a log of its own."""
    sys.stdout.flush()
    os.chdir(checkout.root)
    command = [_python(checkout), "-s", DEMO]
    os.execve(command[0], command, offline_environment(checkout))


def in_small_environment(checkout: Checkout, name: str, words: list[str]) -> None:
    """Become `python -m tools.NAME`, in an environment of its own, without vLLM.

    Raises:
        ToolError: the environment can not be made.
    """
    locked = ("series",) if name == "series" else ("series", "lint")
    folder = checkout.build / ("tools-venv" if name == "series" else "lint-venv")
    python = folder / "bin" / "python"
    pins = [checkout.root / "requirements" / f"{one}.lock" for one in locked]
    pip = [str(python), "-m", "pip", "install", "--require-hashes", "--no-deps"]
    step = Step(
        folder.name,
        f"environment (build/{folder.name})",
        lambda: stamp.key(sys.version, str(folder), *pins),
        python.exists,
        [
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [*pip, "--only-binary=:all:", *(f"--requirement={file}" for file in pins)],
        ],
    )
    if not stamp.is_done(checkout, step.name, step.key()) or not step.present():
        with alone(checkout, f".lock-{step.name}"):
            run_steps(checkout, [step], Log(checkout, name))
    sys.stdout.flush()
    command = [str(python), "-s", "-m", f"tools.{name}", *words]
    os.execve(python, command, clean_environment(checkout))


# ---------------------------------------------------------------- command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./build.sh",
        description="Fetch the pinned vLLM release, apply the patches, build the "
        "wheel into dist/ and install it into .venv.",
        epilog="`./build.sh series --help`: work on the patches; `./build.sh lint`: "
        "upstream's linters on them; `./build.sh sbom`: what the wheel is tested with, as "
        "CycloneDX in dist/; `./build.sh requirements`: resolve all that is installed. The "
        "first two need git and Python only. Steps that are done are skipped; an "
        "interrupted build goes on where it was. Nothing outside this folder is written "
        "but temporary files. Needs Linux on x86-64 or aarch64, Python "
        f"{PYTHONS[0]} to {PYTHONS[-1]}, git and about 8 GiB of disk space.",
    )
    parser.add_argument(
        "verb",
        nargs="?",
        choices=["build", "demo", "test"],
        default="build",
        metavar="demo|test",
        help="demo: then show what it does, in about three minutes; "
        "test: then run all tests, or the parts that are named",
    )
    parser.add_argument(
        "part", nargs="*", default=PARTS, help=f"of the tests: {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"of the tests: {', '.join(QUICK)} only, the last two in short",
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="which of upstream's binaries go in (default: cpu). The cuda wheel is "
        "left in dist/, to be installed where the GPU is",
    )
    parser.add_argument(
        "--machine",
        choices=MACHINES,
        default=Target("cpu").machine,
        help="what the wheel is for, as `uname -m` names it (default: this machine). "
        "Another machine's wheel is left in dist/",
    )
    parser.add_argument(
        "--source",
        choices=["archive", "git"],
        default="archive",
        help="git: clone upstream's tag instead of taking the source archive, to "
        "prepare pull requests",
    )
    return parser


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in ("series", "lint", "sbom", "requirements"):
        in_small_environment(HERE, sys.argv[1], sys.argv[2:])
    arguments = _parser().parse_intermixed_args()
    unknown = sorted({*arguments.part} - {*PARTS})
    if unknown or (arguments.part != PARTS and arguments.verb != "test"):
        raise ToolError(f"no part of the tests: {', '.join(unknown or arguments.part)}")
    if arguments.quick and arguments.verb != "test":
        raise ToolError("--quick is of the tests: ./build.sh test --quick")
    parts = tuple(arguments.part)
    if arguments.quick and parts == PARTS:
        parts = QUICK
    target = Target(arguments.device, arguments.machine)
    if target != Target("cpu") and arguments.verb != "build":
        raise ToolError(
            "demo and test run on this machine's CPU wheel; leave out --device, --machine"
        )
    with alone(HERE):
        HERE.sweep()
        log = Log(HERE, arguments.verb)
        try:
            todo = steps(HERE, target, arguments.source)
            if arguments.verb == "test" and not arguments.quick:
                todo.append(tested_beside(HERE))
            run_steps(HERE, todo, log)
            if arguments.verb == "test":
                environment = offline_environment(HERE)
                test(HERE, log, environment, parts, arguments.quick)
            elif arguments.verb == "build":
                _report(HERE, target)
        except KeyboardInterrupt:
            print(flush=True)
            raise ToolError("interrupted; run it again to go on") from None
        finally:
            HERE.sweep()
    if arguments.verb == "demo":
        demo(HERE)


def _report(checkout: Checkout, target: Target) -> None:
    (wheel,) = _wheels(checkout, target)
    print(f"wheel: dist/{wheel.name}")
    if target == Target("cpu"):
        print("installed in .venv; next: ./build.sh demo")
    else:
        print(f"on the machine that it is for: pip install {wheel.name}")


if __name__ == "__main__":
    run_main(main)
