"""GGUF files by the `gguf` package: metadata and the places of tensors.

Data is not read here: `weights.gguf_source` maps the file. Types that this library does not decode itself are decoded
by the package. Versions of the package: 0.17 to 0.19.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_mk.errors import WeightError, unless_signalled
from moe_mk.external.library import find

Value = str | int | float | bool | list[Any]
LONGEST = 4096
"""Arrays of more values, such as a vocabulary, are left out of the metadata."""
MOST = 1 << 22
"""Values of an array; the package reads them one by one."""


@dataclass(frozen=True)
class GgufEntry:
    """The place of one tensor."""

    name: str
    type_name: str
    """As ggml spells it: F32, BF16, Q4_K, ..."""
    shape: tuple[int, ...]
    """Of the bytes for block types, of the values otherwise; the outermost dimension first."""
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """The header of one file."""

    path: Path
    metadata: Mapping[str, Value]
    """Single values, and arrays of up to `LONGEST` values."""
    tensors: tuple[GgufEntry, ...]
    num_bytes: int


def read_gguf(path: Path) -> GgufFile:
    """The header of a file. Raises LibraryMissing without the package, WeightError for a damaged header."""
    gguf = find("gguf")
    infos: list[Any] = []

    class Header(gguf.GGUFReader):  # type: ignore[name-defined,misc]
        """Without the data, so that a truncated file is described and its tensors can be named."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **named: Any) -> Any:
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):  # the package returns what is there
                raise ValueError(f"a value at byte {offset} is beyond the end of the file")
            return super()._get(offset, dtype, count, *rest, **named)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == gguf.GGUFValueType.ARRAY and (size := int(self._get(orig_offs + 4, np.uint64)[0])) > MOST:
                raise ValueError(f"an array at byte {orig_offs} has {size} values, the limit is {MOST}")
            return super()._get_field_parts(orig_offs, raw_type)

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            infos.extend((start_offs, field) for field in fields)

    try:
        reader = Header(path)
        tensors = tuple(_entry(gguf, start, field) for start, field in infos)
        end = reader.data_offset
        for entry in tensors:  # as llama.cpp: without gaps but those of the alignment, in this order
            if entry.start != end:
                raise ValueError(f"{entry.name} begins at byte {entry.start}, its place is {end}")
            end += -(-entry.num_bytes // int(reader.alignment)) * int(reader.alignment)
        metadata = {
            name: field.contents()
            for name, field in reader.fields.items()
            if len(field.data) <= LONGEST and not name.startswith(("GGUF.", "tokenizer."))
        }
    except unless_signalled(
        OSError, ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError
    ) as problem:
        raise WeightError(f"{path.name} has no readable GGUF header ({type(problem).__name__}: {problem})") from problem
    if len({entry.name for entry in tensors}) < len(tensors):
        raise WeightError(f"{path.name} has two tensors of one name")
    return GgufFile(path, metadata, tensors, path.stat().st_size)


def dequantized(type_name: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Rows of blocks as f32. type_name: as ggml spells it. Raises LibraryMissing without the package."""
    gguf = find("gguf")
    values: NDArray[np.float32] = gguf.dequantize(rows, gguf.GGMLQuantizationType[type_name])
    return values


def parameter_names(architecture: str, num_layers: int, names: Iterable[str]) -> dict[str, str]:
    """The tensors of a file by the names that transformers has for them, as far as the package knows them.

    architecture: as files spell it. Raises LibraryMissing without the package, WeightError for an unknown one.
    """
    gguf = find("gguf")
    number = next((key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture), None)
    if number is None:
        raise WeightError(f"the gguf package knows no architecture {architecture!r}; install a newer one")
    known = gguf.get_tensor_name_map(number, num_layers)

    def stored(name: str) -> str | None:
        found: str | None = known.get_name(name.replace("correction_bias", "correction.bias"), (".weight", ".bias"))
        return found

    return {name: found for name in names if (found := stored(name)) is not None}


def _entry(gguf: Any, start: int, field: Any) -> GgufEntry:
    _, name, _, dims, number, offset = field.parts
    kind = gguf.GGMLQuantizationType(int(number[0]))
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = [int(size) for size in reversed(dims.tolist())]
    total = math.prod(shape) // values * num_bytes
    if values > 1:
        if shape[-1] % values:
            raise ValueError(f"{bytes(name).decode()}: rows of {shape[-1]} are no whole {kind.name} blocks")
        shape[-1] = shape[-1] // values * num_bytes
    return GgufEntry(bytes(name).decode(), kind.name, tuple(shape), int(start) + int(offset[0]), total)
