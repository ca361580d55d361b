"""Two-sided NVLink (FlashInfer): rows are pushed through FIFOs that the receiver empties.

The choice where memory must not grow with tokens: the FIFOs are as large for one token as for ten thousand.

    prepare    ids and weights are exchanged, and every rank learns what it will get
    dispatch   values, then scales: a token goes once to each rank of its experts
    arrival    rows of all sources one behind the other, those of a source in any order; the rest is padding
    combine    a sum from each rank into one of the K places of its token, then a sum over K

An id finds its rank by division and an id above all slots means no rank: -1 becomes that. The library wants slots in
multiples of four and rows in multiples of 16 bytes: numbers and rows are filled up. It keeps one pair of workspaces a
process, so that a process can serve one group. It has no rank mask, so that `leave_out` raises UnsupportedError.
Library API read at 0.6.18 and 0.7.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_mk.config.problem import Problem
from moe_mk.external.library import load
from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize, TransportContext, TransportTraits
from moe_mk.prepare_finalize.deepep.buffers import LibrarySession
from moe_mk.prepare_finalize.deepep.common import UniformExpertIds, payloads_of, rows_of
from moe_mk.prepare_finalize.flashinfer.mapping import DOMAIN, LIBRARY, domain_of
from moe_mk.tokens import ExpertOutput, Routing, Tokens

MULTIPLE, ROW_ALIGNMENT = 4, 16
MULTIPROCESSORS = {(9, 0): 132, (10, 0): 148}
"""Of the GPUs with NVLink that the library knows, by compute capability; channels are cut from them."""
FIFO_BYTES = 8 * 256 * 1024
PREPARE_FIFO_BYTES = 1024 * 1024
CONNECTION_BYTES = 256


@dataclass(frozen=True)
class DispatchHandle:
    """What the library returned for a dispatch."""

    route: Any
    num_tokens: int


@PREPARE_FINALIZE.register("nvlink_two_sided")
class NvlinkTwoSided(PrepareFinalize):
    """FlashInfer's MnnvlMoe, one copy of a token per destination rank."""

    pads_rows: ClassVar[bool] = True
    collectives: ClassVar[int] = 4
    """Prepare, values, scales and combine are launches of their own."""
    traits: ClassVar[TransportTraits] = replace(
        DOMAIN,
        summary="FlashInfer, rows pushed through FIFOs whose size knows no tokens; inside one NVLink domain",
        max_ranks=128,
        max_top_k=32,
    )

    def __init__(self, context: TransportContext) -> None:
        """Get the workspaces of this process, together with all ranks."""
        super().__init__(context)
        moe = load("flashinfer.comm.trtllm_alltoall", allow_emulated=context.allow_emulated).MnnvlMoe
        self._moe = moe
        mapping, config = domain_of(context)
        self._numbers = UniformExpertIds(context, MULTIPLE)
        self._session: LibrarySession[tuple[Any, Any]] = LibrarySession(context, LIBRARY, "two-sided")
        self._session.open(
            (), lambda _: (moe.get_moe_prepare_workspace(mapping, config), moe.get_moe_workspaces(mapping, config))
        )

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Tell the ranks of the experts what they will get, then send it."""
        c = self.context
        self.expect_room(x_TH)
        x_wire = self.encode(x_TH)
        with c.spans.span("dispatch"):
            # Numbers go up to `total`, which means no rank to the library.
            ids_TK = self._numbers.of(routing.ids_TK, nowhere=self._numbers.total).contiguous()
            weights_TK = routing.weights_TK.to(torch.float32).contiguous()
            for_ids, for_rows = self._session.buffer
            with self._session.call("dispatch"):
                route, ids_RK, weights_RK, _ = self._moe.mnnvl_moe_alltoallv_prepare_without_allgather(
                    ids_TK, weights_TK, None, for_ids, c.max_num_tokens, c.comm.rank, c.comm.size,
                    self._numbers.total, self._numbers.total, c.top_k,
                )  # fmt: skip
                parts = [self._push(part, route, for_rows) for part in payloads_of(x_wire)]
            yield InFlight("dispatch")
            handle = DispatchHandle(route, x_TH.shape[0])
            slots_RK = self._numbers.slots(ids_RK)
            return self.window_rows(rows_of(parts, x_wire), slots_RK, weights_RK, handle, x_TH.shape[0])

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Push sums back, and add up those of each token."""
        handle, c = tokens.handle, self.context
        assert isinstance(handle, DispatchHandle)
        with c.spans.span("combine"):
            _, for_rows = self._session.buffer
            with self._session.call("combine"):
                y_TX: Tensor = self._moe.mnnvl_moe_alltoallv_combine(
                    _aligned(output.y), handle.route, for_rows, c.comm.rank, c.comm.size, c.top_k, handle.num_tokens
                )
            yield InFlight("combine")
            return y_TX[:, : output.y.shape[1]].contiguous()

    def _push(self, part_TX: Tensor, route: Any, workspace: Any) -> Tensor:
        c = self.context
        arrived: Tensor = self._moe.mnnvl_moe_alltoallv(_aligned(part_TX), route, workspace, c.comm.rank, c.comm.size)
        return arrived[:, : part_TX.shape[1]].contiguous()

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """The two workspaces of a process, whatever the tokens."""
        return workspace_bytes(problem.ranks, MULTIPROCESSORS.get(problem.device.arch or (9, 0), 132))


def workspace_bytes(ranks: int, multiprocessors: int) -> int:
    """Bytes of both workspaces of one rank, the library's own formula.

    2 MiB for each rank and channel, half the multiprocessors serving channels of one block for eight ranks each way,
    and 1 MiB for each rank for ids and weights; with each FIFO goes a line of 256 bytes.
    """
    channels = max(multiprocessors // 2 // (2 * -(-ranks // 8)), 1)
    rows = (FIFO_BYTES + CONNECTION_BYTES) * ranks * channels
    return rows + (PREPARE_FIFO_BYTES + CONNECTION_BYTES) * ranks


def _aligned(part_TX: Tensor) -> Tensor:
    """Rows filled up to a multiple of 16 bytes, where they are none."""
    elements = ROW_ALIGNMENT // part_TX.element_size()
    short = -part_TX.shape[1] % elements
    return pad(part_TX, (0, short)) if short else part_TX.contiguous()
