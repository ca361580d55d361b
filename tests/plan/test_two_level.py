"""The worked cost example of CANN's operators: a mesh against a relay, and how the gain moves."""

from dataclasses import replace

import pytest

from moe_mk.errors import ConfigError
from moe_mk.lab.plan.links import link_profile
from moe_mk.lab.plan.two_level import Relay

EXAMPLE = Relay(link_profile("ascend_910"), tokens=16, nodes=8, nodes_kept=4)


@pytest.mark.row(146)
def test_the_worked_example() -> None:
    # 16 x 7168 x 8 x 2 B x 63/64; x 4 nodes x 7/8; x 8 ranks x 7/8
    assert EXAMPLE.mesh_bytes == 1_806_336
    assert EXAMPLE.between_bytes == 802_816
    assert EXAMPLE.inside_bytes == 1_605_632
    between, inside = EXAMPLE.legs_us
    assert EXAMPLE.mesh_us == pytest.approx(86.1, abs=0.2)
    assert between == pytest.approx(38.3, abs=0.2)
    assert inside == pytest.approx(8.0, abs=0.2)
    assert EXAMPLE.relayed_us == pytest.approx(46.3, abs=0.2)
    assert EXAMPLE.pipelined_us == between


@pytest.mark.row(147)
def test_the_gain_grows_with_the_batch() -> None:
    table = {
        1: (2.9, 5.4), 8: (23.1, 43.0), 16: (46.3, 86.1), 32: (92.5, 172.2), 64: (185.1, 344.4), 128: (370.1, 688.8),
    }  # fmt: skip
    saved = []
    for tokens, (relayed, mesh) in table.items():
        relay = replace(EXAMPLE, tokens=tokens)
        assert relay.relayed_us == pytest.approx(relayed, abs=0.3) and relay.mesh_us == pytest.approx(mesh, abs=0.3)
        saved.append(relay.mesh_us - relay.relayed_us)
    assert saved == sorted(saved)


@pytest.mark.row(147)
def test_the_gain_shrinks_with_the_ranks() -> None:
    expected = {2: 4.34, 4: 2.25, 8: 1.47, 16: 1.16, 32: 1.03}
    gains = {nodes: replace(EXAMPLE, nodes=nodes, nodes_kept=None).gain for nodes in expected}
    assert gains == pytest.approx(expected, abs=0.006)
    assert list(gains.values()) == sorted(gains.values(), reverse=True)


def test_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"nodes_kept=9 is not in \[1, 8\]"):
        replace(EXAMPLE, nodes_kept=9)
    with pytest.raises(ConfigError, match="at least 1"):
        replace(EXAMPLE, tokens=0)
