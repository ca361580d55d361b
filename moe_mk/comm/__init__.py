"""Groups of ranks: nothing over one rank, `torch.distributed`, or W ranks in one process."""

from typing import TYPE_CHECKING

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.distributed import DistributedCommunicator
from moe_mk.comm.groups import ParallelGroups, communicator, rank_groups
from moe_mk.comm.single import SingleRank
from moe_mk.comm.traffic import LINKS, Nodes, Traffic
from moe_mk.imports import at_first_use

if TYPE_CHECKING:
    from moe_mk.comm.lockstep import LockstepCommunicator, LockstepWorld
else:
    __getattr__ = at_first_use(__name__, {"lockstep": "LockstepCommunicator LockstepWorld"})

__all__ = [
    "LINKS", "Communicator", "DistributedCommunicator", "LockstepCommunicator", "LockstepWorld", "Nodes",
    "ParallelGroups", "SingleRank", "Traffic", "communicator", "rank_groups",
]  # fmt: skip
