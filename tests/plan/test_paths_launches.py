"""Fixed costs that grow with the ranks, and what is left when one side writes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moe_mk.config.shipped import device_profile
from moe_mk.errors import ConfigError
from moe_mk.lab.plan.paths import HostBound, posts_of

MEASURED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "host_bound_cpu.json"

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


@pytest.mark.row(138)
def test_a_line_through_measured_times_has_the_slope_of_each_further_rank() -> None:
    # 3 us with no peer and 10 us for each: exact, whatever the numbers of ranks.
    assert posts_of({2: 13.0, 4: 33.0, 8: 73.0}) == (pytest.approx(3.0), pytest.approx(10.0))
    fitted = HostBound.fitted({2: 13.0, 8: 73.0}, ranks=5, num_bytes=20_000.0, gbs=10.0)
    assert fitted.launch_us == pytest.approx(5.0) and fitted.collective_us == pytest.approx(8 * 5 + 2)
    assert [replace(BY_HAND, ranks=ranks).posts for ranks in (1, 2, 8)] == [0, 2, 14]
    for wrong in ({2: 1.0}, {2: 1.0, 4: 0.0}, {0: 1.0, 2: 2.0}):
        with pytest.raises(ConfigError, match="two numbers of ranks"):
            posts_of(wrong)


@pytest.mark.row(138)
def test_the_measured_time_to_post_grows_by_the_slope_of_the_model() -> None:
    """Times of benchmarks/host_bound.py: the line through 2 and 8 ranks is held against 4, which it has not seen."""
    rows = {(row["way"], row["ranks"]): row for row in json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]}
    for way in ("posts", "puts"):
        times = {ranks: rows[way, ranks]["tenth_us"] for ranks in (2, 4, 8)}
        fixed, each = posts_of({ranks: times[ranks] for ranks in (2, 8)})
        assert each > 0 and abs(fixed) < each, "what grows with the ranks is more than what does not"
        assert times[4] == pytest.approx(fixed + 3 * each, rel=0.15)
        model = HostBound.fitted(times, ranks=4, num_bytes=0.0, gbs=1.0)
        assert model.collective_us == pytest.approx(times[4], rel=0.35), "without the fixed part"
    for ranks in (2, 4, 8):
        host = HostBound.fitted(
            {r: rows["posts", r]["tenth_us"] for r in (2, 4, 8)}, ranks=ranks, num_bytes=0.0, gbs=1.0
        )
        assert rows["posts", ranks]["posted"] == host.posts, "a send and a receive for each further rank"
        assert rows["puts", ranks]["posted"] == ranks - 1
        # With the measured costs the one-sided send gains from three ranks on; without them it gains nothing.
        assert (host.collective_us > host.one_sided_us) and host.slope_us > 0
        assert replace(host, launch_us=0.0).collective_us == replace(host, launch_us=0.0).one_sided_us
