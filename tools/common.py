# SPDX-License-Identifier: Apache-2.0
"""What every tool shares: where things lie, and how an error reaches a person.

Standard library only, since the first step of a build runs before there is an
environment.
"""

import contextlib
import errno
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


class ToolError(Exception):
    """A failure that a person can act on; the text says what and how."""


@dataclass(frozen=True)
class Checkout:
    """The folders of one checkout of the fork.

    Everything that the tools write lies below ``root``.
    """

    root: Path

    @property
    def lock_file(self) -> Path:
        return self.root / "upstream.lock"

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def docs(self) -> Path:
        return self.root / "docs"

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def downloads(self) -> Path:
        return self.build / "downloads"

    @property
    def bases(self) -> Path:
        """Bare repository with one commit per imported upstream release."""
        return self.build / "bases.git"

    @property
    def source(self) -> Path:
        """The working tree that ``series open`` makes."""
        return self.build / "src"

    @property
    def dist(self) -> Path:
        return self.root / "dist"

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    def own_temporary(self) -> Path:
        """This process's folder for temporary files; see ``sweep``."""
        folder = self.build / "tmp" / str(os.getpid())
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def sweep(self) -> None:
        """Remove the temporary folders of this process and of those that are gone."""
        for folder in (self.build / "tmp").glob("*"):
            if (
                folder.name == str(os.getpid())
                or not Path("/proc", folder.name).exists()
            ):
                shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty folder below ``build/``, gone at the end whatever happens."""
        folder = Path(tempfile.mkdtemp(prefix="work-", dir=self.own_temporary()))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


# Quiet; the second one only silences a warning of pytest-asyncio.
PYTEST_OPTIONS = ["-q", "-o", "asyncio_default_fixture_loop_scope=function"]
# A test that hangs ends its session, and says where.
PYTEST_OPTIONS += ["-o", "faulthandler_timeout=1200"]
PYTEST_OPTIONS += ["-o", "faulthandler_exit_on_timeout=true"]

PYTHONS = ("3.11", "3.12", "3.13")
"""Versions of Python that build.sh takes and cpu.lock is resolved for."""

MACHINES = ("x86_64", "aarch64")
"""What build.sh runs on and cpu.lock is resolved for, as ``uname -m`` names it."""


def python_version() -> str:
    """The running Python's, as in ``PYTHONS``."""
    return "{}.{}".format(*sys.version_info)


HERE = Checkout(Path(__file__).resolve().parent.parent)

_DROPPED_PREFIXES = (
    "PYTHON",
    "VLLM_",
    "PIP_BUILD_CONSTRAINT",
    "PIP_CONSTRAINT",
    "PIP_DRY_RUN",
    "PIP_NO_DEPS",
    "PIP_PYTHON",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_USER",
    "PIP_ROOT",
    "PIP_REQUIRE_",
    "PIP_NO_BINARY",
    "PIP_NO_BUILD_ISOLATION",
    "PIP_ONLY_BINARY",
)


def clean_environment(checkout: Checkout) -> dict[str, str]:
    """The user's index and proxy settings, and nothing of their Python set-up.

    Caches and temporary files stay in the checkout.
    """
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(_DROPPED_PREFIXES)
    }
    kept["TMPDIR"] = str(checkout.own_temporary())
    kept.setdefault("PIP_CACHE_DIR", str(checkout.build / "cache" / "pip"))
    kept["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    kept["PIP_NO_INPUT"] = "1"
    kept["PYTHONNOUSERSITE"] = "1"
    kept["PYTHONUTF8"] = "1"
    return kept


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` so that no reader ever sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)


def move(path: Path, folder: Path) -> Path:
    """Move a file, whole or not at all, also to another file system."""
    partial = shutil.move(path, folder / f".{path.name}.{os.getpid()}")
    return partial.replace(folder / path.name)


def run_main(main: Callable[[], None]) -> None:
    """Run a command's ``main``; a ``ToolError`` becomes its text and exit 1.

    A request to end is taken as an interruption, so that temporary folders go.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # not under nohup
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        main()
    except ToolError as error:
        sys.stdout.flush()  # what was said before, in a pipe as well
        sys.exit(f"error: {error}")
    except OSError as error:
        if isinstance(error, PermissionError):
            sys.exit(f"error: {error}: does it belong to another user?")
        if error.errno != errno.ENOSPC:
            raise
        sys.exit(f"error: the disk is full: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
