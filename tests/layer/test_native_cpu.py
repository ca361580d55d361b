"""The layer on native CPU kernels: routed, multiplied and added up in one native call, when it is taken, its traces."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from moe_mk import DeepseekV3MoE, MoEConfig, MoELayer
from moe_mk.errors import CommError, ShapeError
from moe_mk.experts.base import EXPERTS as EXPERTS_BACKENDS
from moe_mk.experts.cpu_native import experts as cpu_native_experts
from moe_mk.experts.cpu_native.experts import CpuNativeExperts
from moe_mk.experts.cpu_native.weights import PackedExpertWeights, native_kernels
from moe_mk.flight import wait
from moe_mk.kernels.native.instruction_set import Rates, choice
from moe_mk.kernels.native.layout import Format
from moe_mk.kernels.native.library import Isa
from moe_mk.lab.checkpoints import write_checkpoint
from moe_mk.lab.testing.transports import run_together, virtual_groups
from moe_mk.layer.experts_of_rank import inherited
from moe_mk.layer.hot_swap import swap_backends
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE
from moe_mk.router.replay import CapturedIds, RoutingCapture, recorded_ids
from moe_mk.runner.overlap import run_dual
from moe_mk.tokens import Routing
from moe_mk.trace.recorder import Recorder
from tests.layer.native import EXPERTS, HIDDEN, NEEDS_COMPILER, SHAPE, built, written

pytestmark = NEEDS_COMPILER


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("native"))


@pytest.fixture
def layer(checkpoint: Path) -> MoELayer:
    return built(checkpoint)


def tokens(count: int, seed: int = 3) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


def whole(layer: MoELayer) -> bool:
    return getattr(layer.prepare().call_for(tokens(2), layer.expert_load, None), "routes", False)


@pytest.mark.row(6, 65)
@pytest.mark.parametrize("count", [0, 1, 5, 64])
def test_it_leaves_what_the_stages_leave(layer: MoELayer, count: int) -> None:
    x_TH = tokens(count)
    y_TH, load_E, report = layer(x_TH), layer.expert_load.clone(), layer.report()
    layer.reset_expert_load()
    layer.reset_report()
    assert whole(layer) and torch.equal(wait(layer.steps(x_TH)), y_TH)
    assert torch.equal(layer.expert_load, load_E) and int(load_E.sum()) == 4 * count
    assert layer.report() == report and not report.departures and report.num_calls == 1


@pytest.mark.parametrize("settings", [{"batch_invariant": True}, {"activations": "checkpoint"}])
def test_settings_of_the_experts_are_heeded(checkpoint: Path, settings: dict[str, object]) -> None:
    layer = built(checkpoint, **settings)
    assert whole(layer) and torch.equal(layer(tokens(9)), wait(layer.steps(tokens(9))))


def test_a_recorder_gets_every_stage(layer: MoELayer) -> None:
    x_TH = tokens(6)
    wanted_TH = layer(x_TH)
    layer.spans.recorder = Recorder()
    assert torch.equal(layer(x_TH), wanted_TH)
    assert {span.stage for span in layer.spans.recorder.spans} >= {"route", "permute", "experts", "reduce"}


def test_another_router_gate_or_placement_serves_from_the_next_forward_on(layer: MoELayer) -> None:
    x_TH = tokens(7)
    first_TH = layer(x_TH)
    layer.router = replace(layer.router, routed_scaling_factor=1.0)
    assert not torch.equal(layer(x_TH), first_TH) and torch.equal(layer(x_TH), wait(layer.steps(x_TH)))
    gate_EH = layer.state.backends.gate.weight_EH
    assert gate_EH is not None
    layer.state.backends.gate.load(gate_EH.flip(0).contiguous(), layer.state.backends.gate.bias_E)
    assert torch.equal(layer(x_TH), wait(layer.steps(x_TH)))
    shared, slot = layer.state.backends.shared, layer.weights.shared
    assert shared is not None and slot is not None and slot.gate_IH is not None
    shared.load(replace(slot, gate_IH=slot.up_IH, up_IH=slot.gate_IH))
    assert torch.equal(layer(x_TH), wait(layer.steps(x_TH)))
    before_TH = layer(x_TH)
    layer.live.set_placement(ExpertMap.from_physical(list(reversed(range(EXPERTS))), 1, EXPERTS))
    assert whole(layer) and torch.equal(layer(x_TH), wait(layer.steps(x_TH)))
    # Sums go through experts in the order of their slots, so another placement rounds otherwise, and no more.
    torch.testing.assert_close(layer(x_TH).float(), before_TH.float(), rtol=2**-6, atol=2**-6 * before_TH.abs().max())


def test_stages_run_one_by_one_where_something_lies_between_them(checkpoint: Path, layer: MoELayer) -> None:
    assert not whole(built(checkpoint, experts="torch_cpu"))
    assert not whole(built(checkpoint, fused_router=False))
    assert not whole(built(checkpoint, tiles=2))
    layer.router = replace(layer.router, simulate="balanced")
    assert not whole(layer)
    layers = [DeepseekV3MoE(layer.config, groups=g).load_from_safetensors(checkpoint, 3) for g in virtual_groups(2, 1)]
    assert not any(whole(rank) or "experts fused" in repr(rank) for rank in layers)
    wanted_TH = built(checkpoint)(tokens(6))
    for y_TH in run_together(layers, [tokens(6), tokens(6)]):
        torch.testing.assert_close(y_TH.float(), wanted_TH.float(), rtol=2**-6, atol=0.05)


class DerivedExperts(CpuNativeExperts):
    """Inherits the native call, which does not call its `run`."""


def test_a_derived_class_runs_by_stages_and_explain_names_it(layer: MoELayer) -> None:
    text, kernel = "native call: DerivedExperts inherits fuse_layer of CpuNativeExperts", layer.kernel
    assert "without a native call" not in str(layer.explain())
    backends, shared = layer.state.backends, copy.copy(layer.state.backends.shared)
    assert shared is not None
    shared.experts = DerivedExperts(shared.experts.context)
    layer.use(replace(layer.state, backends=replace(backends, shared=shared)))
    assert text in layer.explain().text()
    derived = replace(kernel, experts=DerivedExperts(kernel.experts.context))  # type: ignore[type-var]
    layer.use(replace(layer.state, backends=backends, experts=replace(layer.state.experts, kernel=derived)))
    assert not whole(layer) and text in layer.explain().text() and text[13:] in str(layer.explain().as_dict())


@pytest.mark.parametrize("registry", [EXPERTS_BACKENDS, PREPARE_FINALIZE], ids=["experts", "prepare_finalize"])
def test_no_backend_of_the_library_inherits_a_native_call(registry: Any) -> None:
    assert not inherited(*(registry[name] for name in registry))


def test_experts_with_replicas_are_chosen_among_first(layer: MoELayer) -> None:
    rows: Any = layer.kernel.experts
    rows, twice = rows.fuse_layer(layer.state.experts.weights, 4), ExpertMap(((0, 1), (1, 2)), 3).tables(layer.device)
    for gating in (None, layer.state.backends.gate.gating(layer.router)):
        assert rows.alone(None, gating, twice, None) is None
        assert rows.alone(None, gating, layer.state.tables, None).routes == (gating is not None)


def test_what_is_refused_counts_for_nobody(layer: MoELayer) -> None:
    for wrong in (tokens(65), tokens(2).float(), tokens(2)[:, :128], tokens(2)[0]):
        with pytest.raises(ShapeError, match="hidden_states"):
            layer(wrong)
    assert not layer.expert_load.any() and not layer.report().stages
    strided_TH = torch.cat((tokens(3), tokens(3)), 1)[:, HIDDEN:]
    assert torch.equal(layer(strided_TH), layer(tokens(3)))
    prepared, load_E = layer._prepared, layer.expert_load
    assert prepared is not None and prepared.call_for(tokens(3), load_E, None) is not None
    assert layer(tokens(2)) is not None and layer._prepared is prepared, "made once"
    for x_TH, counted in ((strided_TH, load_E), (tokens(3), load_E.int()), (tokens(3), load_E[:-1])):
        assert prepared.call_for(x_TH, counted, None) is None


def test_two_micro_batches_and_two_threads_at_once(layer: MoELayer) -> None:
    halves = tokens(4), tokens(9, seed=5)
    alone = [layer(x_TH) for x_TH in halves]
    for got, wanted in zip(run_dual([layer.steps(x_TH) for x_TH in halves]), alone, strict=True):
        assert torch.equal(got, wanted)
    layer.reset_expert_load()
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            if not torch.equal(layer(halves[i]), alone[i]):
                wrong.append(i)

    with ThreadPoolExecutor(2) as callers:
        list(callers.map(work, range(2)))  # raises what they raise
    assert wrong == [] and int(layer.expert_load.sum()) == 20 * 4 * 13


def test_a_counter_that_no_pointer_may_write_to_is_counted_or_refused_by_the_stages(layer: MoELayer) -> None:
    x_TH = tokens(8)
    wanted_TH, load_E = layer(x_TH), layer.expert_load.clone()
    layer.expert_load = torch.zeros(EXPERTS, 3, dtype=torch.int64, device="cpu")[:, 1]
    assert torch.equal(layer(x_TH), wanted_TH) and torch.equal(layer.expert_load, load_E)
    for wrong in (torch.zeros(EXPERTS, dtype=torch.int32, device="cpu"), load_E[:2], load_E[:1].expand(EXPERTS)):
        layer.expert_load = wrong
        before = wrong.clone()
        with pytest.raises((RuntimeError, IndexError), match=r"index_add_|out of range|memory location"):
            layer(x_TH)
        assert torch.equal(wrong, before)
    layer.expert_load = torch.zeros_like(load_E)
    assert torch.equal(layer(x_TH), wanted_TH) and torch.equal(layer.expert_load, load_E)


def test_a_gate_whose_memory_moves_is_read_where_it_lies_then(layer: MoELayer) -> None:
    x_TH, gate = tokens(8), layer.state.backends.gate
    wanted_TH = layer(x_TH)
    assert whole(layer) and gate.weight_EH is not None and gate.bias_E is not None
    for each in (gate.weight_EH, gate.bias_E):
        before = each.data_ptr()
        each.share_memory_()
        assert each.data_ptr() != before and torch.equal(layer(x_TH), wanted_TH)
    gate.weight_EH.data = gate.weight_EH.flip(0).contiguous()
    assert whole(layer) and torch.equal(layer(x_TH), wait(layer.steps(x_TH)))
    gate.bias_E.zero_()
    assert whole(layer) and torch.equal(layer(x_TH), wait(layer.steps(x_TH)))


@pytest.mark.parametrize("part", ["weight_EH", "bias_E"])
def test_a_gate_that_is_not_dense_chooses_as_its_dense_copy(layer: MoELayer, part: str) -> None:
    # The gaps between elements or rows are 9, which would choose other experts.
    x_TH, gate = tokens(8), layer.state.backends.gate
    before_TH, held = layer(x_TH), getattr(gate, part)
    dense = held.roll(3, 0).clone()
    between = torch.full_like(dense, 9.0)
    forms = [dense.clone(), torch.stack((dense, between), -1)[..., 0]]
    forms += [torch.cat((dense, between), -1)[:, : dense.shape[1]]] if dense.dim() == 2 else []
    setattr(gate, part, dense)
    wanted_TH = layer(x_TH)
    assert not torch.equal(wanted_TH, before_TH)
    for form in forms:
        setattr(gate, part, form)
        assert torch.equal(layer(x_TH), wanted_TH) and torch.equal(wait(layer.steps(x_TH)), wanted_TH)
    setattr(gate, part, held)
    assert torch.equal(layer(x_TH), before_TH) and torch.equal(wait(layer.steps(x_TH)), before_TH)
    for form in forms:
        held.data = form
        assert torch.equal(wait(layer.steps(x_TH)), wanted_TH) and torch.equal(layer(x_TH), wanted_TH)


def test_who_traces_or_transforms_sees_an_operator(layer: MoELayer) -> None:
    traced = make_fx(lambda x_TH: layer(x_TH))(tokens(5))
    assert torch.equal(traced(tokens(5, seed=9)), layer(tokens(5, seed=9)))
    with FlopCounterMode(display=False):
        assert torch.equal(layer(tokens(5)), traced(tokens(5)))
    # Tensors of a transform have no memory to point to.
    with pytest.raises(ShapeError, match="hidden_states is a tensor of torch.func"):
        torch.func.functionalize(layer)(tokens(5))
    with pytest.raises(ShapeError, match="hidden_states is a tensor of torch.func"):
        torch.func.vmap(layer)(torch.stack((tokens(5), tokens(5))))


def test_a_layer_built_in_inference_mode_counts_outside_of_it(checkpoint: Path, layer: MoELayer) -> None:
    with torch.inference_mode():
        inside = built(checkpoint)
        wanted_TH = inside(tokens(5))
    inside.reset_expert_load()
    assert torch.equal(wait(inside.steps(tokens(5))), wanted_TH) and torch.equal(inside(tokens(5)), layer(tokens(5)))
    assert torch.equal(inside.expert_load, 2 * layer.expert_load)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_listener_gets_the_routing_once_and_changes_no_bit(layer: MoELayer, count: int) -> None:
    x_TH, heard = tokens(count), list[Routing]()
    wanted_TH, wanted_E = layer(x_TH), layer.expert_load.clone()
    layer.reset_expert_load()
    layer.reset_report()
    layer.on_routing = heard.append
    assert whole(layer) and torch.equal(layer(x_TH), wanted_TH) and torch.equal(layer.expert_load, wanted_E)
    assert len(heard) == 1 and torch.equal(heard[0].ids_TK, layer.route(x_TH).ids_TK)
    assert {entry.calls for entry in layer.spans.ledger.entries.values()} == {1}


@pytest.mark.row("177")
@pytest.mark.parametrize("experts", [EXPERTS, 256])
def test_a_capture_is_written_by_the_native_call(
    layer: MoELayer, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, heard = [tokens(count, count) for count in (1, 4, 0, 3)], list[Routing]()
    inputs[1][2, :2] = torch.tensor([torch.inf, -torch.inf])  # its scores are NaN: it chooses no expert
    layer.on_routing = heard.append
    wanted_TH = [layer(x_TH) for x_TH in inputs]
    chosen_TK, layer.on_routing = torch.cat([each.ids_TK for each in heard]), None
    assert (chosen_TK == -1).any() and chosen_TK.max() > 3
    capture = RoutingCapture(layers=2, num_experts=experts, top_k=chosen_TK.shape[1], max_num_tokens=8)
    monkeypatch.setattr(CapturedIds, "__call__", None)  # not called
    for _ in range(2):
        for place in range(2):
            with capture.listening({place: layer}):
                for x_TH, y_TH in zip(inputs, wanted_TH, strict=True):
                    torch.testing.assert_close(layer(x_TH), y_TH, rtol=0, atol=0, equal_nan=True)
        counted_E = layer.expert_load.clone()
        with capture.listening({0: layer}), pytest.raises(ShapeError, match="9 tokens were captured, max_num_tokens=8"):
            layer(tokens(1))
        assert torch.equal(layer.expert_load, counted_E), "a refused call counts nothing"
        taken_TXK = capture.take()
        for ids_TK in taken_TXK.unbind(1):
            assert torch.equal(recorded_ids(ids_TK, experts), chosen_TK.long())


@pytest.mark.parametrize("placed", ["linear", "turned"])
def test_routed_tokens_have_the_bits_and_the_load_of_the_stages(layer: MoELayer, placed: str) -> None:
    if placed == "turned":
        layer.live.set_placement(ExpertMap((tuple(reversed(range(EXPERTS))),), EXPERTS))
    x_TH = tokens(9)
    routing = layer.route(x_TH)
    ids_TK = routing.ids_TK.clone()
    ids_TK[2:5, 1] = -1
    assert layer.prepare().alone is not None
    found_TH, found_E = layer.forward_routed(x_TH, routing.weights_TK, ids_TK), layer.expert_load.clone()
    layer.reset_expert_load()
    layer.spans.recorder = Recorder()  # stage by stage
    assert torch.equal(layer.forward_routed(x_TH, routing.weights_TK, ids_TK), found_TH)
    assert torch.equal(layer.expert_load, found_E) and int(found_E.sum()) == 9 * 4 - 3
    ids_TK[1, 3] = EXPERTS
    for recorder in (layer.spans.recorder, None):
        layer.spans.recorder = recorder
        with pytest.raises(ShapeError, match=r"topk_ids holds 1 ids outside \[-1, 16\), for example \[16\]"):
            layer.forward_routed(x_TH, routing.weights_TK, ids_TK)
    assert torch.equal(layer.expert_load, found_E), "nothing is counted"


def test_ids_of_the_layers_own_router_may_be_changed_and_are_read_again_then(layer: MoELayer) -> None:
    x_TH = tokens(4)
    routing = layer.route(x_TH)
    wanted_TH = layer.forward_routed(x_TH, routing.weights_TK, routing.ids_TK)
    copied_TK = routing.ids_TK.clone()
    assert torch.equal(layer.forward_routed(x_TH, routing.weights_TK, copied_TK), wanted_TH)
    for ids_TK in (copied_TK, routing.ids_TK):
        ids_TK[0, 0] = EXPERTS
        with pytest.raises(ShapeError, match="outside"):
            layer.forward_routed(x_TH, routing.weights_TK, ids_TK)


@pytest.fixture
def x_TH() -> Tensor:
    return torch.randn(24, 256, generator=torch.Generator().manual_seed(3)).bfloat16()


def test_the_router_runs_natively_and_chooses_what_torch_chooses(checkpoint: Path, x_TH: Tensor) -> None:
    fused, plain = built(checkpoint), built(checkpoint, fused_router=False)
    assert fused.decision.gate.tier == "native" and "gate native" in repr(fused)
    assert plain.decision.gate.tier == "plain" and "gate plain" in repr(plain)
    assert plain.decision.gate.reasons["native"][0].endswith("unless kernel.fused_router = false")
    weights = list[Tensor]()
    for each in (fused, plain):
        each.router = replace(each.router, ids_dtype=torch.int64)
        routing = each.route(x_TH)
        assert routing.ids_TK.dtype is torch.int64
        weights.append(torch.zeros(len(x_TH), EXPERTS).scatter_(1, routing.ids_TK, routing.weights_TK))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=0.0)


def test_the_decision_records_how_kernel_parameters_were_chosen(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "kernel parameters: built in" in str(built(checkpoint).explain())
    monkeypatch.setattr(cpu_native_experts.tunings, "MEASURED_BYTES", 0)
    decision = built(checkpoint).explain()
    assert decision.as_dict()["parameters"] == decision.parameters and decision.parameters in decision.text(None)
    if native_kernels().best in (Isa.AVX512_BF16, Isa.AMX_BF16):
        assert decision.parameters.startswith("measured at load: from ")
    assert built(checkpoint, experts="torch_cpu").explain().parameters == ""


@pytest.mark.parametrize("name", ["scalar", "avx2"])
def test_a_pinned_instruction_set_runs_and_is_named(checkpoint: Path, name: str) -> None:
    isa = Isa[name.upper()]
    if isa not in native_kernels().isas:
        pytest.skip(f"no {isa.name} here")
    layer, x_TH = built(checkpoint, instruction_set=name), tokens(7)
    call: Any = layer.prepare().call_for(x_TH, layer.expert_load, None)
    layer.route(x_TH)
    routed_alone: Any = layer.state.backends.gate._prepared[-1]
    blocks = [*call._of_mode.values(), call._route, routed_alone._block]
    assert len(blocks) > 2 and {block.isa for block in blocks} == {isa}
    assert torch.equal(layer(x_TH), wait(layer.steps(x_TH)))
    decision = layer.explain()
    assert f"; {isa.name}: pinned by kernel.instruction_set; " in decision.parameters
    assert layer.state.notes["numerics"] == f"{isa.name} (kernel.instruction_set pins it)"


RATES = {"Xeon": Rates(5.76, 5.50, 1.35), "Zen 4": Rates(3.7, 3.7, 3.7)}


def on_ranks(checkpoint: Path, *settings: dict[str, Any], rates: tuple[str, ...] = ()) -> list[MoELayer]:
    """A layer of each rank. rates: as if they had both AVX-512 instruction sets."""
    layers = []
    for rank, (groups, each) in enumerate(zip(virtual_groups(len(settings), 1), settings, strict=True)):
        config = MoEConfig.from_hf(checkpoint, experts="cpu_native", max_num_tokens=64, **each)
        layer = DeepseekV3MoE(config, groups=groups)
        for experts in (layer.kernel.experts, layer.state.backends.shared.experts) if rates else ():
            isas = (Isa.SCALAR, Isa.AVX2, Isa.AVX512_VNNI, Isa.AVX512_BF16)
            experts.native = replace(experts.native, isas=isas, rates=RATES[rates[rank]])
        layers.append(layer.load_from_safetensors(checkpoint, 3))
    return layers


def refusals(layers: list[MoELayer]) -> list[str]:
    """What every rank raises in its first forward."""
    flights, texts = [layer.steps(tokens(4)) for layer in layers], dict[int, str]()
    for _ in range(8):
        for rank, flight in enumerate(flights):
            try:
                next(flight, None)
            except CommError as problem:
                texts[rank] = str(problem)
    return [texts[rank] for rank in range(len(layers))]


def test_ranks_with_other_instruction_sets_are_refused_on_every_rank(checkpoint: Path) -> None:
    layers = on_ranks(checkpoint, {"instruction_set": "scalar"}, {"instruction_set": "avx2"})
    for text in refusals(layers):
        assert "numerics:\n    rank 0: SCALAR (kernel.instruction_set pins it)\n    rank 1: AVX2 (kernel.inst" in text


def test_ranks_whose_rates_choose_differently_are_refused(checkpoint: Path) -> None:
    for text in refusals(on_ranks(checkpoint, {}, {}, rates=("Xeon", "Zen 4"))):
        assert "rank 0: AVX512_VNNI (kernel.instruction_set pins it)" in text
        assert "rank 1: AVX512_BF16 (kernel.instruction_set pins it)" in text
    chosen = on_ranks(checkpoint, {}, {}, rates=("Xeon", "Xeon"))
    assert {layer.state.notes["numerics"] for layer in chosen} == {"AVX512_VNNI (kernel.instruction_set pins it)"}
    assert "; AVX512_VNNI: vfmadd231ps 5.50 G/s, vdpbf16ps 1.35 G/s; " in chosen[0].explain().parameters


def test_a_swap_to_another_instruction_set_reaches_prepared_calls_and_notes(checkpoint: Path) -> None:
    layer, pinned, x_TH = built(checkpoint), built(checkpoint, instruction_set="scalar"), tokens(7)
    wanted_TH = pinned(x_TH)
    packed, experts = layer.state.experts.weights, layer.kernel.experts
    assert isinstance(packed, PackedExpertWeights) and isinstance(experts, CpuNativeExperts)
    assert packed.call(experts.native, experts.mode)._block.isa == choice(experts.native, Format.FP8).isa
    assert swap_backends(layer, x_TH, instruction_set="scalar").swapped
    experts = layer.kernel.experts
    assert isinstance(experts, CpuNativeExperts) and layer.state.experts.weights is packed
    assert packed.call(experts.native, experts.mode)._block.isa == Isa.SCALAR
    for y_TH in (layer(x_TH), wait(layer.steps(x_TH))):
        assert torch.equal(y_TH, wanted_TH)
    assert layer.state.notes["numerics"] == pinned.state.notes["numerics"]


def test_ranks_agree_where_one_is_pinned_to_what_the_other_chose(checkpoint: Path) -> None:
    chosen = choice(native_kernels(), Format.FP8).isa
    layers = on_ranks(checkpoint, {}, {"instruction_set": chosen.name.lower()})
    assert len({layer.explain().parameters for layer in layers}) == 2
    assert len({layer.state.notes["numerics"] for layer in layers}) == 1
    assert all(y_TH.shape == (4, HIDDEN) for y_TH in run_together(layers, [tokens(4), tokens(4)]))


def test_a_gate_stored_in_f32_is_not_rounded(checkpoint: Path) -> None:
    layer = built(checkpoint)
    gate_EH = torch.full((16, 256), 1 + 2**-12)
    layer.state.backends.gate.load(gate_EH, None)
    held = layer.state.backends.gate.weight_EH
    assert held is not None and torch.equal(held, gate_EH)


@pytest.mark.row(6, 65)
def test_shared_experts_ride_in_the_same_pass_on_one_rank(checkpoint: Path, x_TH: Tensor) -> None:
    layer = built(checkpoint)
    assert "shared experts fused" in repr(layer)
    routing = layer.route(x_TH)
    routed = layer.forward_routed(x_TH, routing.weights_TK, routing.ids_TK)
    assert layer.state.backends.shared is not None
    apart = routed.float() + layer.state.backends.shared(x_TH).float()
    # Apart, both halves are rounded to bf16 before they are added; together once.
    assert (layer(x_TH).float() - apart).abs().max() <= 3 * 2**-8 * apart.abs().max()
    assert not torch.equal(layer(x_TH), routed)


def test_packing_reports_how_far_it_is(checkpoint: Path) -> None:
    reported: list[tuple[str, int, int]] = []
    config = MoEConfig.from_hf(checkpoint, experts="cpu_native", activations="plain", max_num_tokens=64)
    layer = DeepseekV3MoE(config).load_from_safetensors(
        checkpoint, 3, on_progress=lambda *event: reported.append(event)
    )
    packed = [event for event in reported if event[0] == "pack"]
    assert [done for _, done, _ in packed] == sorted(done for _, done, _ in packed) and len(packed) == 16
    assert packed[-1][1] == packed[-1][2] == layer.state.experts.weights.num_bytes


def test_a_deep_copy_reads_its_own_weights(checkpoint: Path, x_TH: Tensor) -> None:
    layer = built(checkpoint)
    layer.spans.recorder = Recorder()  # stages run apart, and their prepared calls are kept with the weights
    before = layer(x_TH)
    twin = copy.deepcopy(layer)
    weights = layer.state.experts.weights
    assert isinstance(weights, PackedExpertWeights)
    weights.w2.values_LB.zero_()
    assert not torch.equal(layer(x_TH), before)
    assert torch.equal(twin(x_TH), before)


def test_int8_tokens_of_packed_experts_next_to_shared_ones_in_bf16(tmp_path: Path) -> None:
    # As in Kimi-K2-Thinking only routed experts are packed; tokens of the shared ones are not rounded. h of the
    # reference may take the neighbouring code.
    write_checkpoint(tmp_path / "int4", replace(SHAPE, quant="int4_g32"), threads=1)
    quant = {"weights": "int4_g32", "shared": "bf16", "activations": "int8"}
    x_TH = torch.randn(9, SHAPE.hidden_size, generator=torch.Generator("cpu").manual_seed(0)).bfloat16()
    outputs = {}
    for experts in ("cpu_native", "reference"):
        layer = built(tmp_path / "int4", quant=quant, experts=experts, activations="checkpoint")
        assert layer.decision.compute.name == "int8_1x32" and layer.decision.oracle == "int_wna16"
        outputs[experts] = layer(x_TH).float()
    wanted = outputs["reference"]
    assert ((outputs["cpu_native"] - wanted).norm() / wanted.norm()).item() < 9e-3
