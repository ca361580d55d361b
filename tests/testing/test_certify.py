"""Certification: right backends pass with equal digests, wrong ones fail with the law they broke."""

import json
import re
import sys
import warnings
from dataclasses import asdict, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_mk import registry
from moe_mk.comm.threads import ThreadWorld
from moe_mk.config.problem import Reason
from moe_mk.config.traits import UNSTATED
from moe_mk.errors import ConfigError, PluginWarning, UnsupportedError
from moe_mk.experts.base import EXPERTS
from moe_mk.external.library import emulated, installed
from moe_mk.lab.testing import backend_conformance, certify_checks
from moe_mk.lab.testing.cases import larger_routings, routings_of_slots
from moe_mk.lab.testing.certificate import CONTRACT
from moe_mk.lab.testing.certify import certify, checks_of
from moe_mk.lab.testing.laws import LOST, ORDER, WEIGHTING, law_of
from moe_mk.lab.testing.limits import NonConforming
from moe_mk.lab.testing.on_ranks import outputs_on_processes
from moe_mk.lab.testing.transports import explained, world_of
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize
from tests.cli.conftest import moe_mk, usage_error
from tests.testing.broken import transports
from tests.testing.broken.right_experts import Right


class WrongSignature(transports.Right):
    def prepare(self, hidden_states: Any, routing: Any, extra: int = 0) -> Any:  # type: ignore[override]
        return super().prepare(hidden_states, routing)


def install(monkeypatch: pytest.MonkeyPatch, cls: Any, name: str = "wrong") -> str:
    target = PREPARE_FINALIZE if issubclass(cls, PrepareFinalize) else EXPERTS
    _ = list(target)
    monkeypatch.setitem(target._entries, name, cls)
    monkeypatch.setitem(target._origin, name, "a test")
    return name


@pytest.mark.slow
def test_a_certificate_states_the_sizes_that_its_checks_have_reached() -> None:
    full, quick = certify("no_ep", processes=False), certify("no_ep", processes=False, quick=True)
    assert full.passed and quick.passed and len(full.coverage) > len(quick.coverage)
    assert str(full.sizes).startswith("1025 tokens per rank, ") and full.sizes.slots == 257
    assert full.as_dict()["sizes"] == asdict(full.sizes) and not full.as_dict()["quick"] and quick.as_dict()["quick"]
    assert str(quick.sizes) == "7 tokens per rank, 6 rows per expert, 8 experts per rank, hidden size 192"


def test_sizes_that_a_backend_refuses_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(Right):
        @classmethod
        def reasons_against(cls, problem: Any) -> list[Any]:
            shape = problem.config.model.hidden_size, problem.config.model.num_experts, problem.num_tokens
            return [Reason("shape", "is small")] if any(map(int.__gt__, shape, (256, 40, 200))) else []

    (check,) = [one for one in checks_of(install(monkeypatch, Small), processes=False) if "larger" in one.name]
    assert (check.sizes().slots, check.sizes().tokens, check.sizes().hidden) == (40, 130, 256)


def test_the_larger_cases_have_the_sizes_of_their_names() -> None:
    cases = larger_routings(4)
    assert [case.num_tokens for case in cases[:3]] == [[31, 15, 0, 31], [33, 16, 0, 33], [65, 32, 0, 65]]
    (crowded,) = [case for case in cases if case.name == "130 rows of one expert"]
    ids = torch.cat([ids_TK.flatten() for ids_TK in crowded.logical_ids])
    assert torch.bincount(ids)[7] == 130 and sum(crowded.num_tokens) == 130
    assert [case.top_k for case in cases[-2:]] == [1, 8] and cases[-3].gaps and 0.0 in cases[-4].factors
    for case in (*cases, routings_of_slots(4, 40)):
        assert case.name.endswith("some -1") or all(bool((routing.ids_TK >= 0).all()) for routing in case.routings)
        for row in torch.cat(case.logical_ids).tolist():
            chosen = [expert for expert in row if expert >= 0]
            assert len(set(chosen)) == len(chosen), "a token chooses an expert once"
    many = routings_of_slots(1, 257)
    assert many.expert_map.num_slots(0) == 257 and int(many.logical_ids[0].max()) == 256


