"""From mapped experts to a stack and back, and out to official names."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.lab.checkpoints import CheckpointShape, official_state_dict, write_checkpoint
from moe_mk.quant import Fp8Block, QuantTensor, weight_scheme
from moe_mk.weights import (
    LayerSpec,
    LayerWeights,
    MappedExpertWeights,
    MappingSource,
    SafetensorsSource,
    SlotWeights,
    as_mapped,
    load_layer,
    to_stacked,
)

CPU = torch.device("cpu")
PREFIX = "model.layers.3.mlp."


@pytest.fixture
def loaded(tiny: CheckpointShape, tiny_directory: Path) -> LayerWeights:
    return load_layer(SafetensorsSource(tiny_directory), 3, tiny.layer_spec(), owned=[2, 0, 1, 3])


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_a_stack_has_gate_rows_then_up_rows_of_each_slot() -> None:
    # one expert, I=1, H=2: gate [1 2], up [3 4], down [[5] [6]]
    def plain(rows: list[list[float]]) -> QuantTensor:
        scheme = LayerSpec(1, 2, 1, weight_scheme((1, 1))).scheme
        values = torch.tensor(rows, dtype=torch.float8_e4m3fn, device="cpu")
        assert isinstance(scheme, Fp8Block)
        return QuantTensor(values, torch.full(values.shape, 2.0, dtype=torch.float32, device="cpu"), scheme)

    slot = SlotWeights(plain([[1, 2]]), plain([[3, 4]]), plain([[5], [6]]))
    stacked = to_stacked(MappedExpertWeights((slot,), slot.up_IH.scheme), CPU)
    assert stacked.w13.dequantize(torch.float32).tolist() == [[[2, 4], [6, 8]]]
    assert stacked.w2.dequantize(torch.float32).tolist() == [[[10], [12]]]


def test_stacking_and_looking_at_single_experts_again_changes_nothing(loaded: LayerWeights) -> None:
    stacked = to_stacked(loaded.experts, CPU)
    assert (stacked.w13.shape, stacked.w2.shape) == ((4, 64, 64), (4, 64, 32))
    assert stacked.num_bytes == loaded.experts.num_bytes
    for mapped, slot in zip(loaded.experts.slots, as_mapped(stacked).slots, strict=True):
        for name in ("gate_IH", "up_IH", "down_HI"):
            one, other = getattr(mapped, name), getattr(slot, name)
            assert torch.equal(bits(one.values), bits(other.values))
            assert torch.equal(one.scales, other.scales)
    assert as_mapped(stacked).slot(1).up_IH.values.data_ptr() == stacked.w13.values[1, 32:].data_ptr()


def test_a_stack_is_a_copy_and_stacking_it_again_is_none(loaded: LayerWeights) -> None:
    stacked = to_stacked(loaded.experts, CPU)
    assert stacked.w2.values.data_ptr() != loaded.experts.slot(0).down_HI.values.data_ptr()
    assert to_stacked(stacked, CPU).w2.values.data_ptr() == stacked.w2.values.data_ptr()


def test_tensor_parallel_slices_and_plain_weights_stack_too(
    tiny: CheckpointShape, tiny_directory: Path, tmp_path: Path
) -> None:
    half = load_layer(SafetensorsSource(tiny_directory), 3, tiny.layer_spec(), owned=[1, 2], tp_rank=1, tp_size=2)
    assert to_stacked(half.experts, CPU).w2.shape == (2, 64, 16)
    bf16 = CheckpointShape(4, 64, 30, top_k=2, num_groups=2, top_k_groups=1, quant="bf16")
    write_checkpoint(tmp_path, bf16)
    whole = load_layer(SafetensorsSource(tmp_path), 3, bf16.layer_spec(), owned=[3])
    stacked = to_stacked(whole.experts, CPU)
    assert stacked.w13.scales is None
    assert torch.equal(stacked.slot(0).down_HI.values, whole.experts.slot(0).down_HI.values)


def test_what_cannot_be_stacked_is_refused(loaded: LayerWeights, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a rank without experts has nothing to stack"):
        to_stacked(MappedExpertWeights((), loaded.experts.scheme), CPU)
    ragged = CheckpointShape(2, 64, 40, top_k=1, num_groups=1, top_k_groups=1, block=(16, 16))
    write_checkpoint(tmp_path, ragged)
    weights = load_layer(SafetensorsSource(tmp_path), 3, ragged.layer_spec(), owned=[0])
    with pytest.raises(ConfigError, match="40 is no multiple of the 16 rows of a scale block"):
        to_stacked(weights.experts, CPU)


def test_official_names_out_and_in_again_give_the_same_weights(
    tiny: CheckpointShape, loaded: LayerWeights, tiny_state: dict[str, Tensor]
) -> None:
    state = official_state_dict(loaded, PREFIX)
    assert state.keys() == tiny_state.keys()
    assert all(torch.equal(bits(state[name]), bits(tensor)) for name, tensor in tiny_state.items())
    again = load_layer(MappingSource(state), 3, tiny.layer_spec(), owned=[2, 0, 1, 3])
    assert again.num_bytes == loaded.num_bytes
    assert again.experts.slot(0).up_IH.values.data_ptr() == loaded.experts.slot(0).up_IH.values.data_ptr()


def test_a_tensor_parallel_shard_does_not_pass_for_the_whole(tiny: CheckpointShape, tiny_directory: Path) -> None:
    half = load_layer(SafetensorsSource(tiny_directory), 3, tiny.layer_spec(), owned=[0], tp_size=2)
    with pytest.raises(ConfigError, match="shard 0 of 2, and an official name stands for a whole tensor"):
        official_state_dict(half)
