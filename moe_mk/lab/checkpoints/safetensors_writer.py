"""Write a safetensors file piece by piece: sizes first, bytes in any order and from any thread, constant memory.

The header is padded with blanks so that data starts on a multiple of 64; wider dtypes come first, so that every tensor
is aligned to its own element. Source: the format description of github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from moe_mk.weights.safetensors_header import DTYPE_NAMES

ALIGNMENT = 64


@dataclass(frozen=True)
class Planned:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """One file, open for writing. Every byte of every planned tensor must be written once."""

    def __init__(self, path: Path, tensors: Sequence[Planned], metadata: Mapping[str, str]) -> None:
        ordered = sorted(tensors, key=lambda t: -t.dtype.itemsize)
        header, self._start_of = _layout(ordered, metadata)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        self._origin = len(header)
        os.ftruncate(self._fd, self._origin + sum(t.num_bytes for t in ordered))
        _write_all(self._fd, header, 0)

    def write(self, name: str, data: Tensor, offset: int = 0) -> None:
        """Write a contiguous piece of a tensor, `offset` bytes from its start."""
        buffer = data.contiguous().reshape(-1).view(torch.uint8).numpy().data
        _write_all(self._fd, buffer, self._origin + self._start_of[name] + offset)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def _layout(tensors: Sequence[Planned], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    start_of: dict[str, int] = {}
    end = 0
    for t in tensors:
        start_of[t.name] = end
        end += t.num_bytes
        entries[t.name] = {
            "dtype": DTYPE_NAMES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [start_of[t.name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, start_of


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
