"""FP8 blocks as a scheme: shapes, bytes, stacks, names and the size of its rounding."""

import pytest
import torch

from moe_mk.errors import ConfigError
from moe_mk.quant import (
    FP8_1x128,
    FP8_1x128_UE8M0,
    FP8_128x128,
    FP8_128x128_UE8M0,
    Fp8Block,
    activation_scheme,
    weight_scheme,
)
from tests.support.draws import normal

ALL = [FP8_128x128, FP8_128x128_UE8M0, FP8_1x128, FP8_1x128_UE8M0]


@pytest.mark.row(96)
def test_deepseek_v3_matrices_by_hand() -> None:
    # w1 of an expert, 2048 x 7168: 16 x 56 blocks; 14,680,064 bytes and 896 scales of 4 bytes, or of 1.
    assert FP8_128x128.scale_shape(2048, 7168) == (16, 56)
    assert FP8_128x128.num_bytes(2048, 7168) == 14_680_064 + 896 * 4
    assert FP8_128x128_UE8M0.num_bytes(2048, 7168) == 14_680_064 + 896
    assert FP8_1x128.scale_shape(3, 7168) == (3, 56) and FP8_128x128.scale_shape(129, 1) == (2, 1)


@pytest.mark.parametrize("scheme", ALL, ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(4, 256), (130, 200), (3, 130, 200), (2, 3, 130, 200), (0, 256)])
def test_any_leading_dimensions_give_the_bytes_that_were_promised(scheme: Fp8Block, shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    q = scheme.quantize(x)
    assert q.shape == shape and q.values.dtype == torch.float8_e4m3fn
    assert q.scales is not None and q.scales.dtype == scheme.scale_dtype
    assert q.scales.shape == (*shape[:-2], *scheme.scale_shape(*shape[-2:]))
    matrices = x.reshape(-1, *shape[-2:]).shape[0] if x.numel() else 1
    assert q.num_bytes == matrices * scheme.num_bytes(*shape[-2:])
    back = q.dequantize(torch.float32)
    for piece, whole in zip(x.reshape(matrices, *shape[-2:]), back.reshape(matrices, *shape[-2:]), strict=True):
        assert torch.equal(scheme.quantize(piece).dequantize(torch.float32), whole)
    assert q.dequantize(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.row(96)
@pytest.mark.parametrize("scheme", ALL, ids=lambda s: s.name)
@pytest.mark.parametrize("size", [1.0, 3.7e-5, 1e4])
def test_rounding_of_normals_is_what_the_scheme_states(scheme: Fp8Block, size: float) -> None:
    x = normal(512, 1024) * size
    error = scheme.quantize(x).dequantize(torch.float32) - x
    assert float(error.norm() / x.norm()) == pytest.approx(scheme.relative_rms, rel=0.05)


@pytest.mark.row(97)
def test_ue8m0_scales_are_bytes_and_powers_of_two() -> None:
    x = normal(256, 384) * torch.linspace(-30, 30, 384).exp2()
    exact, rounded = FP8_128x128.quantize(x).scales, FP8_128x128_UE8M0.quantize(x).scales
    assert exact is not None and rounded is not None and rounded.element_size() == 1
    assert (torch.frexp(rounded.float())[0] == 0.5).all()
    assert (rounded.float() >= exact).all() and (rounded.float() < 2 * exact).all()


def test_schemes_are_values_with_names_that_say_their_size() -> None:
    assert weight_scheme((128, 128)) == FP8_128x128 and weight_scheme((128, 128), ue8m0=True) == FP8_128x128_UE8M0
    assert activation_scheme(128) == FP8_1x128 and activation_scheme(128, ue8m0=True) == FP8_1x128_UE8M0
    assert weight_scheme((64, 32)).name == "fp8_64x32" and weight_scheme((64, 32)).block == (64, 32)


@pytest.mark.parametrize("block", [(0, 128), (128, -1)])
def test_blocks_without_sides_are_refused(block: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=f"weight block {block[0]}x{block[1]} must have positive sides"):
        weight_scheme(block)
