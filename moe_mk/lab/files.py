"""Bounded readers of the files that only commands read; limits as of `moe_mk.files`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moe_mk.files import HEADER_BYTES, LINE_BYTES, NO_HEADER, size_of


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file one by one, `LINE_BYTES` each at most. Raises OSError or ValueError."""
    size_of(path)
    with path.open("rb") as file:
        while line := file.readline(LINE_BYTES + 1):
            if len(line) > LINE_BYTES:
                raise ValueError(f"it has a line of more than {LINE_BYTES} bytes, the limit")
            yield line


def expect_small_header(path: Path) -> None:
    """Refuse a safetensors file whose header is above `HEADER_BYTES`, before a library reads it.

    Raises OSError, and ValueError with the size and the limit. Source: the format description of
    github.com/huggingface/safetensors (8 bytes of length, JSON, data).
    """
    size_of(path)
    with path.open("rb") as file:
        announced = int.from_bytes(file.read(8), "little")
    if announced > NO_HEADER:
        raise ValueError("it is not a safetensors file: it does not begin with the size of a header")
    if announced > HEADER_BYTES:
        raise ValueError(f"its header has {announced} bytes, the limit is {HEADER_BYTES}")
