# SPDX-License-Identifier: Apache-2.0
"""Texts and their tokens as streams: no text is held as a whole.

A text longer than `PIECE` characters is tokenized in pieces. A piece ends where the
tokenizer makes no difference between the whole and the parts, which is tried on the
`CONTEXT` characters on both sides of the place. A text without such a place is
tokenized as a whole.
"""

import argparse
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from compare.windows import Window, windows_of

REFERENCE_MODEL = Path(__file__).parents[2] / "reference_model"
PIECE = 2**18  # characters
CONTEXT = 2000  # characters
TRIES = 16  # places to try in a piece
SEPARATOR = "\n\n"  # between the samples of a data set


def add_text_arguments(
    parser: argparse.ArgumentParser, required: bool = True
) -> None:
    text = parser.add_argument_group("text, one of these")
    source = text.add_mutually_exclusive_group(required=required)
    source.add_argument("--dataset", help="name or folder for datasets.load_dataset; "
                        "its samples are joined into one text")  # fmt: skip
    source.add_argument("--text", nargs="+", type=Path, metavar="FILE",
                        help="files, each a text of its own")  # fmt: skip
    source.add_argument("--held-out", type=Path, metavar="ARCHIVE",
                        help="the files of the pinned source archive that the "
                        "reference model was not trained on")  # fmt: skip
    text.add_argument("--dataset-config")
    text.add_argument("--dataset-split", default="test")
    text.add_argument("--text-column", default="text")
    text.add_argument("--num-samples", type=int, help="first samples of the dataset")
    text.add_argument("--limit-tokens", type=int, help="stop after so many tokens")


def add_window_arguments(parser: argparse.ArgumentParser) -> None:
    windows = parser.add_argument_group("windows")
    windows.add_argument("--context-length", type=int, default=512,
                         help="tokens of a window (default: 512). The other ways of "
                         "--baseline generate a token, so they want one fewer than the "
                         "model can have")  # fmt: skip
    windows.add_argument("--stride", type=int, help="default: half the context")


