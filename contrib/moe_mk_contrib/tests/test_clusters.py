"""Decisions for whole clusters, as `tests/oracle/test_clusters.py` has them, with the transports of this package."""

from typing import Any

import pytest

from moe_mk import Problem, oracle
from moe_mk.errors import ConfigError
from moe_mk.oracle.base import ORACLES
from moe_mk.oracle.cost import transport_us
from moe_mk.oracle.decide import judge
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.quant.fp8 import FP8_1x128
from moe_mk.quant.plain import BF16
from tests.oracle import test_clusters as core

LIBRARIES = core.LIBRARIES | {"nixl_ep", "mori"}
TRUST = ("deepep_v2", "mori", "nixl_ep")
TIMES = {
    ("h200", 8): {"deepep_v2": 101, "nixl_ep": 162},
    ("h200", 32): {"deepep_v2": 182, "nixl_ep": 404},
    ("mi300x", 8): {"mori": 72},
    ("mi300x", 32): {"mori": 182},
}
"""Microseconds; the others are for another device."""


def asked(device: str, ranks: int, **settings: Any) -> Problem:
    return core.asked(device, ranks, **{"installed": LIBRARIES, "trust": list(TRUST), **settings})


@pytest.mark.parametrize("device,ranks", TIMES)
def test_every_transport_has_its_time_or_its_reasons(device: str, ranks: int) -> None:
    problem = asked(device, ranks)
    reasons = {name: {r.code for r in PREPARE_FINALIZE[name].reasons_against(problem)} for name in TRUST}
    assert {name for name in TRUST if not reasons[name]} == set(TIMES[device, ranks])
    assert all(codes >= {"device"} for codes in reasons.values() if codes)
    for name, us in TIMES[device, ranks].items():
        volume = PREPARE_FINALIZE[name].volume(problem)
        assert round(transport_us(problem, volume, core.wire_of(name))) == us


@pytest.mark.row(80)
@pytest.mark.parametrize("ranks", [8, 32])
def test_a_cluster_of_mi300x_chooses_mori_where_it_is_installed(ranks: int) -> None:
    untrusted = oracle.select(asked("mi300x", ranks, trust=[]))
    assert untrusted.chosen.prepare_finalize != "mori" and "kernel.trust = [mori]" in untrusted.text()
    with_it = oracle.select(asked("mi300x", ranks))
    assert with_it.chosen.prepare_finalize == "mori" and with_it.wire in (BF16, FP8_1x128)
    without = asked("mi300x", ranks, installed=["triton"])
    assert oracle.select(without).chosen.prepare_finalize != "mori"
    reported = [v for v in judge(without, ORACLES["fp8"]) if v.prepare_finalize == "mori"]
    assert all("mori is not installed" in "; ".join(map(str, v.reasons)) for v in reported)


def test_the_name_of_the_distribution_trusts_all_that_it_brings() -> None:
    whole = oracle.select(asked("mi300x", 8, trust=["moe-mk-contrib"]))
    assert whole.chosen.prepare_finalize == "mori"
    assert not [verdict for verdict in whole.verdicts if any(reason.code == "trust" for reason in verdict.reasons)]
    with pytest.raises(ConfigError, match="names 'moe-mk-contrip'.*did you mean 'moe-mk-contrib'"):
        oracle.select(asked("mi300x", 8, trust=["moe-mk-contrip"]))
