"""The layer an engine embeds, and its DeepSeek-V3 preset."""

from moe_mk.layer.decode_prefill import DecodePrefillMoE
from moe_mk.layer.deepseek_v3 import DeepseekV3MoE
from moe_mk.layer.hot_swap import SwapReport, swap_backends
from moe_mk.layer.moe_layer import MoELayer
from moe_mk.layer.report import MemoryReport
from moe_mk.layer.sequence_parallel import SequenceParallelMoE
from moe_mk.layer.training import TrainingMoE

__all__ = [
    "DecodePrefillMoE", "DeepseekV3MoE", "MemoryReport", "MoELayer", "SequenceParallelMoE", "SwapReport", "TrainingMoE",
    "swap_backends",
]  # fmt: skip
