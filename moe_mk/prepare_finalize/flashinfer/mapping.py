"""What FlashInfer transports share: how the library finds its peers in one NVLink domain, and masks of ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_mk.errors import UnsupportedError
from moe_mk.external.library import load
from moe_mk.prepare_finalize.base import TransportContext, TransportTraits
from moe_mk.prepare_finalize.deepep.buffers import LibrarySession
from moe_mk.tokens import OutputStage, RowTokens

LIBRARY = "flashinfer"
DOMAIN = TransportTraits(
    summary="",
    kinds=frozenset({"cuda"}),
    min_arch=(9, 0),
    library=LIBRARY,
    extra="pip install 'moe-mk[flashinfer]'",
    produces=RowTokens,
    wants=OutputStage.REDUCED,
    wire=TransportTraits.ANY_WIRE,
    min_ranks=2,
    one_node=True,
    blocking=True,
    graph_safe=True,
    deterministic=False,
)
"""What both have in common: ranks of one NVLink domain, rows in any format, in no particular order."""


def domain_of(context: TransportContext) -> tuple[Any, Any]:
    """Mapping and MnnvlConfig of the group. Raises LibraryMissing where neither library nor emulation may be used.

    Expert-parallel ranks are the library's tensor-parallel ones too: its two-sided workspaces are sized by those.
    """
    comm = load("flashinfer.comm", allow_emulated=context.allow_emulated)
    mnnvl = load("flashinfer.comm.mnnvl", allow_emulated=context.allow_emulated)
    ranks, per_node = context.comm.size, context.ranks_per_node or context.comm.size
    mapping = comm.Mapping(ranks, context.comm.rank, per_node, tp_size=ranks, moe_ep_size=ranks)
    return mapping, mnnvl.MnnvlConfig(comm_backend=mnnvl.TorchDistBackend(context.comm.library_group()))


def rank_mask(left_out: Collection[int], size: int) -> Tensor:
    """The ranks that take part, as `moe_a2a_active_rank_mask` of the library makes it: the bits of a uint64."""
    bits = sum(1 << rank for rank in range(size) if rank not in left_out)
    return torch.tensor([bits], dtype=torch.uint64, device="cpu")


def leave_out_once(session: LibrarySession[Any], active: Sequence[bool]) -> None:
    """Mask ranks for good. active: of each rank, whether it takes part.

    Raises UnsupportedError for a rank that would come back: its count of calls stood still, and the library numbers
    the flags of a call by it.
    """
    gone = frozenset(rank for rank, on in enumerate(active) if not on)
    session.expect_between_calls("leave out", gone)
    if back := sorted(session.pool.left_out - gone):
        way_out = "build the layers over a new group"
        raise UnsupportedError(f"ranks {back} were left out and cannot take part again", [way_out])
    with session.call("leave_out"):
        session.pool.left_out = gone
