"""The MoE layer that any inference engine can embed.

Four lines do it:

    import torch, moe_mk
    layer = moe_mk.DeepseekV3MoE.from_checkpoint("DeepSeek-V3", layer=3)
    y = layer(torch.randn(16, 7168).bfloat16())          # (T, H) -> (T, H), shared experts included
    print(layer.explain())                               # what runs, and why not the others
"""

from moe_mk import errors, oracle, router
from moe_mk.comm.groups import ParallelGroups
from moe_mk.config import DeviceProfile, MoEConfig
from moe_mk.errors import (
    CommError,
    ConfigError,
    LibraryMissing,
    MoEMKError,
    ShapeError,
    UnsupportedError,
    WeightError,
)
from moe_mk.layer import DeepseekV3MoE, MemoryReport, MoELayer
from moe_mk.oracle import Decision, Problem
from moe_mk.placement.expert_map import ExpertMap

__version__ = "0.1.0"

__all__ = [
    "CommError", "ConfigError", "Decision", "DeepseekV3MoE", "DeviceProfile", "ExpertMap", "LibraryMissing",
    "MemoryReport", "MoEConfig", "MoELayer", "MoEMKError", "ParallelGroups", "Problem", "ShapeError",
    "UnsupportedError", "WeightError", "__version__", "errors", "oracle", "router",
]  # fmt: skip
