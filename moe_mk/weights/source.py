"""Sources of tensors: files with a header, such as a directory of safetensors, or a dictionary in memory.

A tensor opened from a file is a view that takes no memory: what it refers to is read by `in_memory`, which raises
WeightError if the file is no longer the one whose header was read. A file that is replaced by renaming, or deleted,
stays readable. Changes within the resolution of the file system's modification times are not seen.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from moe_mk.config.equation import VECTORS, TensorNames, TensorPart
from moe_mk.errors import WeightError, unless_signalled
from moe_mk.files import INDEX_BYTES, named_in_utf8, read_json, resolved
from moe_mk.shapes import expect_dense
from moe_mk.weights.safetensors_header import (
    DTYPE_NAMES,
    FileState,
    Header,
    TensorEntry,
    expect_no_pointer,
    is_text,
    read_header,
)

INDEX = "model.safetensors.index.json"


class MappedFile:
    """A file of tensors, open as long as any view of it exists.

    A view has an address in a private mapping of the file, by which it is found; views must not be modified. They are
    read by `in_memory`, through the descriptor: touching a page that is no longer in the file would end the process.
    """

    _open: ClassVar[WeakValueDictionary[FileState, MappedFile]] = WeakValueDictionary()

    def __init__(self, path: Path, state: FileState) -> None:
        """state: of the file when its header was read. Raises WeightError if it has changed or cannot be opened."""
        self.path, self.state, self._fd = path, state, -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self.expect_unchanged()
            with named_in_utf8(path) as name:
                self._octets = torch.UntypedStorage.from_file(name, False, state.num_bytes)
        except unless_signalled(OSError, RuntimeError, ValueError) as problem:
            raise WeightError(f"{path.name} cannot be opened: {problem}") from problem

    @classmethod
    def of(cls, path: Path, state: FileState) -> MappedFile:
        """The one that is open already, if any; see `__init__`."""
        if (found := cls._open.get(state)) is None:
            found = cls._open[state] = cls(path, state)
        return found

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def view(self, entry: TensorEntry) -> Tensor:
        """A tensor of the file. Its storage is these bytes alone: a copy of it does not copy the file."""
        if entry.dtype is None or entry.missing_bytes:
            why = "its file is truncated" if entry.missing_bytes else f"torch has no {entry.dtype_name}"
            raise WeightError(f"{self.path.name} cannot be opened: {entry.name}: {why}")
        storage = self._octets[entry.start : entry.start + entry.num_bytes]
        _MAPPED[storage] = self, entry.start
        return _octets_of(storage).view(entry.dtype).view(entry.shape)

    def expect_unchanged(self) -> None:
        """Raise WeightError if the file was written to or cut. One that was replaced or deleted is still open here."""
        if (now := FileState.of(self._fd)) != self.state:
            raise WeightError(
                f"{self.path} was changed after its header was read: it had {self.state} and has {now}; load the layer "
                "again, and let writers rename a new file to the name of the old one"
            )

    def read(self, start: int, num_bytes: int, scratch: Tensor | None = None) -> Tensor:
        """These bytes, in `scratch` if they fit. Raises WeightError if the file was changed, or cannot be read."""
        made = None if scratch is None or num_bytes > scratch.numel() else scratch[:num_bytes]
        made = torch.empty(num_bytes, dtype=torch.uint8, device="cpu") if made is None else made
        octets = memoryview((ctypes.c_char * num_bytes).from_address(made.data_ptr())).cast("B") if num_bytes else b""
        done = 0
        try:
            while done < num_bytes:
                count = os.preadv(self._fd, [octets[done : done + MOST_AT_ONCE]], start + done)
                if not count:
                    break
                done += count
        except unless_signalled(OSError) as problem:
            raise WeightError(f"{self.path} cannot be read: {problem.strerror}") from problem
        self.expect_unchanged()
        assert done == num_bytes, "the file has the bytes of its header"
        return made

    def read_ahead(self, start: int, num_bytes: int) -> None:
        """Request bytes from the system's page cache, if supported and not yet cached."""
        is_there = _is_cached(self._fd, start) and _is_cached(self._fd, start + num_bytes - 1)
        if hasattr(os, "posix_fadvise") and not is_there:
            os.posix_fadvise(self._fd, start, num_bytes, os.POSIX_FADV_WILLNEED)


AS_OPENED = 1
"""The version of a tensor after `set_`, which counts as a change."""
MOST_AT_ONCE, PIECE = 1 << 30, 4 << 20
"""Bytes of a request, and about those of one for a part of a strided tensor."""
_MAPPED: WeakKeyDictionary[torch.UntypedStorage, tuple[MappedFile, int]] = WeakKeyDictionary()
"""The storages of all live views of files: the file and the first byte. Addresses are used again."""


