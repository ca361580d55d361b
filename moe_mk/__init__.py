"""The MoE layer that any inference engine can embed.

Four lines do it:

    import torch, moe_mk
    layer = moe_mk.DeepseekV3MoE.from_checkpoint("DeepSeek-V3", layer=3)
    y = layer(torch.randn(16, 7168).bfloat16())          # (T, H) -> (T, H), shared experts included
    print(layer.explain())                               # what runs, and why not the others

A name is imported where it is first used, so that a door which needs no layer waits for no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from moe_mk.moved import MOVED

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
    from moe_mk.layer import DeepseekV3MoE, MemoryReport, MoELayer
    from moe_mk.oracle import Decision, Problem
    from moe_mk.placement.expert_map import ExpertMap

__version__ = "0.1.0"

__all__ = [
    "CommError", "ConfigError", "Decision", "DeepseekV3MoE", "DeviceProfile", "ExpertMap", "LibraryMissing",
    "LostExpertError", "MemoryReport", "MoEConfig", "MoELayer", "MoEMKError", "ParallelGroups", "Problem", "ShapeError",
    "UnsupportedError", "WeightError", "__version__", "errors", "oracle", "router",
]  # fmt: skip

_ROOMS = frozenset(
    "comm config errors experts external flight kernel kernels lab layer oracle permute placement prepare_finalize "
    "quant rebalance registry router runner shapes tokens trace weights".split()
)
_HOMES = {
    "comm.groups": ("ParallelGroups",),
    "config": ("DeviceProfile", "MoEConfig"),
    "errors": (
        "CommError", "ConfigError", "LibraryMissing", "LostExpertError", "MoEMKError", "ShapeError",
        "UnsupportedError", "WeightError",
    ),
    "layer": ("DeepseekV3MoE", "MemoryReport", "MoELayer"),
    "oracle": ("Decision", "Problem"),
    "placement.expert_map": ("ExpertMap",),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # a checker reads the imports above, and would take any name for known

    def __getattr__(name: str) -> object:
        """Import a room, or a name of one, at its first use (PEP 562)."""
        if name in _ROOMS or f"{__name__}.{name}" in MOVED:
            return import_module(f"{__name__}.{name}")
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOME_OF.keys() | _ROOMS)
