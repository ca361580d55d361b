"""The engine of the oracles: pure, complete in its reasons, obedient to pins, ready for JSON."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_mk import ConfigError, Problem, UnsupportedError, oracle
from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.config import KernelConfig, ModelConfig, device_profile
from moe_mk.experts import EXPERTS
from moe_mk.experts.monolithic import MonolithicKernel
from moe_mk.experts.reference import ReferenceExperts, ReferenceMonolithic
from moe_mk.kernel import FusedMoEKernel
from moe_mk.oracle import Parts, fp8, unquantized
from moe_mk.oracle.cost import expert_bytes, experts_us, transport_us
from moe_mk.oracle.decide import libraries_of
from moe_mk.oracle.memory import Buffers
from moe_mk.oracle.verdict import OTHER_DEVICE
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.prepare_finalize.all_to_all import AllToAll
from moe_mk.quant.plain import BF16, FP16, FP32, Plain
from moe_mk.quant.wire import row_bytes
from tests.support.problems import problem


@pytest.mark.parametrize("dtype,settings", [(BF16, {}), (FP16, {"tp": 2}), (BF16, {"invariant": True})], ids=str)
@pytest.mark.parametrize("device,ep", [("cpu", 1), ("cpu", 4), ("h200", 1), ("h200", 8)])
def test_a_decision_states_what_both_of_its_pair_state(
    device: str, ep: int, dtype: Plain, settings: dict[str, Any]
) -> None:
    """Its figures are recomputed from rows as they are sent: with one choice each if the layer is invariant."""
    installed = libraries_of(device_profile(device))
    asked = problem("deepseek_v3", device, 16, dtype=dtype, ep=ep, max_num_tokens=64, installed=installed, **settings)
    pairs = [v.pair for v in oracle.select(asked).verdicts if v.cost_us is not None and v.experts in EXPERTS]
    of_transport, of_experts = {pair[0]: pair for pair in pairs}, {pair[1]: pair for pair in pairs}
    sums = 4 if dtype is FP16 else 2
    for name, experts in dict.fromkeys((*of_transport.values(), *of_experts.values())):
        decision = oracle.select(replace(asked, config=asked.config.with_(prepare_finalize=name, experts=experts)))
        assert decision.chosen.pair == (name, experts)
        transport, wire, made = PREPARE_FINALIZE[name], decision.wire, decision.problem
        both = transport.traits, EXPERTS[experts].traits
        assert decision.graph_safe == all(each.graph_safe for each in both)
        assert decision.deterministic == all(each.deterministic for each in both)
        assert decision.budget == transport.budget(made)
        volume, choices = transport.volume(made.as_sent), 1 if settings.get("invariant") else 8
        assert decision.dispatch_bytes == round(volume.dispatch_rows * (row_bytes(wire, 7168) + 8 * choices))
        assert decision.combine_bytes == round(volume.combine_rows * 7168 * sums)
        for tokens, held in ((64, decision.buffers), (16, decision.least_buffers)):
            limited = replace(made, config=made.config.with_(max_num_tokens=tokens), num_tokens=tokens).as_sent
            rows = transport.max_rows(limited)
            of_rows = rows * (2 * row_bytes(wire, 7168) + 7168 * (4 + sums))
            assert held == Buffers(
                of_rows, EXPERTS[experts].workspace_bytes(limited, rows), transport.buffer_bytes(limited)
            )
        spent = experts_us(made, both[1], fp8_math=decision.compute.block is not None)
        spent += transport_us(made.as_sent, volume, wire)
        assert decision.chosen.cost_us == pytest.approx(spent) or decision.chosen.cost_source == "measured"


def test_one_pair_can_have_three_reasons_and_all_are_reported() -> None:
    asked = problem(device="h200", ep=8, prepare_finalize="no_ep", experts="cpu_native", graphs=True)
    with pytest.raises(UnsupportedError) as refused:
        oracle.select(asked)
    (line,) = refused.value.reasons
    assert "no_ep + cpu_native" in line
    for reason in (
        "serves 1 rank, the group has 8",
        "runs on cpu, this device is cuda",
        "c++ is not installed",
        "cannot be captured in a CUDA graph [kernel.graphs = false]",
    ):
        assert reason in line
    assert "no pair that is pinned (kernel.prepare_finalize = no_ep, kernel.experts = cpu_native)" in str(refused.value)


def test_a_pin_skips_ranking_but_no_reason() -> None:
    free, pinned = (oracle.select(problem(ep=4, experts=name)) for name in ("auto", "reference"))
    assert free.chosen.experts == "torch_cpu" and pinned.chosen.experts == "reference"
    reasons = [{v.name: v.reasons for v in decision.verdicts} for decision in (free, pinned)]
    assert reasons[0] == reasons[1]
    assert "pinned by kernel.experts = reference" in pinned.because
    with pytest.raises(UnsupportedError, match=r"(?s)any \+ torch_cpu.*runs on cpu.*replicated \+ torch_cpu"):
        oracle.select(problem(device="h200", ep=4, experts="torch_cpu"))


@pytest.mark.parametrize(
    "pins,message",
    [
        ({"experts": "torch_gpu"}, r"no experts backend is called 'torch_gpu'; did you mean 'torch_cpu'\?"),
        (
            {"prepare_finalize": "all2all"},
            r"no prepare_finalize backend is called 'all2all'; did you mean 'all_to_all'",
        ),
    ],
)
def test_an_unknown_pin_is_answered_with_what_was_meant(pins: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        oracle.select(problem(**pins))


@pytest.mark.parametrize("pins", [("inside", "reference"), ("all_to_all", "reference_monolithic")])
def test_pins_that_make_no_pair_are_reported_so(pins: tuple[str, str]) -> None:
    with pytest.raises(UnsupportedError, match=r"no such pair is registered: reference_monolithic route internally"):
        oracle.select(problem(ep=4, prepare_finalize=pins[0], experts=pins[1]))


def test_the_oracle_of_another_format_states_what_it_serves() -> None:
    with pytest.raises(ConfigError, match=r"oracle 'unquantized' serves bf16, fp16, fp32; .* 'fp8_block'"):
        unquantized.select_unquantized_moe_backend(problem())
    with pytest.raises(
        ConfigError, match=r"oracle 'fp8' serves fp8_block, fp8_channel, fp8_tensor; these experts are 'bf16'"
    ):
        fp8.select_fp8_moe_backend(problem("mixtral_8x7b"))


def test_a_decision_is_a_function_of_its_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem(device="h200", num_tokens=128, ep=32)
    first = oracle.select(asked)
    assert not dist.is_initialized()
    with monkeypatch.context() as patched:  # ends before pytest reads the environment to report a failure
        patched.setattr(os, "environ", None)
        patched.setattr(torch, "cuda", None)
        patched.setattr(dist, "get_rank", None)
        second = oracle.select(asked)
    assert second == first and str(second) == str(first)
    assert json.dumps(second.as_dict(), sort_keys=True) == json.dumps(first.as_dict(), sort_keys=True)


def test_libraries_of_a_device_are_those_of_backends_that_run_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (AllToAll, ReferenceExperts, ReferenceMonolithic):
        monkeypatch.setattr(backend, "traits", replace(backend.traits, library=backend.__name__))
    for device in ("cpu", "h100", "mi300x"):
        assert oracle.libraries_of(device_profile(device)) >= {"AllToAll", "ReferenceExperts", "ReferenceMonolithic"}
    monkeypatch.undo()
    found = {name: oracle.libraries_of(device_profile(name)) for name in ("cpu", "h100", "mi300x")}
    older = oracle.libraries_of(device_profile("h100").model_copy(update={"arch": (8, 0)}))
    assert found["cpu"] == {"c++"} and {"uccl", "triton"} <= older < found["h100"] >= {"deep_ep", "flashinfer"}
    assert "deep_ep" not in older | found["mi300x"]


def test_ranks_compare_whatever_changes_their_numbers_or_their_messages() -> None:
    def notes(asked: Problem) -> Mapping[str, str]:
        return oracle.select(asked).notes()

    pins = {"ep": 4, "prepare_finalize": "all_to_all", "experts": "reference"}
    first = notes(problem(**pins))
    for changed, names in (
        ({}, set()), ({"tiles": 2}, {"tiles"}), ({"max_num_tokens": 64}, {"max_num_tokens"}),
        ({"relay_tokens": 64}, {"relay_tokens"}), ({"routed_scaling_factor": 2.0}, {"router"}),
        ({"top_k": 4}, {"router"}), ({"on_lost_expert": "drop"}, {"parallel"}), ({"tp": 2}, {"parallel"}),
        ({"swiglu_limit": 7.0, "activation": "swiglu_limit"}, {"model"}), ({"ranks_per_node": 2}, {"parallel"}),
        ({"moe_intermediate_size": 1024}, {"model"}), ({"prepare_finalize": "all_gather"}, {"prepare_finalize"}),
        ({"experts": "torch_cpu"}, {"experts", "compute", "wire"}), ({"timeout_s": 7.0}, set()),
    ):  # fmt: skip
        second = notes(problem(**(pins | changed)))
        assert {name for name in first if first[name] != second[name]} == names, changed
    half = problem(dtype=FP16, **pins)
    assert {name for name in first if first[name] != notes(half)[name]} >= {"dtype"}


@pytest.mark.parametrize("wire", ["auto", "plain", "fp8", "checkpoint"])
@pytest.mark.parametrize("activations", ["plain", "checkpoint"])
def test_rows_are_rounded_before_they_are_sent_where_the_experts_or_the_settings_ask(
    wire: str, activations: str
) -> None:
    pins = {"ep": 4, "prepare_finalize": "all_to_all", "experts": "reference"}
    decision = oracle.select(problem(wire=wire, activations=activations, **pins))
    rounds = wire in ("fp8", "checkpoint") or (wire == "auto" and activations == "checkpoint")
    assert (decision.wire, decision.compute) == tuple(
        decision.problem.activations if each else decision.problem.dtype for each in (rounds, activations != "plain")
    )


@pytest.mark.parametrize("settings", [{}, {"ep": 4}, {"ep": 4, "tokens": "replicated"}, {"experts": "reference"}])
def test_a_decision_goes_to_json_and_back(settings: dict[str, Any]) -> None:
    reported = oracle.select(problem(**settings)).as_dict()
    assert json.loads(json.dumps(reported)) == reported
    assert reported["verdicts"][0] == reported["chosen"] and reported["chosen"]["chosen"]
    assert [v["chosen"] for v in reported["verdicts"]].count(True) == 1
    for verdict in reported["verdicts"]:
        assert all(set(reason) == {"code", "text", "fix"} and reason["text"] for reason in verdict["reasons"])
    assert len(reported["verdicts"]) == len(PREPARE_FINALIZE.items()) * len(EXPERTS.items()) + 1


@pytest.mark.row(88, "N1")
def test_a_printed_decision_has_every_pair_that_serves_and_every_reason_against_the_others() -> None:
    decision = oracle.select(problem(device="h200", ep=8))
    lines = decision.text().splitlines()
    refused = [line for line in lines if line.startswith("  refused  ")]
    for verdict in decision.verdicts:
        elsewhere = [reason for reason in verdict.reasons if reason.code in OTHER_DEVICE]
        for reason in elsewhere or verdict.reasons:
            assert any(reason.text in line and any(name in line for name in verdict.pair) for line in refused)
    assert refused[-1].startswith("  refused  for other devices: ") and "cpu_native" in refused[-1]
    assert not any("cpu_native" in line for line in refused[:-1]) and len(refused) == len(set(refused))
    able = [verdict for verdict in decision.verdicts if not verdict.reasons]
    assert sum(" us  model" in line for line in lines) == len(able)
    assert lines[0] == f"{decision.chosen.name}: lowest cost of {len(able)} eligible pairs"
    assert max(map(len, str(decision).splitlines())) <= 140 and str(decision).split() == decision.text().split()


# kernel.activations, kernel.wire -> (wire, compute) of the reference behind a transport that carries FP8.
WIRES = [
    ("auto", "auto", "fp8_1x128", "fp8_1x128"),  # the experts read FP8 and it can travel: rounded before sending
    ("checkpoint", "auto", "fp8_1x128", "fp8_1x128"),
    ("plain", "auto", "bf16", "bf16"),  # plain experts: a plain wire
    ("auto", "plain", "bf16", "fp8_1x128"),  # a pinned plain wire: rounded on arrival, and only there
    ("plain", "fp8", "fp8_1x128", "bf16"),  # a pinned FP8 wire: decoded on arrival
    ("auto", "fp8", "fp8_1x128", "fp8_1x128"),
]


@pytest.mark.row(100)
@pytest.mark.parametrize("activations,wire,travels,computes", WIRES)
@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
def test_who_quantises_follows_from_experts_transport_and_pin(
    transport: str, activations: str, wire: str, travels: str, computes: str
) -> None:
    asked = problem(ep=4, experts="reference", prepare_finalize=transport, activations=activations, wire=wire)
    decision = oracle.select(asked)
    assert (decision.wire.name, decision.compute.name) == (travels, computes)


def test_a_transport_that_cannot_carry_fp8_leaves_rounding_to_the_experts() -> None:
    decision = oracle.select(problem(ep=4, tokens="replicated", experts="reference"))
    assert (decision.wire.name, decision.compute.name) == ("bf16", "fp8_1x128")


def test_an_fp8_wire_for_experts_without_fp8_is_refused_and_not_forgotten() -> None:
    with pytest.raises(UnsupportedError, match=r"\(bf16 experts\) defines no FP8 .*kernel\.wire = auto"):
        oracle.select(problem("mixtral_8x7b", ep=2, wire="fp8"))


def test_memory_is_refused_with_both_numbers_and_the_way_out() -> None:
    # 256 experts of 3 * 7168 * 2048 B and scales are 10.5 GiB; an H100 has 80.
    asked = problem(device="h100", num_tokens=8192, ep=144, max_num_tokens=8192)
    with pytest.raises(
        UnsupportedError, match=r"GB of weights and buffers exceed the device's 85.9 GB \[use fewer tokens a call, or"
    ):
        oracle.select(asked)
    with pytest.raises(UnsupportedError, match=r"exceed the device's 85.9 GB \[use more ranks\]"):
        oracle.select(problem("kimi_k2", device="h100", num_tokens=1, max_num_tokens=1, placement=[*range(384)] * 10))
    small = problem(device="h100", num_tokens=128)
    assert expert_bytes(small) == 3 * (7168 * 2048 + 56 * 16 * 4)
    assert oracle.select(small).weights_bytes == 256 * expert_bytes(small)


STATED = {
    "relay_tokens": 3, "max_num_tokens": 40, "comm_units": 2, "network": "10.0.0.0/8", "allow_emulated": True,
    "instruction_set": "scalar", "cache_dir": Path("/cache"), "tuned_dir": Path("/tuned"), "timeout_s": 7.0,
    "batch_invariant": True,
}  # fmt: skip


@pytest.mark.row(89)
@pytest.mark.parametrize("invariant", [False, True])
def test_what_is_built_is_what_was_decided(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings reach the contexts that have them; limits are those of rows as they are sent."""
    monkeypatch.setattr(ReferenceExperts, "traits", replace(ReferenceExperts.traits, batch_invariant=True))
    monkeypatch.setattr(AllToAll, "traits", replace(AllToAll.traits, comm_unit="threads"))
    pins, comm = {"prepare_finalize": "all_to_all", "experts": "reference"}, LockstepWorld(4).communicators()[1]
    asked = problem("tiny", num_tokens=16, ep=4, invariant=invariant, **pins, **STATED)
    decision = oracle.select(asked)
    made = oracle.assemble(decision, Parts(ExpertMap.linear(16, 4), torch.device("cpu"), comm))
    assert isinstance(made, FusedMoEKernel)
    assert (type(made.prepare_finalize), type(made.experts)) == (AllToAll, ReferenceExperts)
    contexts, top_k = {**vars(made.experts.context), **vars(made.prepare_finalize.context)}, asked.config.router.top_k
    for name, value in STATED.items():
        scaled = invariant and isinstance(value, int) and name.endswith("_tokens")
        assert contexts[name] == (top_k * value if scaled else value), name  # type: ignore[operator]
    assert contexts.keys() & KernelConfig.model_fields.keys() - STATED.keys() == {"network_link", "residency", "wire"}
    for name in contexts.keys() & ModelConfig.model_fields.keys():
        assert contexts[name] == getattr(asked.config.model, name), name
    assert (contexts["top_k"], contexts["num_slots"], contexts["comm"]) == (1 if invariant else top_k, 4, comm)
    assert (contexts["wire"], contexts["compute"]) == (decision.wire, decision.compute)


