"""What an exchange costs beside its bytes when the host drives it: a launch a peer, and a handshake around it.

collective    metadata round trip + launches that grow with the ranks + handshake before and after + bytes
one-sided     one launch, flags instead of a handshake + bytes
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_mk.config.device import DeviceProfile
from moe_mk.errors import ConfigError

PER_US = 1e3


@dataclass(frozen=True)
class HostBound:
    """One host-driven variable all-to-all of a rank."""

    ranks: int
    num_bytes: float
    """Sent over the slow links."""
    gbs: float
    launch_us: float
    """Of one send or receive that the host posts."""
    round_trip_us: float
    """Of a handshake, and of the collective that tells sizes."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.gbs <= 0 or min(self.num_bytes, self.launch_us, self.round_trip_us) < 0:
            raise ConfigError(f"a rate must be above 0 and nothing else below it: {self}")

    @classmethod
    def on(cls, device: DeviceProfile, ranks: int, num_bytes: float) -> HostBound:
        """With the fixed costs of a device profile: a kernel launch, and a collective as the round trip."""
        return cls(ranks, num_bytes, device.inter_node_gbs, device.launch_us, device.collective_us)

    @property
    def slope_us(self) -> float:
        """Microseconds that one rank more costs: a send and a receive to post."""
        return 2.0 * self.launch_us

    @property
    def collective_us(self) -> float:
        """Sizes first, handshakes before and after, and a post for each peer each way."""
        return 3.0 * self.round_trip_us + self.slope_us * (self.ranks - 1) + self.wire_us

    @property
    def one_sided_us(self) -> float:
        """One launch writes to all peers and polls their flags."""
        return self.launch_us + self.wire_us

    @property
    def wire_us(self) -> float:
        """Bytes alone."""
        return self.num_bytes / (self.gbs * PER_US)
