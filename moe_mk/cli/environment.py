"""The one place that reads and sets the process environment: what torchrun says, and where local ranks meet."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Launched:
    """The place that a launcher such as torchrun gave this process."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    """Ranks on this machine; they share its cores."""


def launched() -> Launched | None:
    """What torchrun put into the environment, or None if this process was started by hand."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if not all(name in os.environ for name in names):
        return None
    return Launched(*(int(os.environ[name]) for name in names))


def stay_on_this_machine() -> None:
    """Let gloo use the loopback interface for ranks that are all here, unless the user chose one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def usable_cores() -> int:
    """CPU cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
