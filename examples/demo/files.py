# SPDX-License-Identifier: Apache-2.0
"""The demo's model and text, made in build/ on first use."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent
ROOT = EXAMPLES.parent
REFERENCE = EXAMPLES / "reference_model"
CALIBRATION = HERE / "calibration.safetensors"
TIMES, VOCABULARY = 4, 131_072
DOWNLOADS = ROOT / "build" / "downloads"
FOLDER = ROOT / "build" / "demo"
sys.path.append(str(REFERENCE))


class Files(NamedTuple):
    model: Path  # a folder: the reference model, inflated
    calibration: Path  # for it
    archive: Path  # the source archive whose held-out files are the text


def find_archive() -> Path:
    """
    Raises:
        FileNotFoundError: `build.sh` has not fetched it.
    """
    found = sorted(DOWNLOADS.glob("vllm-[0-9]*.tar.gz"))
    if not found:
        raise FileNotFoundError("no source archive in build/downloads: ./build.sh first")
    return found[-1]


def run(archive: Path) -> Iterator[Files]:
    """Inflates what was not inflated before, in the part's process."""
    import inflate

    made = FOLDER / f"wide-{TIMES}-{VOCABULARY}"
    model, calibration = "model", "calibration.safetensors"

    def write(folder: Path) -> None:
        inflate.inflate_model(REFERENCE / "model", folder / model, TIMES, VOCABULARY)
        inflate.inflate_calibration(CALIBRATION, folder / calibration, TIMES)

    sources = [REFERENCE / "inflate.py", CALIBRATION, *REFERENCE.glob("model/*")]
    if older(made, sources):
        whole(made, write)
    yield Files(made / model, made / calibration, archive)


def older(made: Path, sources: list[Path]) -> bool:
    newest = max(source.stat().st_mtime for source in sources)
    return not made.exists() or made.stat().st_mtime < newest


def whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder elsewhere first, so that it is never there in part."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        write(partial)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(partial, folder)
        os.utime(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def held_out(archive: Path) -> list[str]:
    """The Python files that the reference model was not trained on."""
    from corpus import read

    texts = read(archive, held_out=True)
    return [text for path, text in texts.items() if path.endswith(".py")]
