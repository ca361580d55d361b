"""The only module that reads and sets the process environment: variables of torchrun, and the interface of gloo."""

from __future__ import annotations

import os
from dataclasses import dataclass

from moe_mk.errors import ConfigError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Launched:
    """Rank and sizes set by a launcher such as torchrun."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    """Ranks on this machine; they share its cores."""


def has_launcher() -> bool:
    """Whether a launcher has set its variables."""
    return all(name in os.environ for name in NAMES)


def launched() -> Launched | None:
    """The variables of torchrun, or None without a launcher. Raises ConfigError where they are no ranks."""
    if not has_launcher():
        return None
    try:
        found = Launched(*(int(os.environ[name]) for name in NAMES))
        if not (0 <= found.rank < found.world_size and 0 <= found.local_rank < found.local_size):
            raise ValueError
    except ValueError:
        stated = ", ".join(f"{name}={os.environ[name]}" for name in NAMES)
        raise ConfigError(f"the environment has {stated}: no rank of torchrun; unset these variables") from None
    return found


def stay_on_this_machine() -> None:
    """Let gloo use the loopback interface for local ranks, unless the user selected one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def usable_cores() -> int:
    """CPU cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
