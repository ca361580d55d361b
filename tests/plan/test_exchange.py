"""Bytes of exchanges by hand, and the closed form of destination groups against drawn routings."""

import pytest

from moe_mk.errors import ConfigError
from moe_mk.lab.plan.exchange import Exchange, distinct_groups


def test_bytes_by_hand() -> None:
    one = Exchange(tokens=10, ranks=1, hidden_size=128, top_k=2, num_experts=4)
    assert one.num_bytes("throughput", "dispatch") == 10 * (128 + 4)  # one rank, one row a token
    assert one.num_bytes("throughput", "combine") == 10 * 256
    assert one.num_bytes("latency", "dispatch") == 20 * (128 + 4 + 16)
    assert one.remote_bytes("latency", "dispatch") == 0
    assert Exchange(10, 16).remote_bytes("latency", "combine") == 10 * 8 * 14336 / 2


def test_bytes_inside_nodes_by_hand() -> None:
    # Two nodes: of 128 x 8 messages of 7408 B half stay on the own node. One node: all of them move inside it.
    assert Exchange(128, 16, nodes_kept=None).near_bytes("latency", "dispatch") == 128 * 8 * 7408 / 2
    one = Exchange(128, 8, nodes_kept=None)
    assert one.near_bytes("latency", "dispatch") == one.num_bytes("latency", "dispatch")
    # Where one node of eight is kept, all experts of a token are on its 8 ranks.
    assert Exchange(1, 64, nodes_kept=1).near_bytes("throughput", "dispatch") == distinct_groups(32, 8, 8) * 7392


def test_impossible_exchanges_are_refused_with_all_reasons() -> None:
    with pytest.raises(ConfigError, match="12 ranks do not fill nodes of 8; 256 experts do not divide over 12 ranks"):
        Exchange(1, 12)
    with pytest.raises(ConfigError, match="dropped=9"):
        Exchange(1, 8, dropped=9)
    with pytest.raises(ConfigError, match="at least 1"):
        Exchange(0, 8)
    with pytest.raises(ConfigError, match="do not give 8 choices"):
        distinct_groups(16, 8, 4, kept=1)


@pytest.mark.row(99, 163)
@pytest.mark.parametrize(
    "wire,row", [("bf16", 14336), ("fp8", 7392), ("fp8_ue8m0", 7224), ("mxfp8", 7392), ("nvfp4", 4032), ("int8", 7172)]
)
def test_rows_take_the_bytes_of_their_format(wire: str, row: int) -> None:
    exchange = Exchange(128, 32, nodes_kept=None, wire=wire, combine_wire=wire)
    assert exchange.num_bytes("latency", "dispatch") == 128 * 8 * (row + 16)
    assert exchange.num_bytes("latency", "combine") == 128 * 8 * row


def test_unknown_formats_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="wire='mxpf8' is unknown.*mxfp8.*combine_wire='utf8' is unknown"):
        Exchange(1, 8, wire="mxpf8", combine_wire="utf8")