def is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor is a view of a mapped file, whose contents were not changed since."""
    if tensor.device.type != "cpu" or tensor.untyped_storage() not in _MAPPED:
        return False
    return tensor.is_inference() or tensor._version == AS_OPENED


def _octets_of(storage: torch.UntypedStorage) -> Tensor:
    # torch.asarray would read the first byte.
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def in_memory(tensor: Tensor, scratch: Tensor | None = None) -> Tensor:
    """A copy of a view of a file, read through its descriptor, in `scratch` if it fits; other tensors as they are.

    Raises WeightError naming the file if it was written to, cut, or cannot be read.
    """
    if not is_mapped(tensor):
        return tensor
    size = _extent(tensor)
    if size == tensor.nbytes or tensor.dim() < 2 or size <= PIECE:
        file, first = _MAPPED[tensor.untyped_storage()]
        start = first + tensor.data_ptr() - tensor.untyped_storage().data_ptr()
        made = file.read(start, size, scratch).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        return made if size == tensor.nbytes else made.contiguous()
    axis = max((axis for axis, length in enumerate(tensor.shape) if length > 1), key=tensor.stride)
    count = max(1, PIECE // (tensor.stride(axis) * tensor.element_size()))
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    for part, into in zip(torch.split(tensor, count, axis), torch.split(made, count, axis), strict=True):
        into.copy_(in_memory(part))
    return made


class Copies:
    """Copies in memory of views of files, for functions that compute what may be views of them."""

    def __init__(self) -> None:
        self._copied: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return a tensor as a source, see `in_memory`."""
        copy = in_memory(tensor)
        if copy is not tensor:
            self._copied[copy.untyped_storage()._cdata] = tensor, copy
        return copy

    def back(self, made: Tensor) -> Tensor:
        """A view of a copy as the same view of the file, so that it takes no memory; other tensors as they are."""
        tensor, copy = self._copied.get(made.untyped_storage()._cdata, (made, made))
        if tensor is copy or tensor.stride() != copy.stride() or not (made.is_inference() or made._version == 0):
            return made
        storage = tensor.untyped_storage()
        start, size = tensor.data_ptr() - storage.data_ptr() + made.data_ptr() - copy.data_ptr(), _extent(made)
        octets = _octets_of(storage)[start : start + size]
        return made if start % made.element_size() else octets.view(made.dtype).as_strided(made.shape, made.stride())


def discard_pages(tensor: Tensor) -> None:
    """Give whole pages back to the system, with what is in them where they are not of a file."""
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    start, size = tensor.data_ptr(), _extent(tensor)
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        advise(first, last - first, mmap.MADV_DONTNEED)


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last one, gaps of a strided view included."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class TensorSource(ABC):
    """A mapping of names to tensors, which are opened one at a time."""

    where: str
    """The source in messages."""

    @abstractmethod
    def names(self) -> Collection[str]:
        """All names, without opening anything."""

    @abstractmethod
    def entry(self, name: str) -> TensorEntry:
        """The header of a tensor, without reading its data; WeightError if its file is missing or damaged."""

    @abstractmethod
    def open(self, name: str) -> Tensor:
        """The tensor, as a view if possible. It must not be modified."""

    def read(self, name: str) -> Tensor:
        """The tensor, in memory. It must not be modified."""
        return in_memory(self.open(name))

    def read_ahead(self, name: str, start: int = 0, num_bytes: int | None = None) -> None:
        """Hint that these bytes of a tensor will be read soon; no effect where not supported."""
        del name, start, num_bytes


