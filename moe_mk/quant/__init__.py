"""Number formats: schemes by name, quantised tensors, and rows as bytes on a wire."""

from moe_mk.errors import ConfigError
from moe_mk.quant.fp8_block import (
    FP8_1x128,
    FP8_1x128_UE8M0,
    FP8_128x128,
    FP8_128x128_UE8M0,
    Fp8Block,
    activation_scheme,
    weight_scheme,
)
from moe_mk.quant.plain import BF16, FP16, FP32, Plain, plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.registry import did_you_mean

SCHEMES: dict[str, QuantScheme] = {
    scheme.name: scheme for scheme in (BF16, FP16, FP32, FP8_128x128, FP8_128x128_UE8M0, FP8_1x128, FP8_1x128_UE8M0)
}


def scheme_named(name: str) -> QuantScheme:
    """The scheme of a name; an unknown one raises ConfigError with what was probably meant."""
    if name not in SCHEMES:
        raise ConfigError(f"no quantisation scheme is called {name!r}{did_you_mean(name, list(SCHEMES))}")
    return SCHEMES[name]


__all__ = [
    "BF16", "FP16", "FP32", "FP8_1x128", "FP8_1x128_UE8M0", "FP8_128x128", "FP8_128x128_UE8M0",
    "Fp8Block", "Plain", "QuantScheme", "QuantTensor", "SCHEMES",
    "activation_scheme", "plain", "scheme_named", "weight_scheme",
]  # fmt: skip
