"""Decisions as a table reviewed by hand: the winner, what travels, and every reason against every other pair."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_mk import Problem, UnsupportedError, oracle
from moe_mk.config import device_profile, load_config
from moe_mk.experts import EXPERTS
from moe_mk.experts.monolithic import MONOLITHIC
from moe_mk.oracle import Decision, Oracle
from moe_mk.oracle.decide import judge
from moe_mk.oracle.verdict import refusal_lines
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.quant.plain import BF16, FP16, FP32

TABLE = yaml.safe_load((Path(__file__).parent / "golden.yaml").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = TABLE["cases"]
BACKENDS: dict[str, list[str]] = TABLE["backends"]
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}


def only_the_backends_of(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for registry, names in ((PREPARE_FINALIZE, "transports"), (EXPERTS, "experts"), (MONOLITHIC, "inside")):
        kept = {name: entry for name, entry in registry.items() if name in named(case, names)}
        assert set(kept) == set(named(case, names))
        monkeypatch.setattr(registry, "_entries", kept)


def named(case: dict[str, Any], names: str) -> list[str]:
    """The backends of the table, and those that a case adds to them."""
    return [*BACKENDS[names], *(case.get("with", []) if names == "experts" else [])]


def problem_of(case: dict[str, Any]) -> Problem:
    ask = case["ask"]
    settings = ask.get("settings", {}) | ({"quant": ask["quant"]} if "quant" in ask else {})
    config = load_config(ask["model"]).with_(**settings)
    installed = frozenset(ask.get("installed", []))
    dtype = DTYPES[ask.get("dtype", "bf16")]
    return Problem(config, device_profile(ask["device"]), dtype, ask["num_tokens"], installed)


def expected_codes(case: dict[str, Any]) -> dict[str, set[str]]:
    """Reasons of a pair: against its transport, its experts, both together, and every pair alike."""
    against, both = case["against"], case.get("both", {})
    transport = "no_ep" if case["ask"].get("settings", {}).get("ep", 1) == 1 else "all_gather"
    pairs = [(t, t, e) for t in BACKENDS["transports"] for e in named(case, "experts")]
    pairs += [("inside", transport, e) for e in BACKENDS["inside"]]
    everywhere = against.get("every pair", [])
    return {
        f"{shown} + {e}": {*against.get(t, []), *against.get(e, []), *both.get(f"{shown} + {e}", []), *everywhere}
        for shown, t, e in pairs
    }


def case_ids() -> Iterator[str]:
    return (f"{n}-{case['ask']['device']}-{case['ask']['model']}" for n, case in enumerate(CASES))


@pytest.mark.row(88)
@pytest.mark.parametrize("case", CASES, ids=case_ids())
def test_the_decision_is_the_reviewed_one(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    only_the_backends_of(case, monkeypatch)
    problem, expected = problem_of(case), expected_codes(case)
    verdicts = judge(problem, oracle_of(problem))
    assert {v.name: {reason.code for reason in v.reasons} for v in verdicts} == expected
    if case["winner"] == "nothing":
        asked = [v for v in verdicts if is_wanted(v.name, case)]
        with pytest.raises(UnsupportedError) as refused:
            oracle.select(problem)
        pinned = len(asked) < len(verdicts)
        assert list(refused.value.reasons) == refusal_lines(asked, in_full=pinned), "every reason of every pair"
        return
    decision = oracle.select(problem)
    assert decision.chosen.name == case["winner"], case["why"]
    assert (decision.wire.name, decision.compute.name) == (case["wire"], case["compute"])
    assert decision.problem.weights.name == case.get("held", problem.weights.name)
    if "held" in case:
        check_fallback(decision, problem)
        return
    assert decision.effect is None
    assert {v.name: v.reasons for v in decision.verdicts} == {v.name: v.reasons for v in verdicts}
    assert {v.name for v in decision.verdicts if v.cost_us is None} == {name for name in expected if expected[name]}


def check_fallback(decision: Decision, problem: Problem) -> None:
    """What was given up is named, with its reasons and its effect on memory, speed and accuracy."""
    assert decision.effect is not None
    assert decision.passed_over[0].format == problem.weights.name and decision.passed_over[0].why
    reported = str(decision)
    assert f"{problem.weights.name} weights are held as {decision.problem.weights.name}" in reported
    assert "x the memory" in reported and (
        "rounding adds a relative error" in reported or "no rounding error is added" in reported
    )
    assert f"not held as {problem.weights.name}: " in reported


def is_wanted(pair: str, case: dict[str, Any]) -> bool:
    settings = case["ask"].get("settings", {})
    transport, experts = pair.split(" + ")
    return settings.get("prepare_finalize", transport) == transport and settings.get("experts", experts) == experts


def oracle_of(problem: Problem) -> type[Oracle]:
    stored = problem.config.model.quant.weights
    return next(entry for _, entry in oracle.ORACLES.items() if stored in entry.stored)


def test_the_table_is_broad() -> None:
    assert len(CASES) >= 100 and all(case["why"] for case in CASES)
    assert {case["ask"]["device"] for case in CASES} == {"cpu", "h100", "h200", "b200", "mi300x"}
    assert len({case["ask"]["model"] for case in CASES}) >= 6
    winners = {case["winner"] for case in CASES}
    assert winners >= {"nothing", "no_ep + torch_cpu", "all_to_all + cpu_native", "inside + reference_monolithic"}
    asked = [yaml.safe_dump(case["ask"]) for case in CASES]
    assert len(set(asked)) == len(asked)
    kinds = {problem_of(case).config.model.quant.weights for case in CASES}
    assert kinds >= {"bf16", "fp8_block", "fp8_channel", "fp8_tensor", "int8", "int8_block", "mxfp8", "mxfp4", "nvfp4"}
    assert len({case["held"] for case in CASES if "held" in case}) >= 2
    codes = {c for case in CASES for part in ("against", "both") for cs in case.get(part, {}).values() for c in cs}
    assert codes >= {
        "ranks", "tokens", "device", "library", "dtype", "weights", "activations", "graphs", "wire", "memory", "bias",
        "activation",
    }  # fmt: skip
