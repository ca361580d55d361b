"""The `quantization_config` of a config.json for each expert format, in the notation of its origin.

The other direction is `config/hf.py`. Sources: DeepSeek-V3 (fp8), compressed-tensors (INT8, FP8 of whole rows and
tensors, and integers in groups as of Kimi-K2-Thinking), AutoGPTQ, AutoAWQ, NVIDIA modelopt
(NVFP4, MXFP8), gpt-oss (MXFP4).
"""

from __future__ import annotations

from typing import Any

from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.grouped import GROUPED, Grouped


def quantization_config(
    quant: str, block: tuple[int, int], *, ue8m0: bool = False, packing: str = ""
) -> dict[str, Any]:
    """The `quantization_config` of a config.json; empty for plain weights.

    packing: of integers in groups: "compressed_tensors", "gptq" or "awq".
    """
    if quant in GROUPED:
        return _integers(GROUPED[quant], packing or "compressed_tensors")
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


def _integers(scheme: Grouped, packing: str) -> dict[str, Any]:
    whole = scheme.columns == WHOLE
    size = -1 if whole else scheme.columns
    if packing == "awq":
        fields = {"bits": scheme.bits, "group_size": size, "zero_point": scheme.has_zeros, "version": "gemm"}
        return {"quant_method": "awq", **fields}
    if packing == "gptq":
        fields = {"bits": scheme.bits, "group_size": size, "sym": not scheme.has_zeros, "desc_act": False}
        return {"quant_method": "gptq", **fields, "checkpoint_format": "gptq"}
    weights = {
        "num_bits": scheme.bits, "type": "int", "strategy": "channel" if whole else "group",
        "group_size": None if whole else size, "symmetric": not scheme.has_zeros, "dynamic": False, "actorder": None,
    }  # fmt: skip
    group = {"weights": weights, "input_activations": None, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    }


def _compressed_tensors(quant: str, block: tuple[int, int]) -> dict[str, Any]:
    kind = "int" if quant.startswith("int8") else "float"
    strategy = {"int8": "channel", "fp8_channel": "channel", "fp8_tensor": "tensor", "int8_block": "block"}[quant]
    weights: dict[str, Any] = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = list(block)
    tokens = {"num_bits": 8, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"weights": weights, "input_activations": tokens, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": f"{kind}-quantized", "config_groups": {"group_0": group}}
