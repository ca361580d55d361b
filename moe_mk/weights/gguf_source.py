"""GGUF files as a source of tensors: one file, or all parts of a split one, memory-mapped.

Only tensors of MoE blocks are listed, unless everything is asked for: `blk.3.` is the prefix of a whole transformer
block, with its attention. Rows of block types are opened as their bytes, uint8, and the entry's `dtype_name` is the
type as ggml spells it, such as Q4_K. Headers are read by the `gguf` package, of versions 0.17 to 0.19.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_mk.config.equation import equation_next_to
from moe_mk.errors import WeightError, unless_signalled
from moe_mk.external.library import find
from moe_mk.weights.completeness import some
from moe_mk.weights.names import GGUF_NAMES, GGUF_ONE_BY_ONE
from moe_mk.weights.safetensors_header import FileState, Header, TensorEntry, expect_no_pointer
from moe_mk.weights.source import FileSource, RenamedSource, SafetensorsSource

SUFFIX = ".gguf"
Value = str | int | float | bool | list[Any]
"""Of metadata."""
LONGEST = 4096
"""Arrays of more values, such as a vocabulary, are left out of the metadata."""
MOST = 1 << 22
"""Values of an array; the package reads them one by one."""
_PART = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_BLOCK = re.compile(r"^blk\.\d+\.")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufSource(FileSource):
    """The MoE blocks of a GGUF model."""

    def __init__(self, path: str | os.PathLike[str], *, everything: bool = False) -> None:
        self._everything = everything
        super().__init__(path)

    @property
    def metadata(self) -> Mapping[str, Value]:
        """Single values, and arrays of up to `LONGEST` values."""
        return self._headers[self.files[0]].metadata

    @property
    def files(self) -> list[Path]:
        """Return the paths of all parts."""
        return [*self._headers]

    def _find_files(self) -> dict[str, Path]:
        self._headers = {file: read_gguf(file) for file in gguf_files(self.path)}
        stated = self.metadata.get("split.count", 1)
        if type(stated) is not int or stated not in (0, 1, len(self.files)):
            raise WeightError(
                f"{self.where} is split into {stated!r} files by its metadata (split.count), and has "
                f"{len(self.files)} of that name; keep the names STEM-00001-of-0000N.gguf"
            )
        found = {name: file for file, header in self._headers.items() for name in header.tensors}
        if len(found) < sum(len(header.tensors) for header in self._headers.values()):
            raise WeightError(f"{self.where} has tensors of one name in two files")
        return {name: file for name, file in found.items() if self._everything or _is_of_moe(name)}


def read_gguf(path: Path) -> Header:
    """The header of a file. Raises LibraryMissing without the package, WeightError for a damaged header."""
    gguf = find("gguf")
    infos: list[Any] = []

    class Reader(gguf.GGUFReader):  # type: ignore[name-defined,misc]
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
        expect_no_pointer(path)
        state, reader = FileState.of(path), Reader(path)
        entries, end = [_entry(gguf, start, field, state.num_bytes) for start, field in infos], reader.data_offset
        for entry in entries:  # as llama.cpp: without gaps but those of the alignment, in this order
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
    tensors = {entry.name: entry for entry in entries}
    if len(tensors) < len(entries):
        raise WeightError(f"{path.name} has two tensors of one name")
    return Header(tensors, metadata, state)


def _entry(gguf: Any, data: int, field: Any, file_bytes: int) -> TensorEntry:
    """The place of a tensor, and how much of it is beyond the end of its file."""
    _, name, _, dims, number, offset = field.parts
    kind = gguf.GGMLQuantizationType(int(number[0]))
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = [int(size) for size in reversed(dims.tolist())]
    total = math.prod(shape) // values * num_bytes
    if values > 1:
        if shape[-1] % values:
            raise ValueError(f"{bytes(name).decode()}: rows of {shape[-1]} are no whole {kind.name} blocks")
        shape[-1] = shape[-1] // values * num_bytes
    dtype, start = _DTYPES.get(kind.name, torch.uint8), int(data) + int(offset[0])
    missing = max(0, start + total - max(file_bytes, start))
    return TensorEntry(bytes(name).decode(), dtype, kind.name, tuple(shape), total, start, missing)


def gguf_files(path: Path) -> list[Path]:
    """The file, or all parts of a split one, or those of the only model of a folder. Raises WeightError otherwise."""
    if not path.exists():
        raise WeightError(f"{path} does not exist; pass a checkpoint directory, a .safetensors or a .gguf file")
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    stems = {match["stem"] if (match := _PART.match(file.name)) else file.name for file in files}
    if len(stems) != 1:
        raise WeightError(f"{path} holds {len(stems)} GGUF models: {some(sorted(stems))}; name the first file of one")
    match = _PART.match(files[0].name)
    if match is None:
        return files
    count, folder = int(match["count"]), files[0].parent
    if not 1 <= int(match["number"]) <= count:
        raise WeightError(f"{files[0].name} is part {match['number']} of {count}; parts are numbered from 1")
    parts = [folder / f"{match['stem']}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.exists()]:
        raise WeightError(f"{len(missing)} of {count} parts of {match['stem']} are missing: {some(missing)}")
    return parts


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a GGUF file, or a folder with GGUF files and no safetensors."""
    root = Path(path)
    if root.is_dir():
        return any(root.glob(f"*{SUFFIX}")) and not any(root.glob("*.safetensors"))
    return root.suffix == SUFFIX


def open_source(path: str | os.PathLike[str]) -> SafetensorsSource | GgufSource:
    """The tensors of a checkpoint folder or file, safetensors or GGUF. Raises WeightError.

    Names that a `layer_equation.json` in the folder states are replaced by those of a known family.
    """
    if is_gguf(path):
        return GgufSource(path)
    equation = equation_next_to(Path(path) / "config.json")
    return (
        SafetensorsSource(path) if equation is None or equation.names is None else RenamedSource(path, equation.names)
    )


def _is_of_moe(name: str) -> bool:
    block = _BLOCK.match(name)
    if block is None:
        return False
    return "_exps." in name or any(each.parse(name[block.end() :]) for each in (GGUF_NAMES, GGUF_ONE_BY_ONE))
