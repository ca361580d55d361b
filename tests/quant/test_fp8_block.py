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
