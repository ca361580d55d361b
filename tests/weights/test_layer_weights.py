"""Out to official names."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.lab.checkpoints import CheckpointShape as Shape
from moe_mk.lab.checkpoints import official_state_dict
from moe_mk.weights import LayerWeights, MappingSource, SafetensorsSource, load_layer

PREFIX = "model.layers.3.mlp."


@pytest.fixture
def loaded(tiny: Shape, tiny_directory: Path) -> LayerWeights:
    return load_layer(SafetensorsSource(tiny_directory), 3, tiny.layer_spec(), owned=[2, 0, 1, 3])


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_official_names_out_and_in_again_give_the_same_weights(
    tiny: Shape, loaded: LayerWeights, tiny_state: dict[str, Tensor]
) -> None:
    state = official_state_dict(loaded, PREFIX)
    assert state.keys() == tiny_state.keys()
    assert all(torch.equal(bits(state[name]), bits(tensor)) for name, tensor in tiny_state.items())
    again = load_layer(MappingSource(state), 3, tiny.layer_spec(), owned=[2, 0, 1, 3])
    assert again.num_bytes == loaded.num_bytes
    assert again.experts.slot(0).up_IH.values.data_ptr() == state[f"{PREFIX}experts.2.up_proj.weight"].data_ptr()


def test_a_tensor_parallel_shard_does_not_pass_for_the_whole(tiny: Shape, tiny_directory: Path) -> None:
    half = load_layer(SafetensorsSource(tiny_directory), 3, tiny.layer_spec(), owned=[0], tp_size=2)
    with pytest.raises(ConfigError, match="shard 0 of 2, and an official name stands for a whole tensor"):
        official_state_dict(half)
