"""DeepEP's high-throughput kernels (V1): many tokens a rank, NVLink inside a node and RDMA between nodes.

Source: deep_ep.Buffer of deep_ep 2.1.0 (github.com/deepseek-ai/DeepEP), and its build for SGLang (sgl-deep-ep 0.1.2).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, TransportTraits
from moe_mk.prepare_finalize.deepep.high_throughput import HighThroughputTransport
from moe_mk.prepare_finalize.row_kernels import DEEPEP


@PREPARE_FINALIZE.register("deepep_ht")
class DeepEPHighThroughput(HighThroughputTransport):
    """DeepEP high throughput; for prefill and training."""

    traits: ClassVar[TransportTraits] = replace(
        DEEPEP,
        summary="DeepEP high-throughput kernels, one copy of a token per rank and node; for prefill",
        comm_unit="SMs",
    )