class MappingSource(TensorSource):
    """Tensors of a state dict in memory."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str = "the state dict") -> None:
        self.where = where
        self._tensors = tensors

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def entry(self, name: str) -> TensorEntry:
        """Dtype and shape; WeightError for tensors on the meta device, which have no data, ShapeError for no tensor."""
        tensor = self._tensors[name]
        expect_dense(name, tensor)
        if tensor.is_meta:
            raise WeightError(f"{name} is on the meta device and holds no data")
        size, dtype = tensor.numel() * tensor.element_size(), tensor.dtype
        return TensorEntry(name, dtype, DTYPE_NAMES.get(dtype, str(dtype)), tuple(tensor.shape), size)

    def open(self, name: str) -> Tensor:
        """The tensor itself, detached; a copy where it is negated lazily, since readers take its memory."""
        return self._tensors[name].detach().resolve_neg()


class FileSource(TensorSource):
    """Tensors of memory-mapped files, of which headers are read before one is opened."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.where = str(path)
        self._headers: dict[Path, Header] = {}
        self._maps: dict[Path, MappedFile] = {}
        self._file_of = self._find_files()

    @abstractmethod
    def _find_files(self) -> dict[str, Path]:
        """The file of each tensor."""

    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def entry(self, name: str) -> TensorEntry:
        file = self._file_of[name]
        found = self.header(file).tensors.get(name)
        if found is None:
            raise WeightError(f"{file.name} does not hold tensors that the index looks for there")
        return found

    def open(self, name: str) -> Tensor:
        entry = FileSource.entry(self, name)
        return self._opened(self._file_of[name]).view(entry)

    def read_ahead(self, name: str, start: int = 0, num_bytes: int | None = None) -> None:
        """Request the bytes from the system's page cache, if supported and not yet cached."""
        entry = FileSource.entry(self, name)
        size = entry.num_bytes - start if num_bytes is None else num_bytes
        self._opened(self._file_of[name]).read_ahead(entry.start + start, size)

    def _opened(self, file: Path) -> MappedFile:
        if file not in self._maps:
            self._maps[file] = MappedFile.of(file, self.header(file).state)
        return self._maps[file]

    @property
    def files(self) -> list[Path]:
        """All files that hold tensors, in order."""
        return sorted(set(self._file_of.values()))

    def header(self, file: Path) -> Header:
        """The header of one file, read once."""
        if file not in self._headers:
            if not _exists(file):
                raise WeightError(f"{file.name[:100]} is named by the index but does not exist in {self.path}")
            self._headers[file] = read_header(file)
        return self._headers[file]


