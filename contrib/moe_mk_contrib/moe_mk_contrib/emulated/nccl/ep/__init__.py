"""`nccl.ep`: groups, handles and the tensors that are given to them."""

from moe_mk_contrib.emulated.nccl.ep.enums import (
    Algorithm,
    CombineQuantizationRecipe,
    DispatchQuantizationRecipe,
    ExpertIdKind,
    Layout,
    OverflowPolicy,
    PassDir,
    ZeroCopyMode,
)
from moe_mk_contrib.emulated.nccl.ep.group import AllocConfig, Group, GroupConfig
from moe_mk_contrib.emulated.nccl.ep.handle import (
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    Handle,
    HandleConfig,
    LayoutInfo,
)
from moe_mk_contrib.emulated.nccl.ep.tensor import Tensor

__all__ = [
    "Algorithm", "AllocConfig", "CombineConfig", "CombineInputs", "CombineOutputs", "CombineQuantizationRecipe",
    "DispatchConfig", "DispatchInputs", "DispatchOutputs", "DispatchQuantizationRecipe", "ExpertIdKind", "Group",
    "GroupConfig", "Handle", "HandleConfig", "Layout", "LayoutInfo", "OverflowPolicy", "PassDir", "Tensor",
    "ZeroCopyMode",
]  # fmt: skip
