"""1x128 quantisation bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.reference.quantize import quantize_rows

FP8 = torch.float8_e4m3fn


def quantized(
    native: Native, x_TH: torch.Tensor, *, ue8m0: bool = False, isa: Isa | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows by the kernel: values, and the f32 scales of every 128."""
    tokens, hidden = x_TH.shape
    values_TH, scales_TX = torch.empty(tokens, hidden, dtype=FP8), torch.empty(tokens, -(-hidden // 128))
    native.call(
        "quantize", x_TH.data_ptr(), tokens, hidden, x_TH.stride(0), x_TH.dtype == torch.float32, ue8m0,
        values_TH.data_ptr(), scales_TX.data_ptr(), 2, native.isa_or_best(isa),
    )  # fmt: skip
    return values_TH, scales_TX


@pytest.mark.parametrize("ue8m0", [False, True])
def test_every_instruction_set_is_bit_equal_to_the_reference(isa_here, ue8m0: bool, generator: torch.Generator) -> None:
    native, isa = isa_here
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(11, 400, generator=generator) * torch.logspace(-20, 20, 11).unsqueeze(1)
        x[0] = 0
        x[1, ::3] = torch.finfo(dtype).max  # the largest there is beside the smallest
        x[2, :128] = 1e-40  # subnormal in f32
        x[3, 1::2] *= 1e-5  # subnormal codes
        x = x.to(dtype)
        values, scales = quantized(native, x, ue8m0=ue8m0, isa=isa)
        wanted_values, wanted_scales = quantize_rows(x, 128, power_of_two=ue8m0)
        assert torch.equal(scales, wanted_scales)
        assert torch.equal(values.view(torch.uint8), wanted_values.view(torch.uint8))


@pytest.mark.parametrize("exponent", [-40, -9, 0, 100])
def test_scales_around_a_power_of_two_are_rounded_up_only_beyond_it(isa_here, exponent: int) -> None:
    # The f32 numbers next to 448 * 2^e: below and at it the scale is 2^e, above it 2^(e + 1) and 448 becomes 224.
    native, isa = isa_here
    middle = torch.tensor([448.0 * 2.0**exponent])
    near = torch.cat([middle.nextafter(torch.zeros(1)), middle, middle.nextafter(middle * 2)]).unsqueeze(1)
    values, scales = quantized(native, near, ue8m0=True, isa=isa)
    exact = near / 448.0  # in f32, as it is stored: the number below may round to 2^e itself
    wanted = torch.where(exact <= 2.0**exponent, 2.0**exponent, 2.0 ** (exponent + 1))
    assert torch.equal(scales, wanted) and scales[1].item() == 2.0**exponent < scales[2].item()
    assert values.float()[1:].flatten().tolist() == [448.0, 224.0]


@settings(max_examples=50, deadline=None)
@given(bits=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=300), scale=st.integers(-40, 40), ue8m0=st.booleans())
def test_any_finite_bf16_is_bit_equal_to_the_reference(
    native: Native, bits: list[int], scale: int, ue8m0: bool
) -> None:
    x = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float() * 2.0**scale
    x = x.nan_to_num(0, 0, 0).bfloat16().nan_to_num(0, 0, 0).unsqueeze(0)
    values, scales = quantized(native, x, ue8m0=ue8m0)
    wanted_values, wanted_scales = quantize_rows(x, 128, power_of_two=ue8m0)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(values.view(torch.uint8), wanted_values.view(torch.uint8))


@pytest.mark.parametrize("ue8m0", [False, True])
def test_a_nan_or_an_infinity_poisons_its_own_group_only(isa_here, ue8m0: bool) -> None:
    # Of an infinity the scale is one, and no finite number hides it: 0 * inf is a NaN.
    native, isa = isa_here
    x = torch.ones(1, 384)
    x[0, 3], x[0, 132] = float("nan"), float("-inf")
    values, scales = quantized(native, x, ue8m0=ue8m0, isa=isa)
    assert values.float()[0, :128].isnan().all() and scales[0, 0].isnan()
    assert (values.float() * scales.repeat_interleave(128, 1))[0, 128:256].isnan().all()
    assert values.float()[0, 256:].eq(256 if ue8m0 else 448).all()  # 1 / 448 up to 2^-8


def test_strided_rows_and_no_rows(native: Native) -> None:
    x = torch.randn(4, 512)[:, 128:384]
    assert torch.equal(quantized(native, x)[1], quantize_rows(x, 128)[1])
    values, scales = quantized(native, torch.empty(0, 256))
    assert values.shape == (0, 256) and scales.shape == (0, 2)
