"""DeepEP's low-latency kernels (V1): few tokens a rank, every call of the same shape, over NVLink and RDMA.

Buffers are made with `enable_shrink` where the build knows it. Their kernels then mask a rank that does not answer
within their timeout of about 100 s, drop what it owes and go on, instead of ending the process by a trap. The adapter
queries the masks after each combine and raises CommError with the rank for one that `leave_out` did not name.

Source: deep_ep.Buffer of deep_ep 2.1.0 (github.com/deepseek-ai/DeepEP), and its build for SGLang (sgl-deep-ep 0.1.2).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from moe_mk.errors import CommError
from moe_mk.external.deepep_limits import LOW_LATENCY_HIDDEN, LOW_LATENCY_IN_FLIGHT, LOW_LATENCY_TOP_K
from moe_mk.external.library import load
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, TransportContext, TransportTraits
from moe_mk.prepare_finalize.deepep.low_latency import Dialect, LowLatencyTransport, MaskStatus
from moe_mk.prepare_finalize.library_calls import Call
from moe_mk.prepare_finalize.row_kernels import DEEPEP
from moe_mk.tokens import BatchedTokens, OutputStage


@PREPARE_FINALIZE.register("deepep_ll")
class DeepEPLowLatency(LowLatencyTransport):
    """DeepEP low latency; for decoding."""

    dialect: ClassVar[Dialect] = Dialect(LOW_LATENCY_HIDDEN, LOW_LATENCY_TOP_K, shrinks=True)
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

    def __init__(self, context: TransportContext) -> None:
        """Find or make the group's buffer; see `LowLatencyTransport`."""
        super().__init__(context)
        surface = self._session.buffer
        library = load(self.traits.library, allow_emulated=context.allow_emulated)
        shrinks = Call(library.Buffer, []).knows("enable_shrink")
        if surface.mask is None and shrinks and hasattr(surface.buffer, "low_latency_update_mask_buffer"):
            surface.mask = MaskStatus.of(context.comm.size, context.device)

    def leave_out(self, active_W: Tensor) -> None:
        """See `PrepareFinalize.leave_out`. Masks lie in device memory: captured graphs go on and read them anew.

        A rank that comes back must have kept its buffer and have ended its last call.
        """
        surface, kept = self._session.buffer, self._session.kept
        if surface.mask is None:
            super().leave_out(active_W)
            return
        gone = frozenset(rank for rank, on in enumerate(self.active_ranks(active_W)) if not on)
        self._session.expect_between_calls("leave out", gone)
        self._expect_unmasked("leave_out")
        with self._session.call("leave_out"):
            for rank in sorted(gone ^ kept.left_out):
                surface.buffer.low_latency_update_mask_buffer(rank, rank in gone)
            surface.mask.read(surface.buffer.low_latency_query_mask_buffer, wait=True)
        kept.left_out = gone

    def _read_mask(self) -> None:
        surface = self._session.buffer
        if surface.mask is not None:
            with self._session.call("combine"):
                surface.mask.read(surface.buffer.low_latency_query_mask_buffer, wait=False)
            self._expect_unmasked("combine")

    def _expect_unmasked(self, phase: str) -> None:
        mask, comm, left_out = self._session.buffer.mask, self.context.comm, self._session.kept.left_out
        masked = [] if mask is None else [rank for rank, status in enumerate(mask.host_W.tolist()) if status]
        for rank in masked:
            if rank not in left_out:
                with self._session.call(phase):
                    text = (
                        f"the kernels masked rank {rank} after their timeout and dropped its rows; it is dead or late"
                    )
                    raise CommError(text, rank=comm.rank, phase=phase, layer=comm.layer, peer=rank)
