"""DeepEP's low-latency kernels (V1): few tokens a rank, every call of the same shape, over NVLink and RDMA.

Source: deep_ep.Buffer of deep_ep 2.1.0 (github.com/deepseek-ai/DeepEP), and its build for SGLang (sgl-deep-ep 0.1.2).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from moe_mk.external.deepep_limits import LOW_LATENCY_HIDDEN, LOW_LATENCY_IN_FLIGHT, LOW_LATENCY_TOP_K
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, TransportTraits
from moe_mk.prepare_finalize.low_latency import Dialect, LowLatencyTransport
from moe_mk.prepare_finalize.row_kernels import DEEPEP
from moe_mk.tokens import BatchedTokens, OutputStage


@PREPARE_FINALIZE.register("deepep_ll")
class DeepEPLowLatency(LowLatencyTransport):
    """DeepEP low latency; for decoding."""

    dialect: ClassVar[Dialect] = Dialect(LOW_LATENCY_HIDDEN, LOW_LATENCY_TOP_K)
    traits: ClassVar[TransportTraits] = replace(
        DEEPEP,
        summary="DeepEP low-latency kernels, expert-batched, no host sync; for decoding over NVLink and RDMA",
        produces=BatchedTokens,
        wants=OutputStage.RAW,
        in_flight=LOW_LATENCY_IN_FLIGHT,
        # Rows of an expert change places from call to call, and with them the tiles that a GEMM sums in.
        deterministic=False,
    )