@pytest.mark.parametrize(("value", "law", "stated"), [
    ("no_such_module:Plugin", "loads", "ModuleNotFoundError"),
    ("tests.testing.test_certify:WrongSignature", "signature", r"prepare\(self, hidden_states, routing, extra\)"),
    ("tests.testing.test_certify:json", "signature", "is not a subclass of PrepareFinalize"),
])  # fmt: skip
def test_a_plugin_that_cannot_be_loaded_gets_a_certificate_that_states_so(
    monkeypatch: pytest.MonkeyPatch, value: str, law: str, stated: str
) -> None:
    point = EntryPoint("wrong", value, "moe_mk.prepare_finalize")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    monkeypatch.setattr(PREPARE_FINALIZE, "_discovered", False)
    monkeypatch.setattr(PREPARE_FINALIZE, "broken", {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)
        certificate = certify("wrong")
    (failure,) = certificate.failures
    assert failure.law == law and not certificate.passed and not certificate.coverage
    assert re.search(stated, failure.message) and failure.message.startswith(f"? ({value}): ")
    PREPARE_FINALIZE.broken["no_ep"] = "a wheel that asks for the name of another backend"
    assert certify("no_ep", processes=False, quick=True).passed


@pytest.mark.row("N6")
@pytest.mark.slow
def test_a_right_backend_is_certified_twice_with_equal_digests() -> None:
    one, other = (certify("no_ep", processes=False) for _ in range(2))
    assert one.passed and one.digest == other.digest
    facts = json.loads(str(one))
    assert facts["contract"] == CONTRACT and facts["passed"] and facts["failures"] == []
    assert facts["backend"]["origin"] == "moe_mk.prepare_finalize.no_ep"
    assert facts["environment"]["torch"] == torch.__version__
    assert {check["check"] for check in facts["coverage"]} >= {"1 rank, fp32 on the wire", "1 rank, bf16 on the wire"}
    digested = [check for check in facts["coverage"] if not check["check"].startswith("graph_safe")]
    assert all(len(check["digest"]) == 64 and check["cases"] >= 12 for check in digested)
    assert len(digested) == len(facts["coverage"]) - 1


@pytest.mark.slow
def test_processes_give_the_bits_of_virtual_ranks() -> None:
    (check,) = [check for check in checks_of("all_to_all", processes=True) if "processes" in check.name]
    assert check.run() >= 12


def test_experts_are_tried_in_every_format_of_their_traits() -> None:
    names = [check.name for check in checks_of("cpu_native", processes=False)]
    assert len(set(names)) == len(names) and all("bf16 out" in name for name in names)
    assert {"bf16 weights, bf16 activations, bf16 out, gelu", f"{names[0]}, batch-invariant"} <= set(names)
    assert set(names) >= {
        "bf16 weights, bf16 activations, bf16 out",
        *(f"{weights} weights, {what} activations, bf16 out"
          for weights in ("fp8_128x128", "fp8_128x128_ue8m0") for what in ("FP8", "bf16")),
    }  # fmt: skip


def test_every_built_in_backend_has_checks_or_states_why_it_cannot_run_here() -> None:
    # A backend that refuses everything the kit knows would otherwise never be tried, and this would not be reported.
    names = [(name, registry[name].traits) for registry in (PREPARE_FINALIZE, EXPERTS) for name in registry]
    here = [name for name, traits in names if "cpu" in traits.kinds or traits.library in emulated()]
    assert not [name for name in here if not checks_of(name, processes=False)]
    assert {"all_to_all", "hierarchical", "deepep_ll", "reference", "deep_gemm"} <= set(here)
    assert checks_of("hierarchical", processes=False)[0].name.startswith("4 ranks, 2 a host, ")


@pytest.mark.slow
def test_sizes_that_a_backend_refuses_are_not_what_it_is_tried_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify_checks, "FP8_BLOCKS", certify_checks.FP8_BLOCKS[:1])
    certificate = certify("deep_gemm", processes=False, quick=True)  # its library needs multiples of 128, 192 is none
    assert certificate.passed, certificate.failures
    assert "deep_gemm itself: tested on its emulation" in certificate.not_covered or "deep_gemm" in installed()


