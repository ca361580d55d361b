"""What an engine hands over, and what becomes of it. Real groups and meshes: `test_distributed.py`."""

from types import SimpleNamespace
from typing import cast

import pytest
from torch.distributed.device_mesh import DeviceMesh

from moe_mk.comm import LockstepWorld, ParallelGroups, SingleRank, communicator
from moe_mk.errors import ConfigError


def test_no_group_is_one_rank_and_a_communicator_is_itself() -> None:
    assert isinstance(communicator(None), SingleRank)
    comm = LockstepWorld(2).communicators()[1]
    assert communicator(comm) is comm
    assert ParallelGroups() == ParallelGroups(ep=None, tp=None, dp=None)


@pytest.mark.parametrize("names", [None, ("rows", "columns")])
def test_a_mesh_without_known_dimensions_is_refused(names: tuple[str, ...] | None) -> None:
    mesh = cast(DeviceMesh, SimpleNamespace(mesh_dim_names=names))
    with pytest.raises(ConfigError, match="name at least one of them ep, tp or dp"):
        ParallelGroups.from_mesh(mesh)
