"""What a checkpoint states of one of its layers and its config.json does not, brought into the settings."""

from __future__ import annotations

from os import PathLike

from moe_mk.config.moe import MoEConfig
from moe_mk.layer.calibrated import calibrated
from moe_mk.layer.hashed import hashed


def stated(config: MoEConfig, path: str | PathLike[str], layer: int) -> MoEConfig:
    """The config with a table of experts by token id, and with calibrated scales, where the checkpoint has them.

    What the config states is left as it is. Raises WeightError for a layer that is not there.
    """
    return calibrated(hashed(config, path, layer), path, layer)
