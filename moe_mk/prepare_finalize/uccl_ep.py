"""UCCL-EP: the kernels of DeepEP V1 with RDMA driven by CPU threads, over NICs of any make.

    uccl_ep      low latency
    uccl_ep_ht   high throughput

Its wrapper is imported as `deep_ep`, and has the same calls with other arguments around them. It has neither
`enable_shrink` nor calls that mask ranks, so that `leave_out` raises UnsupportedError.
Source: ep/deep_ep_wrapper of UCCL (github.com/uccl-project/uccl).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from moe_mk.external.deepep_limits import LOW_LATENCY_HIDDEN, LOW_LATENCY_TOP_K
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, TransportTraits
from moe_mk.prepare_finalize.deepep.high_throughput import HighThroughputTransport
from moe_mk.prepare_finalize.deepep.low_latency import Dialect, LowLatencyTransport
from moe_mk.prepare_finalize.deepep_ht import DeepEPHighThroughput
from moe_mk.prepare_finalize.deepep_ll import DeepEPLowLatency

SURFACE = "deep_ep"
INSTALL = "pip install uccl, then install ep/deep_ep_wrapper of its repository"


@PREPARE_FINALIZE.register("uccl_ep")
class UcclLowLatency(LowLatencyTransport):
    """UCCL-EP low latency; for decoding without InfiniBand's own kernels."""

    dialect: ClassVar[Dialect] = Dialect(LOW_LATENCY_HIDDEN, LOW_LATENCY_TOP_K, surface=SURFACE)
    traits: ClassVar[TransportTraits] = replace(
        DeepEPLowLatency.traits,
        summary="UCCL-EP, low-latency kernels with CPU-driven RDMA over any NIC; for decoding",
        min_arch=(8, 0),
        library="uccl",
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
        extra=INSTALL,
    )
