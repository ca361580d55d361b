"""Low-latency kernels of DeepEP and of libraries with its interface: one adapter, a table of differences.

    dispatch  every token to a slot of each of its experts; the kernel rounds to FP8 where FP8 travels
    combine   every slot back to its token; the kernel weighs and sums, with the ids and weights of the source rank

No size is read on the host, so calls can be captured. Two operations may be in flight, as two micro-batches require.
The order of the rows of an expert is not defined.

DeepEP's low-latency kernels (V1): few tokens a rank, every call of the same shape, over NVLink and RDMA.

Buffers are made with `enable_shrink` where the build knows it. Their kernels then mask a rank that does not answer
within their timeout of about 100 s, drop what it owes and go on, instead of ending the process by a trap. The adapter
queries the masks after each combine and raises CommError with the rank for one that `leave_out` did not name.

Source: deep_ep.Buffer of deep_ep 2.1.0 (github.com/deepseek-ai/DeepEP), and its build for SGLang (sgl-deep-ep 0.1.2).

UCCL-EP: the kernels of DeepEP V1 with RDMA driven by CPU threads, over NICs of any make.

    uccl_ep      low latency
    uccl_ep_ht   high throughput

Its wrapper is imported as `deep_ep`, and has the same calls with other arguments around them. It has neither
`enable_shrink` nor calls that mask ranks, so that `leave_out` raises UnsupportedError.
Source: ep/deep_ep_wrapper of UCCL (github.com/uccl-project/uccl).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_mk.config.problem import Problem, Reason
from moe_mk.errors import CommError, UnsupportedError
from moe_mk.external.deepep_limits import (
    LOW_LATENCY_HIDDEN,
    LOW_LATENCY_IN_FLIGHT,
    LOW_LATENCY_TOP_K,
    NVLINK_PEERS,
    low_latency_bytes,
    low_latency_tokens,
    most_low_latency_tokens,
)
from moe_mk.external.library import find, load
from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize, TransportContext, TransportTraits, Volume
from moe_mk.prepare_finalize.deepep.buffers import LibrarySession
from moe_mk.prepare_finalize.deepep.common import (
    DEEPEP,
    Call,
    UniformExpertIds,
    expect_wire,
    format_reasons,
    from_library,
)
from moe_mk.prepare_finalize.deepep.high_throughput import DeepEPHighThroughput, HighThroughputTransport
from moe_mk.quant.fp8 import Fp8Block
from moe_mk.tokens import BatchedTokens, ExpertOutput, OutputStage, Routing, Tokens

NEEDS = ("num_max_dispatch_tokens_per_rank", "use_fp8", "return_recv_hook")
"""Arguments of a dispatch without which the adapter cannot use a build."""


@dataclass
class Surface:
    """One buffer and the calls on it."""

    buffer: Any
    dispatch: Call
    combine: Call
    away_W: Tensor | None = None
    """bool. Ranks that take no part at the moment; None where a library has no such."""
    mask: tuple[Tensor, Tensor] | None = None
    """int32 (W,) each, not 0 for ranks that the kernels masked, as of the last combine that the device has finished: on
    the device, and in memory that the host reads without waiting for it. None where the buffer reports none."""


@dataclass(frozen=True)
class DispatchHandle:
    """State of a dispatch for combine: the library's handle, and this rank's own ids and weights."""

    library_handle: object
    ids_TK: Tensor
    weights_TK: Tensor


class LowLatencyTransport(PrepareFinalize):
    """Tokens to padded blocks of their experts and back, in kernels that neither wait for the host nor for counts."""

    lengths: ClassVar[tuple[int, ...]] = LOW_LATENCY_HIDDEN
    """Row lengths that the library is built for; shorter rows are padded to the next."""
    max_top_k: ClassVar[int] = LOW_LATENCY_TOP_K
    surface: ClassVar[str] = ""
    """The module with its `Buffer`, where that is not the library itself."""
    size_hint: ClassVar[str] = "get_low_latency_rdma_size_hint"
    queue_pairs: ClassVar[bool] = True
    """Whether the depth of its queue pairs limits the tokens of a call."""
    shrinks: ClassVar[bool] = False
    """Whether its buffers can be made with `enable_shrink`, without which they cannot mask ranks."""

    def __init__(self, context: TransportContext) -> None:
        """Find or make the group's buffer; every rank at once. Raises LibraryMissing, UnsupportedError or CommError."""
        super().__init__(context)
        expect_wire(context.wire, self.traits.library)
        hidden = self.hidden_for(context.hidden_size)
        if hidden is None:
            longest = f"the longest that {self.traits.library} is built for is {max(self.lengths)}"
            raise UnsupportedError(f"rows of {context.hidden_size} cannot travel", [longest])
        self._hidden, self._numbers = hidden, UniformExpertIds(context)
        self._max_tokens = low_latency_tokens(context.max_num_tokens, context.comm.size)
        library = load(self.traits.library, allow_emulated=context.allow_emulated)
        if not hasattr(library, "Buffer") and self.surface:
            library = find(self.surface)
        self._ids_dtype = getattr(library, "topk_idx_t", torch.int64)
        # Kernels find flags and rows by all three, so that layers which differ in any cannot use one buffer in turn.
        geometry = ("low latency", self._max_tokens, hidden, self._numbers.total)
        self._session: LibrarySession[Surface] = LibrarySession(context, self.traits.library, geometry)
        with self._session.call("set-up"):
            hint: Callable[..., int] = getattr(library.Buffer, self.size_hint)
            num_bytes = hint(self._max_tokens, hidden, context.comm.size, self._numbers.total)
        self._session.open((num_bytes,), lambda most: self._surface(self._open(library, *most)))

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Send each token to a slot of each of its experts. Raises UnsupportedError for a third call in flight."""
        c = self.context
        self.expect_room(x_TH)
        ids_TK = self._numbers_of(routing.ids_TK).to(self._ids_dtype).contiguous()
        needed = {
            "x": pad(x_TH, (0, self._hidden - c.hidden_size)).contiguous(),
            "topk_idx": ids_TK,
            "num_max_dispatch_tokens_per_rank": self._max_tokens,
            "num_experts": self._numbers.total,
            "use_fp8": isinstance(c.wire, Fp8Block),
            "return_recv_hook": True,
        }
        ue8m0 = isinstance(c.wire, Fp8Block) and c.wire.ue8m0
        options = {"round_scale": ue8m0, "use_ue8m0": ue8m0}
        with c.spans.span("dispatch"):
            self._expect_unmasked("dispatch")
            self._expect_turn("dispatch")
            with self._session.call("dispatch"):
                rows, counts_L, library_handle, _, hook = self._session.buffer.dispatch(needed, options)
            yield from self._arrival(hook, "dispatch")
            handle = DispatchHandle(library_handle, ids_TK, routing.weights_TK.to(torch.float32).contiguous())
            own, counts_L = slice(0, c.num_slots), counts_L[: c.num_slots].to(torch.int64)
            rows = rows[own] if isinstance(rows, Tensor) else tuple(part[own] for part in rows)
            x_LSH, expected_N = from_library(rows, c.wire, c.hidden_size), self.expected_in_window(x_TH.shape[0])
            return BatchedTokens(x_LSH, counts_L, home=None, handle=handle, expected_N=expected_N)

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Send each slot back, weighed and summed on arrival."""
        c, handle = self.context, tokens.handle
        assert isinstance(handle, DispatchHandle)
        needed = {
            "x": pad(
                output.y, (0, self._hidden - c.hidden_size, 0, 0, 0, self._numbers.per_rank - c.num_slots)
            ).contiguous(),
            "topk_idx": handle.ids_TK,
            "topk_weights": handle.weights_TK,
            "handle": handle.library_handle,
            "return_recv_hook": True,
        }
        with c.spans.span("combine"):
            self._expect_turn("combine")
            with self._session.call("combine"):
                total_TH, _, hook = self._session.buffer.combine(needed)
            yield from self._arrival(hook, "combine")
            self._read_mask("combine", wait=False)
            self._expect_unmasked("combine")
            y_TH: Tensor = total_TH[:, : c.hidden_size].contiguous()
            return y_TH

    def _read_mask(self, phase: str, *, wait: bool) -> None:
        """Query which ranks the kernels masked, where the buffer reports that. wait: until the host has it."""
        surface = self._session.buffer
        if surface.mask is not None:
            device_W, host_W = surface.mask
            with self._session.call(phase):
                surface.buffer.low_latency_query_mask_buffer(device_W)
                host_W.copy_(device_W, non_blocking=not wait)

    def _expect_unmasked(self, phase: str) -> None:
        mask, comm, left_out = self._session.buffer.mask, self.context.comm, self._session.pool.left_out
        masked = [] if mask is None else [rank for rank, status in enumerate(mask[1].tolist()) if status]
        for rank in masked:
            if rank not in left_out:
                with self._session.call(phase):
                    text = (
                        f"the kernels masked rank {rank} after their timeout and dropped its rows; it is dead or late"
                    )
                    raise CommError(text, rank=comm.rank, phase=phase, layer=comm.layer, peer=rank)

    def _numbers_of(self, physical_TK: Tensor) -> Tensor:
        return self._numbers.of(physical_TK)

    def _open(self, library: ModuleType, num_bytes: int) -> Any:
        c = self.context
        needed = {
            "group": c.comm.library_group(),
            "num_rdma_bytes": num_bytes,
            "low_latency_mode": True,
            "num_qps_per_rank": self._numbers.per_rank,
        }
        options = {"allow_nvlink_for_low_latency_mode": True, "explicitly_destroy": False}
        options |= {"enable_shrink": True} if self.shrinks else {}
        return Call(library.Buffer, list(needed))(needed, options)

    def _surface(self, buffer: Any) -> Surface:
        """Raises UnsupportedError for a build that lacks what the adapter needs."""
        combine = Call(buffer.low_latency_combine, ["topk_weights", "handle", "return_recv_hook"])
        return Surface(buffer, Call(buffer.low_latency_dispatch, NEEDS), combine)

    def _expect_turn(self, phase: str) -> None:
        """The library has two buffers that take turns: a third operation, of whichever layer, would overwrite one."""
        if self._session.pool.in_flight >= LOW_LATENCY_IN_FLIGHT:
            way_out = "run at most two micro-batches at once"
            refusal = UnsupportedError(
                f"{self.traits.library} has two operations in flight already, {phase}", [way_out]
            )
            refusal.harmless_to_peers = True
            raise refusal

    def _arrival(self, hook: Callable[[], None], phase: str) -> Flight[None]:
        """Leave the flight alone once, then receive; also where the flight is given up, so that the buffer is free."""
        self._session.pool.in_flight += 1
        try:
            yield InFlight(phase)
        finally:
            self._session.pool.in_flight -= 1
            with self._session.call(phase):
                hook()

    @classmethod
    def hidden_for(cls, hidden_size: int) -> int | None:
        """The row length that a layer's rows travel in; None if they are too long."""
        return min((length for length in cls.lengths if length >= hidden_size), default=None)

    @classmethod
    def volume(cls, problem: Problem) -> Volume:
        """A row for each assignment that leaves the rank, and one back; nothing is counted beforehand."""
        remote = problem.num_tokens * problem.config.router.top_k * (problem.ranks - 1) / problem.ranks
        return Volume(remote, remote, 2)

    @classmethod
    def max_rows(cls, problem: Problem) -> int:
        most = low_latency_tokens(problem.config.kernel.max_num_tokens, problem.ranks)
        return problem.slots * problem.ranks * most

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """The library's RDMA buffer: 1.78 GiB for 128 tokens, 256 experts and rows of 7168; 14.2 GiB for 1024."""
        hidden = cls.hidden_for(problem.config.model.hidden_size) or problem.config.model.hidden_size
        most = low_latency_tokens(problem.config.kernel.max_num_tokens, problem.ranks)
        return low_latency_bytes(most, hidden, problem.slots * problem.ranks)

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Every limit: row length, top-k, tokens, ranks, number formats."""
        reasons = [*super().reasons_against(problem), *format_reasons(problem)]
        model, top_k = problem.config.model, problem.config.router.top_k
        if cls.hidden_for(model.hidden_size) is None:
            built = f"is built for rows of up to {max(cls.lengths)}, this layer has {model.hidden_size}"
            reasons.append(Reason("hidden", built))
        if top_k > cls.max_top_k:
            reasons.append(Reason("top_k", f"takes {cls.max_top_k} experts a token, the router has {top_k}"))
        if problem.ranks > NVLINK_PEERS and problem.ranks % NVLINK_PEERS:
            text = f"takes up to {NVLINK_PEERS} ranks or a multiple, the group has {problem.ranks}"
            reasons.append(Reason("ranks", text))
        asked, most = problem.config.kernel.max_num_tokens, most_low_latency_tokens()
        if cls.queue_pairs and low_latency_tokens(asked, problem.ranks) > most:
            text = f"queue pairs hold the requests of {most} tokens a rank, {asked} are asked for"
            reasons.append(Reason("tokens", text, f"kernel.max_num_tokens = {most // 4 * 4}"))
        return reasons


@PREPARE_FINALIZE.register("deepep_ll")
class DeepEPLowLatency(LowLatencyTransport):
    """DeepEP low latency; for decoding."""

    shrinks: ClassVar[bool] = True
    traits: ClassVar[TransportTraits] = replace(
        DEEPEP,
        summary="DeepEP low-latency kernels, expert-batched, no host sync; for decoding over NVLink and RDMA",
        produces=BatchedTokens,
        wants=OutputStage.RAW,
        in_flight=LOW_LATENCY_IN_FLIGHT,
        # Rows of an expert change places from call to call, and with them the tiles that a GEMM sums in.
        deterministic=False,
        masks_ranks=True,
    )

    def _surface(self, buffer: Any) -> Surface:
        surface, comm, device = super()._surface(buffer), self.context.comm, self.context.device
        shrinks = Call(type(buffer), []).knows("enable_shrink")
        if shrinks and hasattr(buffer, "low_latency_update_mask_buffer"):
            nobody_W = torch.zeros(comm.size, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
            surface.mask = nobody_W.to(device, copy=True), nobody_W
        return surface

    def leave_out(self, active_W: Tensor) -> None:
        """See `PrepareFinalize.leave_out`. Masks are in device memory: captured graphs read them at every replay.

        A rank that comes back must have kept its buffer and have ended its last call.
        """
        surface, kept = self._session.buffer, self._session.pool
        if surface.mask is None:
            super().leave_out(active_W)
            return
        gone = frozenset(rank for rank, on in enumerate(self.active_ranks(active_W)) if not on)
        self._session.expect_between_calls("leave out", gone)
        self._expect_unmasked("leave_out")
        with self._session.call("leave_out"):
            for rank in sorted(gone ^ kept.left_out):
                surface.buffer.low_latency_update_mask_buffer(rank, rank in gone)
        self._read_mask("leave_out", wait=True)
        kept.left_out = gone


SURFACE = "deep_ep"
INSTALL = "pip install uccl, then install ep/deep_ep_wrapper of its repository"


@PREPARE_FINALIZE.register("uccl_ep")
class UcclLowLatency(LowLatencyTransport):
    """UCCL-EP low latency; for decoding without InfiniBand's own kernels."""

    surface: ClassVar[str] = SURFACE
    traits: ClassVar[TransportTraits] = replace(
        DeepEPLowLatency.traits,
        summary="UCCL-EP, low-latency kernels with CPU-driven RDMA over any NIC; for decoding",
        min_arch=(8, 0),
        library="uccl",
        met="",
        extra=INSTALL,
        masks_ranks=False,
    )


@PREPARE_FINALIZE.register("uccl_ep_ht")
class UcclHighThroughput(HighThroughputTransport):
    """UCCL-EP high throughput; for prefill without InfiniBand's own kernels."""

    surface: ClassVar[str] = SURFACE
    traits: ClassVar[TransportTraits] = replace(
        DeepEPHighThroughput.traits,
        summary="UCCL-EP, high-throughput kernels with CPU-driven RDMA over any NIC; for prefill",
        min_arch=(8, 0),
        library="uccl",
        met="",
        extra=INSTALL,
    )