def test_a_monolithic_kernel_is_built_as_decided() -> None:
    decision = oracle.select(problem("tiny", "cpu", 16, dtype=FP32, ep=4, prepare_finalize="inside"))
    comm = LockstepWorld(4).communicators()[1]
    kernel = oracle.assemble(decision, Parts(ExpertMap.linear(16, 4), torch.device("cpu"), comm))
    assert isinstance(kernel, MonolithicKernel) and kernel.gathers
    assert decision.chosen.name == "inside + reference_monolithic"
    assert kernel.experts.context.experts.num_slots == 4


@pytest.mark.row(81)
def test_every_pair_has_a_verdict_and_every_refusal_a_reason() -> None:
    pairs = {f"{t} + {e}" for t in PREPARE_FINALIZE for e in EXPERTS}
    for ep in (1, 4):
        verdicts: Mapping[str, Any] = {v.name: v for v in oracle.select(problem("mixtral_8x7b", ep=ep)).verdicts}
        assert set(verdicts) == pairs | {"inside + reference_monolithic"}
        assert all((v.cost_us is None) == bool(v.reasons) for v in verdicts.values())
        times = [v.cost_us for v in verdicts.values() if v.cost_us is not None]
        assert times == sorted(times) and len(times) > 2, "the cheapest first"


