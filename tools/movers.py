"""The section of docs/transports.md on methods to move bytes: tables from the records of `moe_mk.lab.plan.paths`."""

from __future__ import annotations

from collections.abc import Iterator

from moe_mk.lab.plan.paths import MOVERS, mover, small_copy_us

INTRODUCTION = """\
## Methods to move bytes

Methods to move bytes to, from and between GPUs, from `moe_mk.lab.plan.paths`. The fixed cost is the published time of
one small copy from host to device; the two published times differ by a factor of {ratio:g}.
"""

LIBRARIES = """\
### Collectives against one-sided puts
"""

PROPERTIES = {
    "unit": "unit of one call", "scope": "scope", "one_sided": "without participation of the receiver",
    "from_kernel": "can be started by a running kernel", "needs_cpu": "needs a CPU thread for every transfer",
    "gpu_direct": "transfers directly between GPU memory and the network", "fine_grained": "suited to small transfers",
}  # fmt: skip


def page_of_movers() -> Iterator[str]:
    """All lines of the section."""
    ratio = small_copy_us("cuda_memcpy", 0, 1.0) / small_copy_us("gdrcopy", 0, 1.0)
    yield from (INTRODUCTION.format(ratio=ratio), *movers_of(), "", LIBRARIES, *compared("nccl", "nvshmem"))


def movers_of() -> Iterator[str]:
    """One line per method."""
    yield "| | Method | Scope | Needs the CPU | GPU direct | From a kernel | One-sided | Fixed cost |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in MOVERS.values():
        cost = "-" if each.small_copy_us is None else f"{each.small_copy_us:g} us"
        flags = [_yes(flag) for flag in (each.needs_cpu, each.gpu_direct, each.from_kernel, each.one_sided)]
        yield _row(f"`{each.name}`", each.what, each.scope, *flags, cost)


def compared(one: str, other: str) -> Iterator[str]:
    """Two methods, property by property."""
    pair = mover(one), mover(other)
    yield _row("", *(each.what for each in pair))
    yield "|---|---|---|"
    for name, title in PROPERTIES.items():
        values = [getattr(each, name) for each in pair]
        yield _row(title, *(_yes(value) if isinstance(value, bool) else str(value) for value in values))


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
