"""Memory of a GPU that several processes map: CUDA IPC, by the handles torch makes for it.

The owner of a window states how it may be opened, as text that travels like any other; a peer opens it and holds it as
long as it uses it. Legacy IPC handles name a whole block of the driver: an offset into it goes along.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor


def describe_window(window: Tensor) -> str:
    """How another process of this host opens a window: (bytes,) uint8 on a GPU, which must outlive its use there."""
    return json.dumps([_written(part) for part in _storage(window)._share_cuda_()])


def open_window(description: str, num_bytes: int) -> Tensor:
    """The window of another process, (bytes,) uint8. Raises RuntimeError where the driver refuses."""
    parts = [_read(part) for part in json.loads(description)]
    storage = torch.UntypedStorage._new_shared_cuda(*parts)
    device = torch.device("cuda", parts[0])
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))


def _storage(window: Tensor) -> Any:
    assert window.device.type == "cuda" and window.dtype == torch.uint8 and window.storage_offset() == 0
    return window.untyped_storage()


def _written(part: object) -> object:
    return {"hex": part.hex()} if isinstance(part, bytes) else part


def _read(part: Any) -> Any:
    return bytes.fromhex(part["hex"]) if isinstance(part, dict) else part