def test_a_combination_that_a_backend_refuses_is_reported_and_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    class Choosy(Right):
        @classmethod
        def reasons_against(cls, problem: Any) -> list[Any]:
            return [*super().reasons_against(problem), Reason("shape", "does not run on Sundays")]

    certificate = certify(install(monkeypatch, Choosy), processes=False)
    assert not certificate.passed and not certificate.failures and not certificate.coverage
    assert certificate.not_covered == ("fp32 weights, fp32 activations, fp32 out: does not run on Sundays",)


def test_what_is_claimed_and_not_tried_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    class Boastful(Right):
        traits = replace(Right.traits, weights=frozenset({"plain", "int3"}), kinds=UNSTATED)

    claims, devices = certify(install(monkeypatch, Boastful), processes=False, quick=True).not_covered
    assert claims == "int3 weights, which its traits claim"
    assert devices.startswith("states no kinds of device and is used on a CPU only; state them")


def test_a_backend_of_another_device_is_refused_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Right):
        traits = replace(Right.traits, kinds=frozenset({"cuda"}), library="not_there", extra="build it")

    name = install(monkeypatch, Elsewhere)
    with pytest.raises(UnsupportedError, match=r"runs on cuda.*\n.*not_there is not installed: build it"):
        certify(name)
    with pytest.raises(ConfigError, match=r"unknown transport or experts backend 'al_gather'; did you mean"):
        certify("al_gather")


# One line of a test file.


@pytest.mark.row("N5")
def test_a_conformance_class_has_one_test_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = backend_conformance("all_gather")
    tests = [name for name in vars(suite) if name.startswith("test_")]
    assert len(tests) == len(checks_of("all_gather", processes=False)) and "test_2_ranks__fp32_on_the_wire" in tests
    suite().test_2_ranks__fp32_on_the_wire()
    broken = backend_conformance(install(monkeypatch, transports.EqualWeights))
    with pytest.raises(NonConforming, match="was combined to"):
        broken().test_2_ranks__fp32_on_the_wire()


TestNoEP = backend_conformance("no_ep")


# Diagnosis, by hand: two tokens, weights 1 and 2.


@pytest.mark.parametrize(
    ("got", "law"),
    [
        ([[1.0, 0.0], [0.0, 2.0]], None),  # right
        ([[0.0, 2.0], [1.0, 0.0]], ORDER),
        ([[1.0, 0.0], [0.0, 1.0]], WEIGHTING),  # the weight of 2 was forgotten
        ([[1.0, 0.0], [0.0, 0.0]], LOST),
        ([[1.0, 0.0], [5.0, 5.0]], None),  # none of these
    ],
)
def test_the_simplest_explanation_is_found(got: list[list[float]], law: Any) -> None:
    tokens = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])]
    assert explained([torch.tensor([row]) for row in got], tokens, [torch.tensor([1.0]), torch.tensor([2.0])]) == law


def test_messages_of_the_kit_name_their_law() -> None:
    assert law_of("x, 2 ranks, bf16, even: ranks have different yield points: []").name == "yield points"
    assert law_of("x, fp32 canonical, some -1, rows: tokens [1] are up to 2e-1 away").name == "nowhere"
    assert law_of("x, fp32 canonical, even, rows: tokens [1] are up to 2e-1 away").name == "values"
    assert law_of("x, fp32 canonical, some -1, grouped: tokens [1] are up to 2e-1 away").name == "values"


# The command.


