"""`nccl.ep.interop.torch`: a communicator with the members of a process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from moe_mk.lab.testing.emulated.exchange import exchange_over
from moe_mk_contrib.emulated.nccl.core import Communicator


def get_nccl_comm_from_group(group: Any = None) -> Communicator:
    """A new communicator; every rank of the group calls it at once."""
    if group is None and not dist.is_initialized():
        raise RuntimeError("PyTorch distributed is not initialized. Call torch.distributed.init_process_group first.")
    exchange = exchange_over(dist.group.WORLD if group is None else group)
    exchange.swap([[]] * exchange.size, "communicator")
    return Communicator(exchange)
