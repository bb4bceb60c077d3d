# SPDX-License-Identifier: Apache-2.0
"""The demo's models and text, made in build/ on first use."""

import json
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
"""Of the reference model: `utio_calibrate.py --cutoffs 6 9 --output ...`."""
TIMES, VOCABULARY = 4, 131_072
LONGEST = 1023
"""Tokens of a text; the model takes 1,024, and vLLM wants room for one."""
FOLDER = ROOT / "build" / "demo"
sys.path.append(str(REFERENCE))


class Files(NamedTuple):
    model: Path  # a folder: the reference model, inflated
    narrow: Path  # the same with its own vocabulary
    calibration: Path  # for both
    tokens: Path  # of the beginnings of held-out files


def find_archive() -> Path:
    """
    Raises:
        FileNotFoundError: `build.sh` has not fetched it.
    """
    from corpus import pinned_archive

    archive = pinned_archive()
    if not archive.exists():
        raise FileNotFoundError("no source archive in build/downloads: ./build.sh first")
    return archive


def run(archive: Path) -> Iterator[Files]:
    """Makes what was not made before, in the part's process."""
    import inflate

    folder = FOLDER / f"times-{TIMES}"
    made = under(folder)

    def write(partial: Path) -> None:
        parts = under(partial)
        inflate.inflate_model(REFERENCE / "model", parts.model, TIMES, VOCABULARY)
        inflate.inflate_model(REFERENCE / "model", parts.narrow, TIMES)
        inflate.inflate_calibration(CALIBRATION, parts.calibration, TIMES)
        parts.tokens.write_text(json.dumps(tokenize(archive)))

    sources = [Path(__file__), REFERENCE / "inflate.py", CALIBRATION, archive]
    if older(folder, [*sources, *REFERENCE.glob("model/*")]):
        whole(folder, write)
    yield made


def under(folder: Path) -> Files:
    return Files(
        folder / "model",
        folder / "narrow",
        folder / "calibration.safetensors",
        folder / "tokens.json",
    )


def tokenize(archive: Path) -> list[list[int]]:
    """The first tokens of Python files that the reference model was not trained on."""
    from corpus import read
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REFERENCE / "model")
    texts = read(archive, held_out=True)
    python = (text for path, text in texts.items() if path.endswith(".py"))
    return [tokenizer.encode(text, verbose=False)[:LONGEST] for text in python]


def tokens(files: Files) -> list[list[int]]:
    return json.loads(files.tokens.read_text())


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