def test_a_reference_on_a_gpu_is_warned_of_with_backends_that_lack_a_library_and_nothing_else() -> None:
    asked, backends = problem(device="h200"), [each for each in EXPERTS if not EXPERTS.is_foreign(each)]
    (warning,) = oracle.select(asked).warnings
    complete = replace(asked, installed=libraries_of(asked.device))
    near = [name for name in backends if EXPERTS[name].traits.library and not EXPERTS[name].reasons_against(complete)]
    assert [name for name in backends if f" {name} [" in warning] == near != []
    assert not oracle.select(problem()).warnings and not oracle.select(complete).warnings


def test_native_experts_round_tokens_to_fp8_with_the_scales_of_the_checkpoint() -> None:
    for scale, compute in (("float32", "fp8_1x128"), ("ue8m0", "fp8_1x128_ue8m0")):
        quant = {"weights": "fp8_block", "scale": scale}
        asked = problem(installed=["c++"], quant=quant, activations="checkpoint", experts="cpu_native")
        assert oracle.select(asked).compute.name == compute
    asked = problem(quant={"weights": "fp8_channel"}, activations="checkpoint")
    reported = [reason.text for reason in EXPERTS["cpu_native"].reasons_against(asked) if reason.code == "activations"]
    assert reported == ["rounds tokens to FP8 with a scale for 128 values only, not to fp8_token"]


def test_a_sum_over_all_ranks_at_once_is_not_invariant() -> None:
    pinned: dict[str, Any] = {"tokens": "replicated", "experts": "reference", "prepare_finalize": "replicated"}
    assert oracle.select(problem(ep=4, **pinned)).chosen.prepare_finalize == "replicated"
    with pytest.raises(UnsupportedError, match=r"adds the parts of all ranks in one all-reduce .kernel.invariant = f"):
        oracle.select(problem(ep=4, invariant=True, **pinned))
