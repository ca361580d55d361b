"""The layer an engine embeds, its DeepSeek-V3 preset, and variants that are imported at their first use."""

from typing import TYPE_CHECKING

from moe_mk.imports import at_first_use
from moe_mk.layer.moe_layer import MoELayer
from moe_mk.layer.report import MemoryReport

if TYPE_CHECKING:
    from moe_mk.layer.custom_op import bind
    from moe_mk.layer.decode_prefill import DecodePrefillMoE
    from moe_mk.layer.deepseek_v3 import DeepseekV3MoE
    from moe_mk.layer.hot_swap import SwapReport, swap_backends
    from moe_mk.layer.sequence_parallel import SequenceParallelMoE
else:
    VARIANTS = {
        "custom_op": "bind",
        "decode_prefill": "DecodePrefillMoE",
        "deepseek_v3": "DeepseekV3MoE",
        "hot_swap": "SwapReport swap_backends",
        "sequence_parallel": "SequenceParallelMoE",
    }
    __getattr__ = at_first_use(__name__, VARIANTS)

__all__ = [
    "DecodePrefillMoE", "DeepseekV3MoE", "MemoryReport", "MoELayer", "SequenceParallelMoE", "SwapReport", "bind",
    "swap_backends",
]  # fmt: skip
