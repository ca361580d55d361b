"""Link profiles: rates of both kinds of link of a fabric, and its published measurements.

moe_mk.lab.plan.links.link_profile("h800_cx7").measured_at("latency", 32).dispatch_us     155.0
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from moe_mk.config.base import Settings
from moe_mk.config.shipped import config_folder
from moe_mk.errors import ConfigError
from moe_mk.registry import did_you_mean

Mode = Literal["throughput", "latency"]
Direction = Literal["dispatch", "combine"]
Leg = Literal["near", "far"]


class Measured(Settings):
    """One published row. Bandwidth is logical: all bytes of an exchange, those for the own node too, over its time."""

    mode: Mode
    """throughput: a row to each node or rank of a token; latency: a message for each assignment."""
    ranks: int = Field(ge=1)
    tokens: int | None = Field(default=None, ge=1)
    """Of each rank; None: 4096, or 128 of latency kernels."""
    wire: str = "fp8"
    """Format of dispatched rows, one of `plan.exchange.WIRES`; returned rows are bf16."""
    fits: Leg | None = None
    """The link whose constants are fitted to this row; None: it is only predicted."""
    dispatch_us: float | None = Field(default=None, gt=0)
    dispatch_gbs: float | None = Field(default=None, gt=0)
    combine_us: float | None = Field(default=None, gt=0)
    combine_gbs: float | None = Field(default=None, gt=0)

    def us(self, direction: Direction) -> float | None:
        """Microseconds, where they are published."""
        return self.dispatch_us if direction == "dispatch" else self.combine_us

    def gbs(self, direction: Direction) -> float | None:
        """Logical bandwidth, where it is published."""
        return self.dispatch_gbs if direction == "dispatch" else self.combine_gbs


class LinkProfile(Settings):
    """The links between the ranks of one kind of cluster, and what is published of one library on it."""

    name: str
    about: str
    source: str = ""
    """Address of the measured rows, or of the rates where there are none."""
    near: str = ""
    """Kind of link inside a node, such as nvlink4; profiles of one kind share its constants. Empty: not known."""
    far: str = ""
    """Kind of link between nodes, such as cx7_400g."""
    experts_per_rank: int | None = Field(default=None, ge=1)
    """Of the measured rows; None: 256 over all ranks."""
    nodes_kept: int | None = Field(default=4, ge=1)
    """Groups to which the router of throughput rows sends a token; None: no limit."""
    dropped: int = Field(default=10, ge=0)
    """Masked assignments of latency rows."""
    misses: str = ""
    """Why rows are not predicted within 20 %, where known."""
    ranks_per_node: int = Field(ge=1)
    intra_gbs: float = Field(gt=0)
    """GB/s that one rank sends inside a node."""
    inter_gbs: float = Field(gt=0)
    """GB/s that one rank sends between nodes."""
    measured: tuple[Measured, ...] = ()

    def rows(self, mode: Mode) -> tuple[Measured, ...]:
        """The published rows of one kind of kernel, by ranks."""
        return tuple(sorted((row for row in self.measured if row.mode == mode), key=lambda row: row.ranks))

    def measured_at(self, mode: Mode, ranks: int) -> Measured:
        """The row of so many ranks; raises ConfigError where none is published."""
        rows = self.rows(mode)
        for row in rows:
            if row.ranks == ranks:
                return row
        have = ", ".join(str(row.ranks) for row in rows) or "none"
        raise ConfigError(f"{self.name}: nothing is published of {mode} kernels on {ranks} ranks; rows: {have}")


def shipped_links() -> dict[str, Path]:
    """Link profiles by name."""
    return {path.stem: path for path in sorted((config_folder() / "links").glob("*.yaml"))}


def links_of_device(name: str) -> str:
    """The link profile of a device by its name: that of the GPU alone, not of a published table.

    Raises ConfigError for a device without one.
    """
    devices = [each for each in shipped_links() if not link_profile(each).measured and link_profile(each).near]
    if name not in devices:
        raise ConfigError(
            f"no link profile of device {name!r}{did_you_mean(name, devices)}; there are {', '.join(devices)}; "
            "give --links FILE for others"
        )
    return name


def link_profile(name_or_path: str | Path) -> LinkProfile:
    """A shipped fabric by name, or a profile file; raises ConfigError for what is neither."""
    links = shipped_links()
    path = links.get(str(name_or_path), Path(name_or_path))
    if not path.is_file():
        raise ConfigError(
            f"{name_or_path} is neither a file nor a shipped link profile{did_you_mean(str(name_or_path), list(links))}"
        )
    return LinkProfile.load(path)
