"""The layer equals transformers' DeepseekV3MoE on the same checkpoint, however it is spread over ranks."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from moe_mk import DeepseekV3MoE, MoEConfig
from moe_mk.errors import UnsupportedError
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.testing.transports import run_together, virtual_groups
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.all_to_all import AllToAll
from moe_mk.weights.expert_weights import SlotWeights
from moe_mk.weights.layer_weights import LayerWeights
from tests.layer.conftest import Twin

LIMIT = 1e-6
TRANSPORTS = ["all_to_all", "all_gather"]


def uneven(x_TH: Tensor, ranks: int) -> list[Tensor]:
    """Cut tokens into parts of different lengths, the first of them empty where there are several."""
    if ranks == 1:
        return [x_TH]
    ends = [x_TH.shape[0] * rank * (rank + 1) // (ranks * (ranks - 1)) for rank in range(ranks)]
    return [x_TH[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@pytest.mark.row(65)
@pytest.mark.parametrize("experts", ["reference", "torch_cpu", "reference_monolithic"])
def test_one_rank_equals_transformers(twin: Twin, experts: str) -> None:
    assert 0.1 < float(twin.y_TH.std()) < 2.0, "the limit means something only for outputs of this size"
    layer = DeepseekV3MoE.from_checkpoint(
        twin.path, layer=0, dtype=torch.float32, router_dtype="float32", experts=experts
    )
    torch.testing.assert_close(layer(twin.x_TH), twin.y_TH, atol=LIMIT, rtol=0)


@pytest.mark.row(24, 26, 65, "N18")
@pytest.mark.parametrize("transport", [*TRANSPORTS, "inside"])
@pytest.mark.parametrize("ep", [2, 4])
def test_expert_parallel_ranks_with_their_own_tokens_equal_transformers(twin: Twin, ep: int, transport: str) -> None:
    layers = twin.layers(ep=ep, prepare_finalize=transport)
    parts = uneven(twin.x_TH, ep)
    assert [layer.expert_map.num_slots(layer.ep.rank) for layer in layers] == [16 // ep] * ep
    assert [len(layer.weights.experts.slots) for layer in layers] == [16 // ep] * ep
    assert len(parts[0]) == 0 and sum(map(len, parts)) == len(twin.x_TH)
    got = run_together(layers, parts)
    for y_TH, x_TH in zip(got, parts, strict=True):
        torch.testing.assert_close(y_TH, twin.run(x_TH), atol=LIMIT, rtol=0)


@pytest.mark.row(27)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sliced_experts_on_a_tensor_parallel_pair_equal_transformers(twin: Twin, transport: str) -> None:
    # {0, 1} hold the first tokens, {2, 3} the others; each pair slices its experts, each rank routes by itself.
    layers = twin.layers(ep=2, tp=2, prepare_finalize=transport)
    first, second = twin.x_TH[:9], twin.x_TH[9:]
    got = run_together(layers, [first, first, second, second])
    for y_TH, x_TH in zip(got, [first, first, second, second], strict=True):
        torch.testing.assert_close(y_TH, twin.run(x_TH), atol=LIMIT, rtol=0)
    for layer in layers:
        assert layer.weights.experts.slots[0].up_IH.shape == (16, 64), "half of an intermediate size of 32"
        assert set(layer.tp.traffic.calls_by_phase) == {"agreement", "late reduce"}, "no all-to-all within the pair"
        assert layer.report().sent["late reduce"] == layer.tp.traffic.bytes_by_phase["late reduce"] > 0


@pytest.mark.row(29)
@pytest.mark.parametrize("ep,tp", [(2, 1), (4, 1), (2, 2)])
def test_replicated_tokens_without_all_to_all_equal_transformers(twin: Twin, ep: int, tp: int) -> None:
    layers = twin.layers(ep=ep, tp=tp, tokens="replicated")
    for layer, y_TH in zip(layers, run_together(layers, [twin.x_TH] * (ep * tp)), strict=True):
        torch.testing.assert_close(y_TH, twin.y_TH, atol=LIMIT, rtol=0)
        both = [comm.traffic.bytes_by_phase["late reduce"] for comm in (layer.ep, layer.tp)]
        assert layer.report().sent["late reduce"] == sum(both) and (both[1] > 0) == (tp > 1)
    assert {phase for layer in layers for phase in layer.ep.traffic.calls_by_phase} == {"agreement", "late reduce"}
    once = [layer.ep.traffic.calls_by_phase["agreement"] for layer in layers]
    run_together(layers, [twin.x_TH] * (ep * tp))
    assert [layer.ep.traffic.calls_by_phase["agreement"] for layer in layers] == once, "notes are compared once"


def test_replicas_on_replicated_tokens_are_computed_exactly_once(twin: Twin) -> None:
    # Every expert twice, on ranks 0 and 1, or 2 and 3: ranks that chose replicas by themselves would both compute
    # a token's expert, or neither.
    for placement in ((*range(8), *range(8), *range(8, 16), *range(8, 16)), TWICE):
        layers = twin.layers(ep=4, tokens="replicated", placement=placement)
        for y_TH in run_together(layers, [twin.x_TH] * 4):
            torch.testing.assert_close(y_TH, twin.y_TH, atol=LIMIT, rtol=0)


TWICE = (*(0, 0, 0, 1, 2, 3), *(0, 4, 5, 6, 7, 7), *(8, 9, 8, 9, 10, 11), *(12, 13, 14, 15, 0, 15))
"""Copies of an expert on one rank and on several."""


@pytest.mark.parametrize("placement", ["round_robin", (*range(15, -1, -1),), (*range(16), *range(0, 16, 2)), TWICE])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_any_placement_of_experts_gives_the_same_output(twin: Twin, placement: object, transport: str) -> None:
    layers = twin.layers(ep=4, placement=placement, prepare_finalize=transport)
    for y_TH, x_TH in zip(run_together(layers, uneven(twin.x_TH, 4)), map(twin.run, uneven(twin.x_TH, 4)), strict=True):
        torch.testing.assert_close(y_TH, x_TH, atol=LIMIT, rtol=0)


@pytest.mark.row(108)
def test_a_transport_without_tables_is_refused_for_any_placement_but_linear(
    twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AllToAll, "traits", replace(AllToAll.traits, tables=False))
    for placement in ("round_robin", (*range(15, -1, -1),)):
        with pytest.raises(UnsupportedError, match=r"has no placement tables(.|\n)*parallel\.placement = linear"):
            twin.layers(ep=4, placement=placement, prepare_finalize="all_to_all")
    assert "parallel.placement is round_robin" in str(
        twin.layers(ep=4, placement="round_robin")[0].explain().verdicts
    ), "another transport is chosen, with the reason against this one"
    layers = twin.layers(ep=2, prepare_finalize="all_to_all")
    for layer in layers:
        layer.live.set_placement(ExpertMap.linear(16, 2))
        with pytest.raises(UnsupportedError, match="no placement tables"):  # as a rebalance asks for
            layer.live.set_placement(ExpertMap.round_robin(16, 2))
    for y_TH in run_together(layers, [twin.x_TH] * 2):
        torch.testing.assert_close(y_TH, twin.y_TH, atol=LIMIT, rtol=0)


@pytest.mark.row(6, 65)
@pytest.mark.parametrize("tokens", ["sharded", "replicated"])
@pytest.mark.parametrize("ep,tp", [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_scaling_and_shared_experts_count_exactly_once_on_every_grid(twin: Twin, ep: int, tp: int, tokens: str) -> None:
    layers = twin.layers(ep=ep, tp=tp, tokens=tokens)
    # Ranks that may bring their own tokens do: EP rank r leaves out the first r. Neighbours in TP bring the same ones.
    skipped = [0 if tokens == "replicated" else rank // tp for rank in range(ep * tp)]
    got = run_together(layers, [twin.x_TH[skip:] for skip in skipped])
    for y_TH, skip in zip(got, skipped, strict=True):
        torch.testing.assert_close(y_TH, twin.y_TH[skip:], atol=LIMIT, rtol=0)


@pytest.mark.row(65)
@pytest.mark.parametrize("ep,transport", [(1, "no_ep"), (2, "all_to_all"), (4, "all_gather")])
def test_a_checkpoint_written_here_runs_the_same_in_transformers(
    twin: Twin, tmp_path: Path, ep: int, transport: str
) -> None:
    # transformers' own module takes the tensors by the safetensors library alone, gate rows above up rows.
    shape = CheckpointShape(
        num_experts=16, hidden_size=64, intermediate_size=32, top_k=4, num_groups=4, top_k_groups=2, quant="bf16"
    )
    write_checkpoint(tmp_path, shape, seed=3, shard_bytes=64 << 10)
    mlp = copy.deepcopy(twin.mlp)
    fill(mlp, read(tmp_path, "model.layers.3.mlp."))
    layers = [
        DeepseekV3MoE(
            MoEConfig.from_hf(tmp_path, prepare_finalize=transport, router_dtype="float32"),
            dtype=torch.float32,
            groups=groups,
        ).load_from_safetensors(tmp_path, layer=3)
        for groups in virtual_groups(ep)
    ]
    x_TH = twin.x_TH / 2
    expected_TH = replace(twin, mlp=mlp).run(x_TH)
    assert 0.1 < float(expected_TH.std()) < 2.0
    for y_TH in run_together(layers, [x_TH] * ep):
        torch.testing.assert_close(y_TH, expected_TH, atol=LIMIT, rtol=0)


def read(directory: Path, prefix: str) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 1, "several shards"
    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as shard:
            tensors |= {n.removeprefix(prefix): shard.get_tensor(n).float() for n in list(shard.keys())}
    return tensors


def fill(mlp: nn.Module, tensors: dict[str, Tensor]) -> None:
    ours = {n: t for n, t in tensors.items() if not n.startswith("experts.")}
    halves = [[tensors[f"experts.{e}.{p}_proj.weight"] for p in ("gate", "up")] for e in range(16)]
    ours["experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in halves])
    ours["experts.down_proj"] = torch.stack([tensors[f"experts.{e}.down_proj.weight"] for e in range(16)])
    mlp.load_state_dict(ours, strict=True)


# Each of these mistakes must be far outside the limit, or the tests above prove nothing.


def spoilt(weights: LayerWeights, change: Callable[[SlotWeights], SlotWeights]) -> LayerWeights:
    slots = tuple(map(change, weights.experts.slots))
    return replace(weights, experts=replace(weights.experts, slots=slots))


def swap_halves(slot: SlotWeights) -> SlotWeights:
    assert slot.gate_IH is not None
    return replace(slot, gate_IH=slot.up_IH, up_IH=slot.gate_IH)


MISTAKES: dict[str, Callable[[LayerWeights], LayerWeights]] = {
    "gate and up swapped": lambda w: spoilt(w, swap_halves),
    "one expert in another's place": lambda w: replace(
        w, experts=replace(w.experts, slots=(w.experts.slots[1], w.experts.slots[0], *w.experts.slots[2:]))
    ),
    "no correction bias": lambda w: replace(w, bias_E=torch.zeros(16)),
    "shared gate and up swapped": lambda w: replace(w, shared=swap_halves(w.shared) if w.shared else None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_weights_would_be_seen(twin: Twin, mistake: str) -> None:
    layer = twin.layers()[0]
    layer.take(MISTAKES[mistake](layer.weights))
    assert float((layer(twin.x_TH) - twin.y_TH).abs().max()) > 1000 * LIMIT
