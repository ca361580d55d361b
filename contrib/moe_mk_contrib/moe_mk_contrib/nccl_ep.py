"""NCCL EP: NVIDIA's expert-parallel kernels on top of NCCL's device API, over NVLink and RDMA.

    nccl_ep      low latency: every token to a slot of each of its experts, combine weights and sums; for decoding
    nccl_ep_ht   high throughput: one copy of a token per rank, relayed between nodes; for prefill

A call goes through a group of the library and a handle of it, which are made once and kept for one call at a time: the
second half of a staged operation must follow its first before the group begins another. A handle is given the ids of
each call by `update`, which a CUDA graph may capture, unlike the creation of a handle.

    dispatch   low latency: the handle reads ids where they lie until combine has ended, so they are kept with the call
    arrival    high throughput: rows at the front of the room for the worst routing; the device alone knows how many
    rows       values and scales travel as bytes in rows of multiples of 16 (QUANT_FWD), so in any number format

Outside of a graph, high-throughput dispatch waits on the host for the number of rows, inside the library. Groups are
kept until the process ends: their destruction is a collective with a barrier, which garbage collection cannot order.
The Python API wraps none of the calls that mask ranks, so that `leave_out` raises UnsupportedError.
Source: nccl.ep of nccl-extensions 0.1.0 (github.com/NVIDIA/nccl-extensions), the Python package and nccl_ep.h.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_mk.config.problem import Problem, Reason
from moe_mk.external.deepep_limits import up_to
from moe_mk.external.device import stream_of
from moe_mk.external.library import load
from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.base import (
    Budget,
    TransportContext,
    TransportTraits,
    Volume,
)
from moe_mk.prepare_finalize.deepep.buffers import MAX_OPEN_CALLS, LibrarySession, SlotHandle
from moe_mk.prepare_finalize.deepep.common import SlotTransport, UniformExpertIds, payloads_of, rows_of, wire_bytes
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantTensor
from moe_mk.quant.wire import row_bytes
from moe_mk.tokens import BatchedTokens, OutputStage, Routing, RowTokens, Tokens
from moe_mk_contrib.nccl_ep_limits import (
    HT_SMS,
    HT_TOKENS,
    LOW_LATENCY_HIDDEN,
    ROW_ALIGNMENT,
    high_throughput_bytes,
    least_low_latency_sms,
    low_latency_bytes,
    most_low_latency_top_k,
)

LIBRARY = "nccl"
MULTIPROCESSORS = {(9, 0): 132, (10, 0): 148, (10, 3): 148, (12, 0): 188}
"""Of GPUs by compute capability; 132 for others."""


@dataclass(frozen=True)
class DispatchHandle(SlotHandle):
    """And what the library reads again in combine."""

    ids: Any
    """The library's descriptor, which keeps the ids of this rank's tokens alive."""
    weights_TK: Tensor


class NcclTransport(SlotTransport):
    """Groups, handles and payloads, which both kinds of kernels have in common."""

    algorithm: ClassVar[str]
    layout: ClassVar[str]
    elements: ClassVar[int] = 1
    """Rows in the layer's dtype are filled up to a multiple of so many values, and of 16 bytes."""

    def __init__(self, context: TransportContext) -> None:
        """Make the first group, together with all ranks. Raises LibraryMissing, UnsupportedError or CommError."""
        super().__init__(context)
        c, emulated = context, context.allow_emulated
        self._ep = load("nccl.ep", allow_emulated=emulated)
        interop = load("nccl.ep.interop.torch", allow_emulated=emulated)
        self._numbers = UniformExpertIds(context)
        self._row = self.plain_bytes(c.dtype, c.hidden_size)
        self._wire_row = self._row if isinstance(c.wire, Plain) else wire_bytes(c.wire, c.hidden_size)
        geometry = (self.algorithm, self._row, self._wire_row, c.max_num_tokens, c.top_k, self._numbers.total)
        self._session: LibrarySession[Any] = LibrarySession(context, LIBRARY, (*geometry, c.comm_units))
        self._session.open((), lambda _: interop.get_nccl_comm_from_group(c.comm.library_group()))
        self._session.open_first_slot(self._channel)

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Send each token to its experts, or to their ranks."""
        c, ep = self.context, self._ep
        self.expect_room(x_TH)
        x_wire = self.encode(x_TH)
        parts = self._payloads(x_wire)
        with c.spans.span("dispatch"):
            buffer_slot = self._session.take("dispatch", self._channel)
            _, handle = buffer_slot.buffer
            ids = ep.Tensor(self._numbers.of(routing.ids_TK).to(torch.int64).contiguous())
            weights_TK = routing.weights_TK.to(torch.float32).contiguous()
            rooms = [self._room(part) for part in parts]
            recipe = ep.DispatchQuantizationRecipe.FWD if len(parts) > 1 else ep.DispatchQuantizationRecipe.NONE
            with self._session.call("dispatch"):
                counts = self._dispatch(handle, ids, (parts, rooms, weights_TK), recipe)
            yield InFlight("dispatch")
            with self._session.call("dispatch"):
                handle.complete(stream=self._stream)
            kept = DispatchHandle(buffer_slot, buffer_slot.call, ids, weights_TK)
            return self._tokens(rows_of(rooms, x_wire), counts, kept, x_TH.shape[0])

    def _combine(self, y: Tensor, handle: DispatchHandle) -> Tensor:
        ep, y = self._ep, self._sent_back(y)
        total_TX = torch.empty((len(handle.weights_TK), y.shape[-1]), dtype=y.dtype, device=y.device)
        inputs, out = ep.CombineInputs(tokens=ep.Tensor(y)), self._sums(total_TX, handle)
        config = ep.CombineConfig(send_only=int(self.algorithm == "LOW_LATENCY"))
        handle.buffer_slot.buffer[1].combine(inputs, out, config=config, stream=self._stream)
        return total_TX

    def _complete(self, handle: SlotHandle) -> None:
        with self._session.call("combine"):
            handle.buffer_slot.buffer[1].complete(stream=self._stream)

    @property
    def _stream(self) -> int:
        return stream_of(self.context.device)

    @abstractmethod
    def _dispatch(
        self, handle: Any, ids: Any, sent: tuple[list[Tensor], list[Tensor], Tensor], recipe: Any
    ) -> tuple[Tensor, ...]:
        """Bind the ids and begin to send. sent: payloads, the rooms for them, weights. Returns what was counted."""

    def _room(self, part_TX: Tensor) -> Tensor:
        """Where payloads arrive."""
        size = (self.context.comm.size * self.context.max_num_tokens, part_TX.shape[1])
        return torch.empty(size, dtype=part_TX.dtype, device=part_TX.device)

    @abstractmethod
    def _tokens(self, x: QuantTensor, counts: tuple[Tensor, ...], kept: DispatchHandle, num_tokens: int) -> Tokens:
        """What has arrived."""

    def _sent_back(self, y: Tensor) -> Tensor:
        """Outputs as combine reads them."""
        return pad(y, (0, self._row // y.element_size() - self.context.hidden_size)).contiguous()

    def _sums(self, total_TX: Tensor, kept: DispatchHandle) -> Any:
        """The outputs of combine."""
        return self._ep.CombineOutputs(tokens=self._ep.Tensor(total_TX))

    def _payloads(self, x_TH: QuantTensor) -> list[Tensor]:
        """Rows in the dtype of the layer, or bytes and the bytes of their scales; each filled up."""
        if x_TH.scales is None:
            element = x_TH.values.element_size()
            return [pad(x_TH.values, (0, self._row // element - x_TH.values.shape[1])).contiguous()]
        filled = payloads_of(x_TH, filled=True)
        return [filled[0].view(torch.float8_e4m3fn), filled[1]]  # a type that the library forwards as bytes

    def _channel(self, number: int) -> tuple[Any, Any]:
        """One more group and its handle, for one call at a time; every rank makes them at the same call."""
        del number
        c, ep = self.context, self._ep
        config = ep.GroupConfig(
            algorithm=ep.Algorithm[self.algorithm],
            num_experts=self._numbers.total,
            max_dispatch_tokens_per_rank=c.max_num_tokens,
            max_recv_tokens_per_rank=c.comm.size * c.max_num_tokens,
            max_token_bytes=max(self._row, self._wire_row),
            max_num_sms=c.comm_units or 0,
        )
        group = ep.Group.create(self._session.buffer, config)
        nothing_TK = torch.empty((0, c.top_k), dtype=torch.int64, device=c.device)
        layout = ep.Layout[self.layout]
        return group, group.create_handle(layout, ep.Tensor(nothing_TK), stream=self._stream)

    @classmethod
    def plain_bytes(cls, dtype: Plain, hidden_size: int) -> int:
        """Bytes of one row in the dtype of the layer, filled up."""
        return up_to(row_bytes(dtype, up_to(hidden_size, cls.elements)), ROW_ALIGNMENT)

    @classmethod
    def largest_row(cls, problem: Problem) -> int:
        """Bytes of the longest row of a layer, there or back."""
        hidden, wire = problem.config.model.hidden_size, problem.activations
        plain = cls.plain_bytes(problem.dtype, hidden)
        return plain if wire is None or isinstance(wire, Plain) else max(plain, wire_bytes(wire, hidden))

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        reasons, units = super().reasons_against(problem), problem.config.kernel.comm_units
        there = multiprocessors(problem)
        if problem.ranks > 1 and units is not None and units > there:
            text = f"asks for {units} SMs, the device has {there}"
            reasons.append(Reason("comm_units", text, f"kernel.comm_units = {there}"))
        return reasons


NCCL = TransportTraits(
    summary="",
    kinds=frozenset({"cuda"}),
    min_arch=(9, 0),
    library=LIBRARY,
    extra="pip install 'nccl-extensions[cu13]'",
    produces=RowTokens,
    wants=OutputStage.REDUCED,
    min_ranks=2,
    blocking=True,
    open_calls=MAX_OPEN_CALLS,
    comm_unit="SMs",
    graph_safe=True,
    deterministic=False,
    met="its Python, over emulated kernels",
)
"""Traits common to both kinds of kernels."""


class NcclLowLatency(NcclTransport):
    """NCCL EP low latency; for decoding."""

    algorithm: ClassVar[str] = "LOW_LATENCY"
    layout: ClassVar[str] = "EXPERT_MAJOR"
    elements: ClassVar[int] = LOW_LATENCY_HIDDEN
    traits: ClassVar[TransportTraits] = replace(
        NCCL,
        summary="NCCL EP low-latency kernels, expert-batched, on NCCL's device API; for decoding over NVLink and RDMA",
        produces=BatchedTokens,
        wants=OutputStage.RAW,
        wire=frozenset({"plain", "fp8"}),
    )

    def _dispatch(
        self, handle: Any, ids: Any, sent: tuple[list[Tensor], list[Tensor], Tensor], recipe: Any
    ) -> tuple[Tensor, ...]:
        ep, (parts, rooms, _) = self._ep, sent
        counts_L = torch.empty(self._numbers.per_rank, dtype=torch.int32, device=parts[0].device)
        handle.update(ids, stream=self._stream)
        handle.dispatch(
            ep.DispatchInputs(**_named(ep, parts)),
            ep.DispatchOutputs(**_named(ep, rooms)),
            layout_info=ep.LayoutInfo(expert_counters=ep.Tensor(counts_L)),
            config=ep.DispatchConfig(send_only=1, quantization_recipe=recipe),
            stream=self._stream,
        )
        return (counts_L,)

    def _room(self, part_TX: Tensor) -> Tensor:
        c = self.context
        size = (self._numbers.per_rank, c.comm.size * c.max_num_tokens, part_TX.shape[1])
        return torch.empty(size, dtype=part_TX.dtype, device=part_TX.device)

    def _tokens(self, x: QuantTensor, counts: tuple[Tensor, ...], kept: DispatchHandle, num_tokens: int) -> Tokens:
        slots = self.context.num_slots
        scales = None if x.scales is None else x.scales[:slots]
        x_LSH = replace(x, values=x.values[:slots], scales=scales)
        counts_L = counts[0][:slots].to(torch.int64)
        return BatchedTokens(x_LSH, counts_L, None, kept, expected_N=self.expected_in_window(num_tokens))

    def _sent_back(self, y: Tensor) -> Tensor:
        filled = self._row // y.element_size() - self.context.hidden_size
        return pad(y, (0, filled, 0, 0, 0, self._numbers.per_rank - self.context.num_slots)).contiguous()

    def _sums(self, total_TX: Tensor, kept: DispatchHandle) -> Any:
        ep = self._ep
        return ep.CombineOutputs(tokens=ep.Tensor(total_TX), topk_weights=ep.Tensor(kept.weights_TK))

    @classmethod
    def volume(cls, problem: Problem) -> Volume:
        """A row for each other rank of a token, and one back for each of its experts there."""
        elsewhere = problem.num_tokens * (problem.ranks - 1) / problem.ranks
        return Volume(elsewhere * problem.ranks_per_token, elsewhere * problem.config.router.top_k, 2)

    @classmethod
    def max_rows(cls, problem: Problem) -> int:
        """A slot for every token of every rank at every local expert, filled or not."""
        return problem.slots * problem.ranks * problem.config.kernel.max_num_tokens

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """The RDMA buffer of one group; each further call in flight takes another one."""
        return low_latency_bytes(
            problem.config.kernel.max_num_tokens, cls.largest_row(problem), problem.ranks,
            problem.slots * problem.ranks, problem.config.router.top_k,
        )  # fmt: skip

    @classmethod
    def own_budget(cls, problem: Problem) -> Budget:
        return Budget(cls.traits.comm_unit, multiprocessors(problem), "all, the library's default")

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Warps of a block serve experts, and forward to the experts of a token."""
        reasons, experts = super().reasons_against(problem), problem.slots * problem.ranks
        sms, least = problem.config.kernel.comm_units or multiprocessors(problem), least_low_latency_sms(experts)
        top_k = problem.config.router.top_k
        if problem.ranks == 1:
            return reasons
        if sms < least:
            text = f"needs {least} SMs for {experts} physical experts, {sms} may be used"
            reasons.append(Reason("comm_units", text, f"kernel.comm_units = {least}"))
        elif top_k > (most := most_low_latency_top_k(experts, sms)):
            reasons.append(Reason("top_k", f"forwards to {most} experts a token on {sms} SMs, the router has {top_k}"))
        return reasons


