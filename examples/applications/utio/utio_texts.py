# SPDX-License-Identifier: Apache-2.0
"""The texts that a calibration reads, and the windows of tokens that it cuts them into.

Texts are read as streams. Those of the reference model are in vLLM's source archive.
"""

import argparse
import io
import math
import random
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from compare.texts import PIECE, Encoder, encode_stream

EXAMPLES = Path(__file__).parents[2]
MIN_TEXTS = 100
"""No text gives more than this part of the tokens while others still have some."""

Text = Path | str
"""A file, which is read as a stream, or the text itself."""


def read_texts(args: argparse.Namespace, held_out: bool = False) -> list[Text]:
    """The texts that the options name, none of them blank.

    Args:
        held_out: of the archive, the files that the reference model has not seen.
    """
    if args.text is None:
        print("No --text: reading vLLM's Python and Markdown", file=sys.stderr)
        if not args.archive.is_file():
            sys.exit(f"--archive {args.archive}: no such file; or name a --text")
        sys.path.insert(0, str(EXAMPLES / "reference_model"))
        from corpus import read

        try:
            return list(read(args.archive, held_out).values())
        except (OSError, EOFError, tarfile.TarError) as error:
            sys.exit(f"--archive {args.archive}: {error}")
    texts: list[Text] = []
    for path in args.text:
        if path.is_dir():
            texts += read_folder(path)
            continue
        if path.exists() and not path.is_file():
            sys.exit(f"--text {path}: neither file nor folder, and so read only once")
        try:
            texts += [path] * has_words(path)
        except (OSError, UnicodeDecodeError) as error:
            sys.exit(f"--text {path}: {error}")
    if not texts:
        sys.exit(f"--text {' '.join(map(str, args.text))}: nothing but blanks")
    return texts


def read_folder(folder: Path) -> list[Path]:
    """Its UTF-8 files that are not blank, those of visible folders below it as well."""
    texts, found = [], False
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or not path.is_file():
            continue
        try:
            texts += [path] * has_words(path)
            found = True
        except UnicodeDecodeError:
            continue  # a picture or the like
        except OSError as error:
            sys.exit(f"--text {folder}: {error}")
    if not found:
        sys.exit(f"--text {folder}: no UTF-8 file in this folder")
    return texts


def chunks_of(text: Text) -> Iterator[str]:
    """The text in parts of at most `PIECE` characters, its line ends as they are."""
    opened = io.StringIO(text, newline="") if isinstance(text, str) else text.open(
        encoding="utf-8", newline=""
    )  # fmt: skip
    with opened as file:
        while chunk := file.read(PIECE):
            yield chunk


def has_words(path: Path) -> bool:
    """Says whether a file is more than blanks.

    Raises:
        UnicodeDecodeError: some part of it is not UTF-8.
    """
    return any([not chunk.isspace() for chunk in chunks_of(path)])  # reads all of it


def usable(window: Sequence[int]) -> int:
    """Tokens of a window that have one before them and one after."""
    return max(len(window) - 2, 0)


def count(windows: Sequence[Sequence[int]]) -> int:
    return sum(map(usable, windows))


def begin_of(tokenizer) -> list[int]:
    """What the tokenizer puts before a text. Of an empty one it would give what it puts
    after it as well."""
    return Encoder(tokenizer).ends("0")[0]


def cut(tokenizer, texts: Sequence[Text], context: int, tokens: int) -> list[list[int]]:
    """Windows of the texts in random order, those of a text together.

    Each begins as the tokenizer begins a text. Windows of the same text do not
    overlap. Holds no more than some `tokens` tokens of a text and of all of them.

    Returns:
        Up to `tokens` usable tokens.
    """
    generator = random.Random(0)
    encoder = Encoder(tokenizer, special_tokens=False)
    prefix = begin_of(tokenizer)
    most = math.ceil(tokens / MIN_TEXTS / (context - 2))
    enough = math.ceil(tokens / (context - 2)) + 1
    first: list[tuple[int, list[int]]] = []
    spare: list[tuple[int, list[int]]] = []
    found, room = 0, tokens
    order = generator.sample(range(len(texts)), len(texts))
    for rank, index in enumerate(order):
        ids = encode_stream(encoder, chunks_of(texts[index]))
        parts = (prefix + part for part in parts_of(ids, context - len(prefix)))
        windows = draw((part for part in parts if usable(part)), enough, generator)
        generator.shuffle(windows)
        first += [(rank, window) for window in windows[:most]]
        for window in windows[most:]:
            if room > 0:
                spare.append((rank, window))
                room -= usable(window)
        found += count(windows[:most])
        if found >= tokens:
            break
    chosen = []
    for rank, window in first + spare:
        if tokens <= 0:
            break
        chosen.append((rank, window[: tokens + 2]))
        tokens -= usable(window)
    return [window for _, window in sorted(chosen, key=lambda pair: pair[0])]


def parts_of(pieces: Iterable[list[int]], size: int) -> Iterator[list[int]]:
    """Parts of `size` tokens of a stream of them; the last may be shorter."""
    held: list[int] = []
    for piece in pieces:
        held += piece
        whole = len(held) - len(held) % size
        yield from (held[i : i + size] for i in range(0, whole, size))
        del held[:whole]
    if held:
        yield held


def draw(
    windows: Iterable[list[int]], most: int, generator: random.Random
) -> list[list[int]]:
    """All windows if they are at most `most`, else so many, each as likely as any other
    (algorithm R: Vitter, ACM Trans. Math. Softw. 11, 1985)."""
    drawn: list[list[int]] = []
    for number, window in enumerate(windows):
        if number < most:
            drawn.append(window)
        elif (place := generator.randrange(number + 1)) < most:
            drawn[place] = window
    return drawn


def split(
    windows: list[list[int]], holdout: float
) -> tuple[list[list[int]], list[list[int]]]:
    """Holds the last windows out, so that at most one text is on both sides."""
    wanted = holdout * count(windows)
    first = len(windows)
    while count(windows[first:]) < wanted:
        first -= 1
    return windows[:first], windows[first:]
