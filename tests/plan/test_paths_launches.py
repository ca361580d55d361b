"""Fixed costs that grow with the ranks, and what is left when one side writes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_mk.config.shipped import device_profile
from moe_mk.errors import ConfigError
from moe_mk.plan.paths import HostBound

BY_HAND = HostBound(ranks=5, num_bytes=20_000.0, gbs=10.0, launch_us=4.0, round_trip_us=20.0)


@pytest.mark.row(138)
def test_host_driven_time_is_linear_in_the_ranks() -> None:
    assert BY_HAND.collective_us == 3 * 20 + 8 * 4 + 2  # handshakes, four peers, 20 kB at 10 GB/s
    assert BY_HAND.one_sided_us == 4 + 2
    times = [replace(BY_HAND, ranks=ranks).collective_us for ranks in (2, 3, 4, 64)]
    assert times[1] - times[0] == times[2] - times[1] == BY_HAND.slope_us == 8.0
    assert times[3] - times[0] == 62 * BY_HAND.slope_us


@pytest.mark.row(138)
def test_without_slope_and_handshake_the_one_sided_send_gains_nothing() -> None:
    host = HostBound.on(device_profile("h200"), 64, 1_806_336)
    assert host.collective_us > host.one_sided_us  # as the operator that writes one message a rank was made to be
    bare = replace(host, launch_us=0.0, round_trip_us=0.0)
    assert bare.slope_us == 0 and bare.collective_us == bare.one_sided_us == host.wire_us


def test_rates_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        replace(BY_HAND, gbs=0.0)