class NcclHighThroughput(NcclTransport):
    """NCCL EP high throughput; for prefill."""

    algorithm: ClassVar[str] = "HIGH_THROUGHPUT"
    layout: ClassVar[str] = "FLAT"
    relays: ClassVar[bool] = True
    pads_rows: ClassVar[bool] = True
    default_units: ClassVar[int | None] = HT_SMS
    collectives: ClassVar[int] = 3
    traits: ClassVar[TransportTraits] = replace(
        NCCL,
        summary="NCCL EP high-throughput kernels, one copy of a token per rank and node; for prefill",
        wire=TransportTraits.ANY_WIRE,
    )

    def _dispatch(
        self, handle: Any, ids: Any, sent: tuple[list[Tensor], list[Tensor], Tensor], recipe: Any
    ) -> tuple[Tensor, ...]:
        ep, (parts, rooms, weights_TK) = self._ep, sent
        device, shape = parts[0].device, (len(rooms[0]), self.context.top_k)
        slots_RK = torch.empty(shape, dtype=torch.int64, device=device)
        weights_RK = torch.empty(shape, dtype=torch.float32, device=device)
        total = torch.empty(1, dtype=torch.int32, device=device)
        handle.update(ids, layout_info=ep.LayoutInfo(recv_total_counter=ep.Tensor(total)), stream=self._stream)
        handle.dispatch(
            ep.DispatchInputs(topk_weights=ep.Tensor(weights_TK), **_named(ep, parts)),
            ep.DispatchOutputs(topk_weights=ep.Tensor(weights_RK), topk_idx=ep.Tensor(slots_RK), **_named(ep, rooms)),
            layout_info=ep.LayoutInfo(recv_topk_idx_kind=ep.ExpertIdKind.LOCAL),
            config=ep.DispatchConfig(quantization_recipe=recipe),
            stream=self._stream,
        )
        return slots_RK, weights_RK, total

    def _tokens(self, x: QuantTensor, counts: tuple[Tensor, ...], kept: DispatchHandle, num_tokens: int) -> Tokens:
        slots_RK, weights_RK, total = counts
        # How many rows there are is known on the device alone: behind them nothing was written.
        row_R1 = torch.arange(len(slots_RK), dtype=total.dtype, device=total.device)[:, None]
        slots_RK = torch.where(row_R1 < total, slots_RK, -1).to(torch.int32)
        return self.window_rows(x, slots_RK, weights_RK, kept, num_tokens)

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """The buffers of one group; each further call in flight takes another one."""
        return high_throughput_bytes(
            problem.config.kernel.max_num_tokens, cls.largest_row(problem), problem.ranks, problem.nodes,
            problem.slots * problem.ranks,
        )  # fmt: skip

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """At most 8192 tokens a rank, nodes of equal size."""
        reasons, asked = super().reasons_against(problem), problem.config.kernel.max_num_tokens
        if asked > HT_TOKENS:
            text = f"takes {HT_TOKENS} tokens a rank, {asked} are asked for"
            reasons.append(Reason("tokens", text, f"kernel.max_num_tokens = {HT_TOKENS}"))
        if problem.ranks % problem.nodes:
            text = f"needs nodes of equal size, {problem.ranks} ranks span {problem.nodes}"
            reasons.append(Reason("ranks", text, "parallel.ranks_per_node"))
        return reasons


def multiprocessors(problem: Problem) -> int:
    """Multiprocessors of the device."""
    return MULTIPROCESSORS.get(problem.device.arch or (9, 0), 132)


def _named(ep: Any, parts: list[Tensor]) -> dict[str, Any]:
    return {name: ep.Tensor(part) for name, part in zip(("tokens", "scales"), parts, strict=False)}
