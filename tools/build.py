# SPDX-License-Identifier: Apache-2.0
"""What ``build.sh`` does, step by step. Standard library only.

Each step is one command in the environment's own Python. Its output goes to a log;
a stamp holds the hash of what it depended on, so that a step is done once.
"""

import argparse
import contextlib
import datetime
import fcntl
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tools import fetch, lock as locks, stamp
from tools.common import HERE, PYTEST_OPTIONS, Checkout, ToolError, run_main

ROOM_FOR_TWO = 16 * 2**30
"""Bytes of memory for two sessions of the engine tests at once, seen to take 14 GiB."""

# The project's main job on real input, and what to do after it.
DEMO = [
    "examples/score_perplexity.py",
    "--model", "examples/reference_model/model",
    "--held-out", "build/downloads/vllm-{release}.tar.gz",
    "--limit-tokens", "15000",
    "--baseline", "prompt_logprobs",
    "--baseline-full-positions", "64",
    "--repeat", "3",
    # Starts in seconds; all paths share the engine.
    "--enforce-eager",
]  # fmt: skip
NEXT = """\
What to try next:
  .venv/bin/python examples/score_perplexity.py --help
  .venv/bin/python examples/score_perplexity.py \\
      --model examples/reference_model/model --text README.md --enforce-eager
  ./build.sh test"""

