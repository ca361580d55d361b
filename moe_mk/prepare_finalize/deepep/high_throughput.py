"""High-throughput kernels of DeepEP (V1) and of drop-ins for it: many tokens a rank, one copy of a token per rank.

    layout    who goes where, counted on the device
    dispatch  rows with ids and weights, quantised before; the host waits for how many come, except in a graph
    combine   sums of each rank's experts return to the source rank, which adds ranks up

Inside one node a call can be captured: it then takes room for the worst routing instead of waiting for counts.

DeepEP's high-throughput kernels (V1): many tokens a rank, NVLink inside a node and RDMA between nodes.

Source: deep_ep.Buffer of deep_ep 2.1.0 (github.com/deepseek-ai/DeepEP), and its build for SGLang (sgl-deep-ep 0.1.2).
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_mk.config.problem import Problem, Reason
from moe_mk.errors import UnsupportedError
from moe_mk.external.deepep_limits import (
    HIGH_THROUGHPUT_CHUNKS,
    HIGH_THROUGHPUT_ROW_BYTES,
    NUM_SMS,
    NVLINK_PEERS,
    QPS_PER_RANK,
    nvlink_bytes,
    rdma_bytes,
)
from moe_mk.external.device import capturing
from moe_mk.external.library import find, load
from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, TransportContext, TransportTraits
from moe_mk.prepare_finalize.deepep.common import (
    DEEPEP,
    Call,
    RowKernels,
    Surface,
    from_library,
    padded_row,
)
from moe_mk.tokens import Routing, RowTokens, Tokens

LAYOUT = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")
"""What a layout consists of, in the order in which it is returned."""


class HighThroughputTransport(RowKernels):
    """One row a token and rank, in the order of ranks and tokens."""

    kernels: ClassVar[str] = "high throughput"
    later: ClassVar[str] = "async_finish"
    collectives: ClassVar[int] = 3
    default_units: ClassVar[int | None] = NUM_SMS
    surface: ClassVar[str] = ""
    """The module with the library's `Buffer`, where that is not the library itself."""

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        library = load(self.traits.library, allow_emulated=context.allow_emulated)
        if not hasattr(library, "Buffer") and self.surface:
            library = find(self.surface)
        self._ids_dtype = getattr(library, "topk_idx_t", torch.int64)
        with self._session.call("set-up"):
            self._configs = self._configs_of(library)
            sizes = self._sizes(library)
        self._session.open(sizes, lambda most: self._made(library, most))

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        c, sent = self.context, self._sent(x_TH, routing)
        worst = c.comm.size * c.max_num_tokens if capturing(c.device) else 0
        with c.spans.span("dispatch"):
            buffer = self._session.buffer
            assert buffer.layout is not None
            with self._session.call("dispatch"):
                *layout, _ = buffer.layout({"topk_idx": sent["topk_idx"], "num_experts": self._numbers.total})
                received, slots_RK, weights_RK, _, handle, event = buffer.dispatch(
                    sent | dict(zip(LAYOUT, layout, strict=True)), {"expert_alignment": 1, "num_worst_tokens": worst}
                )
            yield InFlight("dispatch")
            self._wait(event, "dispatch")
            mine_RK = torch.where(slots_RK >= 0, weights_RK, 0.0)
            x_RH = from_library(received, c.wire, c.hidden_size)
            # In a graph the library gives every rank room for all tokens of the group.
            expected_N = self.expected_in_window(x_TH.shape[0]) if worst else self.expected_of_rows(len(slots_RK))
            return RowTokens(
                x_RH, slots_RK.to(torch.int32), mine_RK, c.num_slots, (buffer, handle),
                expected_N=expected_N, most_K=self.most_K,
            )  # fmt: skip

    def _configs_of(self, library: ModuleType) -> tuple[Any, ...]:
        """Configs of dispatch and combine with a budget of their own; none where the library's are right.

        The library also keeps a number of its own, for all buffers of the process; that one is never touched.
        """
        ranks, units = self.context.comm.size, self.context.comm_units
        if units is None or ranks not in HIGH_THROUGHPUT_CHUNKS:  # the library refuses those ranks
            return ()
        if reasons := [str(reason) for reason in _reasons_against_units(units)]:
            raise UnsupportedError(f"{self.traits.library} cannot be held to a budget", reasons)
        return tuple(library.Config(units, *chunks) for chunks in HIGH_THROUGHPUT_CHUNKS[ranks])

    def _units(self, *, combine: bool) -> dict[str, object]:
        return {"config": self._configs[combine]} if self._configs else {}

    def _sizes(self, library: ModuleType) -> tuple[int, int, int]:
        """Bytes over NVLink and RDMA that the configs ask for, and queue pairs."""
        ranks, row = self.context.comm.size, 2 * self._hidden
        configs = self._configs or (library.Buffer.get_dispatch_config(ranks), library.Buffer.get_combine_config(ranks))
        return (
            max(config.get_nvl_buffer_size_hint(row, ranks) for config in configs),
            max(config.get_rdma_buffer_size_hint(row, ranks) for config in configs),
            max(QPS_PER_RANK, self.context.comm_units or 0) if ranks > NVLINK_PEERS else QPS_PER_RANK,
        )

    def _made(self, library: ModuleType, sizes: tuple[int, ...]) -> Surface:
        near, far, qps = sizes
        needed = {"group": self.context.comm.library_group(), "num_nvl_bytes": near, "num_rdma_bytes": far}
        options = {"explicitly_destroy": False, "num_qps_per_rank": qps}
        buffer = Call(library.Buffer, list(needed))(needed, options)
        by_budget = ["config"] if self._configs else []
        return Surface(
            Call(buffer.dispatch, [*LAYOUT, "topk_idx", "topk_weights", self.later, *by_budget]),
            Call(buffer.combine, ["handle", self.later, *by_budget]),
            Call(buffer.get_dispatch_layout, ["topk_idx", "num_experts"]),
        )

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """Queues over NVLink and RDMA, which do not grow with tokens; 0 where the library has no config."""
        if problem.ranks not in HIGH_THROUGHPUT_CHUNKS:
            return 0
        row = 2 * padded_row(problem.config.model.hidden_size, HIGH_THROUGHPUT_ROW_BYTES)
        chunks, num_sms = HIGH_THROUGHPUT_CHUNKS[problem.ranks], problem.config.kernel.comm_units or NUM_SMS
        near = max(nvlink_bytes(chunk[1], row, problem.ranks, num_sms) for chunk in chunks)
        return near + max(rdma_bytes(chunk[3], row, problem.ranks, num_sms) for chunk in chunks)

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Every limit: ranks and nodes, graphs, number formats."""
        reasons = super().reasons_against(problem)
        ranks, per_node = problem.ranks, problem.ep_ranks_per_node
        if ranks > 1 and ranks not in HIGH_THROUGHPUT_CHUNKS:
            tuned = ", ".join(map(str, HIGH_THROUGHPUT_CHUNKS))
            reasons.append(Reason("ranks", f"is tuned for {tuned} ranks, the group has {ranks}"))
        if ranks <= NVLINK_PEERS and problem.nodes > 1:
            text = f"{ranks} ranks must share a node, they span {problem.nodes}"
            reasons.append(Reason("fabric", text, "parallel.ranks_per_node"))
        if ranks > NVLINK_PEERS and per_node != NVLINK_PEERS:
            text = f"takes nodes of {NVLINK_PEERS} ranks, these have {per_node}"
            reasons.append(Reason("fabric", text, "parallel.ranks_per_node"))
        if ranks > NVLINK_PEERS and problem.config.kernel.graphs:
            text = "waits on the host for counts between nodes, which no CUDA graph can capture"
            reasons.append(Reason("graphs", text, "kernel.graphs = false"))
        return [*reasons, *_reasons_against_units(problem.config.kernel.comm_units)]


def _reasons_against_units(units: int | None) -> list[Reason]:
    """Half of the multiprocessors send, the others receive: a channel is a pair."""
    if units is None or units % 2 == 0:
        return []
    text = f"takes an even number of SMs, a pair for each channel, not {units}"
    return [Reason("comm_units", text, f"kernel.comm_units = {units + 1}")]


@PREPARE_FINALIZE.register("deepep_ht")
class DeepEPHighThroughput(HighThroughputTransport):
    """DeepEP high throughput; for prefill and training."""

    traits: ClassVar[TransportTraits] = replace(
        DEEPEP,
        summary="DeepEP high-throughput kernels, one copy of a token per rank and node; for prefill",
        comm_unit="SMs",
    )
