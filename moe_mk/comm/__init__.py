"""Groups of ranks: nothing over one rank, `torch.distributed`, or W ranks in one process."""

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.distributed import DistributedCommunicator
from moe_mk.comm.groups import ParallelGroups, communicator, rank_groups
from moe_mk.comm.lockstep import LockstepCommunicator, LockstepWorld
from moe_mk.comm.single import SingleRank
from moe_mk.comm.traffic import LINKS, Nodes, Traffic

__all__ = [
    "LINKS", "Communicator", "DistributedCommunicator", "LockstepCommunicator", "LockstepWorld", "Nodes",
    "ParallelGroups", "SingleRank", "Traffic", "communicator", "rank_groups",
]  # fmt: skip