_GIB = 2**30
# Measured: environment 3.7 (6.4 with torch for CUDA), archives and trees 0.6, while a wheel is built 1.3 GiB.
_SPACE = {"environment": 6 * _GIB, "wheel": 3 * _GIB // 2}
_SUMMARY = re.compile(
    r"=* ?((?:\d+ (?:subtests )?(?:passed|failed|errors?|skipped|deselected|xfailed|"
    r"xpassed|warnings?)(?:, )?)+ in [\d.]+s.*?|no tests ran in [\d.]+s) ?=*$"
)


@dataclass(frozen=True)
class Step:
    """One stamped command.

    Attributes:
        name: of the stamp.
        title: what the person reads.
        key: digest of the inputs.
        present: whether what the step makes is still there.
        commands: run one after the other.
    """

    name: str
    title: str
    key: Callable[[], str]
    present: Callable[[], bool]
    commands: list[list[str]]


class Log:
    """The full log of one call of ``build.sh``."""

    def __init__(self, checkout: Checkout, verb: str) -> None:
        folder = checkout.build / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        moment = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        self.path = folder / f"{moment}-{verb}.log"
        self.stream = self.path.open("w", buffering=1)
        for old in sorted(folder.glob("*.log"))[:-20]:
            old.unlink()

    def run(
        self,
        command: list[str],
        cwd: Path,
        environment: dict[str, str],
        show: Callable[[str], None] = lambda line: None,
    ) -> tuple[int, list[str]]:
        """Run a command; every line goes to the log and to ``show``.

        Returns:
            the exit status and the lines.
        """
        process = _start(command, cwd, environment, subprocess.PIPE)
        assert process.stdout is not None
        return self._follow(process, process.stdout, show)

    @contextlib.contextmanager
    def beside(
        self, command: list[str], cwd: Path, environment: dict[str, str]
    ) -> Iterator[Callable[..., tuple[int, list[str]]]]:
        """Run a command while the body does something else.

        Yields:
            what waits for the command; takes ``show`` and returns as ``run`` does.
        """
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = _start(command, cwd, environment, output)

            def wait(show: Callable[[str], None]) -> tuple[int, list[str]]:
                process.wait()
                output.seek(0)
                return self._follow(process, output, show)

            try:
                yield wait
            finally:
                if process.poll() is None:
                    _end(process)

    def _follow(
        self,
        process: subprocess.Popen[str],
        output: IO[str],
        show: Callable[[str], None],
    ) -> tuple[int, list[str]]:
        self.stream.write(f"\n$ {' '.join(map(str, process.args))}\n")
        lines = []
        try:
            for line in output:
                self.stream.write(line)
                lines.append(line.rstrip("\n"))
                show(line)
            return process.wait(), lines
        except BaseException:
            _end(process)
            raise


def _start(
    command: list[str], cwd: Path, environment: dict[str, str], output: int | IO[str]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _end(process: subprocess.Popen[str]) -> None:
    """End a command and what it started; it gets time to clean up."""
    # A shell starts background jobs with SIGINT ignored, and so are their children.
    for number, seconds in ((signal.SIGINT, 5), (signal.SIGTERM, 30)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=seconds)
            return
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---------------------------------------------------------------- the steps


def _python(checkout: Checkout) -> str:
    return str(checkout.venv / "bin" / "python")


def _wheels(checkout: Checkout, device: str) -> list[Path]:
    version = locks.read(checkout).version(device)
    return sorted(checkout.dist.glob(f"vllm-{version}-*.whl"))


def _installed(checkout: Checkout, device: str) -> bool:
    version = locks.read(checkout).version(device)
    packages = checkout.venv / "lib" / "python3.11" / "site-packages"
    return (packages / f"vllm-{version}.dist-info" / "RECORD").is_file()


def _is_fetched(checkout: Checkout, device: str) -> bool:
    """Whether both archives are there; checks their hashes, whatever a stamp says."""
    lock = locks.read(checkout)
    there = True
    for archive in (lock.sdist, lock.wheel(device)):
        path = checkout.downloads / archive.file
        if path.exists():
            fetch.verify(path, archive.sha256)
        else:
            there = False
    return there


def steps(checkout: Checkout, device: str, source: str) -> list[Step]:
    """The steps to an installed wheel, in order."""
    root, python = checkout.root, _python(checkout)
    pins = root / "requirements" / "cpu.lock"
    tools = sorted((root / "tools").glob("*.py"))
    # A moved environment does not work, hence its path.
    environment_key = stamp.key(sys.version, str(checkout.venv), pins)
    venv = [[sys.executable, "-m", "venv", "--clear", str(checkout.venv)]]
    if _works(python):
        venv = []
    pip = [python, "-m", "pip"]
    made = [
        Step(
            "environment",
            "environment (.venv)",
            lambda: environment_key,
            lambda: Path(python).exists(),
            [*venv, [*pip, "install", "--requirement", str(pins)]],
        ),
        Step(
            "downloads",
            "upstream's archives",
            lambda: stamp.key(checkout.lock_file, device),
            lambda: _is_fetched(checkout, device),
            [[python, "-m", "tools.fetch", "sdist", device]],
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
            f"wheel-{device}",
            "patches and wheel",
            lambda: stamp.key(
                checkout.lock_file,
                *sorted(checkout.patches.glob("*.patch")),
                *(t for t in tools if t.name not in ("build.py", "requirements.py")),
                environment_key,
                source,
            ),
            lambda: len(_wheels(checkout, device)) == 1,
            [[python, "-m", "tools.wheel", "--device", device]],
        ),
    ]
    if device == "cpu":
        made.append(
            Step(
                "install",
                "install",
                lambda: stamp.key(*_wheels(checkout, device), environment_key),
                lambda: _installed(checkout, device),
                [[python, "-m", "tools.install", device]],
            )
        )
    return made


def _works(python: str) -> bool:
    """Whether an environment is complete enough to run pip."""
    try:
        command = [python, "-m", "pip", "--version"]
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def environment(checkout: Checkout) -> dict[str, str]:
    """Variables for the steps: nothing of the user's Python set-up."""
    return {**fetch.clean_environment(checkout), "PYTHONNOUSERSITE": "1"}


def offline_environment(checkout: Checkout) -> dict[str, str]:
    """Variables for running vLLM: offline, silent, caches in the checkout."""
    cache = checkout.build / "cache"
    kept = {
        key: value
        for key, value in os.environ.items()
        if key.startswith(("VLLM_CPU_", "VLLM_LOGGING_"))
    }
    built = environment(checkout)
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


# ---------------------------------------------------------------- running them


def _space(checkout: Checkout, step: str) -> None:
    needed = _SPACE.get(step.split("-")[0], 0)
    if step == "environment" and _works(_python(checkout)):
        return  # most of it is there, or all but a new version of something
    free = shutil.disk_usage(checkout.root).free
    if free < needed:
        raise ToolError(
            f"this step wants {needed / _GIB:.0f} GiB of disk space and "
            f"{checkout.root} has {free / _GIB:.1f} GiB free"
        )


def _failure(step: Step, lines: list[str], log: Path) -> ToolError:
    text = "\n".join(lines)
    errors = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    if "No space left on device" in text:
        said = (
            "the disk is full; a build needs about 6 GiB, and 12 where the package "
            "index has torch for CUDA only (see README.md)"
        )
    elif errors:
        # Such an error may speak of the messages above it.
        above = lines[max(0, errors[-1] - 12) : errors[-1]]
        said = "\n".join(lines[errors[-1] :]).removeprefix("error: ")
        if "above" in said:
            said = "\n".join([*above, said])
    elif fetch.network_failed(text):
        said = (
            "the package index could not be reached. Check the network, or "
            "PIP_INDEX_URL and the proxy settings, and run again: it goes on from here"
        )
    else:
        said = f"{step.title} failed:\n  " + "\n  ".join(lines[-12:])
    return ToolError(f"{said}\nfull log: {log}")


def run_steps(checkout: Checkout, chosen: list[Step], log: Log) -> None:
    """Run what is not done yet, one line of progress each.

    Raises:
        ToolError: a step failed; its last words and the path of the log.
    """
    for number, step in enumerate(chosen, start=1):
        head = f"[{number}/{len(chosen)}] {step.title} ..."
        present = step.present()
        if stamp.is_done(checkout, step.name, step.key()) and present:
            print(head, "up to date")
            continue
        print(head, end=" ", flush=True)
        _space(checkout, step.name)
        started = time.monotonic()
        stamp.clear(checkout, step.name)
        for command in step.commands:
            status, lines = log.run(command, checkout.root, environment(checkout))
            if status:
                print("failed")
                raise _failure(step, lines, log.path)
        stamp.done(checkout, step.name, step.key())
        print(f"{time.monotonic() - started:.0f} s")


def demo(checkout: Checkout, log: Log) -> None:
    """Run the project's main job on real input.

    Raises:
        ToolError: it failed.
    """
    release = locks.read(checkout).release
    words = [word.format(release=release) for word in DEMO]
    if not (checkout.root / words[0]).exists():
        raise ToolError(f"{words[0]} is not in this checkout")
    print("$ .venv/bin/python", *words, flush=True)
    command = [_python(checkout), "-s", *words]
    status, _ = log.run(
        command, checkout.root, offline_environment(checkout), _to_terminal
    )
    if status:
        raise ToolError(f"the demo failed\nfull log: {log.path}")
    print(NEXT)


def _to_terminal(line: str) -> None:
    print(line, end="", flush=True)


def test(checkout: Checkout, log: Log) -> None:
    """Run every kind of test and print one summary of all.

    The longest part runs beside others where there is room.

    Raises:
        ToolError: a part failed.
    """
    python = _python(checkout)
    pytest = [python, "-s", "-m", "pytest", *PYTEST_OPTIONS]
    engine = ["tests", "--ignore=tests/tools", "--parts=3"]
    parts = {
        "series": [python, "-m", "tools.series", "check"],
        "tools": [*pytest, "--confcutdir=tests/tools", "tests/tools"],
        "upstream's tests": [python, "-m", "tools.upstream_tests"],
        "engine, V1": [*pytest, *engine, "--runner=v1"],
        "engine, V2": [*pytest, *engine, "--runner=v2"],
    }
    environment = offline_environment(checkout)
    rows, failed = [], []

    def report(title: str, run: Callable[..., tuple[int, list[str]]]) -> None:
        print(f"\n--- {title}", flush=True)
        started = time.monotonic()
        status, lines = run(show=_to_terminal)
        matches = [found for line in lines if (found := _SUMMARY.match(line))]
        # The engine tests run once per model runner, each with a summary.
        said = "; ".join(m.group(1) for m in matches) or f"exit status {status}"
        if title == "series" and not status:
            said = lines[-1].strip()
        seconds = time.monotonic() - started
        rows.append(f"{'FAILED' if status else 'ok':6} {title}: {said}")
        print(f"--- {title}: {'FAILED' if status else 'ok'}, {seconds:.0f} s")
        if status:
            failed.append(title)

    def run_part(title: str) -> None:
        report(
            title, functools.partial(log.run, parts[title], checkout.root, environment)
        )

    run_part("series")
    run_part("tools")
    if _has_room_for_two():
        # Each on the core that is free; vLLM would bind both to the same one.
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        threads = max(len(os.sched_getaffinity(0)) // 2, 1)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        longest = "engine, V1"
        with log.beside(parts[longest], checkout.root, environment) as wait:
            run_part("upstream's tests")
            run_part("engine, V2")
            report(longest, wait)
    else:
        for title in ("upstream's tests", "engine, V1", "engine, V2"):
            run_part(title)
    print(f"\nfull log: {log.path}\n" + "\n".join(rows))
    if failed:
        raise ToolError(f"{len(failed)} of {len(parts)} parts failed: {failed}")


def _has_room_for_two() -> bool:
    """Whether two sessions of the engine tests can run at once."""
    return len(os.sched_getaffinity(0)) > 1 and _free_memory() > ROOM_FOR_TWO


def _free_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be had: the machine's, in a container at most its own."""
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    free = int(found[1]) * 1024 if found else 0
    with contextlib.suppress(OSError, ValueError):  # no container; no limit: "max"
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = (group / "memory.stat").read_text()
        cached = re.search(r"^inactive_file (\d+)$", stat, re.MULTILINE)
        free = min(free, limit - used + (int(cached[1]) if cached else 0))
    return free


# ---------------------------------------------------------------- command line


@contextlib.contextmanager
def alone(checkout: Checkout) -> Iterator[None]:
    """Keep a second build of this checkout out.

    Raises:
        ToolError: one is running.
    """
    checkout.build.mkdir(exist_ok=True)
    with (checkout.build / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ToolError("another build of this checkout is running") from None
        yield


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./build.sh",
        description="Fetch the pinned vLLM release, apply the patches, build the "
        "wheel into dist/ and install it into .venv.",
        epilog="Steps that are done are skipped; an interrupted build goes on where "
        "it was. Nothing outside this folder is written but temporary files. Needs "
        "Linux on x86-64, Python 3.11, git and about 6 GiB of disk space.",
    )
    parser.add_argument(
        "verb",
        nargs="?",
        choices=["build", "demo", "test"],
        default="build",
        metavar="demo|test",
        help="demo: then score held-out source files with the reference model; "
        "test: then run all tests",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="which of upstream's binaries go in (default: cpu). The cuda wheel is "
        "left in dist/, to be installed where the GPU is",
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
    arguments = _parser().parse_args()
    if arguments.device == "cuda" and arguments.verb != "build":
        raise ToolError("demo and test run on the CPU wheel; leave out --device cuda")
    with alone(HERE):
        HERE.sweep()
        log = Log(HERE, arguments.verb)
        try:
            run_steps(HERE, steps(HERE, arguments.device, arguments.source), log)
            if arguments.verb == "demo":
                demo(HERE, log)
            elif arguments.verb == "test":
                test(HERE, log)
            else:
                _report(HERE, arguments.device)
        except KeyboardInterrupt:
            print(flush=True)
            raise ToolError("interrupted; run it again to go on") from None
        finally:
            HERE.sweep()


def _report(checkout: Checkout, device: str) -> None:
    (wheel,) = _wheels(checkout, device)
    print(f"wheel: dist/{wheel.name}")
    if device == "cuda":
        print(f"on the machine with the GPU: pip install {wheel.name}")
    else:
        print("installed in .venv; next: ./build.sh demo")


if __name__ == "__main__":
    run_main(main)
