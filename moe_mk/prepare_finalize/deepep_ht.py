"""DeepEP's high-throughput kernels (V1): many tokens a rank, NVLink inside a node and RDMA between nodes.

Source: deep_ep.Buffer of deep_ep 2.1.0 (github.com/deepseek-ai/DeepEP), and its build for SGLang (sgl-deep-ep 0.1.2).
"""

from __future__ import annotations

from typing import ClassVar

from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, TransportTraits
from moe_mk.prepare_finalize.high_throughput import HighThroughputTransport
from moe_mk.tokens import OutputStage, RowTokens


@PREPARE_FINALIZE.register("deepep_ht")
class DeepEPHighThroughput(HighThroughputTransport):
    """DeepEP high throughput; for prefill and training."""

    traits: ClassVar[TransportTraits] = TransportTraits(
        summary="DeepEP high-throughput kernels, one copy of a token per rank and node; for prefill",
        kinds=frozenset({"cuda"}),
        min_arch=(9, 0),
        library="deep_ep",
        extra="pip install sgl-deep-ep, or build DeepEP",
        produces=RowTokens,
        wants=OutputStage.REDUCED,
        wire=frozenset({"plain", "fp8"}),
        min_ranks=2,
        blocking=True,
    )
