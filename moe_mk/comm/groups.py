"""The groups an engine hands to a layer, and the communicators made from them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

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

    Layers that get the same object share what transports keep open over its groups, such as windows of equal geometry:
    one set serves all layers of a model. This object owns them; they end with the last layer that uses them.
    """

    ep: Group | None = None
    tp: Group | None = None
    dp: Group | None = None
    kept: dict[str, dict[Hashable, object]] = field(default_factory=dict, compare=False, repr=False)
    """What is open, by dimension; see `Communicator.kept`."""

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> ParallelGroups:
        """Take the dimensions called ep, tp and dp of a device mesh; a mesh with none of them is refused."""
        names = mesh.mesh_dim_names or ()
        dimensions: tuple[Literal["ep", "tp", "dp"], ...] = ("ep", "tp", "dp")
        known: dict[str, Any] = {name: mesh.get_group(name) for name in dimensions if name in names}
        if not known:
            raise ConfigError(f"device mesh has dimensions {names}; name at least one of them ep, tp or dp")
        return cls(**known)


def communicator(
    group: Group | None,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    layer: str = "",
    kept: dict[Hashable, object] | None = None,
) -> Communicator:
    """The communicator of a group; a communicator is taken as it is. kept: what its views share, see `Communicator`."""
    if group is None:
        return SingleRank()
    if isinstance(group, Communicator):
        return group
    return DistributedCommunicator(group, timeout_s=timeout_s, layer=layer, kept=kept)
