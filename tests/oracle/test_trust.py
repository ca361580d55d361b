"""What is registered from outside of this package: selected by name, or certified and timed here; never otherwise."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_mk import ConfigError, MoEConfig, Problem, UnsupportedError, oracle
from moe_mk.config import device_profile
from moe_mk.config.tuned import Case, TunedPoint, tuned_path
from moe_mk.experts.base import EXPERTS
from moe_mk.experts.monolithic import MONOLITHIC
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.experts.triton.tuning import CANDIDATES
from moe_mk.external.device import processor
from moe_mk.external.library import installed
from moe_mk.lab.cli.doctor import findings
from moe_mk.lab.plan.wanted import ways_to
from moe_mk.lab.testing.certificate import Certificate, Passed
from moe_mk.lab.tuning import save_measured
from moe_mk.oracle import ORACLES, Decision
from moe_mk.oracle.trust import REGISTRIES, Identity, certificate_path, measured_us
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE
from moe_mk.quant.plain import BF16

SOURCE = """
import torch
from base_of_a_stranger import Base
from moe_mk.experts.base import ExpertsTraits
from moe_mk.experts.reference import ReferenceMonolithic
from moe_mk.oracle import Oracle
from moe_mk.prepare_finalize.all_to_all import AllToAll
from moe_mk.prepare_finalize.base import Volume
from moe_mk.tokens import ExpertOutput, GroupedTokens, OutputStage

class Experts(Base):
    traits = ExpertsTraits(
        summary="claims to be the fastest", emits={GroupedTokens: OutputStage.RAW}, computes=("plain",),
        weights=frozenset({"plain"}), kinds=frozenset({"cpu", "cuda"}), bandwidth=1.0, compute=1.0, launches=0,
    )
    asked = 0

    @classmethod
    def reasons_against(cls, problem):
        Experts.asked += 1
        return super().reasons_against(problem)

    @classmethod
    def priced(cls, problem, compute):
        Experts.asked += 1
        return 1e-9, "measured"

    def run(self, tokens, weights):
        return ExpertOutput(torch.zeros_like(tokens.x_NH.values), OutputStage.RAW)

class Transport(AllToAll):
    asked = 0

    @classmethod
    def volume(cls, problem):
        Transport.asked += 1
        return Volume(0.0, 0.0, 0)

class Inside(ReferenceMonolithic):
    pass

class Chooses(Oracle):
    name, stored = "chooses", frozenset({"bf16"})
