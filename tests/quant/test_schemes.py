"""What every scheme with scales promises: bytes, shapes, bounds that follow from its format, damage that shows."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk.errors import ShapeError
from moe_mk.quant import (
    FP8_TENSOR,
    INT8_CHANNEL,
    INT8_TOKEN,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_TOKENS,
    SCHEMES,
    BlockedScheme,
    Fp8Block,
    fp8_static,
    nvfp4_tokens,
)
from moe_mk.quant.blocked import E2M1, E4M3, INT8, expected_error
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.wire import decode_rows, encode_rows, row_bytes
from moe_mk.weights.slices import stacked_rows
from tests.support.draws import normal

BLOCKED = [scheme for scheme in SCHEMES.values() if isinstance(scheme, BlockedScheme)]
STATIC = fp8_static(0.02)


def test_bytes_of_a_deepseek_v3_row_by_hand() -> None:
    # 7,168 values: 56 groups of 128, 224 of 32, 448 of 16.
    by_hand = {
        "bf16": 14_336, "fp8_1x128": 7_168 + 56 * 4, "fp8_1x128_ue8m0": 7_168 + 56, "fp8_token": 7_168 + 4,
        "int8_token": 7_168 + 4, "mxfp8": 7_168 + 224, "mxfp4": 3_584 + 224, "nvfp4_1x16": 3_584 + 448,
    }  # fmt: skip
    assert {name: row_bytes(SCHEMES[name], 7168) for name in by_hand} == by_hand
    assert by_hand["nvfp4_1x16"] == 4_032 and by_hand["mxfp4"] == 3_808
    assert row_bytes(STATIC, 7168) == 7_168, "a static scale does not travel"


@pytest.mark.row(101)
def test_mxfp4_takes_17_32nds_of_a_byte_a_value() -> None:
    assert MXFP4.num_bytes(2048, 7168) / (2048 * 7168) == 0.53125


@pytest.mark.row(102)
def test_mxfp8_activations_have_a_scale_for_32() -> None:
    q = MXFP8.quantize(normal(5, 7168))
    assert q.scales is not None and q.scales.shape == (5, 7168 // 32) and q.scales.dtype == torch.float8_e8m0fnu
    assert q.num_bytes / q.values.numel() == 1.03125


@pytest.mark.parametrize("scheme", [*BLOCKED, *GROUPED.values()], ids=lambda s: s.name)
@pytest.mark.parametrize("shape", [(4, 256), (130, 200), (1, 2), (3, 130, 72), (2, 3, 130, 72), (0, 256)])
def test_bytes_are_those_that_were_promised(scheme: BlockedScheme, shape: tuple[int, ...]) -> None:
    q = scheme.quantize(normal(*shape))
    assert q.shape == shape, "the shape is the logical one, whatever the packing"
    assert q.num_bytes == math.prod(shape[:-2]) * scheme.num_bytes(*shape[-2:])
    assert (q.zeros is not None) == (scheme in GROUPED.values() and not scheme.is_symmetric)
    if len(shape) == 3:
        for part in range(shape[0]):
            alone = scheme.quantize(normal(*shape)[part]).dequantize(torch.float32)
            assert torch.equal(q[part].dequantize(torch.float32), alone), "an expert of a stack stands for itself"
            assert q[part].values.data_ptr() == q.values[part].data_ptr(), "and is a view"


def test_expected_errors_by_hand() -> None:
    # The largest of 8 normals is about sqrt(2 ln 16) = 2.355. Integers: a step of amax / 127, uniform: / sqrt(12).
    assert expected_error(INT8, 1 / 127, 8) == pytest.approx(2.355 / 127 / 12**0.5, rel=1e-3)
    # e4m3: 2^-3 of the mantissa for normal numbers, / sqrt(24), and near zero 2^-9 of amax / 448, which is far less.
    assert expected_error(E4M3, 1 / 448, 8) == pytest.approx(2.0**-3 / 24**0.5, rel=1e-3)
    assert expected_error(E2M1, 1 / 6, 8) == pytest.approx(
        math.hypot(0.5 / 24**0.5, 0.5 * 2.355 / 6 / 12**0.5), rel=1e-3
    )
    by_hand = {"q4_0": 16, "q4_1": 15, "q8_0": 254, "q6_k": 64}
    for name, levels in by_hand.items():  # a range from one extreme of a group to the other; with a minimum, both ends
        crest = math.sqrt(2 * math.log(2 * GGUF[name].group))
        assert GGUF[name].relative_rms == pytest.approx(2 * crest / levels / 12**0.5), name
    assert expected_error(INT8, 1.0, 1) == expected_error(INT8, 1.0, 2) < expected_error(INT8, 1.0, 3)
    assert INT8_CHANNEL.relative_rms == pytest.approx(math.log(8192) / 127 / 12**0.5)


@pytest.mark.row(96, 101)
@pytest.mark.parametrize("scheme", [*BLOCKED, STATIC, *GROUPED.values(), *GGUF.values()], ids=lambda s: s.name)
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_rounding_of_normals_is_no_more_than_the_scheme_states(scheme: BlockedScheme, size: float) -> None:
    if scheme is STATIC and size < 1:
        scheme = fp8_static(0.02 * size)
    if scheme is NVFP4_TOKENS:
        scheme = nvfp4_tokens(size)
    x = normal(512, 1024) * size
    q = scheme.quantize(x)
    error = q.dequantize(torch.float32) - x
    assert q.shape == x.shape and q.num_bytes == scheme.num_bytes(512, 1024)
    least = 0.95 if isinstance(scheme, Fp8Block) else 0.3
    assert least * scheme.relative_rms < float(error.norm() / x.norm()) < 1.05 * scheme.relative_rms


@pytest.mark.row(96)
@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from([s.name for s in BLOCKED]),
    n=st.integers(1, 9),
    pairs=st.integers(1, 80),
    spread=st.floats(0, 12),
    seed=st.integers(0, 2**16),
)
def test_no_value_is_further_off_than_half_a_spacing(name: str, n: int, pairs: int, spread: float, seed: int) -> None:
    """Against the scale that each value got: half a step near zero, half the relative spacing above."""
    scheme = SCHEMES[name]
    assert isinstance(scheme, BlockedScheme)
    x = normal(n, 2 * pairs, seed=seed) * (normal(n, 2 * pairs, seed=seed + 1) * spread / 4).exp2()
    q = scheme.quantize(x)
    scale, element = scheme.spread_scales(q).expand_as(x), scheme.element
    back = q.dequantize(torch.float32)
    half = torch.maximum(torch.full_like(x, element.step), element.relative_spacing * (x / scale).abs()) * scale / 2
    # A block's largest value may lie between the largest code and where its rounded FP8 scale ends: it saturates.
    beyond = (x.abs() - element.largest * scale).clamp_min(0)
    assert bool(((back - x).abs() <= half * (1 + 1e-6) + beyond).all())
    if scheme.family != "nvfp4":
        assert not bool((beyond > x.abs() * 1e-6).any()), "no amax clips"


@pytest.mark.row(97)
@pytest.mark.parametrize("scheme", [MXFP4, MXFP8], ids=lambda s: s.name)
def test_microscales_are_powers_of_two_and_never_clip(scheme: BlockedScheme) -> None:
    x = normal(64, 320) * torch.linspace(-60, 60, 320).exp2()
    q = scheme.quantize(x)
    assert q.scales is not None
    wide = q.scales.float()
    assert (torch.frexp(wide)[0] == 0.5).all()
    amax = x.reshape(64, 10, 32).abs().amax(dim=-1)
    assert (amax <= wide * scheme.element.largest).all() and (amax > wide * scheme.element.largest / 2).all()


def test_mxfp8_values_are_those_of_ml_dtypes() -> None:
    x = normal(16, 64)
    q = MXFP8.quantize(x)
    assert q.scales is not None
    exponent = np.ceil(np.log2(np.abs(x.numpy().reshape(16, 2, 32)).max(-1).astype(np.float64) / 448))
    assert np.array_equal(q.scales.view(torch.uint8).numpy(), exponent + 127)
    theirs = np.exp2(exponent).astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(q.scales.float().numpy(), theirs)
    theirs = (x.numpy().reshape(16, 2, 32) / np.exp2(exponent)[..., None]).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(q.values.float().numpy(), theirs.astype(np.float32).reshape(16, 64))


def test_nvfp4_scales_are_e4m3_under_one_f32_by_hand() -> None:
    # The largest block has amax 12: global 12 / (6 * 448); its scale is 448, and 12 is code 6. A block of 3s: 112.
    x = torch.cat((torch.full((1, 16), 12.0), torch.full((1, 16), 3.0)), dim=1)
    q = NVFP4.quantize(x)
    assert q.scales is not None and q.global_scale is not None
    assert q.global_scale.tolist() == [[pytest.approx(12 / 2688)]] and q.scales.float().tolist() == [[448.0, 112.0]]
    assert torch.allclose(q.dequantize(torch.float32), x, rtol=1e-6)


def test_int8_by_hand() -> None:
    # Row scales 127/127 = 1 and 2.54/127 = 0.02; 0.5 rounds to even, so does 1.5.
    x = torch.tensor([[127.0, 0.5, 1.5, -126.6], [2.54, -0.02, 0.0, 0.031]])
    q = INT8_CHANNEL.quantize(x)
    assert q.values.tolist() == [[127, 0, 2, -127], [127, -1, 0, 2]]
    assert q.scales is not None and q.scales.flatten().tolist() == pytest.approx([1.0, 0.02])


@pytest.mark.parametrize("scheme", [*BLOCKED, STATIC], ids=lambda s: s.name)
def test_zeros_come_back_as_zeros(scheme: BlockedScheme) -> None:
    q = scheme.quantize(torch.zeros(4, 64))
    assert not q.dequantize(torch.float32).any()
    assert q.scales is None or bool((q.scales.float() > 0).all()), "a scale of 0 would divide by it"


@pytest.mark.parametrize("scheme", BLOCKED, ids=lambda s: s.name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_come_back_as_nan_never_as_numbers(scheme: BlockedScheme, bad: float) -> None:
    x = normal(2, 64)
    x[1, 40] = bad
    back = scheme.quantize(x).dequantize(torch.float32)
    assert not torch.isfinite(back[1, 40])
    if scheme.rows == 1 and scheme is not NVFP4:
        assert torch.isfinite(back[0]).all(), "other rows are untouched"


@pytest.mark.parametrize("scheme", [MXFP4, MXFP8, INT8_TOKEN], ids=lambda s: s.name)
def test_subnormal_numbers_survive_or_become_zero(scheme: BlockedScheme) -> None:
    x = normal(4, 64) * 2.0**-128
    back = scheme.quantize(x).dequantize(torch.float32)
    assert torch.isfinite(back).all() and bool((back.abs() <= x.abs() * 2 + 2.0**-126).all())


def test_a_static_scale_saturates_and_sends_none() -> None:
    q = fp8_static(0.5).quantize(torch.tensor([[1000.0, -1.0, 224.0]]))
    assert q.scales is None and q.dequantize(torch.float32).tolist() == [[224.0, -1.0, 224.0]]
    assert torch.equal(decode_rows(encode_rows(q), q.scheme, 3).values.float(), q.values.float())


@pytest.mark.parametrize("scheme", [FP8_TENSOR, NVFP4], ids=lambda s: s.name)
def test_a_stack_of_whole_matrices_keeps_their_scales_apart(scheme: BlockedScheme) -> None:
    # Gate over up, each with a scale of its own: two equal parts of the rows.
    parts = [scheme.quantize(normal(4, 32, seed=seed) * 100.0**seed) for seed in (0, 1)]
    whole = torch.cat([part.dequantize(torch.float32) for part in parts])
    assert torch.equal(stacked_rows(parts).dequantize(torch.float32), whole)


@pytest.mark.parametrize("scheme", [MXFP4, NVFP4], ids=lambda s: s.name)
def test_an_odd_number_of_four_bit_values_is_refused(scheme: BlockedScheme) -> None:
    with pytest.raises(ShapeError, match=rf"{scheme.name} holds 2 values a byte; 33 columns must be even"):
        scheme.quantize(normal(2, 33))
