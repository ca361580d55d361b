"""What both FlashInfer transports share: how the library finds its peers in one NVLink domain."""

from __future__ import annotations

from typing import Any

from moe_mk.external.library import load
from moe_mk.prepare_finalize.base import TransportContext, TransportTraits
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
    wire=frozenset({"plain", "fp8", "int8", "mxfp8", "nvfp4"}),
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
