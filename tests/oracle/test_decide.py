"""The engine of the oracles: pure, complete in its reasons, obedient to pins, ready for JSON."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_mk import ConfigError, Problem, UnsupportedError, oracle
from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.config import device_profile
from moe_mk.experts import EXPERTS
from moe_mk.experts.monolithic import MonolithicKernel
from moe_mk.oracle import Parts, fp8, unquantized
from moe_mk.oracle.cost import dispatch_bytes, expert_bytes
from moe_mk.oracle.decide import libraries_of
from moe_mk.oracle.verdict import OTHER_DEVICE
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, Volume
from moe_mk.quant.fp8 import FP8_1x128
from moe_mk.quant.plain import FP16, FP32
from tests.support.problems import problem


@pytest.mark.parametrize("device,ep", [("cpu", 1), ("cpu", 4), ("h200", 1), ("h200", 8)])
def test_a_decision_states_what_both_of_its_pair_state(device: str, ep: int) -> None:
    installed = libraries_of(device_profile(device))
    asked = problem(device=device, ep=ep, num_tokens=16, max_num_tokens=16, installed=installed)
    pairs = [v.pair for v in oracle.select(asked).verdicts if v.cost_us is not None and v.experts in EXPERTS]
    of_transport, of_experts = {pair[0]: pair for pair in pairs}, {pair[1]: pair for pair in pairs}
    seen = set()
    for transport, experts in dict.fromkeys((*of_transport.values(), *of_experts.values())):
        pinned = asked.config.with_(prepare_finalize=transport, experts=experts)
        decision = oracle.select(replace(asked, config=pinned))
        assert decision.chosen.pair == (transport, experts)
        both = PREPARE_FINALIZE[transport].traits, EXPERTS[experts].traits
        assert decision.graph_safe == all(each.graph_safe for each in both)
        assert decision.deterministic == all(each.deterministic for each in both)
        assert decision.budget == PREPARE_FINALIZE[transport].budget(decision.problem)
        seen.add((tuple(each.graph_safe for each in both), tuple(each.deterministic for each in both)))
    assert len(seen) > 1 or ep == 1 or device == "cpu"


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 4}, {"routed_scaling_factor": 2.0}, {"swiglu_limit": 7.0, "activation": "swiglu_limit"}, {"tp": 2},
        {"ranks_per_node": 2}, {"on_lost_expert": "drop"}, {"max_num_tokens": 99}, {"hidden_size": 7296},
    ],
    ids=str,
)  # fmt: skip
def test_ranks_of_other_settings_have_other_notes(change: dict[str, Any]) -> None:
    asked = problem(ep=4, num_tokens=16, prepare_finalize="all_to_all", experts="reference")
    other = replace(asked, config=asked.config.with_(**change))
    one, two = (oracle.select(each).notes() for each in (asked, other))
    assert one.keys() == two.keys() and one != two


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


def test_both_oracles_are_called_by_their_known_names() -> None:
    assert fp8.select_fp8_moe_backend(problem()) == oracle.select(problem())
    plain = problem("mixtral_8x7b")
    assert unquantized.select_unquantized_moe_backend(plain) == oracle.select(plain)


class Trapped(dict[str, str]):
    def __getitem__(self, key: str) -> str:
        raise AssertionError(f"{key} was read")

    def get(self, key: str, default: Any = None) -> Any:
        raise AssertionError(f"{key} was read")

    def __contains__(self, key: object) -> bool:
        raise AssertionError(f"{key} was looked for")


def test_a_decision_is_a_function_of_its_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem(device="h200", num_tokens=128, ep=32)
    first = oracle.select(asked)
    assert not dist.is_initialized()
    with monkeypatch.context() as patched:  # ends before pytest reads the environment to report a failure
        patched.setattr(os, "environ", Trapped())
        patched.setattr(torch, "cuda", None)
        patched.setattr(dist, "get_rank", None)
        second = oracle.select(asked)
    assert second == first and str(second) == str(first)
    assert json.dumps(second.as_dict(), sort_keys=True) == json.dumps(first.as_dict(), sort_keys=True)


def test_libraries_of_a_device_are_those_of_backends_that_run_on_it() -> None:
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
        ({"relay_tokens": 64}, {"relay_tokens"}), ({"top_k": 4}, {"router"}),
        ({"on_lost_expert": "drop"}, {"parallel"}),
        ({"moe_intermediate_size": 1024}, {"model"}), ({"prepare_finalize": "all_gather"}, {"prepare_finalize"}),
        ({"experts": "torch_cpu"}, {"experts", "compute", "wire"}), ({"timeout_s": 7.0}, set()),
    ):  # fmt: skip
        second = notes(problem(**(pins | changed)))
        assert {name for name in first if first[name] != second[name]} == names, changed
    half = problem(dtype=FP16, **pins)
    assert {name for name in first if first[name] != notes(half)[name]} >= {"dtype"}


@pytest.mark.parametrize("settings", [{}, {"ep": 4}, {"ep": 4, "tokens": "replicated"}, {"experts": "reference"}])
def test_a_decision_goes_to_json_and_back(settings: dict[str, Any]) -> None:
    reported = oracle.select(problem(**settings)).as_dict()
    assert json.loads(json.dumps(reported)) == reported
    assert reported["verdicts"][0] == reported["chosen"] and reported["chosen"]["chosen"]
    assert [v["chosen"] for v in reported["verdicts"]].count(True) == 1
    for verdict in reported["verdicts"]:
        assert (verdict["cost_us"] is None) == bool(verdict["reasons"])
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
    volume = PREPARE_FINALIZE[transport].volume(asked)
    row = {"fp8_1x128": 7392, "bf16": 14336}[travels] + 8 * 8
    assert decision.dispatch_bytes == round(volume.dispatch_rows * row)
    assert dispatch_bytes(asked, Volume(10, 0, 0), FP8_1x128) == 10 * (7392 + 64)


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


def test_memory_is_one_reason_among_others() -> None:
    asked = problem(device="h100", num_tokens=8192, ep=144, prepare_finalize="all_gather", experts="torch_cpu")
    with pytest.raises(
        UnsupportedError, match=r"runs on cpu, this device is cuda; .* GB of weights and buffers exceed"
    ):
        oracle.select(asked)


@pytest.mark.row(89)
@pytest.mark.parametrize("pins", [("all_to_all", "reference"), ("all_gather", "torch_cpu"), ("inside", "auto")])
def test_what_is_built_is_what_was_decided(pins: tuple[str, str]) -> None:
    asked = problem("tiny", "cpu", 16, dtype=FP32, ep=4, prepare_finalize=pins[0], experts=pins[1])
    decision = oracle.select(asked)
    comm = LockstepWorld(4).communicators()[1]
    kernel = oracle.assemble(decision, Parts(ExpertMap.linear(16, 4), torch.device("cpu"), comm))
    if isinstance(kernel, MonolithicKernel):
        assert decision.chosen.name == "inside + reference_monolithic" and kernel.gathers
        assert kernel.experts.context.experts.num_slots == 4
        return
    assert type(kernel.prepare_finalize) is PREPARE_FINALIZE[decision.chosen.prepare_finalize]
    assert type(kernel.experts) is EXPERTS[decision.chosen.experts]
    assert kernel.prepare_finalize.context.wire == decision.wire
    assert kernel.experts.context.compute == decision.compute
    assert kernel.experts.context.num_slots == 4 and kernel.prepare_finalize.context.comm is comm


@pytest.mark.row(81)
def test_every_pair_has_a_verdict_and_every_refusal_a_reason() -> None:
    pairs = {f"{t} + {e}" for t in PREPARE_FINALIZE for e in EXPERTS}
    for ep in (1, 4):
        verdicts: Mapping[str, Any] = {v.name: v for v in oracle.select(problem("mixtral_8x7b", ep=ep)).verdicts}
        assert set(verdicts) == pairs | {"inside + reference_monolithic"}
        assert all((v.cost_us is None) == bool(v.reasons) for v in verdicts.values())
        times = [v.cost_us for v in verdicts.values() if v.cost_us is not None]
        assert times == sorted(times) and len(times) > 2, "the cheapest first"


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
