"""Files of other programs as tensors and plain containers. Nothing in them is run: pickled objects are refused."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.trace.routing_forward import TracedForward, TraceError

UNPACKING = (zipfile.BadZipFile, zlib.error)
MOST_DEFLATED = 1032
"""Bytes that deflate can make of one."""


def read_pt(file: Path) -> object:
    """What `torch.save` wrote, if it is tensors, numbers, texts and plain containers; raises TraceError."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as problem:  # torch says in many ways that a file is damaged, or holds more than data
        raise TraceError(f"{file} cannot be read as tensors and plain containers: {problem}") from problem


def read_arrays(file: Path) -> dict[str, Tensor]:
    """Arrays of a .npz file by name, or the one of a .npy file under the empty name; raises TraceError."""
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as members:
                arrays = {info.filename.removesuffix(".npy"): _member(members, info) for info in members.infolist()}
        else:
            arrays = {"": read_npy(file)}
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    except (OSError, ValueError, TypeError, EOFError, RuntimeError, NotImplementedError, *UNPACKING) as problem:
        raise TraceError(f"{file} cannot be read as arrays of numbers: {problem}") from problem


def read_npy(file: Path) -> NDArray[Any]:
    """The array of a .npy file. Raises OSError or ValueError, before anything is allocated for it, where its header
    says more than the file holds.
    """
    with file.open("rb") as stream:
        return _array(stream, file.stat().st_size)


def _member(members: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    if info.file_size > info.compress_size * MOST_DEFLATED + 1024:
        raise ValueError(f"{info.filename} has {info.file_size} bytes in {info.compress_size}, which nothing packs so")
    with members.open(info) as stream:
        return _array(stream, info.file_size)


def _array(stream: IO[bytes], num_bytes: int) -> NDArray[Any]:
    """One array, if its header fits the bytes behind it. Source: the format description of numpy.lib.format."""
    try:
        version = npy.read_magic(stream)
        header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = header(stream)
    except (tokenize.TokenError, SyntaxError, RecursionError, MemoryError) as problem:
        raise ValueError(f"its header is damaged ({problem})") from problem
    if any(side < 0 for side in shape) or math.prod(shape) * dtype.itemsize > num_bytes - stream.tell():
        raise ValueError(f"its header says {shape} of {dtype}, which are more than its {num_bytes} bytes")
    stream.seek(0)
    return np.lib.format.read_array(stream, allow_pickle=False)


def resized(forward: TracedForward, top_k: int) -> TracedForward:
    """The same forward with rows of another width; -1 and weight 0 fill it up, and only such entries fall away."""
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
