"""The header of a safetensors file: which tensors it holds, where they lie, and whether the file is long enough.

Read without the library, because a reader must be able to name everything that is wrong with a damaged file, and to
know byte ranges. Source: the format description of github.com/huggingface/safetensors (8 bytes of length, JSON, data).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_mk.errors import WeightError

MAX_HEADER_BYTES = 100_000_000

DTYPES: dict[str, torch.dtype] = {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """What a header says about one tensor."""

    name: str
    dtype: torch.dtype | None
    """None: a dtype that torch does not have; `dtype_name` says which."""
    dtype_name: str
    shape: tuple[int, ...]
    num_bytes: int
    start: int = 0
    """First byte, counted from the start of the file."""
    missing_bytes: int = 0
    """How many of its bytes lie behind the end of the file."""


@dataclass(frozen=True)
class Header:
    """The tensors of one file, and the file's own metadata."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    num_bytes: int
    """Size of the file in bytes."""


def read_header(path: Path) -> Header:
    """Read a header; WeightError says what is wrong with the file as a whole."""
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if num_bytes < 8 or length > min(MAX_HEADER_BYTES, num_bytes - 8):
                raise WeightError(
                    f"{path.name} is truncated or no safetensors file: {num_bytes} bytes, header of {length} announced"
                )
            raw = json.loads(file.read(length))
    except OSError as problem:
        raise WeightError(f"{path.name} cannot be read: {problem.strerror}") from problem
    except ValueError as problem:
        raise _damaged(path, f"its header is not JSON ({problem})") from problem
    if not isinstance(raw, dict):
        raise _damaged(path, "its header is not a JSON object")
    metadata = raw.pop("__metadata__", {})
    tensors = {name: _entry(path, name, said, 8 + length, num_bytes) for name, said in raw.items()}
    return Header(tensors, metadata if isinstance(metadata, dict) else {}, num_bytes)


def _entry(path: Path, name: str, said: object, origin: int, file_bytes: int) -> TensorEntry:
    try:
        assert isinstance(said, dict)
        dtype_name, shape = str(said["dtype"]), tuple(int(size) for size in said["shape"])
        start, end = (int(offset) for offset in said["data_offsets"])
    except (AssertionError, KeyError, TypeError, ValueError) as problem:
        raise _damaged(path, f"the entry of {name} is {said!r}") from problem
    dtype = DTYPES.get(dtype_name)
    wanted = end - start if dtype is None else math.prod(shape) * dtype.itemsize
    if start < 0 or end - start != wanted or any(size < 0 for size in shape):
        raise _damaged(
            path, f"{name} of shape {list(shape)} {dtype_name} needs {wanted} bytes, its range has {end - start}"
        )
    missing = min(end - start, max(0, origin + end - file_bytes))
    return TensorEntry(name, dtype, dtype_name, shape, end - start, origin + start, missing)


def _damaged(path: Path, why: str) -> WeightError:
    return WeightError(f"{path.name} is damaged: {why}")
