"""MoRI-EP: AMD GPUs, over xGMI inside a node and RDMA between nodes.

The choice on MI300X and its successors.

    dispatch   a token goes once to each rank of its experts; between nodes once to each node, and is forwarded there
    arrival    rows in the operator's memory, room for every token of every rank, the first `total` of them in any order
    combine    sums back to their tokens, found by the ids that this rank dispatched

All that the operator returns is overwritten by its next call, so that each call in flight has an operator of its own,
whichever layer it is of, and results are copied out. Source of the API: mori.ops of ROCm/mori as of August 2026.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_mk.config.problem import Problem, Reason
from moe_mk.external.library import load
from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.base import TransportContext, TransportTraits
from moe_mk.prepare_finalize.deepep.buffers import MAX_OPEN_CALLS, LibrarySession, SlotHandle
from moe_mk.prepare_finalize.deepep.common import SlotTransport, UniformExpertIds, payloads_of, rows_of
from moe_mk.tokens import OutputStage, Routing, RowTokens, Tokens

LIBRARY = "mori"
BLOCKS = 80
"""What the library launches by default."""


@dataclass(frozen=True)
class DispatchHandle(SlotHandle):
    """And the ids that the dispatch was given."""

    ids_TK: Tensor


class Mori(SlotTransport):
    """MoRI's EpDispatchCombineOp, one copy of a token per destination rank."""

    relays: ClassVar[bool] = True
    pads_rows: ClassVar[bool] = True
    default_units: ClassVar[int | None] = BLOCKS
    traits: ClassVar[TransportTraits] = TransportTraits(
        summary="MoRI, over xGMI and RDMA; between AMD GPUs",
        kinds=frozenset({"rocm"}),
        library=LIBRARY,
        extra="build it from github.com/ROCm/mori",
        produces=RowTokens,
        wants=OutputStage.REDUCED,
        wire=frozenset({"plain", "fp8", "mxfp8"}),
        min_ranks=2,
        max_top_k=9,
        open_calls=MAX_OPEN_CALLS,
        blocking=True,
        comm_unit="CUs",
        graph_safe=True,
        deterministic=False,
    )

    def __init__(self, context: TransportContext) -> None:
        """Join the symmetric heap and see that there is an operator, together with all ranks."""
        super().__init__(context)
        self._ops = load("mori.ops", allow_emulated=context.allow_emulated)
        self._shmem = load("mori.shmem", allow_emulated=context.allow_emulated)
        self._numbers = UniformExpertIds(context)
        geometry = tuple(self._settings().values())
        self._session: LibrarySession[Any] = LibrarySession(context, LIBRARY, geometry)
        self._session.open_first_slot(self._operator)

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        c = self.context
        self.expect_room(x_TH)
        x_wire = self.encode(x_TH)
        values_TX, *scales = payloads_of(x_wire)
        with c.spans.span("dispatch"):
            buffer_slot = self._session.take("dispatch", self._operator)
            handle = DispatchHandle(buffer_slot, buffer_slot.call, self._numbers.of(routing.ids_TK).contiguous())
            weights_TK = routing.weights_TK.to(torch.float32).contiguous()
            with self._session.call("dispatch"):
                values_RX, weights_RK, scales_RX, ids_RK, total = buffer_slot.buffer.dispatch(
                    values_TX.view(x_wire.values.dtype), weights_TK, scales[0] if scales else None, handle.ids_TK,
                    **self._blocks(),
                )  # fmt: skip
            yield InFlight("dispatch")
            parts = [values_RX] if scales_RX is None else [values_RX, scales_RX]
            # How many rows there are is known on the device alone: the others are recognised by their number.
            row_R1 = torch.arange(len(ids_RK), dtype=total.dtype, device=total.device)[:, None]
            slots_RK = torch.where(row_R1 < total, self._numbers.slots(ids_RK), -1)
            return self.window_rows(rows_of(parts, x_wire), slots_RK, weights_RK, handle, x_TH.shape[0])

    def _combine(self, y: Tensor, handle: DispatchHandle) -> Tensor:
        padded, _ = handle.buffer_slot.buffer.combine(y.contiguous(), None, handle.ids_TK, **self._blocks())
        return torch.clone(padded[: len(handle.ids_TK)])

    def _blocks(self) -> dict[str, int]:
        """How many blocks a call launches, each on a compute unit of its own; unsaid where kernel.comm_units is not."""
        units = self.context.comm_units
        return {} if units is None else {"block_num": units}

    def _settings(self) -> dict[str, Any]:
        """Arguments of an operator's config; layers that have all in common share operators."""
        c = self.context
        empty_TH = torch.empty((0, c.hidden_size), dtype=c.dtype.dtype, device=c.device)
        values, *scales = payloads_of(c.wire.quantize(empty_TH))
        per_node = min(c.ranks_per_node or c.comm.size, c.comm.size)
        kinds = self._ops.EpDispatchCombineKernelType
        return {
            "data_type": c.dtype.dtype,
            "rank": c.comm.rank,
            "world_size": c.comm.size,
            "hidden_dim": c.hidden_size,
            "scale_dim": scales[0].shape[1] if scales else 0,
            "scale_type_size": scales[0].element_size() if scales else 1,
            "max_token_type_size": max(values.element_size(), c.dtype.dtype.itemsize),
            "max_num_inp_token_per_rank": c.max_num_tokens,
            "num_experts_per_rank": self._numbers.per_rank,
            "num_experts_per_token": c.top_k,
            "kernel_type": kinds.IntraNode if per_node == c.comm.size else kinds.InterNodeV1,
            "gpu_per_node": per_node,
        }

    def _operator(self, number: int) -> Any:
        del number
        group: Any = self.context.comm.library_group()
        self._shmem.shmem_torch_process_group_init(group.group_name)  # skipped by the library once it is done
        return self._ops.EpDispatchCombineOp(self._ops.EpDispatchCombineConfig(**self._settings()))

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """One operator; each further call in flight takes another one."""
        hidden, top_k = problem.config.model.hidden_size, problem.config.router.top_k
        scheme = problem.activations
        scales = 0 if scheme is None else scheme.num_bytes(1, hidden) - hidden // scheme.per_byte
        size = (problem.ranks, problem.nodes, problem.config.kernel.max_num_tokens)
        return operator_bytes(*size, hidden * problem.dtype.dtype.itemsize, top_k, scales)

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Nodes of equal size that is a power of two."""
        reasons = super().reasons_against(problem)
        per_node = min(problem.ep_ranks_per_node, problem.ranks)
        if per_node & (per_node - 1) or problem.ranks % per_node:
            text = f"needs nodes of 1, 2, 4, 8 or more ranks each, {problem.ranks} ranks lie {per_node} to a node"
            reasons.append(Reason("ranks", text, "parallel.ranks_per_node"))
        return reasons


def operator_bytes(ranks: int, nodes: int, max_num_tokens: int, row_bytes: int, top_k: int, scale_bytes: int) -> int:
    """Symmetric memory of one operator, the library's own formula.

    Rows in, rows out and sums, three sets of weights, two of ids and two of scales for every token of every rank; with
    several nodes also what waits to cross: one set of rows with all that goes with them for each node coming in, two
    going out, and one of this rank's own tokens.
    """
    cap, picks = ranks * max_num_tokens, 4 * top_k
    whole = row_bytes + 2 * picks + 4 + scale_bytes
    inside = cap * (whole + row_bytes) + max_num_tokens * row_bytes + cap * (5 * picks + 2 * scale_bytes)
    crossing = (3 * nodes + 1) * max_num_tokens * whole if nodes > 1 else 0
    return inside + crossing
