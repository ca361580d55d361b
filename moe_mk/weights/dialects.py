"""The `quantization_config` of a config.json for each expert format, in the notation of its origin.

The other direction is `config/hf.py`. Sources: DeepSeek-V3 (fp8), compressed-tensors (INT8, FP8 of whole rows and
tensors), NVIDIA modelopt (NVFP4, MXFP8), gpt-oss (MXFP4).
"""

from __future__ import annotations

from typing import Any


def quantization_config(quant: str, block: tuple[int, int], *, ue8m0: bool = False) -> dict[str, Any]:
    """The `quantization_config` of a config.json; empty for plain weights."""
    if quant == "fp8_block":
        fields = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": list(block),
            "activation_scheme": "dynamic",
        }
        return {**fields, "scale_fmt": "ue8m0"} if ue8m0 else fields
    if quant == "mxfp4":
        return {"quant_method": "mxfp4"}
    if quant in ("nvfp4", "mxfp8"):
        return {"quant_method": "modelopt", "quant_algo": quant.upper()}
    if quant in ("bf16", "fp16", "fp32"):
        return {}
    return _compressed_tensors(quant, block)


def _compressed_tensors(quant: str, block: tuple[int, int]) -> dict[str, Any]:
    kind = "int" if quant.startswith("int8") else "float"
    strategy = {"int8": "channel", "fp8_channel": "channel", "fp8_tensor": "tensor", "int8_block": "block"}[quant]
    weights: dict[str, Any] = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = list(block)
    tokens = {"num_bits": 8, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"weights": weights, "input_activations": tokens, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "config_groups": {"group_0": group},
    }
