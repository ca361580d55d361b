"""`mori.shmem`: the symmetric heap of a process, set up once over a process group that is called by its name."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.distributed import distributed_c10d

from moe_mk.lab.testing.emulated.exchange import Exchange, exchange_over


class Process(threading.local):
    """What the library keeps once for a whole process: a rank that is a thread has its own."""

    def __init__(self) -> None:
        self.group: object = None
        self.exchange: Exchange | None = None


PROCESS = Process()


def shmem_torch_process_group_init(group_name: str) -> int:
    """Set up the heap over a group; once it is, any further call is skipped. Returns 0."""
    if PROCESS.exchange is not None:
        # The library skips without a look at the group, and corrupts whatever the second one sends.
        assert _resolve(group_name) is PROCESS.group, "shmem was initialised over another group"
        return 0
    PROCESS.group = _resolve(group_name)
    PROCESS.exchange = exchange_over(PROCESS.group)
    unique_id = torch.zeros(1, dtype=torch.int64, device="cpu")
    PROCESS.exchange.swap([[unique_id]] * PROCESS.exchange.size, "set-up")
    return 0


def shmem_mype() -> int:
    """This rank."""
    return _heap().rank


def shmem_npes() -> int:
    """How many ranks there are."""
    return _heap().size


def _heap() -> Exchange:
    if PROCESS.exchange is None:
        raise RuntimeError("shmem is not initialized")
    return PROCESS.exchange


def _resolve(group_name: str) -> object:
    known: Any = distributed_c10d  # the function that libraries call; torch exports it to none
    group: object = getattr(group_name, "group", None)  # a rank that is a thread has a name that knows its group
    return known._resolve_process_group(group_name) if group is None else group
