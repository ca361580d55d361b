"""A heap of a rank over the network, and the rows that tests send through it."""

from collections.abc import Callable

import torch

from moe_mk.comm import Communicator
from moe_mk.comm.network.heap import NetworkHeap
from moe_mk.comm.network.link import LINKS
from moe_mk.comm.network.setup import Network, open_network_heap
from moe_mk.comm.threads import ThreadWorld
from moe_mk.comm.traffic import Nodes
from moe_mk.trace.clock import now
from tests.support.network_ends import CHOSEN, library_of

X = torch.arange(12, dtype=torch.uint8).view(4, 3)


def opened(
    comm: Communicator, data_bytes: int = 1 << 16, per_node: int | None = None, link: str = "", **network: object
) -> NetworkHeap:
    name = link or CHOSEN["link"]
    chosen = Network(Nodes.of(comm.size, per_node), link=name, library=library_of(LINKS[name]), **network)  # type: ignore[arg-type]
    return open_network_heap(comm, 4, data_bytes, now, chosen, num_counters=2)


def in_threads(
    ranks: int, job: Callable[[int, NetworkHeap], object], timeout_s: float = 20.0, **settings: object
) -> list:  # type: ignore[type-arg]
    """One job a rank, each with a heap; every rank is a host of its own."""
    world = ThreadWorld(ranks, timeout_s=timeout_s)

    def whole(comm: Communicator) -> object:
        heap = opened(comm, **settings)  # type: ignore[arg-type]
        try:
            return job(comm.rank, heap)
        finally:
            heap.close()

    return world.together([lambda comm=comm: whole(comm) for comm in world.communicators()])  # type: ignore[misc]
