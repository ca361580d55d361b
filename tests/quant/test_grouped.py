"""Weight-only integers in groups: values by hand, bounds of the format, bytes, slices, another library's decoding."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_mk.errors import ShapeError
from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.grouped import GROUPED, Grouped, grouped
from moe_mk.quant.tensor import QuantTensor
from moe_mk.weights.slices import gate_and_up, narrow_columns, narrow_rows
from tests.support.draws import normal

ALL = pytest.mark.parametrize("scheme", GROUPED.values(), ids=list(GROUPED))


def test_values_by_hand() -> None:
    # Bytes 0x80 0x2f: columns 0, 8, 15, 2. Symmetric: minus 8, times 0.5. With a zero point of 3: minus 3.
    values, scales = torch.tensor([[0x80, 0x2F]], dtype=torch.uint8), torch.tensor([[0.5]], dtype=torch.bfloat16)
    q = QuantTensor(values, scales, GROUPED["int4_row"])
    assert q.dequantize(torch.float32).tolist() == [[-4.0, 0.0, 3.5, -3.0]] and q.shape == (1, 4)
    zeros = torch.tensor([[3]], dtype=torch.uint8)
    q = QuantTensor(values, scales, GROUPED["int4_row_zp"], zeros=zeros)
    assert q.dequantize(torch.float32).tolist() == [[-1.5, 2.5, 6.0, -0.5]]
    biases = torch.tensor([[7.25]], dtype=torch.bfloat16)  # times -0.5, plus 7.25
    q = QuantTensor(values, -scales, GROUPED["int4_g32_affine"], zeros=biases)
    assert q.dequantize(torch.float32).tolist() == [[7.25, 3.25, -0.25, 6.25]]
    codes, scales = torch.tensor([[0, 128, 255]], dtype=torch.uint8), torch.tensor([[0.25]], dtype=torch.float16)
    q = QuantTensor(codes, scales, GROUPED["int8_row"])
    assert q.dequantize(torch.float32).tolist() == [[-32.0, 0.0, 31.75]]


def test_schemes_are_named_by_bits_group_and_zero_points() -> None:
    assert len(GROUPED) == 22 and grouped(4, 32) is GROUPED["int4_g32"]
    assert grouped(8, WHOLE, zeros=True) is GROUPED["int8_row_zp"]
    assert grouped(4, 64, biases=True) is GROUPED["int4_g64_affine"]
    complaint = "4-bit weights with groups of 48 are not supported; use 4 or 8 bits and 32, 64"
    with pytest.raises(ShapeError, match=complaint):
        grouped(4, 48)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("low", "high"), [(1, 14), (0, 14), (-4, 10), (-13, 1), (-14, 0), (-14, -2)])
def test_groups_with_zero_points_hold_zero_and_both_extremes(bits: int, low: int, high: int) -> None:
    # 14 or 254 steps of 1 from min(low, 0) to max(high, 0), and a shorter group with a step of 0.5: all are codes.
    top = 2**bits - 2
    low, high = (edge + (top - 14) * (1 if edge > 0 else -1) if abs(edge) == 14 else edge for edge in (low, high))
    high = low + top if low < 0 < high else high
    x = torch.cat((torch.linspace(low, high, 32).round(), torch.tensor([-top / 2, -top / 4])))[None]
    q = GROUPED[f"int{bits}_g32_zp"].quantize(x)
    assert q.zeros is not None and q.zeros.tolist() == [[-min(low, 0), top]]
    assert q.scales is not None and q.scales.tolist() == [[1.0, 0.5]]
    assert torch.equal(q.dequantize(torch.float32), x)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(list(GROUPED)),
    n=st.integers(1, 5),
    pairs=st.integers(1, 90),
    mean=st.floats(-5, 5),
    seed=st.integers(0, 2**16),
)
@example("int8_g32_affine", 1, 1, -1.0, 98)
def test_no_value_is_further_off_than_half_a_step(name: str, n: int, pairs: int, mean: float, seed: int) -> None:
    scheme, x = GROUPED[name], normal(n, 2 * pairs, seed=seed) + mean
    q = scheme.quantize(x)
    error, rounded = (q.dequantize(torch.float32) - x).abs(), 1e-6
    limit = scheme.spread_scales(q).abs() * 0.5 * (1 + 1e-5) + rounded
    if scheme.has_biases and q.zeros is not None:  # in bf16, and no code is beyond the first and the last one
        is_end, off = torch.isin(scheme.codes(q), torch.tensor([0, 2**scheme.bits - 1])), float(q.zeros.abs().max())
        limit = limit + torch.where(is_end, off * 2**-8, off * 2**-20)
    assert bool((error <= limit).all())


@ALL
def test_zeros_come_back_as_zeros_and_damage_as_nan(scheme: Grouped) -> None:
    assert not scheme.quantize(torch.zeros(4, 64)).dequantize(torch.float32).any()
    for bad in (float("nan"), float("inf")):
        x = normal(2, 64)
        x[1, 40] = bad
        back = scheme.quantize(x).dequantize(torch.float32)
        assert not torch.isfinite(back[1, 40]) and torch.isfinite(back[0]).all()


@ALL
def test_slices_at_edges_are_slices_of_the_values(scheme: Grouped) -> None:
    q = scheme.quantize(normal(6, 256))
    whole = q.dequantize(torch.float32)
    assert torch.equal(narrow_columns(q, 128, 128).dequantize(torch.float32), whole[:, 128:])
    assert torch.equal(narrow_rows(q, 2, 3).dequantize(torch.float32), whole[2:5])
    assert torch.equal(gate_and_up(q, "interleaved")[1].dequantize(torch.float32), whole[1::2])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_compressed_tensors_unpacks_and_dequantises_the_same(bits: int, zeros: bool) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    scheme = grouped(bits, 32, zeros=zeros)
    q = scheme.quantize(normal(8, 128) + 0.5 * zeros)
    assert q.scales is not None
    packed = q.values.view(torch.int32)
    theirs = helpers.unpack_from_int32(packed, bits, torch.Size(q.shape))
    assert torch.equal(theirs.to(torch.int32) + scheme.middle, scheme.codes(q).to(torch.int32))
    codes = scheme.codes(q).to(torch.int16) - scheme.middle
    zero = 0 if q.zeros is None else (q.zeros.to(torch.int16) - scheme.middle).repeat_interleave(32, dim=1)
    by_them = (codes - zero).to(torch.bfloat16) * q.scales.repeat_interleave(32, dim=1)
    assert torch.equal(q.dequantize(torch.bfloat16), by_them)
