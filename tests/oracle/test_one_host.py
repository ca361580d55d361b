"""A transport that shares memory is chosen where all ranks share a host, and refused by name where they do not."""

import pytest

from moe_mk.oracle import Decision, select
from tests.support.problems import problem


def codes_against_one_sided(decision: Decision) -> set[str]:
    verdict = next(
        v for v in decision.verdicts if v.prepare_finalize == "one_sided" and v.experts in ("cpu_native", "reference")
    )
    return {reason.code for reason in verdict.reasons}


@pytest.mark.row(88)
@pytest.mark.parametrize(
    ("settings", "winner"),
    [
        ({"ep": 4}, "one_sided"),  # 4 ranks of the profile's 8 a host
        ({"ep": 16}, "all_to_all"),  # two hosts by the profile
        ({"ep": 16, "ranks_per_node": 16}, "one_sided"),  # one host, as stated
        ({"ep": 2, "ranks_per_node": 1}, "all_to_all"),  # two hosts, as stated
        ({"ep": 2, "tokens": "replicated"}, "replicated"),  # nothing to send
    ],
)
def test_the_number_of_hosts_decides(settings: dict[str, object], winner: str) -> None:
    decision = select(problem("deepseek_v3", "cpu", installed=["c++"], **settings))
    assert decision.chosen.prepare_finalize == winner
    expected = {"all_to_all": {"fabric"}, "one_sided": set(), "replicated": {"tokens"}}[winner]
    assert codes_against_one_sided(decision) == expected