@pytest.mark.row("N6")
@pytest.mark.slow
def test_the_command_writes_a_certificate_and_compares_it(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    done = moe_mk("certify", "no_ep", "--out", first)
    assert done.exit_code == 0 and "CERTIFIED" in done.stdout and "1 rank, fp32 on the wire" in done.stdout
    done = moe_mk("certify", "no_ep", "--out", second, "--against", first, "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["differing"] == []
    facts = json.loads(first.read_text())
    facts["coverage"][0]["digest"] = "0" * 64
    first.write_text(json.dumps(facts))
    done = moe_mk("certify", "no_ep", "--out", second, "--against", first)
    assert done.exit_code == 1 and "other bits" in done.stdout and "0000000000000000 there" in done.stdout
    other_kind = '{"contract": 2, "coverage": [{"check": [1], "digest": 2}]}'
    for text in ("{}", other_kind, "[" * 100_000):
        first.write_text(text)
        assert "is no certificate" in usage_error("certify", "no_ep", "--against", first)


def test_the_command_fails_with_the_law(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = install(monkeypatch, transports.ReversesTokens)
    done = moe_mk("certify", name, "--no-processes", "--out", tmp_path / "c.json")
    assert done.exit_code == 1 and "REFUSED" in done.stdout
    assert "order: combined tokens have the order of the dispatched tokens" in done.stdout
    assert json.loads((tmp_path / "c.json").read_text())["failures"][0]["law"] == "order"


def test_a_module_of_the_working_folder_can_be_imported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = moe_mk("certify", "no_ep", "--import", "no_such_module", "--out", tmp_path / "c.json")
    assert done.exit_code == 2
    (tmp_path / "backend_of_ones_own.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    done = moe_mk("certify", "no_such_backend", "--import", "backend_of_ones_own")
    assert done.exit_code == 2 and "no_such_backend" in done.stderr and "backend_of_ones_own" in sys.modules


def test_processes_import_the_module_of_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transport_of_ones_own.py").write_text(
        "from moe_mk.prepare_finalize.all_to_all import PREPARE_FINALIZE, AllToAll\n\n"
        "@PREPARE_FINALIZE.register('ones_own')\nclass OnesOwn(AllToAll):\n    'The same under another name.'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert len(outputs_on_processes("ones_own", 2, modules=("transport_of_ones_own",))) > 2


def test_every_type_of_stored_experts_is_tried_where_the_traits_claim_it() -> None:
    names = {check.name for check in checks_of("torch_cpu", processes=False)}
    further = {"fp8_channel", "fp8_tensor", "int8_channel", "int8_128x128", "mxfp4", "mxfp8", "nvfp4"}
    assert {f"{scheme} weights, bf16 activations, bf16 out" for scheme in further} <= names
    rounded = {check.name for check in checks_of("reference", processes=False)}
    assert "int8_channel weights, int8_token activations, bf16 out" in rounded


def test_ranks_that_are_threads_wait_longer_than_a_busy_machine_keeps_one_aside() -> None:
    # With 30 s a certificate once failed by the law of yield points because a dozen other processes had the cores.
    world = world_of(PREPARE_FINALIZE["deepep_ll"].traits, 2)
    assert isinstance(world, ThreadWorld) and world.timeout_s >= 100.0


@pytest.mark.slow
def test_an_emulated_library_is_certified_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two ranks and one format are enough here; `conformance/test_transports.py` runs the others.
    monkeypatch.setattr(certify_checks, "RANKS", (2,))
    monkeypatch.setattr(certify_checks, "WIRES", {"plain": certify_checks.WIRES["plain"]})
    certificate = certify("deepep_ll", processes=False, quick=True)
    assert certificate.passed, certificate.failures
    assert "2 ranks, bf16 on the wire" in {one.check for one in certificate.coverage}
    assert any(line.startswith("2 ranks, fp32 on the wire: ") for line in certificate.not_covered)
    if "deep_ep" not in installed():
        assert "deep_ep itself: tested on its emulation" in certificate.not_covered
