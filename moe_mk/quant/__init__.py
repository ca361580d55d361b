"""Number formats: quantisation schemes by name, quantised tensors, and rows as bytes for transports."""

from moe_mk.quant.blocked import WHOLE, BlockedScheme, Element
from moe_mk.quant.fp8 import (
    FP8_CHANNEL,
    FP8_DYNAMIC_TENSOR,
    FP8_TENSOR,
    FP8_TOKEN,
    FP8_1x128,
    FP8_1x128_UE8M0,
    FP8_128x128,
    FP8_128x128_UE8M0,
    Fp8Block,
    Fp8Static,
    activation_scheme,
    fp8_static,
    weight_scheme,
)
from moe_mk.quant.int8 import INT8_CHANNEL, INT8_TOKEN, INT8_128x128, Int8Block
from moe_mk.quant.microscaling import MXFP4, MXFP8, Microscaled
from moe_mk.quant.nvfp4 import NVFP4, NVFP4_TOKENS, Nvfp4, nvfp4_tokens
from moe_mk.quant.plain import BF16, FP16, FP32, Plain, plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.quant.wire import Timing, when_to_round

SCHEMES: dict[str, QuantScheme] = {
    scheme.name: scheme
    for scheme in (
        BF16, FP16, FP32, FP8_128x128, FP8_128x128_UE8M0, FP8_1x128, FP8_1x128_UE8M0, FP8_CHANNEL, FP8_TOKEN,
        FP8_TENSOR, FP8_DYNAMIC_TENSOR, INT8_CHANNEL, INT8_TOKEN, INT8_128x128, MXFP8, MXFP4, NVFP4, NVFP4_TOKENS,
    )
}  # fmt: skip


__all__ = [
    "BF16", "FP16", "FP32", "FP8_1x128", "FP8_1x128_UE8M0", "FP8_128x128", "FP8_128x128_UE8M0", "FP8_CHANNEL",
    "FP8_DYNAMIC_TENSOR", "FP8_TENSOR", "FP8_TOKEN", "INT8_128x128", "INT8_CHANNEL", "INT8_TOKEN", "MXFP4", "MXFP8",
    "NVFP4", "NVFP4_TOKENS", "SCHEMES", "WHOLE", "BlockedScheme", "Element", "Fp8Block", "Fp8Static", "Int8Block",
    "Microscaled", "Nvfp4", "Plain", "QuantScheme", "QuantTensor", "Timing", "activation_scheme",
    "fp8_static", "nvfp4_tokens", "plain", "weight_scheme", "when_to_round",
]  # fmt: skip
