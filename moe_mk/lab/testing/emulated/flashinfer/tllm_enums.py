"""`flashinfer.tllm_enums`, as far as its experts go: the numbers of the kernels, read at 0.7.2."""

from __future__ import annotations

from enum import IntEnum


class RoutingMethodType(IntEnum):
    """How kernels that route themselves would do it."""

    Default = 0
    Renormalize = 1
    DeepSeekV3 = 2
    Llama4 = 3
    RenormalizeNaive = 4
    TopK = 5
    SigmoidRenorm = 6
    MiniMax2 = 7
    Sigmoid = 8
    TopKSigmoid = 9
    Unspecified = 10


class ActivationType(IntEnum):
    """The activation between the two products; Swiglu and Relu2 are emulated."""

    Gelu = 0
    Relu = 1
    Silu = 2
    Swiglu = 3
    Geglu = 4
    SwigluBias = 5
    Relu2 = 6
    SwigluStep = 7
    GegluTanh = 8
    Identity = 9
    Situ = 10
    InvalidType = 11
    ClampedRelu2 = 12


class SfLayout(IntEnum):
    """Where scales of rows lie."""

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


class WeightLayout(IntEnum):
    """Where the columns of weights lie."""

    MajorK = 0
    MajorMn = 1
    BlockMajorK = 2


class Fp8QuantizationType(IntEnum):
    """Whose scales FP8 codes have."""

    NoneFp8 = 0
    DeepSeekFp8 = 1
    MxFp8 = 2
    PerTensorFp8 = 3
