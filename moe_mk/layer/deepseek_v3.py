"""The DeepSeek-V3 MoE layer: sigmoid gate with a correction bias, group-limited top-k, FP8 experts, a shared expert."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from moe_mk.config.moe import MoEConfig
from moe_mk.layer.moe_layer import MoELayer


class DeepseekV3MoE(MoELayer):
    """`MoELayer` under its DeepSeek-V3 name; it runs every supported model family."""

    @classmethod
    def from_config(cls, config: MoEConfig | str | Path, **where: Any) -> Self:
        """Build from a config, or from a YAML or JSON file of one. where: device, dtype, groups, name."""
        if not isinstance(config, MoEConfig):
            config = MoEConfig.load(config)
        return cls(config, **where)
