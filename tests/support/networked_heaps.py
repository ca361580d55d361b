"""A heap of a rank over the network, and the rows that tests send through it."""

from __future__ import annotations

import torch

from moe_mk.comm import Communicator
from moe_mk.comm.network.heap import NetworkHeap
from moe_mk.comm.network.links import LINKS
from moe_mk.comm.network.setup import Network, open_network_heap
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
