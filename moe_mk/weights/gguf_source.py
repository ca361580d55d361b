"""GGUF files as a source of tensors: one file, or all parts of a split one, memory-mapped.

Only tensors of MoE blocks are listed, unless everything is asked for: `blk.3.` is the prefix of a whole transformer
block, with its attention. Rows of block types are opened as their bytes, uint8, and the entry's `dtype_name` is the
type, such as Q4_K.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_mk.config.equation import equation_next_to
from moe_mk.errors import WeightError
from moe_mk.weights.completeness import some
from moe_mk.weights.names import GGUF_NAMES
from moe_mk.weights.safetensors_header import TensorEntry
from moe_mk.weights.source import MappedFile, RenamedSource, SafetensorsSource, TensorSource

if TYPE_CHECKING:
    from moe_mk.external.gguf_file import Value

SUFFIX = ".gguf"
_PART = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_BLOCK = re.compile(r"^blk\.\d+\.")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufSource(TensorSource):
    """The MoE blocks of a GGUF model."""

    def __init__(self, path: str | os.PathLike[str], *, everything: bool = False) -> None:
        from moe_mk.external.gguf_file import read_gguf

        self.path, self.where = Path(path), str(path)
        self._files = [read_gguf(file) for file in gguf_files(self.path)]
        stated = self._files[0].metadata.get("split.count", 1)
        if type(stated) is not int or stated not in (0, 1, len(self._files)):
            raise WeightError(
                f"{self.where} is split into {stated!r} files by its metadata (split.count), and has "
                f"{len(self._files)} of that name; keep the names STEM-00001-of-0000N.gguf"
            )
        entries = {entry.name: (file, entry) for file in self._files for entry in file.tensors}
        if len(entries) < sum(len(file.tensors) for file in self._files):
            raise WeightError(f"{self.where} has tensors of one name in two files")
        self._entries = {name: found for name, found in entries.items() if everything or _is_of_moe(name)}
        self._maps: dict[Path, MappedFile] = {}

    @property
    def metadata(self) -> Mapping[str, Value]:
        return self._files[0].metadata

    @property
    def files(self) -> list[Path]:
        return [file.path for file in self._files]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self._files)

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def entry(self, name: str) -> TensorEntry:
        """The place of a tensor, and how much of it is beyond the end of its file."""
        file, entry = self._entries[name]
        dtype = _DTYPES.get(entry.type_name, torch.uint8)
        missing = max(0, entry.start + entry.num_bytes - max(file.num_bytes, entry.start))
        return TensorEntry(name, dtype, entry.type_name, entry.shape, entry.num_bytes, entry.start, missing)

    def open(self, name: str) -> Tensor:
        file = self._entries[name][0]
        if file.path not in self._maps:
            self._maps[file.path] = MappedFile(file.path, file.num_bytes)
        return self._maps[file.path].view(self.entry(name))


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
    return block is not None and (GGUF_NAMES.parse(name[block.end() :]) is not None or "_exps." in name)