class SafetensorsSource(FileSource):
    """A checkpoint directory with an index, a directory of safetensors files without one, or a single file.

    All shards must be inside the directory; symbolic links may leave it only within a Hugging Face cache (snapshots/ ->
    blobs/).
    """

    def _find_files(self) -> dict[str, Path]:
        if self.path.is_file():
            return dict.fromkeys(self.header(self.path).tensors, self.path)
        if not self.path.is_dir():
            raise WeightError(f"{self.path} does not exist; pass a checkpoint directory or a .safetensors file")
        if (self.path / INDEX).is_file():
            return self._files_of_index()
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise WeightError(f"{self.path} holds no {INDEX} and no *.safetensors file{_instead(self.path)}")
        return self._files_of_headers(files)

    def _files_of_headers(self, files: list[Path]) -> dict[str, Path]:
        self._expect_inside({file.name for file in files}, "the folder")
        file_of: dict[str, Path] = {}
        twice: list[str] = []
        for file in files:
            names = self.header(file).tensors
            twice += [f"{name} in {file_of[name].name} and {file.name}" for name in names if name in file_of]
            file_of |= dict.fromkeys(names, file)
        if twice:
            raise WeightError(
                f"{self.path} has no {INDEX}, and {len(twice)} tensors lie in two files: {'; '.join(twice[:5])}"
            )
        return file_of

    def _files_of_index(self) -> dict[str, Path]:
        try:
            index = read_json(self.path / INDEX, INDEX_BYTES)
            weight_map = index["weight_map"]
            shard_of = {str(name): str(shard) for name, shard in weight_map.items()}
        except unless_signalled(OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            expect_no_pointer(self.path / INDEX)
            raise WeightError(
                f"{self.path / INDEX} is not an index with a weight_map ({type(problem).__name__}: {problem})"
            ) from problem
        if broken := [name for name in shard_of if not is_text(name)]:
            raise WeightError(f"{self.path / INDEX} has {len(broken)} names that are no text: {broken[0]!r}")
        self._expect_inside(set(shard_of.values()), str(self.path / INDEX))
        path_of = {shard: self.path / shard for shard in set(shard_of.values())}
        return {name: path_of[shard] for name, shard in shard_of.items()}

    def _expect_inside(self, shards: set[str], where: str) -> None:
        outside = sorted(s for s in shards if not is_inside(self.path, s))
        if outside:
            raise WeightError(
                f"{where} names {len(outside)} files that are not inside the directory: "
                f"{', '.join(map(repr, outside[:5]))}; put the files themselves into {self.path}"
            )


def _instead(folder: Path) -> str:
    """Describe what a folder holds in place of safetensors, and the remedy; "" for nothing that is known."""
    pickles = sorted(file.name for end in ("bin", "pt", "pth", "ckpt") for file in folder.glob(f"*.{end}"))
    if pickles:
        return (
            f", but {len(pickles)} files of pickled tensors ({', '.join(pickles[:3])}), not read: write it anew "
            "by save_pretrained of transformers, in safetensors"
        )
    if parts := sorted(
        file.name for end in ("incomplete", "part", "aria2", "crdownload") for file in folder.glob(f"*.{end}")
    ):
        return f", but an unfinished download ({', '.join(parts[:3])})"
    below = sorted(file.parent for file in folder.glob("*/*.safetensors"))
    return f"; {below[0]} does" if below else ""


def is_inside(folder: Path, name: str) -> bool:
    """Whether a file is inside a folder after resolving links, or among the blobs of its Hugging Face cache."""
    if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        return False
    root = folder.resolve()
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    try:
        real = resolved(root / name)
    except unless_signalled(OSError):  # circular links and invalid file names
        return False
    return real.is_relative_to(root) or real.is_relative_to(blobs)


def _exists(file: Path) -> bool:
    try:
        return file.exists()
    except unless_signalled(OSError):  # a name that is too long
        return False


def _is_cached(fd: int, offset: int) -> bool:
    """Whether a byte is in the page cache; the check is 10 times cheaper than an unnecessary madvise call."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except unless_signalled(OSError, AttributeError):
        return False


class RenamedSource(SafetensorsSource):
    """A checkpoint under the names of `config.equation`: every matrix of its layers by the name of a linear module.

    Parts of stacks are views; transposed and alternating ones are copied when they are opened.
    """

    def __init__(self, path: str | os.PathLike[str], names: TensorNames) -> None:
        super().__init__(path)
        self._views = {name: _View(name) for name in super().names()}
        for name, rest in itertools.product(tuple(self._views), ("", r"\.[^.]+")):  # gate.bias may be a part itself
            parts = names.parts.items() if name in self._views else ()
            found = {made: view for key, part in parts for made, view in self._named(names, key, part, name, rest)}
            if found:
                del self._views[name]
                self._views |= found

    def names(self) -> Collection[str]:
        """The names of linear modules, and all others as they are."""
        return self._views.keys()

    def entry(self, name: str) -> TensorEntry:
        view = self._views[name]
        whole = super().entry(view.name)
        shape = view.shape_of(whole.shape)
        return replace(
            whole,
            name=name,
            shape=shape,
            num_bytes=whole.num_bytes * math.prod(shape) // max(1, math.prod(whole.shape)),
        )

    def open(self, name: str) -> Tensor:
        view, whole = self._views[name], super().open(self._views[name].name)
        part = view.of(whole)
        return part if part.is_contiguous() else in_memory(part).contiguous()

    def read_ahead(self, name: str, start: int = 0, num_bytes: int | None = None) -> None:
        """Of whole tensors only."""
        view = self._views[name]
        if view == _View(view.name):
            super().read_ahead(view.name, start, num_bytes)

    def _named(
        self, names: TensorNames, key: str, part: str | TensorPart, name: str, rest: str
    ) -> Iterator[tuple[str, _View]]:
        """Yield the views of a tensor that belong to a part, by name. rest: what may follow the part's path."""
        path = part if isinstance(part, str) else part.tensor
        pattern = (
            re.escape(names.prefix + path).replace(r"\{N\}", r"(?P<N>\d{1,9})").replace(r"\{e\}", r"(?P<e>\d{1,9})")
        )
        found = re.fullmatch(f"{pattern}(?P<rest>{rest})", name)
        if found is None:
            return
        groups, last = found.groupdict(), found["rest"] or ("" if key in VECTORS else ".weight")
        made = f"model.layers.{groups['N']}.mlp.{key}{last}".replace("shared_experts.{e}", "experts.{e}")
        if isinstance(part, str):
            yield made.replace("{e}", groups.get("e", "")), _View(name)
        elif "{e}" in key and "{e}" not in path:
            for expert in range(super().entry(name).shape[0]):
                yield made.replace("{e}", str(part.first + expert)), _View(name, expert, part.rows, part.transposed)
        else:
            number = str(part.first + int(groups.get("e", 0)))
            yield made.replace("{e}", number), _View(name, None, part.rows, part.transposed)


@dataclass(frozen=True)
class _View:
    """A tensor, or a matrix that is a part of it."""

    name: str
    expert: int | None = None
    rows: str = "all"
    transposed: bool = False

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the part of a tensor."""
        return tuple(self.of(torch.empty(shape, dtype=torch.uint8, device="meta")).shape)

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a tensor. Biases of stacks are rows too."""
        tensor = tensor if self.expert is None else tensor[self.expert]
        if self.transposed and tensor.dim() == 2:
            tensor = tensor[0] if len(tensor) == 1 else tensor.T
        if self.rows == "all":
            return tensor
        half = tensor.shape[0] // 2
        parts = {
            "first": slice(half),
            "second": slice(half, None),
            "even": slice(0, None, 2),
            "odd": slice(1, None, 2),
        }
        return tensor[parts[self.rows]]
