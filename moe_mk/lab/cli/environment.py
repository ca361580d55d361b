"""The only module that reads and sets the process environment: variables of torchrun, and the interface of gloo."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Launched:
    """Rank and sizes set by a launcher such as torchrun."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    """Ranks on this machine; they share its cores."""


def launched() -> Launched | None:
    """The variables of torchrun, or None without a launcher."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if not all(name in os.environ for name in names):
        return None
    return Launched(*(int(os.environ[name]) for name in names))


def stay_on_this_machine() -> None:
    """Let gloo use the loopback interface for local ranks, unless the user selected one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def usable_cores() -> int:
    """CPU cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
