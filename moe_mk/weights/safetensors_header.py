"""The header of a safetensors file: its tensors, their byte ranges, and whether the file is complete.

It is parsed here instead of by the library, in order to report all problems of a damaged file and to get byte ranges.
Source: the format description of github.com/huggingface/safetensors (8 bytes of length, JSON, data).
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from moe_mk.errors import WeightError, unless_signalled
from moe_mk.files import HEADER_BYTES, NO_HEADER, parse_json

POINTER, POINTER_BYTES = "version https://git-lfs.github.com/spec/", 1024
"""How a pointer of git-LFS begins, and more than its size."""
LARGEST = 2**62
"""Upper limit of sizes and offsets."""

DTYPES: dict[str, torch.dtype] = {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "U32": torch.uint32,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """The entry of one tensor."""

    name: str
    dtype: torch.dtype | None
    """None: a dtype that torch does not support, see `dtype_name`."""
    dtype_name: str
    shape: tuple[int, ...]
    num_bytes: int
    start: int = 0
    """First byte, counted from the start of the file."""
    missing_bytes: int = 0
    """Number of its bytes beyond the end of the file."""


class FileState(NamedTuple):
    """By what a file is recognised as the one whose header was read."""

    num_bytes: int
    modified_ns: int
    device: int
    inode: int

    @classmethod
    def of(cls, file: Path | int) -> Self:
        """Of a path or a descriptor. Raises OSError, and ValueError for what is no regular file."""
        found = os.stat(file)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        return cls(found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino)

    def __str__(self) -> str:
        modified = datetime.fromtimestamp(self.modified_ns / 1e9, UTC).isoformat(timespec="milliseconds")
        return f"{self.num_bytes} bytes of {modified} (inode {self.inode})"


@dataclass(frozen=True)
class Header:
    """The tensors of one file, and the file's own metadata."""

    tensors: dict[str, TensorEntry]
    metadata: Mapping[str, Any]
    state: FileState
    """Before it was read."""

    @property
    def num_bytes(self) -> int:
        """Size of the file in bytes."""
        return self.state.num_bytes


def read_header(path: Path) -> Header:
    """Read a header. Raises WeightError for a damaged file."""
    text, state = _text_of(path)
    length, num_bytes = len(text), state.num_bytes
    try:
        raw = parse_json(text)
    except ValueError as problem:
        raise _damaged(path, f"its header is not JSON ({problem})") from problem
    if not isinstance(raw, dict):
        raise _damaged(path, "its header is not a JSON object")
    metadata = raw.pop("__metadata__", {})
    if broken := [name for name in raw if not is_text(name)]:
        raise _damaged(path, f"{len(broken)} names of tensors are no text, the first is {broken[0]!r}")
    tensors = {name: _entry(path, name, given, 8 + length, num_bytes) for name, given in raw.items()}
    _expect_no_gaps(path, tensors.values(), 8 + length, num_bytes)
    return Header(tensors, metadata if isinstance(metadata, dict) else {}, state)


def _text_of(path: Path) -> tuple[bytes, FileState]:
    """The bytes of the header, and the state of the file before."""
    try:
        if not path.is_file():  # opening a pipe may block forever
            raise WeightError(f"{path.name} is no regular file")
        with path.open("rb") as file:
            state = FileState.of(file.fileno())
            num_bytes = state.num_bytes
            length = int.from_bytes(file.read(8), "little")
            if length > NO_HEADER:
                expect_no_pointer(path)
                raise WeightError(f"{path.name} is not a safetensors file: it does not begin with the size of a header")
            if num_bytes < 8 or length > num_bytes - 8:
                raise WeightError(f"{path.name} is truncated: {num_bytes} bytes, its header alone has {8 + length}")
            if length > HEADER_BYTES:
                raise WeightError(
                    f"{path.name} has a header of {length} bytes, the limit is {HEADER_BYTES}; write the checkpoint as "
                    "more files (save_pretrained with max_shard_size)"
                )
            return file.read(length), state
    except unless_signalled(OSError) as problem:
        raise WeightError(f"{path.name} cannot be read: {problem.strerror}") from problem


def expect_no_pointer(path: Path) -> None:
    """Raise WeightError for a pointer of git-LFS, which a clone without git-lfs has in place of a large file."""
    if not path.is_file() or path.stat().st_size >= POINTER_BYTES:
        return
    lines = path.read_bytes().decode("utf-8", "replace").splitlines()
    if lines and lines[0].startswith(POINTER):
        size = next((line[5:] for line in lines if line.startswith("size ")), "?")
        raise WeightError(
            f"{path.name} is a git-LFS pointer to {size} bytes, not the file itself: run git lfs pull in {path.parent} "
            "(or hf download)"
        )


def is_text(name: str) -> bool:
    """Whether a name is valid UTF-8: JSON can also encode unpaired surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _expect_no_gaps(path: Path, tensors: Iterable[TensorEntry], origin: int, file_bytes: int) -> None:
    """Check that every byte behind the header belongs to one tensor; truncation is reported per tensor."""
    end, before = origin, "the header"
    for entry in sorted(tensors, key=lambda entry: (entry.start, entry.num_bytes)):
        if entry.start != end:
            what = "shares bytes with" if entry.start < end else f"starts {entry.start - end} bytes after"
            raise _damaged(path, f"{entry.name} {what} {before}")
        end, before = entry.start + entry.num_bytes, entry.name
    if end < file_bytes:
        raise _damaged(path, f"{file_bytes - end} bytes behind {before} belong to no tensor")


def _entry(path: Path, name: str, given: object, origin: int, file_bytes: int) -> TensorEntry:
    try:
        dtype_name, shape, (start, end) = _parsed(given)
    except (KeyError, TypeError, ValueError) as problem:
        raise _damaged(path, f"the entry of {name} is {str(given)[:200]}") from problem
    dtype = DTYPES.get(dtype_name)
    wanted = end - start if dtype is None else math.prod(shape) * dtype.itemsize
    if start < 0 or end - start != wanted or any(size < 0 for size in shape):
        raise _damaged(
            path, f"{name} of shape {list(shape)} {dtype_name} needs {wanted} bytes, its range has {end - start}"
        )
    missing = min(end - start, max(0, origin + end - file_bytes))
    return TensorEntry(name, dtype, dtype_name, shape, end - start, origin + start, missing)


def _parsed(given: object) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Dtype, shape and range of an entry; raises KeyError, TypeError or ValueError for anything else."""
    if not isinstance(given, dict):
        raise TypeError(type(given))
    dtype, shape, offsets = given["dtype"], given["shape"], given["data_offsets"]
    numbers = [*shape, *offsets]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise TypeError(type(shape))
    if not all(type(number) is int and number < LARGEST for number in numbers):
        raise ValueError(numbers)
    return dtype, tuple(shape), tuple(offsets)


def _damaged(path: Path, why: str) -> WeightError:
    return WeightError(f"{path.name} is damaged: {why}")
