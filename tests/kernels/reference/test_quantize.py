"""Quantising rows and blocks: scales by hand and by loops, exact powers of two, and bytes against ml_dtypes."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_mk.kernels.reference.quantize import (
    AMAX_FLOOR,
    FP8_MAX,
    fp8_scales,
    global_scales,
    linear_scales,
    power_of_two_scales,
    quantize_rows,
    round_up_to_power_of_two,
    scales_of,
)
from moe_mk.quant.fp8 import weight_scheme
from moe_mk.quant.tensor import QuantTensor
from tests.support.draws import normal

F32_MAX = torch.finfo(torch.float32).max
BELOW_FLOOR = float(torch.tensor(AMAX_FLOOR, dtype=torch.float32))


def test_a_row_by_hand() -> None:
    # Groups of 2: (1, -4) has amax 4, scale 4/448 = 1/112, values 112 and -448; (0, 0.5) alone has scale 0.5/448.
    values, scales = quantize_rows(torch.tensor([[1.0, -4.0, 0.0, 0.5]]), 2)
    assert values.float().tolist() == [[112.0, -448.0, 0.0, 448.0]]
    assert scales.tolist() == [[pytest.approx(1 / 112), pytest.approx(1 / 896)]]
    # As powers of two: 1/112 -> 1/64, values 64 and -256; 1/896 -> 1/512, value 256.
    values, scales = quantize_rows(torch.tensor([[1.0, -4.0, 0.0, 0.5]]), 2, power_of_two=True)
    assert values.float().tolist() == [[64.0, -256.0, 0.0, 256.0]] and scales.tolist() == [[1 / 64, 1 / 512]]


@pytest.mark.row(98)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("columns", [128, 256, 7168, 200, 1, 0])
def test_each_token_has_a_scale_for_every_started_group_of_128(columns: int, power_of_two: bool) -> None:
    x = normal(5, columns) * 10.0 ** torch.arange(-6, 4, 2)[:, None]
    values, scales = quantize_rows(x, 128, power_of_two=power_of_two)
    assert values.shape == (5, columns) and scales.shape == (5, math.ceil(columns / 128))
    for row in range(5):
        for group in range(scales.shape[1]):
            piece = x[row, group * 128 : (group + 1) * 128]
            exact = piece.abs().max() / torch.tensor(FP8_MAX)
            expected = 2.0 ** math.ceil(math.log2(float(exact))) if power_of_two else exact
            assert float(scales[row, group]) == float(expected)
            # Other groups and other tokens change nothing.
            alone = quantize_rows(piece[None], 128, power_of_two=power_of_two)[0]
            assert torch.equal(
                alone.view(torch.uint8)[0], values[row, group * 128 : (group + 1) * 128].view(torch.uint8)
            )


@pytest.mark.row(96)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 200), (1, 129), (127, 1)])
def test_each_block_is_within_half_a_spacing_of_e4m3(shape: tuple[int, int], power_of_two: bool) -> None:
    w = normal(*shape) * torch.linspace(-9, 3, shape[1]).exp2()
    q = weight_scheme((128, 128), ue8m0=power_of_two).quantize(w)
    assert q.scales is not None
    back, scales = q.dequantize(torch.float32), q.scales.float()
    assert scales.shape == (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            scale, exact = scales[i, j].double(), w[block].double()
            if not power_of_two:
                assert float(scale) == float(w[block].abs().max() / FP8_MAX)
            # Spacing is 2^-3 of the leading power of two, and 2^-9 below 2^-6; f32 rounds the quotient and the product.
            limit = torch.maximum(exact.abs() * 2.0**-4, scale * 2.0**-10) + exact.abs() * 2.0**-22
            assert ((back[block].double() - exact).abs() <= limit).all()


TINY = torch.finfo(torch.float32).tiny


def test_scales_of_extreme_amax_by_hand() -> None:
    # Zero has the scale 1, the smallest f32 a normal one, in which it is rounded to 0; infinity and NaN have NaN.
    amax = torch.tensor([0.0, 2.0**-149, TINY, 127.0 * TINY, 254.0, math.inf, math.nan])
    assert linear_scales(amax, 127.0)[:5].tolist() == [1.0, TINY, TINY, TINY, 2.0]
    assert power_of_two_scales(amax, 448.0)[:4].tolist() == [1.0, 2.0**-126, 2.0**-126, 2.0**-126]
    assert power_of_two_scales(torch.tensor([448.0, 449.0, 224.0]), 448.0).tolist() == [1.0, 2.0, 0.5]
    assert float(global_scales(amax, 6.0)[4]) == pytest.approx(254.0 / 6.0 / 448.0, rel=1e-6)
    # FP8 under a global scale of 0.5: 6 / 6 / 0.5 = 2; below 2^-9 and above 448 the ends of e4m3;
    # 17 is between 16 and 18.
    found = fp8_scales(torch.tensor([6.0, 2.0**-20, 0.0, 6.0 * 448, 3 * 17.0]), 6.0, 0.5)
    assert found.tolist() == [2.0, 2.0**-9, 2.0**-9, 448.0, 16.0]
    for scales in (linear_scales(amax, 127.0), power_of_two_scales(amax, 448.0), fp8_scales(amax, 6.0, 1.0)):
        assert scales[5:].isnan().all() and scales[:5].isfinite().all() and (scales[:5] > 0).all()


@pytest.mark.parametrize("rows", [1, 128])
def test_fp8_bytes_and_scales_are_those_of_ml_dtypes(rows: int) -> None:
    x = normal(130, 300, seed=1)
    x[:, 150:] *= 2.0**-9  # into the subnormals of e4m3, in the same groups as large numbers
    q = weight_scheme((rows, 128)).quantize(x)
    values, scales = q.values, q.scales
    assert scales is not None
    wide = scales.repeat_interleave(x.shape[0] // scales.shape[0] if len(scales) == len(x) else 128, 0)[: x.shape[0]]
    divided = x.numpy() / wide.repeat_interleave(128, 1)[:, : x.shape[1]].numpy()
    expected = divided.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(values.view(torch.uint8).numpy(), expected)
    subnormal = (expected & 0x78 == 0) & (expected & 0x07 != 0)
    assert subnormal.any()  # the comparison has reached them


@pytest.mark.row(97)
@given(st.floats(0, F32_MAX, width=32))
def test_power_of_two_scales_never_clip_and_are_the_smallest(amax: float) -> None:
    check_scale(amax)


@pytest.mark.row(97)
def test_power_of_two_scales_at_every_exact_power_and_beside_it() -> None:
    for exponent in range(-149, 128):
        for factor in (1.0, 1.75):  # 448 is 1.75 * 2^8: there the scale itself is a power of two
            edge = torch.tensor(factor * 2.0**exponent, dtype=torch.float64).clamp(max=F32_MAX).float()
            for amax in (edge, torch.nextafter(edge, torch.tensor(math.inf)), torch.nextafter(edge, torch.tensor(0.0))):
                check_scale(min(float(amax), F32_MAX))


def check_scale(amax: float) -> None:
    scale = float(scales_of(torch.tensor([amax], dtype=torch.float32), power_of_two=True)[0])
    assert math.frexp(scale)[0] == 0.5
    assert Fraction(amax) / Fraction(scale) <= 448
    # Half the scale would clip, within the rounding of one division.
    assert Fraction(max(amax, BELOW_FLOOR)) * (1 + Fraction(1, 2**22)) / (Fraction(scale) / 2) > 448
    as_byte = torch.tensor([scale]).to(torch.float8_e8m0fnu)
    assert float(as_byte.float()) == scale
    assert int(as_byte.view(torch.uint8)) == int(np.array([scale]).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)[0])


@pytest.mark.row(97)
@given(st.floats(2.0**-149, 2.0**127, width=32))
def test_rounding_up_to_a_power_of_two_is_exact(number: float) -> None:
    rounded = float(round_up_to_power_of_two(torch.tensor([number], dtype=torch.float32))[0])
    assert math.frexp(rounded)[0] == 0.5 and rounded / 2 < number <= rounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_read_in_f32_and_left_alone(dtype: torch.dtype) -> None:
    x = normal(4, 130).to(dtype)
    before = x.clone()
    for scheme in (weight_scheme((1, 128)), weight_scheme((2, 128))):
        narrow, wide = scheme.quantize(x), scheme.quantize(x.float())
        assert narrow.scales is not None and wide.scales is not None
        assert torch.equal(narrow.values.view(torch.uint8), wide.values.view(torch.uint8))
        assert narrow.scales.dtype == torch.float32 and torch.equal(narrow.scales, wide.scales)
    assert torch.equal(x, before)


def test_dequantising_rounds_once() -> None:
    # 1.75 * (1 + 2^-8) = 1.7568...: one rounding to bf16 from f32, not from a rounded scale.
    values = torch.tensor([[1.75, 1.0]]).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1 + 2.0**-8]])
    back = QuantTensor(values, scales, weight_scheme((1, 2))).dequantize(torch.bfloat16)
    assert torch.equal(back, torch.tensor([[1.75 * (1 + 2.0**-8), 1 + 2.0**-8]]).bfloat16())