def check_windows(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fills in the stride; a parser error if there can be no text or no such window."""
    for name in ("limit_tokens", "num_samples"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.stride is None:
        args.stride = max(args.context_length // 2, 1)
    if args.context_length < 2:
        parser.error("--context-length must be at least 2")
    if not 1 <= args.stride <= args.context_length:
        parser.error("--stride must be from 1 to --context-length")


def check_output(parser: argparse.ArgumentParser, name: str, path: Path) -> None:
    if not path.parent.is_dir():
        parser.error(f"{name}: there is no folder {path.parent}")
    if path.is_dir():
        parser.error(f"{name}: {path} is a folder")


def refuse(message: str) -> NoReturn:
    sys.exit(f"error: {message}")


# The characters


def open_texts(args: argparse.Namespace) -> Callable[[], Iterator[Iterable[str]]]:
    """What gives the texts that the arguments name, each as a stream of strings, as
    often as it is called. Ends the program if they are not there."""
    if args.text:
        for path in args.text:
            check_readable(path)
        return lambda: map(read_file, args.text)
    if args.held_out:
        texts = read_held_out(args.held_out)
        return lambda: ([text] for text in texts)
    rows = load_rows(args)
    return lambda: iter([join_rows(rows, args.text_column)])


def check_readable(path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        refuse(f"--text {path}: {error.strerror}")


def read_file(path: Path) -> Iterator[str]:
    """Reads a text as it is: line ends of any kind are scored."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while chunk := file.read(PIECE):
                yield chunk
    except OSError as error:
        refuse(f"--text {path}: {error.strerror}")
    except UnicodeDecodeError as error:
        refuse(f"--text {path} is not UTF-8: {error.reason}")


def read_held_out(archive: Path) -> list[str]:
    sys.path.insert(0, str(REFERENCE_MODEL))
    from corpus import read

    try:
        return list(read(archive, held_out=True).values())
    except (OSError, EOFError, tarfile.TarError) as error:
        refuse(f"--held-out {archive}: {error}")


def load_rows(args: argparse.Namespace) -> Any:
    """The data set's first samples; `datasets` maps the file, it does not read it."""
    from datasets import load_dataset

    try:
        rows = load_dataset(args.dataset, args.dataset_config, split=args.dataset_split)
    except Exception as error:  # datasets has many of its own
        refuse(
            f"--dataset {args.dataset}, --dataset-config {args.dataset_config}, "
            f"--dataset-split {args.dataset_split}: {error}"
        )
    if args.text_column not in rows.column_names:
        known = ", ".join(rows.column_names)
        refuse(f"--text-column {args.text_column}: there are {known}")
    kind = getattr(rows.features[args.text_column], "dtype", "list")
    if kind not in ("string", "large_string"):
        refuse(f"--text-column {args.text_column} has no texts: its type is {kind}")
    return rows.select(range(min(args.num_samples or len(rows), len(rows))))


def join_rows(rows: Any, column: str) -> Iterator[str]:
    """The samples as one text."""
    separator = ""
    for batch in rows.select_columns(column).iter(1000):
        yield separator + SEPARATOR.join(text or "" for text in batch[column])
        separator = SEPARATOR


# The tokens


class Encoder:
    """A tokenizer's ids of whole texts and of parts of them.

    Args:
        special_tokens: whole texts have the tokenizer's own tokens at their ends.
    """

    def __init__(self, tokenizer: Any, special_tokens: bool = True):
        from transformers import PreTrainedTokenizerBase

        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._options = {}
        if isinstance(tokenizer, PreTrainedTokenizerBase):  # Mistral's is none
            # It would warn that a text is longer than the model's context.
            self._options["verbose"] = False

    def whole(self, text: str) -> list[int]:
        if not self._special_tokens:
            return self.part(text)
        return self._tokenizer.encode(text, **self._options)

    def part(self, text: str) -> list[int]:
        """Without the special tokens at the ends of a text."""
        return self._tokenizer.encode(text, add_special_tokens=False, **self._options)

    def ends(self, text: str) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        whole, part = self.whole(text), self.part(text)
        for begin in range(len(whole) - len(part) + 1):
            if whole[begin : begin + len(part)] == part:
                return whole[:begin], whole[begin + len(part) :]
        return [], []


def encode_stream(encoder: Encoder, chunks: Iterable[str]) -> Iterator[list[int]]:
    """Token ids of one text, piece by piece: together, those of the whole."""
    held, first, suffix = "", True, []
    for chunk in chain(chunks, [None]):
        if chunk is None and first:  # a short text
            yield encoder.whole(held)
            return
        held += chunk or ""
        place = find_cut(encoder, held) if chunk and len(held) > PIECE else 0
        if chunk is not None and not place:
            continue
        piece, held = (held[:place], held[place:]) if place else (held, "")
        if first:
            prefix, suffix = encoder.ends(piece[:CONTEXT])
            yield prefix
            first = False
        yield encoder.part(piece)
    yield suffix


def find_cut(encoder: Encoder, text: str) -> int:
    """A place where the text can be cut without a change of its tokens; 0 if none of
    the line ends that are tried is one."""
    place = len(text) - CONTEXT
    for _ in range(TRIES):
        line_end = text.rfind("\n", CONTEXT, place)
        # How a run of spaces is cut may depend on all of it. In WikiText each line ends
        # in one.
        place = len(text[:line_end].rstrip()) if line_end > 0 else -1
        if place < CONTEXT:
            return 0
        left, right = text[place - CONTEXT : place], text[place : place + CONTEXT]
        if encoder.part(left + right) == encoder.part(left) + encoder.part(right):
            return place
    return 0


@dataclass
class Tally:
    texts: int = 0  # that have tokens
    tokens: int = 0


def stream_windows(
    tokenizer: Any,
    texts: Iterable[Iterable[str]],
    context: int,
    stride: int,
    limit: int | None = None,
    tally: Tally | None = None,
) -> Iterator[Window]:
    """Windows of all texts, of at most `limit` tokens, which `tally` counts."""
    encoder = Encoder(tokenizer)
    left = limit or sys.maxsize
    tally = tally or Tally()

    def limited(pieces: Iterable[list[int]]) -> Iterator[list[int]]:
        nonlocal left
        for piece in pieces:
            few = piece[:left]
            yield few
            left -= len(few)
            tally.tokens += len(few)
            if not left:
                return

    for chunks in texts:
        before = tally.tokens
        yield from windows_of(limited(encode_stream(encoder, chunks)), context, stride)
        tally.texts += tally.tokens > before
        if not left:
            return


class ByteCounter:
    """UTF-8 bytes of the text of scored tokens, call by call."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._held: list[int] = []  # the first bytes of a character, perhaps

    def add(self, windows: Iterable[Window]) -> int:
        """Bytes of these windows' scored tokens; those of a character that they may
        end in the middle of count with the next."""
        ids = [i for ids, scored in windows for i in ids[-scored:]]
        ids = self._held + ids
        self._held = []
        while ids and len(self._held) < 4 and self._text(ids).endswith("\ufffd"):
            self._held.insert(0, ids.pop())
        return len(self._text(ids).encode())

    def rest(self) -> int:
        """Bytes of what was held back."""
        held, self._held = self._held, []
        return len(self._text(held).encode())

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
