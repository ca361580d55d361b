"""Files of other programs as tensors and plain containers. Nothing in them is run: pickled objects are refused."""

from __future__ import annotations

import io
import math
import pickletools
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.files import MIB
from moe_mk.lab.trace.routing_forward import TracedForward, TraceError

UNPACKING = (zipfile.BadZipFile, zlib.error)
ALWAYS_BYTES, MOST_TIMES, MOST_BYTES = 16 * MIB, 100, 16 * 1024 * MIB
"""What a file may stand for: 16 MiB, or 100 times its own bytes if that is more, and never above 16 GiB."""
MOST_PICKLED = 16 * MIB
"""Limit on the bytes of a .pt file other than its tensors."""
MOST_CONTAINERS = 1_000_000
PACKED_BY = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""The methods that NumPy writes. Readers of other methods allocate whatever size a block states."""
PICKLED = {
    "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "collections OrderedDict", "torch Size",
    "torch device", "_codecs encode", "builtins set", "__builtin__ set", "builtins complex", "__builtin__ complex",
}  # fmt: skip
"""What the description of plain containers of tensors names, next to dtypes and storages of torch. Others are safe to
call too, but allocate as much memory as a number in the file asks for: torch.FloatTensor, bytearray."""


def read_pt(file: Path) -> object:
    """Read a file of `torch.save` that holds tensors, numbers, texts and plain containers; raises TraceError."""
    try:
        most = most_bytes_of(file)
        _expect_plain(file, most)
        content = torch.load(file, map_location="cpu", weights_only=True)
        _expect_held(content, most)
        return content
    except Exception as problem:  # torch raises many types for damaged files, and for files with more than data
        raise TraceError(f"{file} cannot be read as tensors and plain containers: {problem}") from problem


def most_bytes_of(file: Path) -> int:
    """How many bytes the tensors of a file may have, by its own size."""
    return min(max(MOST_TIMES * file.stat().st_size, ALWAYS_BYTES), MOST_BYTES)


def read_arrays(file: Path) -> dict[str, Tensor]:
    """Arrays of a .npz file by name, or the one of a .npy file under the empty name; raises TraceError."""
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as members:
                infos, most = members.infolist(), most_bytes_of(file)
                if (size := sum(info.file_size for info in infos)) > most:
                    limit = f"{most} ({MOST_TIMES} times as many, {ALWAYS_BYTES} to {MOST_BYTES})"
                    packed = file.stat().st_size
                    raise ValueError(
                        f"its {len(infos)} arrays have {size} bytes; of {packed} bytes the limit is {limit}"
                    )
                arrays = {}
                for info in infos:
                    if info.compress_type not in PACKED_BY:
                        how = f"is packed by method {info.compress_type}, np.savez_compressed uses deflate"
                        raise ValueError(f"{info.filename} {how}")
                    with members.open(info) as stream:
                        arrays[info.filename.removesuffix(".npy")] = array_of(stream, info.file_size)
        else:
            arrays = {"": read_npy(file)}
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    except (OSError, ValueError, TypeError, EOFError, RuntimeError, NotImplementedError, *UNPACKING) as problem:
        raise TraceError(f"{file} cannot be read as arrays of numbers: {problem}") from problem


def read_npy(file: Path) -> NDArray[Any]:
    """The array of a .npy file. Raises OSError or ValueError, before anything is allocated for it, where its header
    states more than the file holds.
    """
    with file.open("rb") as stream:
        return array_of(stream, file.stat().st_size)


def array_of(stream: IO[bytes], num_bytes: int) -> NDArray[Any]:
    """One array, if its header fits the bytes behind it. Source: the format description of numpy.lib.format."""
    try:
        version = npy.read_magic(stream)
        header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = header(stream)
    except (tokenize.TokenError, SyntaxError, RecursionError, MemoryError) as problem:
        raise ValueError(f"its header is damaged ({problem})") from problem
    if any(side < 0 for side in shape) or math.prod(shape) * dtype.itemsize > num_bytes - stream.tell():
        raise ValueError(f"its header states {shape} of {dtype}, which are more than its {num_bytes} bytes")
    stream.seek(0)
    return np.lib.format.read_array(stream, allow_pickle=False)


def _expect_plain(file: Path, most: int) -> None:
    """Whether a .pt file states no more than tensors that it holds. Raises OSError or ValueError otherwise.

    Source: the format of torch.serialization since 1.6, a zip file of records that are stored as they are.
    """
    with zipfile.ZipFile(file) as members:
        infos = members.infolist()
        if packed := [info.filename for info in infos if info.compress_type != zipfile.ZIP_STORED]:
            raise ValueError(
                f"{len(packed)} records are compressed, the first is {packed[0]}; torch.save compresses none"
            )
        if (size := sum(info.file_size for info in infos)) > most:
            raise ValueError(f"its {len(infos)} records have {size} bytes, the file has {file.stat().st_size}")
        described = [info for info in infos if info.filename.endswith("/data.pkl")]
        if any(info.file_size > MOST_PICKLED for info in described):
            raise ValueError(f"its contents other than tensors are above {MOST_PICKLED} bytes, the limit")
        names = {name for info in described for name in _names_in(members.read(info))}
    known = {f"torch {name}" for name in dir(torch) if name.endswith("Storage") or _is_dtype(name)} | PICKLED
    if foreign := sorted(names - known):
        raise ValueError(f"it names {', '.join(foreign[:4])}, which are neither tensors nor plain containers")


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name), torch.dtype)


def _names_in(pickled: bytes) -> set[str]:
    """Every function and class that a pickle names. Nothing of it is run."""
    operations = pickletools.genops(io.BytesIO(pickled))
    return {str(argument) for code, argument, _ in operations if code.name in ("GLOBAL", "INST")}


def _expect_held(content: object, most: int) -> None:
    """Whether tensors are strided, are inside their storage, and have `most` bytes in all, each counted at every place.

    Raises ValueError: what one file states twice, or spreads by strides of 0, would be copied as often as it states.
    """
    waiting = [content] if isinstance(content, Tensor | dict | list | tuple | set) else []
    size = containers = 0
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor):
            if each.layout is not torch.strided or each.is_quantized or each.device.type != "cpu":
                raise ValueError(f"a tensor of layout {each.layout} on {each.device} is no plain array of numbers")
            size += each.numel() * each.element_size()
            if size > most:
                raise ValueError(f"its tensors have {size} bytes or more, the limit for a file of this size is {most}")
            continue
        inner = each.values() if isinstance(each, dict) else each
        assert isinstance(inner, Iterable)
        containers += 1
        if containers > MOST_CONTAINERS:
            raise ValueError(f"it has more than {MOST_CONTAINERS} lists and dictionaries, the limit")
        waiting += [one for one in inner if isinstance(one, Tensor | dict | list | tuple | set)]


def signed(ids: Tensor) -> Tensor:
    """Whole numbers in a dtype that has -1, as narrow as they come."""
    if ids.dtype == torch.uint8:
        return ids.to(torch.int16)
    return ids if ids.dtype in (torch.int8, torch.int16, torch.int32) else ids.long()


def resized(forward: TracedForward, top_k: int) -> TracedForward:
    """Return a forward with rows of another width; -1 and weight 0 fill it up, and only such entries fall away."""
    ids_TK, weights_TK = forward.ids_TK, forward.weights_TK
    missing = max(top_k - ids_TK.shape[1], 0)
    ids_TK = torch.nn.functional.pad(ids_TK, (0, missing), value=-1)[:, :top_k]
    if weights_TK is not None:
        weights_TK = torch.nn.functional.pad(weights_TK, (0, missing))[:, :top_k]
    same = (forward.step, forward.layer, forward.rank, forward.phase)
    return TracedForward(*same, ids_TK, weights_TK, forward.token_ids_T)


def num_experts_of(given: int | None, ids: Sequence[Tensor]) -> int:
    """E as it was given; raises TraceError with the least there can be where it was not."""
    largest = max((int(each.max()) for each in ids if each.numel()), default=-1)
    if given is None:
        raise TraceError(f"the file does not say how many experts there are; pass num_experts, {largest + 1} or more")
    return given
