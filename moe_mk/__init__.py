"""The MoE layer that any inference engine can embed.

Four lines do it:

    import torch, moe_mk
    layer = moe_mk.DeepseekV3MoE.from_checkpoint("DeepSeek-V3", layer=3)
    y = layer(torch.randn(16, 7168).bfloat16())          # (T, H) -> (T, H), shared experts included
    print(layer.explain())                               # what runs, and why not the others

Names are imported lazily, so that `import moe_mk` does not import torch.
"""

from typing import TYPE_CHECKING

from moe_mk.imports import at_first_use

if TYPE_CHECKING:
    from moe_mk import errors, oracle, router
    from moe_mk.comm.groups import ParallelGroups
    from moe_mk.config import DeviceProfile, MoEConfig
    from moe_mk.errors import (
        CommError,
        ConfigError,
        LibraryMissing,
        LostExpertError,
        MoEMKError,
        ShapeError,
        UnsupportedError,
        WeightError,
    )
    from moe_mk.experts.residency import ResidencyPool
    from moe_mk.layer import DeepseekV3MoE, MemoryReport, MoELayer
    from moe_mk.oracle import Decision, Problem
    from moe_mk.placement.expert_map import ExpertMap

__version__ = "0.1.0"

__all__ = [
    "CommError", "ConfigError", "Decision", "DeepseekV3MoE", "DeviceProfile", "ExpertMap", "LibraryMissing",
    "LostExpertError", "MemoryReport", "MoEConfig", "MoELayer", "MoEMKError", "ParallelGroups", "Problem",
    "ResidencyPool", "ShapeError", "UnsupportedError", "WeightError", "__version__", "errors", "oracle", "router",
]  # fmt: skip

_ROOMS = frozenset(
    "comm config errors experts external flight kernel kernels lab layer oracle permute placement prepare_finalize "
    "quant rebalance registry router runner shapes tokens trace weights".split()
)
_HOMES = {
    "comm.groups": "ParallelGroups",
    "config": "DeviceProfile MoEConfig",
    "errors": "CommError ConfigError LibraryMissing LostExpertError MoEMKError ShapeError UnsupportedError WeightError",
    "experts.residency": "ResidencyPool",
    "layer": "DeepseekV3MoE MemoryReport MoELayer",
    "oracle": "Decision Problem",
    "placement.expert_map": "ExpertMap",
}

if not TYPE_CHECKING:  # a checker reads the imports above, and would take any name for known
    __getattr__ = at_first_use(__name__, _HOMES, _ROOMS)


def __dir__() -> list[str]:
    return sorted({*globals(), *" ".join(_HOMES.values()).split(), *_ROOMS})
