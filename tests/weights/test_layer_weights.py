"""Out to official names."""

from pathlib import Path

import pytest
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.lab.checkpoints import CheckpointShape as Shape
from moe_mk.lab.checkpoints import official_state_dict
from moe_mk.lab.testing.bits import bits_of
from moe_mk.weights import MappingSource, SafetensorsSource, load_layer
from tests.weights.one_layer import PREFIX


def test_official_names_out_and_in_again_give_the_same_weights(
    tiny: Shape, tiny_directory: Path, tiny_state: dict[str, Tensor]
) -> None:
    loaded = load_layer(SafetensorsSource(tiny_directory), 3, tiny.layer_spec(), owned=[2, 0, 1, 3])
    state = official_state_dict(loaded, PREFIX)
    assert {name: bits_of(each) for name, each in state.items()} == {n: bits_of(each) for n, each in tiny_state.items()}
    again = load_layer(MappingSource(state), 3, tiny.layer_spec(), owned=[2, 0, 1, 3])
    assert again.num_bytes == loaded.num_bytes
    assert again.experts.slot(0).up_IH.values.data_ptr() == state[f"{PREFIX}experts.2.up_proj.weight"].data_ptr()


def test_a_tensor_parallel_shard_does_not_pass_for_the_whole(tiny: Shape, tiny_directory: Path) -> None:
    half = load_layer(SafetensorsSource(tiny_directory), 3, tiny.layer_spec(), owned=[0], tp_size=2)
    with pytest.raises(ConfigError, match="shard 0 of 2, and an official name stands for a whole tensor"):
        official_state_dict(half)
