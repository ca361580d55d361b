"""Scales of activations that a checkpoint was calibrated with, brought into the settings of a layer."""

from __future__ import annotations

from os import PathLike

from moe_mk.config.moe import MoEConfig
from moe_mk.weights.input_scales import read_input_scales
from moe_mk.weights.source import SafetensorsSource


def calibrated(config: MoEConfig, path: str | PathLike[str], layer: int) -> MoEConfig:
    """The config with the input scales of one layer of a checkpoint, where it has any and its type can use them.

    A scale that the config states is left as it is. FP8 tokens and the rows between the products get a scale each;
    NVFP4 gets the larger one for both, because the scales below it reach far enough down. Every rank reads the scales
    of all experts, so all of them come to the same settings. Raises WeightError for scales that are broken.
    """
    quant = config.model.quant
    if quant.weights not in ("fp8_tensor", "fp8_channel", "nvfp4") or quant.input_scale is not None:
        return config
    if quant.activations == "none" or (scales := read_input_scales(SafetensorsSource(path), layer)) is None:
        return config
    if quant.weights == "nvfp4":
        found = {"input_scale": max(scales.tokens, scales.hidden)}
    else:
        found = {"input_scale": scales.tokens, "hidden_scale": scales.hidden}
    return config.with_(quant={**quant.model_dump(), **found})
