"""Memory of a GPU that several processes map: CUDA IPC by the handles that torch makes, and torch's symmetric memory.

The owner of a window states how it may be opened, as text that travels like any other; a peer opens it and holds it as
long as it uses it. Legacy IPC handles name a whole block of the driver: an offset into it goes along.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_mk.errors import unless_signalled


def describe_window(window: Tensor) -> str:
    """How another process of this host opens a window: (bytes,) uint8 on a GPU, which must outlive its use there."""
    assert window.device.type == "cuda" and window.dtype == torch.uint8 and window.storage_offset() == 0
    storage: Any = window.untyped_storage()
    parts = storage._share_cuda_()
    return json.dumps([{"hex": part.hex()} if isinstance(part, bytes) else part for part in parts])


def open_window(description: str, num_bytes: int) -> Tensor:
    """The window of another process, (bytes,) uint8. Raises RuntimeError where the driver refuses."""
    parts: list[Any] = json.loads(description)
    parts = [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in parts]
    storage = torch.UntypedStorage._new_shared_cuda(*parts)
    device = torch.device("cuda", parts[0])
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))


MODULE = "torch.distributed._symmetric_memory"
BACKEND = "CUDA"
"""The backend of torch's symmetric memory that needs no device library: kernels use peer pointers directly."""


def library() -> Any:
    """Torch's module; None in a torch that has none."""
    try:
        return importlib.import_module(MODULE)
    except ImportError:
        return None


def window_of(num_bytes: int, device: torch.device, torch_memory: Any) -> tuple[Tensor | None, str]:
    """A window of zeros that peers can map, (num_bytes,) uint8; or None, and why there is none."""
    if torch_memory is None:
        return None, f"this torch has no {MODULE}"
    try:
        backend = torch_memory.get_backend(device)
        if backend != BACKEND:
            return None, f"it is served by {backend or 'nothing'} here, not by {BACKEND}"
        return torch_memory.empty(num_bytes, dtype=torch.uint8, device=device).zero_(), ""
    except unless_signalled(RuntimeError, NotImplementedError) as problem:
        return None, (str(problem).splitlines() or [type(problem).__name__])[0]


def addresses_of(
    window: Tensor, group: object, torch_memory: Any, exchange: Callable[[str], list[str]]
) -> tuple[list[int], object]:
    """The address of each rank's window in this process, and the object that keeps the mappings alive.

    Every rank calls this with its own window; `exchange` gathers the notes of all. Raises RuntimeError where a peer
    cannot be mapped, or where the addresses are not those of these windows.
    """
    handle = torch_memory.rendezvous(window, group)
    offsets = map(int, exchange(str(handle.offset)))  # windows begin somewhere in an allocation, each in its own
    addresses = [int(base) + offset for base, offset in zip(handle.buffer_ptrs, offsets, strict=True)]
    if addresses[handle.rank] != window.data_ptr():
        text = f"its window at {window.data_ptr():#x} is reported at {addresses[handle.rank]:#x}"
        raise RuntimeError(f"symmetric memory of rank {handle.rank}: {text}")
    return addresses, handle
