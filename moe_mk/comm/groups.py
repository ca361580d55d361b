"""The groups an engine hands to a layer, and the communicators made from them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch.distributed as dist

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.distributed import DEFAULT_TIMEOUT_S, DistributedCommunicator
from moe_mk.comm.single import SingleRank
from moe_mk.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | Communicator


@dataclass(frozen=True)
class ParallelGroups:
    """Process groups, or communicators, for the dimensions of a MoE layer. None is a dimension of one.

    ep: ranks that share out the experts. tp: ranks that hold the same tokens and a slice of every expert.
    dp: ranks that hold different tokens; used to add up expert loads, never inside a forward.
    """

    ep: Group | None = None
    tp: Group | None = None
    dp: Group | None = None

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> ParallelGroups:
        """Take the dimensions called ep, tp and dp of a device mesh; a mesh with none of them is refused."""
        names = mesh.mesh_dim_names or ()
        known = [field.name for field in fields(cls) if field.name in names]
        if not known:
            raise ConfigError(f"device mesh has dimensions {names}; name at least one of them ep, tp or dp")
        return cls(**{name: mesh.get_group(name) for name in known})


def communicator(group: Group | None, *, timeout_s: float = DEFAULT_TIMEOUT_S, layer: str = "") -> Communicator:
    """The communicator of a group; a communicator is taken as it is."""
    if group is None:
        return SingleRank()
    if isinstance(group, Communicator):
        return group
    return DistributedCommunicator(group, timeout_s=timeout_s, layer=layer)
