"""The placement in use: what ranks compare of it, and maps that cannot replace it."""

import gc
import weakref

import pytest
import torch

from moe_mk import MoELayer, ParallelGroups
from moe_mk.comm import LockstepWorld
from moe_mk.errors import ConfigError
from moe_mk.layer.live import check_sizes
from moe_mk.placement.expert_map import ExpertMap
from tests.support import layers as build

TWICE = ((0, 1, 2), (3, 0))


def test_ranks_compare_experts_shares_and_the_number_of_changes() -> None:
    maps = [
        ExpertMap(TWICE, 4), ExpertMap(TWICE, 4, (0.25, 1.0, 1.0, 1.0, 0.75)), ExpertMap(((0, 2, 1), (3, 0)), 4),
    ]  # fmt: skip
    notes = []
    for expert_map in maps:
        groups = ParallelGroups(ep=LockstepWorld(2).communicators()[0])
        layer = MoELayer(build.config(4, 2), dtype=torch.float32, groups=groups)
        layer.live.set_placement(expert_map)
        notes.append(layer.state.notes)
    assert len({each["placement"] for each in notes}) == 3 and {each["epoch"] for each in notes} == {"1"}
    layer.live.set_placement(maps[0])
    assert layer.state.notes == {"placement": notes[0]["placement"], "epoch": "2"}


def test_gates_are_compared_by_value_and_not_by_the_dtype_that_a_backend_keeps() -> None:
    gate = build.layer(4, 2).state.backends.gate
    weight_EH = torch.tensor([[1.0, -0.5], [0.25, 3.0], [2.0, 0.0], [1.5, 1.0]])
    notes = []
    for stored in (weight_EH, weight_EH.bfloat16(), weight_EH.T.contiguous().T, weight_EH + 1):
        gate.weight_EH = stored
        notes.append(gate.notes()["gate weights"])
    assert notes[0] == notes[1] == notes[2] != notes[3]


def test_a_map_of_other_sizes_is_refused_with_all_numbers() -> None:
    serving, comm = ExpertMap(((0, 1), (2, 3)), 4), LockstepWorld(2).communicators()[0]
    check_sizes(ExpertMap(((3, 1), (2, 0)), 4), serving, comm)
    with pytest.raises(ConfigError, match=r"it places 3 experts, the layer has 4; it has 3 ranks, the group has 2$"):
        check_sizes(ExpertMap(((0,), (1,), (2,)), 3), serving, comm)


def test_a_layer_that_was_changed_is_freed_with_its_last_reference() -> None:
    gc.disable()
    try:
        layer = build.layer(4, 2)
        layer.live.set_placement(layer.expert_map)
        last = weakref.ref(layer)
        del layer
        assert last() is None, "a cycle would keep the weights of a replaced layer until the next collection"
    finally:
        gc.enable()
