"""Files of other programs as tensors and plain containers. Nothing in them is run: pickled objects are refused."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_mk.trace.routing_forward import TracedForward, TraceError


def read_pt(file: Path) -> object:
    """What `torch.save` wrote, if it is tensors, numbers, texts and plain containers; raises TraceError."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as problem:  # torch says in many ways that a file is damaged, or holds more than data
        raise TraceError(f"{file} cannot be read as tensors and plain containers: {problem}") from problem


def read_arrays(file: Path) -> dict[str, Tensor]:
    """Arrays of a .npz file by name, or the one of a .npy file under the empty name; raises TraceError."""
    try:
        content = np.load(file, allow_pickle=False)
        arrays = {"": content} if isinstance(content, np.ndarray) else {name: content[name] for name in content.files}
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as problem:
        raise TraceError(f"{file} cannot be read as arrays of numbers: {problem}") from problem


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
