"""Loading one layer: only what is owned, in any naming convention."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_mk.errors import ConfigError
from moe_mk.lab.checkpoints import CheckpointShape as Shape
from moe_mk.quant import BF16, FP8_128x128
from moe_mk.quant.kinds import legal_tp_sizes
from moe_mk.weights import LayerSpec, MappingSource, SafetensorsSource, load_layer
from tests.weights.one_layer import ALL, PREFIX, StateDict, load, same


@pytest.mark.parametrize("prefix", ["", "mlp.", "model.layers.{N}.mlp."])
def test_the_caller_may_say_what_stands_before_the_names(tiny: Shape, tiny_state: StateDict, prefix: str) -> None:
    bare = prefix.replace("{N}", "3")
    state = {bare + name.removeprefix(PREFIX): tensor for name, tensor in tiny_state.items()}
    weights = load(state, tiny.layer_spec(), prefix=prefix)
    assert weights.facts.prefix == bare
    assert weights.experts.num_slots == 4


def test_only_owned_experts_are_opened(tiny: Shape, tiny_state: StateDict, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    source = MappingSource(tiny_state)
    monkeypatch.setattr(source, "open", lambda name: opened.append(name) or tiny_state[name])
    weights = load_layer(source, 3, tiny.layer_spec(), owned=[1])
    assert {name.split(".")[5] for name in opened if ".experts." in name} == {"1"}
    assert weights.facts.names == tuple(opened)
    # 4 x 64 bf16 gate, 4 f32 biases, and two experts (one shared) of three 32 x 64 matrices with 2 x 4 f32 scales
    assert weights.facts.bytes_read == 512 + 16 + 2 * 3 * (2048 + 32) == weights.num_bytes


def test_slots_follow_the_order_asked_for_and_replicas_share_memory(tiny: Shape, tiny_state: StateDict) -> None:
    weights = load(tiny_state, tiny.layer_spec(), owned=[3, 1, 3])
    first, middle, last = weights.experts.slots
    assert first.up_IH.values.data_ptr() == last.up_IH.values.data_ptr() != middle.up_IH.values.data_ptr()
    assert same(first.up_IH, tiny_state[f"{PREFIX}experts.3.up_proj.weight"], first.up_IH.scales)
    assert weights.facts.owned == (3, 1, 3) and len({*map(id, weights.experts.changed(torch.clone).slots)}) == 2


def test_a_rank_without_experts_still_gets_gate_and_shared_experts(tiny: Shape, tiny_state: StateDict) -> None:
    weights = load(tiny_state, tiny.layer_spec(), owned=[])
    assert weights.experts.num_slots == 0 and weights.shared is not None


def test_nothing_is_copied_from_the_mapped_file(tiny: Shape, tiny_directory: Path) -> None:
    source = SafetensorsSource(tiny_directory)
    slot = load_layer(source, 3, tiny.layer_spec(), owned=[2], tp_rank=1, tp_size=2).experts.slots[0]
    whole = source.open(f"{PREFIX}experts.2.up_proj.weight")
    assert slot.up_IH.values.data_ptr() == whole.data_ptr() + 16 * 64


@pytest.mark.parametrize("convention", ["official", "fused"])
def test_tensor_parallel_ranks_get_rows_of_gate_and_up_and_columns_of_down(
    tiny: Shape, renamed: Callable[[str], StateDict], convention: str
) -> None:
    whole = load(renamed("official"), tiny.layer_spec())
    parts = [load(renamed(convention), tiny.layer_spec(), tp_rank=rank, tp_size=2) for rank in (0, 1)]
    for get in (lambda w: w.experts.slot(3), lambda w: w.shared):
        one, left, right = (get(weights) for weights in (whole, *parts))
        for q, axis in (("gate_IH", 0), ("up_IH", 0), ("down_HI", 1)):
            pieces = [getattr(half, q) for half in (left, right)]
            values = torch.cat([piece.values.view(torch.uint8) for piece in pieces], dim=axis)
            scales = torch.cat([piece.scales for piece in pieces], dim=axis)
            assert same(getattr(one, q), values, scales), q
    assert parts[0].facts.bytes_read == 512 + 16 + 5 * 3 * (1024 + 16)


def test_a_slice_inside_a_scale_block_is_refused_with_the_sizes_that_are_possible(
    tiny: Shape, tiny_state: StateDict
) -> None:
    with pytest.raises(ConfigError, match=r"tp_size=4 cannot cut .* 32 at the edges of 16x16 blocks; possible: 1, 2$"):
        load(tiny_state, tiny.layer_spec(), tp_rank=0, tp_size=4)
    with pytest.raises(ConfigError, match=r"tp_rank=2 is not in 0..1"):
        load(tiny_state, tiny.layer_spec(), tp_rank=2, tp_size=2)
    v3 = LayerSpec(256, 7168, 2048, FP8_128x128, 1, 2048)
    assert legal_tp_sizes((v3.intermediate_size, v3.shared_intermediate_size), v3.edges) == [1, 2, 4, 8, 16]
    assert legal_tp_sizes((12, 8), replace(v3, scheme=BF16).edges) == [1, 2, 4]


def test_the_other_order_of_a_fused_tensor_is_turned_round_once(
    tiny: Shape, renamed: Callable[[str], StateDict]
) -> None:
    state = renamed("fused")
    for ending in ("", "_scale_inv"):
        name = f"{PREFIX}experts.gate_up_proj{ending}"
        half = state[name].shape[1] // 2
        state[name] = torch.cat((state[name][:, half:], state[name][:, :half]), dim=1)
    slot = load(state, replace(tiny.layer_spec(), gate_up_order="up_gate")).experts.slot(1)
    official = load(renamed("official"), tiny.layer_spec()).experts.slot(1)
    assert official.gate_IH is not None
    assert same(slot.gate_IH, official.gate_IH.values, official.gate_IH.scales)
    assert same(slot.up_IH, official.up_IH.values, official.up_IH.scales)
    with pytest.raises(ConfigError, match="official names distinguish them"):
        load(renamed("official"), replace(tiny.layer_spec(), gate_up_order="up_gate"))


def test_progress_ends_at_all_bytes_of_weights(tiny: Shape, tiny_directory: Path) -> None:
    reported: list[tuple[str, int, int]] = []
    source = SafetensorsSource(tiny_directory)
    load_layer(source, 3, tiny.layer_spec(), owned=ALL, on_progress=lambda *stated: reported.append(stated))
    assert {what for what, _, _ in reported} == {"check"}
    assert reported[-1][1] == reported[-1][2] == 512 + 16 + 5 * 3 * 2048
