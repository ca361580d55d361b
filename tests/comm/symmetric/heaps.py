"""Heaps of virtual ranks, and rows to put into them."""

import torch
from torch import Tensor

from moe_mk.comm import LockstepWorld
from moe_mk.comm.symmetric.heap import SymmetricHeap
from moe_mk.comm.symmetric.setup import open_heap
from moe_mk.trace.clock import now


def heaps(ranks: int, num_flags: int = 2, data_bytes: int = 64) -> list[SymmetricHeap]:
    return [open_heap(comm, num_flags, data_bytes, now) for comm in LockstepWorld(ranks).communicators()]


def row(*numbers: int) -> Tensor:
    return torch.tensor([numbers], dtype=torch.uint8)
