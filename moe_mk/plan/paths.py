"""Ways to move bytes to or from a GPU, as records: who drives them, how far they reach, what a small copy costs.

`tools/transports.py` writes the tables of docs/transports.md from these records. Sources: NVSHMEM and NCCL
documentation; README of GDRCopy for its copies (about 1 us against 7 us of cudaMemcpy, host to device, DGX-1V).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from moe_mk.errors import ConfigError
from moe_mk.registry import did_you_mean

Scope = Literal["one device", "one host", "cluster"]


@dataclass(frozen=True)
class Mover:
    """What one way of moving bytes is."""

    name: str
    what: str
    scope: Scope
    needs_cpu: bool
    """Whether a thread of the CPU takes part in every transfer."""
    gpu_direct: bool
    """Whether bytes go between GPU memory and the wire, or a peer's memory, without a copy in host memory."""
    from_kernel: bool
    """Whether a running kernel can start a transfer."""
    one_sided: bool
    """Whether the receiver takes no part."""
    fine_grained: bool
    """Whether transfers of a few bytes to a few kilobytes are what it is for."""
    unit: str
    """What one call moves."""
    small_copy_us: float | None = None
    """Fixed cost of one small copy from host to device, where published."""
    bulk_gbs: float | None = None
    """Of long copies from host to device, where published."""


MOVERS: Mapping[str, Mover] = MappingProxyType(
    {
        mover.name: mover
        for mover in (
            Mover(
                "nccl", "NCCL all-to-all", "cluster", needs_cpu=True, gpu_direct=True, from_kernel=False,
                one_sided=False, fine_grained=False, unit="a collective of all ranks, sizes known to both sides",
            ),
            Mover(
                "cuda_memcpy", "cudaMemcpy", "one host", needs_cpu=True, gpu_direct=True, from_kernel=False,
                one_sided=True, fine_grained=False, unit="one copy, through the driver", small_copy_us=7.0,
            ),
            Mover(
                "nvshmem", "NVSHMEM put and get", "cluster", needs_cpu=False, gpu_direct=True, from_kernel=True,
                one_sided=True, fine_grained=True, unit="one put of any size into symmetric memory, a signal behind it",
            ),
            Mover(
                "gdrcopy", "GDRCopy, device memory mapped through the BAR", "one host", needs_cpu=True, gpu_direct=True,
                from_kernel=False, one_sided=True, fine_grained=True, unit="loads and stores of a CPU thread",
                small_copy_us=1.0,
            ),
            Mover(
                "mpi", "MPI all-to-all", "cluster", needs_cpu=True, gpu_direct=False, from_kernel=False,
                one_sided=False, fine_grained=False, unit="a collective of all ranks, through host memory",
            ),
        )
    }
)  # fmt: skip


def mover(name: str) -> Mover:
    """One record; raises ConfigError for an unknown name."""
    if name not in MOVERS:
        raise ConfigError(f"no way to move bytes is called {name!r}{did_you_mean(name, list(MOVERS))}")
    return MOVERS[name]


def movers(**wanted: object) -> Iterator[Mover]:
    """The records that have all the given values: `movers(scope="cluster", needs_cpu=False)`."""
    fields = Mover.__dataclass_fields__
    if unknown := [name for name in wanted if name not in fields]:
        raise ConfigError(f"movers have no field {unknown[0]!r}{did_you_mean(unknown[0], list(fields))}")
    return (each for each in MOVERS.values() if all(getattr(each, name) == value for name, value in wanted.items()))


def small_copy_us(name: str, num_bytes: int, gbs: float) -> float:
    """One copy from host to device: the fixed cost, then bytes at the rate of the bus.

    Raises ConfigError for a mover whose fixed cost is not published.
    """
    fixed = mover(name).small_copy_us
    if fixed is None:
        raise ConfigError(f"the cost of a small copy by {name} is not published; known of gdrcopy and cuda_memcpy")
    return fixed + num_bytes / (gbs * 1e3)
