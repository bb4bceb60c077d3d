# SPDX-License-Identifier: Apache-2.0
"""The files of references: written and read in parts, whole or not at all."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from compare.reference import FORMAT, Reference, Refused
from compare.windows import Window

COPY_BYTES = 2**24
_NAMES = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.int32): "I32",
    np.dtype(np.uint16): "U16",
}  # of safetensors


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` when all is written and on disk."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    with replacing(path) as partial:
        text = json.dumps(content, indent=2, ensure_ascii=False)
        partial.write_text(text + "\n", encoding="utf-8")


def save_arrays(
    path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]
) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    with replacing(path) as partial:
        save_file(arrays, partial, metadata=metadata)


def load_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Raises `Refused` if the file is missing, damaged or something else."""
    try:
        with safe_open(path, "np") as file:
            return {k: file.get_tensor(k) for k in file.keys()}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise Refused(f"can not read {path}: {error}") from None


def load_metadata(path: Path) -> dict[str, str]:
    """As `load_arrays`, without the arrays."""
    try:
        with safe_open(path, "np") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise Refused(f"can not read {path}: {error}") from None


def to_arrays(reference: Reference) -> dict[str, np.ndarray]:
    """As stored: ids take two bytes where the vocabulary lets them."""
    small = int(reference.metadata["vocabulary"]) <= 2**16
    id_type = np.uint16 if small else np.int32
    windows = reference.windows
    return {
        "windows": np.array([[len(w.token_ids), w.scored] for w in windows], np.int32),
        "token_ids": np.concatenate([w.token_ids for w in windows]).astype(id_type),
        "candidates": reference.candidates.astype(id_type),
        "logprobs": reference.logprobs,
        "tail_mass": reference.tail_mass,
        "tail_samples": reference.tail_samples.astype(id_type),
        "tail_logprobs": reference.tail_logprobs,
        "next_logprobs": reference.next_logprobs,
    }


def from_arrays(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> Reference:
    lengths, scored = arrays["windows"].T
    parts = np.split(arrays["token_ids"], np.cumsum(lengths)[:-1])
    windows = [Window(ids.tolist(), int(n)) for ids, n in zip(parts, scored)]
    fields = [arrays[field] for field in Reference._fields[1:-1]]
    return Reference(windows, *fields, metadata)


def write_reference(references: Iterable[Reference], path: Path) -> dict[str, str]:
    """Writes parts of one reference as one safetensors file, holding one at a time.

    Returns:
        The file's metadata.
    """
    columns: dict[str, Path] = {}
    shapes: dict[str, list] = {}
    metadata: dict[str, str] = {}
    try:
        for reference in references:
            metadata = reference.metadata
            for name, array in to_arrays(reference).items():
                columns[name] = path.with_name(f".{path.name}.{name}.partial")
                shape = shapes.setdefault(name, [array.dtype, 0, *array.shape[1:]])
                with columns[name].open("ab" if shape[1] else "wb") as file:
                    file.write(np.ascontiguousarray(array).tobytes())
                shape[1] += len(array)
        if not columns:
            raise Refused("the text has no token with another before it")
        metadata |= {"text_sha256": hash_columns(columns, shapes)}
        with replacing(path) as partial:
            join_columns(partial, columns, shapes, metadata)
    except OSError as error:
        raise Refused(f"--reference {path}: {error}") from error
    finally:
        for column in columns.values():
            column.unlink(missing_ok=True)
    return metadata


def join_columns(
    path: Path,
    columns: dict[str, Path],
    shapes: dict[str, list],
    metadata: dict[str, str],
) -> None:
    """Joins raw columns to a safetensors file: the length of a header, the header,
    the columns (https://github.com/huggingface/safetensors#format)."""
    names = sorted(columns, key=lambda name: (-shapes[name][0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        begin, end = end, end + columns[name].stat().st_size
        dtype, *shape = shapes[name]
        header[name] = {
            "dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begin, end]
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for chunk in read_chunks(columns[name]):
                file.write(chunk)


def read_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(COPY_BYTES):
            yield chunk


def hash_columns(columns: dict[str, Path], shapes: dict[str, list]) -> str:
    """The fingerprint of the windows: their lengths and token ids as int64."""
    digest = hashlib.sha256()
    for name in ("windows", "token_ids"):
        for chunk in read_chunks(columns[name]):
            digest.update(np.frombuffer(chunk, shapes[name][0]).astype("<i8").tobytes())
    return digest.hexdigest()


class ReferenceFile:
    """A file that `write_reference` wrote, read part by part.

    Raises:
        Refused: the file is missing, damaged or something else.
    """

    def __init__(self, path: Path):
        self._path = path
        try:
            self._file = safe_open(path, "np")
            self.metadata = self._file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise Refused(f"can not read {path}: {error}") from None
        if self.metadata.get("format") != FORMAT:
            raise Refused(f"{path} is no reference file ({FORMAT})")
        self.windows = self._file.get_tensor("windows")  # [windows, 2]
        self._check_tokens()
        self.positions = int(self.windows[:, 1].sum())
        self.context = int(self.windows[:, 0].max())
        widths = [
            self._file.get_slice(name).get_shape()[1]
            for name in ("candidates", "tail_samples")
        ]
        self.top_k = widths[0]
        self.named = sum(widths)  # tokens a position

    def _check_tokens(self) -> None:
        digest = hashlib.sha256(self.windows.astype("<i8").tobytes())
        ids = self._file.get_slice("token_ids")
        length = ids.get_shape()[0]
        for begin in range(0, length, COPY_BYTES):
            few = ids[begin : min(begin + COPY_BYTES, length)]
            digest.update(few.astype("<i8").tobytes())
        if digest.hexdigest() != self.metadata["text_sha256"]:
            raise Refused(
                f"{self._path} is damaged: its tokens are not those of its fingerprint"
            )

    def parts(self, tokens: int) -> Iterator[Reference]:
        """The reference in order, in parts of up to `tokens` prompt tokens; a window
        that is longer is a part of its own."""
        token = position = first = 0
        while first < len(self.windows):
            lengths = np.cumsum(self.windows[first:, 0])
            last = first + max(int(np.searchsorted(lengths, tokens, "right")), 1)
            windows = self.windows[first:last]
            size, scored = windows.sum(axis=0).tolist()
            arrays = {"windows": windows}
            arrays["token_ids"] = self._rows("token_ids", token, size)
            for name in Reference._fields[1:-1]:
                arrays[name] = self._rows(name, position, scored)
            yield from_arrays(arrays, self.metadata)
            token, position, first = token + size, position + scored, last

    def _rows(self, name: str, begin: int, count: int) -> np.ndarray:
        return self._file.get_slice(name)[begin : begin + count]

    def tail_mass(self) -> float:
        """Mean probability of all tokens but the candidates."""
        return float(self._file.get_tensor("tail_mass").mean())
