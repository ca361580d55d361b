"""Who initiates transfers between GPUs, and the fixed costs: two models, printed by `moe-mk plan paths`.

`dispatch_us` compares a proxy thread on the CPU (IBRC) with the GPU itself (IBGDA) as the initiator:

    t = alpha + sigma log2(nodes) + max(near copies, far messages)
    near    nu for each row to a rank of the own node, copied by SMs
    far     gamma a message from the GPU, over many queue pairs in parallel;
            tau sqrt(remote nodes) a message through the proxy, one after the other: the serial term

It is semi-empirical: a least-squares fit to the 16 dispatch times in the README of pplx-kernels for 1 and 128 tokens a
GPU, top-8, on 16 to 128 GPUs. Ratios of the two initiators are reproduced within 19 %. It does not extend beyond that
range or to messages much longer than a row; there the proxy can be faster, as by 5 % in the combine of 128 tokens on 16
GPUs (633 against 668 us).

`HostBound` compares a collective that the host drives with one-sided sends:

    collective    metadata round trip + launches that grow with the ranks + handshake before and after + bytes
    one-sided     one launch, flags instead of a handshake + bytes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2, sqrt
from typing import Literal

from moe_mk.config.device import BYTES_PER_US, DeviceProfile
from moe_mk.errors import ConfigError

Initiator = Literal["cpu_proxy", "gpu"]


@dataclass(frozen=True)
class Constants:
    """Fitted constants of one initiator, in microseconds."""

    alpha: float
    """Fixed cost of a call between two nodes."""
    sigma: float
    """Added by each doubling of nodes."""
    message: float
    """Per message to another node; for the proxy, times the square root of the number of remote nodes."""


FITTED: dict[Initiator, Constants] = {
    "cpu_proxy": Constants(alpha=208.0, sigma=85.0, message=0.45),
    "gpu": Constants(alpha=96.0, sigma=7.8, message=0.20),
}
NEAR_US = 1.0
"""Microseconds of a row to a rank of the own node."""


def dispatch_us(initiator: Initiator, tokens: int, ranks: int, *, top_k: int = 8, ranks_per_node: int = 8) -> float:
    """Microseconds of one dispatch of `tokens` tokens a rank; raises ConfigError unless two or more nodes are full."""
    if tokens < 0 or ranks < 2 * ranks_per_node or ranks % ranks_per_node:
        least = f"give tokens of at least 0 and two full nodes of {ranks_per_node} or more"
        raise ConfigError(f"tokens={tokens} on {ranks} ranks: {least}")
    nodes, messages, fitted = ranks // ranks_per_node, tokens * top_k, FITTED[initiator]
    near = messages / nodes
    serial = sqrt(nodes - 1) if initiator == "cpu_proxy" else 1.0
    far = (messages - near) * fitted.message * serial
    return fitted.alpha + fitted.sigma * log2(nodes) + max(near * NEAR_US, far)


POSTS_EACH_RANK = 2
"""Of the host, for each further rank: a send and a receive."""


def posts_of(posting_us: Mapping[int, float]) -> tuple[float, float]:
    """The line through measured times by number of ranks: microseconds with no peer, and for each further rank.

    Least squares of relative errors. Raises ConfigError for fewer than two numbers of ranks, or times that are not
    above 0.
    """
    if len(posting_us) < 2 or min(posting_us) < 1 or min(posting_us.values()) <= 0:
        raise ConfigError(f"give times above 0 of two numbers of ranks or more: {dict(posting_us)}")
    # Of y = a + b x, each divided by y: minimise the sum of (1 - a u - b v)^2 with u = 1 / y and v = x / y.
    points = [(1.0 / us, (ranks - 1) / us) for ranks, us in posting_us.items()]
    uu, uv, vv = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    u, v = (sum(p[i] for p in points) for i in (0, 1))
    spread = uu * vv - uv * uv
    return (u * vv - v * uv) / spread, (v * uu - u * uv) / spread


@dataclass(frozen=True)
class HostBound:
    """The variable-size all-to-all of one rank, driven by the host or one-sided."""

    ranks: int
    num_bytes: float
    """Bytes sent over the slow links."""
    gbs: float
    launch_us: float
    """Of one send or receive posted by the host."""
    round_trip_us: float
    """Of a handshake, and of the collective that exchanges sizes."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.gbs <= 0 or min(self.num_bytes, self.launch_us, self.round_trip_us) < 0:
            raise ConfigError(f"gbs must be above 0, ranks at least 1 and all other values at least 0: {self}")

    @classmethod
    def on(cls, device: DeviceProfile, ranks: int, num_bytes: float) -> HostBound:
        """Use the fixed costs of a device profile: launch_us, and collective_us as the round trip."""
        return cls(ranks, num_bytes, device.inter_node_gbs, device.launch_us, device.collective_us)

    @classmethod
    def fitted(cls, posting_us: Mapping[int, float], *, ranks: int, num_bytes: float, gbs: float) -> HostBound:
        """Use measured times to post to and from all peers, by number of ranks, see `posts_of`; no round trips."""
        return cls(ranks, num_bytes, gbs, posts_of(posting_us)[1] / POSTS_EACH_RANK, 0.0)

    @property
    def posts(self) -> int:
        """Sends and receives that the host posts in one call."""
        return POSTS_EACH_RANK * (self.ranks - 1)

    @property
    def slope_us(self) -> float:
        """Microseconds added by each further rank: one send and one receive to post."""
        return POSTS_EACH_RANK * self.launch_us

    @property
    def collective_us(self) -> float:
        """Size exchange, handshakes before and after, and one post for each peer and direction."""
        return 3.0 * self.round_trip_us + self.launch_us * self.posts + self.wire_us

    @property
    def one_sided_us(self) -> float:
        """One launch that writes to all peers and polls their flags."""
        return self.launch_us + self.wire_us

    @property
    def wire_us(self) -> float:
        """Time of the bytes alone."""
        return self.num_bytes / (self.gbs * BYTES_PER_US)
