"""The part of docs/transports.md about what moves bytes: tables from the records of `moe_mk.plan.paths`."""

from __future__ import annotations

from collections.abc import Iterator

from moe_mk.plan.paths import MOVERS, mover, small_copy_us

INTRODUCTION = """\
## What moves bytes

Ways to move bytes to, from and between GPUs, from the records of `moe_mk.plan.paths`. A fixed cost is that of one
small copy from host to device, where it is published; between the two that are, it differs {ratio:g} times.
"""

LIBRARIES = """\
### Collectives against one-sided puts
"""

PROPERTIES = {
    "unit": "one call moves", "scope": "reaches", "one_sided": "the receiver takes no part",
    "from_kernel": "a running kernel can start it", "needs_cpu": "a CPU thread takes part in every transfer",
    "gpu_direct": "bytes go between GPU memory and the wire", "fine_grained": "is for small transfers",
}  # fmt: skip


def page_of_movers() -> Iterator[str]:
    """All lines."""
    ratio = small_copy_us("cuda_memcpy", 0, 1.0) / small_copy_us("gdrcopy", 0, 1.0)
    yield from (INTRODUCTION.format(ratio=ratio), *movers_of(), "", LIBRARIES, *beside("nccl", "nvshmem"))


def movers_of() -> Iterator[str]:
    """One line a way to move bytes."""
    yield "| | What it is | Reaches | Needs the CPU | GPU direct | From a kernel | One-sided | Fixed cost |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in MOVERS.values():
        cost = "-" if each.small_copy_us is None else f"{each.small_copy_us:g} us"
        flags = [_yes(flag) for flag in (each.needs_cpu, each.gpu_direct, each.from_kernel, each.one_sided)]
        yield _row(f"`{each.name}`", each.what, each.scope, *flags, cost)


def beside(one: str, other: str) -> Iterator[str]:
    """Two records property by property."""
    pair = mover(one), mover(other)
    yield _row("", *(each.what for each in pair))
    yield "|---|---|---|"
    for name, told in PROPERTIES.items():
        values = [getattr(each, name) for each in pair]
        yield _row(told, *(_yes(value) if isinstance(value, bool) else str(value) for value in values))


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
