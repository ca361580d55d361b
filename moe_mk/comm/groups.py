"""The process groups that an engine passes to a layer, and the communicators made from them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.distributed import DEFAULT_TIMEOUT_S, DistributedCommunicator
from moe_mk.comm.single import SingleRank
from moe_mk.errors import ConfigError, expect_kind

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | Communicator
MOST_RANKS = 1 << 20


class Absent(Enum):
    """The value of a group that is not given, which is not None: `dist.group.WORLD` is, before there is one."""

    ABSENT = "one rank"


def expect_group(what: str, group: object) -> None:
    """Raise ConfigError for what is no group; what: its name."""
    if group is None:
        raise ConfigError(
            f"{what} is None, as dist.group.WORLD is before torch.distributed.init_process_group; call that first, or "
            f"leave {what} out where it has one rank (or pass moe_mk.comm.SingleRank())"
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(f"this process is not a member of the group in {what}; leave it out, or pass its own group")
    if not isinstance(group, dist.ProcessGroup | Communicator | Absent):
        kinds = "a torch.distributed.ProcessGroup or a moe_mk.comm.Communicator"
        raise ConfigError(f"{what} is {group!r} ({type(group).__name__}), not {kinds}")


@dataclass(frozen=True)
class ParallelGroups:
    """Process groups, or communicators, for the dimensions of a MoE layer. One that is left out has one rank.

    ep: ranks that share out the experts. tp: ranks that hold the same tokens and a slice of every expert.
    dp: ranks that hold different tokens; used to add up expert loads, never inside a forward.

    Layers that get the same object share what transports keep open over its groups, such as windows of equal geometry:
    one set serves all layers of a model. This object owns them; they end with the last layer that uses them.
    Raises ConfigError for None and for what is no group.
    """

    ep: Group | Absent | None = Absent.ABSENT  # None is refused; dist.group.WORLD has a type with it
    tp: Group | Absent | None = Absent.ABSENT
    dp: Group | Absent | None = Absent.ABSENT
    kept: dict[str, dict[Hashable, object]] = field(default_factory=dict, compare=False, repr=False)
    """What is open, by dimension; see `Communicator.kept`."""

    def __post_init__(self) -> None:
        for name in ("ep", "tp", "dp"):
            expect_group(f"ParallelGroups({name}=...)", getattr(self, name))

    @classmethod
    def of(cls, groups: ParallelGroups | DeviceMesh | None) -> ParallelGroups:
        """Groups as they are, those of a mesh, or one rank for None. Raises ConfigError for anything else."""
        if groups is None:
            return cls()
        return groups if isinstance(groups, ParallelGroups) else cls.from_mesh(groups)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> ParallelGroups:
        """Take the dimensions ep, tp and dp of a device mesh. Raises ConfigError for a mesh without any of them."""
        if not hasattr(mesh, "mesh_dim_names"):
            wanted = "moe_mk.ParallelGroups(ep=...) or a DeviceMesh with a dimension ep, tp or dp"
            raise ConfigError(f"groups is {mesh!r} ({type(mesh).__name__}), not {wanted}")
        names = mesh.mesh_dim_names or ()
        dimensions: tuple[Literal["ep", "tp", "dp"], ...] = ("ep", "tp", "dp")
        known: dict[str, Any] = {name: mesh.get_group(name) for name in dimensions if name in names}
        if not known:
            raise ConfigError(f"device mesh has dimensions {names}; name at least one of them ep, tp or dp")
        return cls(**known)


def rank_groups(num_ranks: int, *, pp: int = 1, dp: int = 1, pcp: int = 1, tp: int = 1) -> dict[str, list[list[int]]]:
    """The ranks of every group of an engine, by dimension, each list in the order of the group's ranks.

    Ranks are numbered with TP innermost, then prefill context parallelism (PCP: ranks that share out the positions of
    one prompt), pipeline stages and, outermost, DP. `ep` shares out the experts over all ranks of a stage,
    dp * pcp * tp, where a layer's own `tp` is 1. A group is made of each list on every rank, for instance by
    `torch.distributed.new_subgroups_by_enumeration(rank_groups(...)["ep"])`.

    Raises ConfigError if the dimensions do not multiply to num_ranks. Source: vLLM's order of ranks (parallel_state.py,
    ExternalDP x DP x PP x PCP x TP) and its flattening of DP, PCP and TP into EP.
    """
    sizes = {"dp": dp, "pp": pp, "pcp": pcp, "tp": tp}
    for name, size in (sizes | {"num_ranks": num_ranks}).items():
        expect_kind(name, size, int, most=MOST_RANKS)
    if min(sizes.values()) < 1 or prod(sizes.values()) != num_ranks:
        asked = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(
            f"{asked} is {prod(sizes.values())} ranks, there are {num_ranks}; let each be 1 or more and make them equal"
        )
    order = tuple(sizes)
    grid = torch.arange(num_ranks, dtype=torch.int64, device="cpu").view(tuple(sizes.values()))
    groups = {name: grid.movedim(order.index(name), -1).flatten(0, -2).tolist() for name in order}
    return groups | {"ep": grid.movedim(order.index("pp"), 0).flatten(1).tolist()}


def communicator(
    group: Group | Absent | None,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    layer: str = "",
    kept: dict[Hashable, object] | None = None,
) -> Communicator:
    """The communicator of a group; a communicator is taken as it is. kept: what its views share, see `Communicator`.

    Raises ConfigError for None and for what is no group.
    """
    expect_group("group", group)
    if isinstance(group, Absent):
        return SingleRank()
    if isinstance(group, Communicator):
        return group
    assert group is not None
    return DistributedCommunicator(group, timeout_s=timeout_s, layer=layer, kept=kept)