"""
BASE = "from moe_mk.experts.base import FusedExperts\n\nclass Base(FusedExperts):\n    pass\n"
FILES = {"wheel_of_a_stranger": SOURCE, "base_of_a_stranger": BASE}
MODEL = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "quant": {"weights": "bf16"}}
CASE = Case(256, 128, 8, "bf16", "bf16")
TOKENS = 64


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of another package whose classes are registered as stranger_..., in every registry."""
    for stem, source in FILES.items():
        (tmp_path / f"{stem}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = import_module("wheel_of_a_stranger")
    entries = {
        "stranger": (EXPERTS, module.Experts), "stranger_sends": (PREPARE_FINALIZE, module.Transport),
        "stranger_inside": (MONOLITHIC, module.Inside), "chooses": (ORACLES, module.Chooses),
    }  # fmt: skip
    for name, (registry, cls) in entries.items():
        list(registry)  # its own wheels first
        monkeypatch.setitem(registry._entries, name, cls)  # type: ignore[attr-defined]
        monkeypatch.setitem(registry._origin, name, "their-wheel (wheel_of_a_stranger:X)")  # type: ignore[attr-defined]
    yield module
    for stem in FILES:
        del sys.modules[stem]


def problem(ep: int = 1, tokens: int = TOKENS, device: str = "cpu", **overrides: Any) -> Problem:
    config = MoEConfig.parse({"model": MODEL, "router": {"top_k": 2}}, "a test")
    return Problem(config.with_(ep=ep, **overrides), device_profile(device), BF16, tokens, installed())


def stranger_of(decision: Decision) -> str:
    (verdict,) = (each for each in decision.verdicts if each.pair == ("no_ep", "stranger"))
    assert "trust" in {reason.code for reason in verdict.reasons}
    return next(str(reason) for reason in verdict.reasons if reason.code == "trust")


def certify_and_time(module: Any, folder: Path) -> tuple[Path, Path]:
    """The certificate and the tuned file, as `moe-mk certify` and `moe-mk tune` write them."""
    held = Certificate(
        "stranger", "experts", "their-wheel", {}, (Passed("all", 1, ""),), (),
        identity=Identity.of("stranger", module.Experts),
    )  # fmt: skip
    path, timed = certificate_path("stranger", folder), tuned_path(processor(), "stranger", CASE.name(2), folder)
    save_measured(timed, [TunedPoint(tokens, {"threads": 1}, 0.5) for tokens in (1, 64)], {})
    path.write_text(str(held))
    return path, timed


@pytest.mark.parametrize("ep", [1, 2])
def test_what_nothing_names_is_listed_with_the_reason_and_not_asked(wheel: Any, ep: int) -> None:
    decision = oracle.select(problem(ep))
    assert not any(name.startswith("stranger") for name in decision.chosen.pair) and decision.oracle == "unquantized"
    assert wheel.Experts.asked == wheel.Transport.asked == 0
    text = decision.text()
    assert text.count("any + stranger: is not of this package but of their-wheel (wheel_of_a_stranger:X), and has") == 1
    assert "kernel.trust = [stranger] or kernel.experts = stranger or moe-mk certify stranger --tuned-dir " in text
    assert "stranger_sends + any: is not of this package" in text and "kernel.prepare_finalize = stranger_sends" in text
    assert "inside + stranger_inside: is not of this package" in text
    assert "not selected: oracle chooses is not of this package" in text and "[kernel.trust = [chooses]]" in text
    own = {v for v in decision.verdicts if not {"stranger", "stranger_sends", "stranger_inside"} & {*v.pair}}
    for name in ("stranger", "stranger_sends", "stranger_inside", "chooses"):
        for registry in (*(each for each, _ in REGISTRIES), ORACLES):
            registry._entries.pop(name, None)  # type: ignore[attr-defined]
    assert own == {*oracle.select(problem(ep)).verdicts}, "nothing else depends on what is registered besides"


def test_names_are_trusted_by_the_list_and_by_a_pin(wheel: Any) -> None:
    assert oracle.select(problem(experts="stranger")).chosen.experts == "stranger"
    assert oracle.select(problem(trust=["stranger"])).chosen.experts == "stranger"
    pinned = oracle.select(problem(2, prepare_finalize="stranger_sends"))
    assert pinned.chosen.prepare_finalize == "stranger_sends" and pinned.chosen.experts != "stranger"
    assert oracle.select(problem(2, trust=["stranger_sends"])).chosen.prepare_finalize == "stranger_sends"
    assert oracle.select(problem(trust=["chooses"])).oracle == "chooses"
    assert oracle.select(problem(experts="stranger_inside")).chosen.experts == "stranger_inside"
    with pytest.raises(ConfigError, match=r"kernel.trust names 'strangers', which is not registered; did you mean '"):
        oracle.select(problem(trust=["strangers"]))


def test_experts_that_are_certified_and_timed_here_are_selected_by_their_time(wheel: Any, tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    certify_and_time(wheel, folder)
    chosen = oracle.select(problem(tuned_dir=folder)).chosen
    assert (chosen.experts, chosen.cost_us, chosen.cost_source) == ("stranger", 0.5, "measured")
    assert "moe-mk tune stranger" in stranger_of(oracle.select(problem(tokens=65, tuned_dir=folder)))
    assert "moe-mk certify" not in stranger_of(oracle.select(problem(tokens=65, tuned_dir=folder)))
    assert "neither certified nor timed on h200" in stranger_of(oracle.select(problem(device="h200", tuned_dir=folder)))
    slow = tuned_path(processor(), "stranger", CASE.name(2), folder)
    save_measured(slow, [TunedPoint(tokens, {}, 1e9) for tokens in (1, 64)], {})
    assert oracle.select(problem(tuned_dir=folder)).chosen.experts != "stranger"
    assert oracle.select(problem(tuned_dir=tmp_path)).chosen.experts != "stranger", "another folder"


@pytest.mark.parametrize(
    "ranks", [{}, {"ep": 2}, {"ep": 2, "tp": 2}, {"ep": 2, "parallel.tokens": "replicated"}], ids=str
)
def test_a_time_is_looked_up_for_the_share_of_a_rank(wheel: Any, tmp_path: Path, ranks: dict[str, Any]) -> None:
    """Its experts and slices; of tokens that all ranks have, fewer rows reach an expert than of their own ones."""
    ep, tokens = ranks.get("ep", 1), TOKENS // (2 if "parallel.tokens" in ranks else 1)
    case = Case(256, 128 // ranks.get("tp", 1), 8 // ep, "bf16", "bf16")
    for device, name in ((processor(), "stranger"), ("NVIDIA H200", "triton")):
        file = tuned_path(device, name, case.name(2), tmp_path)
        save_measured(file, [TunedPoint(each, asdict(CANDIDATES[0]), float(each)) for each in (1, 256)], {})
    assert measured_us("stranger", problem(**ranks, tuned_dir=tmp_path), BF16) == pytest.approx(tokens)
    found, _ = EXPERTS["triton"].priced(problem(**ranks, device="h200", tuned_dir=tmp_path), BF16)
    assert found == pytest.approx(tokens)


def facts_changed(**changed: Any) -> Callable[[Path, Path], None]:
    def change(certificate: Path, timed: Path) -> None:
        certificate.write_text(json.dumps(json.loads(certificate.read_text()) | changed))

    return change


def identity_changed(key: str) -> Callable[[Path, Path], None]:
    def change(certificate: Path, timed: Path) -> None:
        facts = json.loads(certificate.read_text())
        facts["identity"][key] = facts["identity"][key] * 2 + (1 if key == "contract" else "x")
        certificate.write_text(json.dumps(facts))

    return change


SPOILED: dict[str, Callable[[Path, Path], object]] = {
    **{f"another {key}": identity_changed(key) for key in Identity.__dataclass_fields__},
    "refused": facts_changed(passed=False),
    "passed is no truth": facts_changed(passed="yes"),
    "quick": facts_changed(quick=True),
    "no identity": facts_changed(identity=None),
    "no certificate": lambda certificate, _: certificate.unlink(),
    "a folder": lambda certificate, _: (certificate.unlink(), certificate.mkdir()),
    "not timed": lambda _, timed: timed.unlink(),
    "timed in another shape": lambda _, timed: timed.rename(timed.with_name(f"{CASE.name(2)}x.json")),
    "no times": lambda _, timed: timed.write_text("{}"),
    "a time of zero": lambda _, timed: timed.write_text(timed.read_text().replace("0.5", "0")),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_each_part_of_the_proof_is_required(wheel: Any, tmp_path: Path, spoil: Callable[[Path, Path], object]) -> None:
    folder = tmp_path / "tuned"
    spoil(*certify_and_time(wheel, folder))
    decision = oracle.select(problem(tuned_dir=folder))
    assert decision.chosen.experts != "stranger" and stranger_of(decision)


@pytest.mark.parametrize("stem", FILES)
def test_a_certificate_ends_with_a_change_of_the_code(wheel: Any, tmp_path: Path, stem: str) -> None:
    folder = tmp_path / "tuned"
    certify_and_time(wheel, folder)
    (tmp_path / f"{stem}.py").write_text(FILES[stem] + "\n# another line\n")
    decision = oracle.select(problem(tuned_dir=folder))
    assert decision.chosen.experts != "stranger" and "another version or machine" in stranger_of(decision)


@given(st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damaged_certificate_or_tuned_file_serves_or_raises(wheel: Any, tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "tuned"
    files = certify_and_time(wheel, folder)
    file = data.draw(st.sampled_from(files))
    whole = file.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    file.write_bytes(data.draw(st.sampled_from((whole[:at], whole[:at] + b"\xff" + whole[at + 1 :], b"[" * 5000, b""))))
    assert oracle.select(problem(tuned_dir=folder)).chosen.experts != "stranger"


class Raises:
    """A step of a backend that fails."""

    def __get__(self, instance: object, owner: type) -> Any:
        raise ZeroDivisionError("of a stranger")


@pytest.mark.parametrize("step", ["reasons_against", "priced", "workspace_bytes"])
def test_experts_that_fail_are_a_reason_if_trusted_and_not_asked_otherwise(
    wheel: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(wheel.Experts, step, Raises())
    assert oracle.select(problem()).chosen.experts != "stranger"
    trusted = oracle.select(problem(trust=["stranger"]))
    assert "raised ZeroDivisionError: of a stranger" in trusted.text()
    with pytest.raises(UnsupportedError, match="raised ZeroDivisionError: of a stranger"):
        oracle.select(problem(experts="stranger"))
    assert any(row["name"] == "stranger" and row["by_name"] for row in findings()["backends"])


@pytest.mark.parametrize("step", ["reasons_against", "volume", "max_rows", "buffer_bytes"])
def test_transports_that_fail_are_a_reason_if_trusted_and_not_asked_otherwise(
    wheel: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(wheel.Transport, step, Raises())
    assert oracle.select(problem(2)).chosen.prepare_finalize != "stranger_sends"
    assert "raised ZeroDivisionError: of a stranger" in oracle.select(problem(2, trust=["stranger_sends"])).text()
    with pytest.raises(UnsupportedError, match="raised ZeroDivisionError: of a stranger"):
        oracle.select(problem(2, prepare_finalize="stranger_sends"))


def test_memory_of_slots_does_not_depend_on_what_is_registered(wheel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = problem(residency={"slots": 2, "store": "/nowhere"}, max_num_tokens=TOKENS)
    before = oracle.memory.slot_bytes(ask)
    monkeypatch.setattr(wheel.Experts, "traits", replace(wheel.Experts.traits, pages=True))
    monkeypatch.setattr(wheel.Experts, "slot_bytes", classmethod(lambda cls, problem: 1 << 60))
    assert oracle.memory.slot_bytes(ask) == before


def test_what_makes_a_backend_eligible_begins_with_its_name(wheel: Any) -> None:
    ways, _ = ways_to(problem(2), "stranger_sends")
    assert ways and not ways[0].changes, "a wanted backend is a named one"


def test_estimates_that_a_backend_does_not_state_are_those_of_the_reference(wheel: Any) -> None:
    stated = {"bandwidth", "compute", "launches", "per_expert"}
    fields = {name: field.default for name, field in type(ReferenceExperts.traits).__dataclass_fields__.items()}
    assert {name: fields[name] for name in stated} == {name: getattr(ReferenceExperts.traits, name) for name in stated}


def test_a_class_is_from_elsewhere_by_its_module_or_by_its_wheel() -> None:
    name = next(iter(EXPERTS))
    assert not any(EXPERTS.is_foreign(each) for each in EXPERTS if EXPERTS.origin(each).startswith("moe_mk."))
    before = EXPERTS._origin[name]
    try:
        EXPERTS._origin[name] = "moe_mk_extras (moe_mk_extras:X)"
        assert EXPERTS.is_foreign(name), "another package may begin with the same letters"
    finally:
        EXPERTS._origin[name] = before
