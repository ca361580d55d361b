"""What an engine hands over, and what becomes of it. Real groups and meshes: `test_distributed.py`."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from moe_mk.comm import LockstepWorld, ParallelGroups, SingleRank, communicator, rank_groups
from moe_mk.config import load_config
from moe_mk.errors import ConfigError
from moe_mk.lab.training import TrainingMoE
from moe_mk.layer import MoELayer, SequenceParallelMoE


def test_a_group_that_is_not_given_is_one_rank_and_a_communicator_is_itself() -> None:
    assert isinstance(communicator(ParallelGroups().ep), SingleRank)
    comm = LockstepWorld(2).communicators()[1]
    assert communicator(comm) is comm and ParallelGroups(ep=comm).ep is comm
    assert ParallelGroups() == pickle.loads(pickle.dumps(ParallelGroups())) != ParallelGroups(tp=comm)
    assert replace(ParallelGroups(tp=comm), ep=comm) == ParallelGroups(ep=comm, tp=comm)


CONFIG = load_config("tiny")
DOORS: dict[str, Callable[[Any], object]] = {
    "ParallelGroups(ep)": lambda group: ParallelGroups(ep=group),
    "ParallelGroups(tp)": lambda group: ParallelGroups(tp=group),
    "ParallelGroups(dp)": lambda group: ParallelGroups(dp=group),
    "communicator": communicator,
    "from_mesh": ParallelGroups.from_mesh,
    "TrainingMoE(comm)": lambda group: TrainingMoE(CONFIG, group),
    "SequenceParallelMoE(group)": lambda group: SequenceParallelMoE(MoELayer(CONFIG), group),
    "MoELayer(groups)": lambda group: MoELayer(CONFIG, groups=group),
}
"""Everything public that takes a group."""


@pytest.mark.parametrize("door", DOORS)
def test_none_and_what_is_no_group_are_refused_at_every_door(door: str) -> None:
    # dist.group.WORLD is None before init_process_group: the layer would hold all experts, on every rank.
    assert dist.group.WORLD is None
    for wrong in (2, "world", [0, 1], object(), dist):
        with pytest.raises(ConfigError, match="not "):
            DOORS[door](wrong)
    if door != "MoELayer(groups)":  # None is its default
        with pytest.raises(ConfigError, match="init_process_group" if door != "from_mesh" else "groups is None"):
            DOORS[door](None)


@pytest.mark.parametrize("names", [None, ("rows", "columns")])
def test_a_mesh_without_known_dimensions_is_refused(names: tuple[str, ...] | None) -> None:
    mesh = cast(DeviceMesh, SimpleNamespace(mesh_dim_names=names))
    with pytest.raises(ConfigError, match="name at least one of them ep, tp or dp"):
        ParallelGroups.from_mesh(mesh)


@pytest.mark.row(73)
def test_sixteen_ranks_of_every_dimension_by_hand() -> None:
    # 2 batches x 2 stages x 2 parts of a prompt x 2 slices: rank = 8 dp + 4 pp + 2 pcp + tp.
    groups = rank_groups(16, dp=2, pp=2, pcp=2, tp=2)
    assert groups["tp"] == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert groups["pcp"] == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups["pp"] == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert groups["dp"] == [[rank, rank + 8] for rank in range(8)]
    # Experts of a stage are shared out over all of its ranks, whatever else these divide.
    assert groups["ep"] == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]


@pytest.mark.row(73)
@given(pp=st.integers(1, 3), dp=st.integers(1, 4), pcp=st.integers(1, 3), tp=st.integers(1, 4))
def test_every_rank_is_once_in_each_dimension_and_meets_others_in_one(pp: int, dp: int, pcp: int, tp: int) -> None:
    count = pp * dp * pcp * tp
    groups = rank_groups(count, pp=pp, dp=dp, pcp=pcp, tp=tp)
    for name, size in {"pp": pp, "dp": dp, "pcp": pcp, "tp": tp, "ep": dp * pcp * tp}.items():
        assert {len(group) for group in groups[name]} == {size}
        assert sorted(rank for group in groups[name] for rank in group) == list(range(count))
        assert all(group == sorted(group) for group in groups[name])
    for first, second in combinations(("pp", "dp", "pcp", "tp"), 2):
        assert all(len({*one} & {*two}) <= 1 for one in groups[first] for two in groups[second])


@pytest.mark.parametrize("sizes", [{"tp": 3}, {"dp": 4, "tp": 4}, {"dp": 0}])
def test_dimensions_that_are_not_the_ranks_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="ranks, there are 8; let each be 1 or more"):
        rank_groups(8, **sizes)
