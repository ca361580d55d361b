"""FP8 blocks as a scheme: shapes, bytes, stacks, names and the size of its rounding."""

import pytest

from moe_mk.errors import ConfigError
from moe_mk.quant import (
    FP8_1x128,
    FP8_1x128_UE8M0,
    FP8_128x128,
    FP8_128x128_UE8M0,
    activation_scheme,
    weight_scheme,
)


@pytest.mark.row(96)
def test_deepseek_v3_matrices_by_hand() -> None:
    # w1 of an expert, 2048 x 7168: 16 x 56 blocks; 14,680,064 bytes and 896 scales of 4 bytes, or of 1.
    assert FP8_128x128.scale_shape(2048, 7168) == (16, 56)
    assert FP8_128x128.num_bytes(2048, 7168) == 14_680_064 + 896 * 4
    assert FP8_128x128_UE8M0.num_bytes(2048, 7168) == 14_680_064 + 896
    assert FP8_1x128.scale_shape(3, 7168) == (3, 56) and FP8_128x128.scale_shape(129, 1) == (2, 1)


def test_schemes_are_values_with_names_that_say_their_size() -> None:
    assert weight_scheme((128, 128)) == FP8_128x128 and weight_scheme((128, 128), ue8m0=True) == FP8_128x128_UE8M0
    assert activation_scheme(128) == FP8_1x128 and activation_scheme(128, ue8m0=True) == FP8_1x128_UE8M0
    assert weight_scheme((64, 32)).name == "fp8_64x32" and weight_scheme((64, 32)).block == (64, 32)


@pytest.mark.parametrize("block", [(0, 128), (128, -1)])
def test_blocks_without_sides_are_refused(block: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=f"weight block {block[0]}x{block[1]} must have positive sides"):
        weight_scheme(block)
