"""The DeepSeek-V3 MoE layer: sigmoid gate with a correction bias, group-limited top-k, FP8 experts, a shared expert."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from moe_mk.comm.groups import ParallelGroups
from moe_mk.config.moe import MoEConfig
from moe_mk.layer.moe_layer import MoELayer, Progress
from moe_mk.layer.settings import config_of, stated

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DeepseekV3MoE(MoELayer):
    """A `MoELayer` by the name of the model it is made for; other families' configurations run in it as well."""

    @classmethod
    def from_config(cls, config: MoEConfig | str | Path, **where: Any) -> Self:
        """Build from a config, or from a YAML or JSON file of one. where: device, dtype, groups, name."""
        if not isinstance(config, MoEConfig):
            config = MoEConfig.load(config)
        return cls(config, **where)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | PathLike[str],
        layer: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        groups: ParallelGroups | DeviceMesh | None = None,
        prefix: str | None = None,
        on_progress: Progress | None = None,
        **overrides: Any,
    ) -> Self:
        """Build from a checkpoint folder's config.json and load one layer of it.

        prefix: the part of names before "experts.0...", where several blocks have the number of the layer.
        overrides: settings by their bare key, such as experts="reference". Scales of activations that the checkpoint
        was calibrated with become settings of the layer, and so does a table that chooses experts by token id: call
        such a layer with token_ids_T. Raises ConfigError or WeightError.
        """
        config = stated(config_of(path, layer, **overrides), path, layer, prefix)
        built = cls(config, device=device, dtype=dtype, groups=groups, name=f"layer {layer}")
        return built.load_from_safetensors(path, layer, prefix=prefix, on_progress=on_progress)
