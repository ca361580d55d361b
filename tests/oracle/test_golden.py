"""Decisions as a table reviewed by hand: the winner, what travels, and every reason against every other pair."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_mk import Problem, UnsupportedError, oracle
from moe_mk.config import device_profile, load_config
from moe_mk.experts import EXPERTS
from moe_mk.experts.monolithic import MONOLITHIC
from moe_mk.oracle import Oracle
from moe_mk.oracle.decide import judge
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.quant.plain import BF16, FP16, FP32

TABLE = yaml.safe_load((Path(__file__).parent / "golden.yaml").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = TABLE["cases"]
BACKENDS: dict[str, list[str]] = TABLE["backends"]
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}


@pytest.fixture(autouse=True)
def only_the_backends_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry, names in ((PREPARE_FINALIZE, "transports"), (EXPERTS, "experts"), (MONOLITHIC, "inside")):
        kept = {name: entry for name, entry in registry.items() if name in BACKENDS[names]}
        assert set(kept) == set(BACKENDS[names])
        monkeypatch.setattr(registry, "_entries", kept)


def problem_of(case: dict[str, Any]) -> Problem:
    ask = case["ask"]
    config = load_config(ask["model"]).with_(**ask.get("settings", {}))
    installed = frozenset(ask.get("installed", []))
    dtype = DTYPES[ask.get("dtype", "bf16")]
    return Problem(config, device_profile(ask["device"]), dtype, ask["num_tokens"], installed)


def expected_codes(case: dict[str, Any]) -> dict[str, set[str]]:
    """Reasons of a pair: against its transport, its experts, both together, and every pair alike."""
    against, both = case["against"], case.get("both", {})
    carrier = "no_ep" if case["ask"].get("settings", {}).get("ep", 1) == 1 else "all_gather"
    pairs = [(t, t, e) for t in BACKENDS["transports"] for e in BACKENDS["experts"]]
    pairs += [("inside", carrier, e) for e in BACKENDS["inside"]]
    everywhere = against.get("every pair", [])
    return {
        f"{shown} + {e}": {*against.get(t, []), *against.get(e, []), *both.get(f"{shown} + {e}", []), *everywhere}
        for shown, t, e in pairs
    }


def case_ids() -> Iterator[str]:
    return (f"{n}-{case['ask']['device']}-{case['ask']['model']}" for n, case in enumerate(CASES))


@pytest.mark.row(88)
@pytest.mark.parametrize("case", CASES, ids=case_ids())
def test_the_decision_is_the_reviewed_one(case: dict[str, Any]) -> None:
    problem, expected = problem_of(case), expected_codes(case)
    verdicts = judge(problem, oracle_of(problem))
    assert {v.name: {reason.code for reason in v.reasons} for v in verdicts} == expected
    if case["winner"] == "nothing":
        wanted = {v.line() for v in verdicts if is_wanted(v.name, case)}
        with pytest.raises(UnsupportedError) as refused:
            oracle.select(problem)
        assert set(refused.value.reasons) == wanted and wanted, "the error tells every reason of every pair asked for"
        return
    decision = oracle.select(problem)
    assert decision.chosen.name == case["winner"], case["why"]
    assert (decision.wire.name, decision.compute.name) == (case["wire"], case["compute"])
    assert {v.name: v.reasons for v in decision.verdicts} == {v.name: v.reasons for v in verdicts}
    assert {v.name for v in decision.verdicts if v.cost_us is None} == {name for name in expected if expected[name]}


def is_wanted(pair: str, case: dict[str, Any]) -> bool:
    settings = case["ask"].get("settings", {})
    transport, experts = pair.split(" + ")
    return settings.get("prepare_finalize", transport) == transport and settings.get("experts", experts) == experts


def oracle_of(problem: Problem) -> type[Oracle]:
    stored = problem.config.model.quant.weights
    return next(entry for _, entry in oracle.ORACLES.items() if stored in entry.stored)


def test_the_table_is_broad() -> None:
    assert len(CASES) >= 60 and all(case["why"] for case in CASES)
    assert {case["ask"]["device"] for case in CASES} == {"cpu", "h100", "h200", "b200", "mi300x"}
    assert len({case["ask"]["model"] for case in CASES}) >= 6
    winners = {case["winner"] for case in CASES}
    assert winners >= {"nothing", "no_ep + torch_cpu", "all_to_all + cpu_native", "inside + reference_monolithic"}
    asked = [yaml.safe_dump(case["ask"]) for case in CASES]
    assert len(set(asked)) == len(asked)
    codes = {c for case in CASES for part in ("against", "both") for cs in case.get(part, {}).values() for c in cs}
    assert codes >= {
        "ranks",
        "tokens",
        "device",
        "library",
        "dtype",
        "weights",
        "activations",
        "graphs",
        "wire",
        "memory",
    }
