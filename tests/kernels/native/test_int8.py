"""W8A8: tokens rounded to INT8 and exact integer sums, bit for bit, on every instruction set."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.kernels.native.experts_mode import Activation, ExpertsMode, Rounding, Tuning
from moe_mk.kernels.native.layout import Format, MatrixLayout
from moe_mk.kernels.native.library import Native
from moe_mk.kernels.native.packed import allocate, pack_slot
from moe_mk.kernels.native.prepared import experts_rows
from moe_mk.quant import INT8_TOKEN
from tests.kernels.native.layers import Layer, Storage, batch, error

W8A8 = ExpertsMode(quantize=Rounding.INT8)


def codes(rows: int, columns: int, seed: int) -> Tensor:
    """INT8 of every value, -128 as well."""
    g = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(-128, 128, (rows, columns), generator=g).to(torch.int8)


def test_one_row_worked_by_hand(isa_here) -> None:
    # H = I = 32, no gate, relu2, all scales 1. x = (127, -127, 3, 0, ...): amax / 127 = 1, so codes are x. Weights of
    # w13 are the identity: h = relu(x)^2 = (16129, 0, 9, 0, ...) -> bf16 (16128, 0, 9): scale 16128 / 127 = 126.99213,
    # codes (127, 0, round(0.0709) = 0). w2 has 2 in its first column: y = 127 * 2 * 126.99213 = 32256, a bf16 number.
    native, isa = isa_here
    w13 = allocate(native, MatrixLayout(32, 32, False, Format.INT8, by_output=True), 1)
    w2 = allocate(native, MatrixLayout(32, 32, False, Format.INT8, by_output=True), 1)
    second = torch.zeros(32, 32, dtype=torch.int8)
    second[:, 0] = 2
    one = torch.ones(32, 1)
    pack_slot(native, w13, 0, (torch.eye(32).to(torch.int8),), (one,))
    pack_slot(native, w2, 0, (second,), (one,))
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, :3] = torch.tensor([127.0, -127.0, 3.0])
    mode = ExpertsMode(Activation.RELU2, quantize=Rounding.INT8)
    y = experts_rows(native, x, torch.zeros(1, 1, dtype=torch.int32), None, w13, w2, mode=mode, isa=isa)
    assert y.tolist() == [[32256.0] * 32]


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 9, 17, 33, 300])
def test_integer_sums_are_exact_bit_for_bit(isa_here, rows: int) -> None:
    # Ungated relu2 and scales a channel: every f32 operation after the integer sums is done here in the same order.
    # 47 and 3 steps of k: tiles of 64 leave half of one over. From 9 rows on AMX has tiles, of 16 rows, two at a time.
    native, isa = isa_here
    hidden, inter = 1504, 72  # more than one unit of k, not a multiple of it
    first, second = codes(inter, hidden, 1), codes(hidden, inter, 2)
    scales = torch.rand(inter, 1) * 1e-3, torch.rand(hidden, 1) * 1e-2
    w13 = allocate(native, MatrixLayout(inter, hidden, False, Format.INT8, by_output=True), 1)
    w2 = allocate(native, MatrixLayout(hidden, inter, False, Format.INT8, by_output=True), 1)
    pack_slot(native, w13, 0, (first,), (scales[0],))
    pack_slot(native, w2, 0, (second,), (scales[1],))
    x = torch.randn(rows, hidden).bfloat16()
    mode = ExpertsMode(Activation.RELU2, quantize=Rounding.INT8)
    ids = torch.zeros(rows, 1, dtype=torch.int32)
    got = experts_rows(native, x, ids, None, w13, w2, mode=mode, isa=isa, threads=2)
    q = INT8_TOKEN.quantize(x)
    assert q.scales is not None
    total = (q.values.long() @ first.long().T).float() * q.scales * scales[0].T
    h = INT8_TOKEN.quantize(torch.relu(total).square().bfloat16())
    assert h.scales is not None
    wanted = (h.values.long() @ second.long().T).float() * h.scales * scales[1].T
    assert torch.equal(got, wanted.bfloat16())
    sent = experts_rows(native, q.values, ids, None, w13, w2, mode=mode, isa=isa, x_scales_RX=q.scales)
    assert torch.equal(sent, got)  # rows that come rounded
    least = replace(mode, tuning=Tuning(gather_kib=128))  # of 256 rows 16 steps at a time
    assert torch.equal(experts_rows(native, x, ids, None, w13, w2, mode=least, isa=isa), wanted.bfloat16())


@pytest.mark.parametrize("storage", [Storage.INT8, Storage.INT8_CHANNEL])
@pytest.mark.parametrize(("hidden", "inter"), [(320, 272), (96, 40)])
def test_gated_layers_equal_the_rounded_reference(isa_here, storage: Storage, hidden: int, inter: int) -> None:
    # h is rounded as well, to steps of 1 / 127 of its largest: about 1 % of a typical value.
    native, isa = isa_here
    layer = Layer(3, hidden, inter, storage, biases=True)
    packed = layer.pack(native)
    for rows in (1, 6, 40):
        x, ids, weights = batch(rows, hidden, 3, 2, seed=rows)
        ids[0, 0] = 0
        rounded = INT8_TOKEN.quantize(x).dequantize(torch.float32)
        wanted = layer.reference(rounded, ids, weights, ExpertsMode())
        got = experts_rows(native, x, ids, weights, *packed, mode=W8A8, isa=isa, threads=2)
        assert error(got, wanted) < 1.5e-2, rows
        alone = [
            experts_rows(native, x[r : r + 1], ids[r : r + 1], weights[r : r + 1], *packed, mode=W8A8, isa=isa)
            for r in range(rows)
        ]
        assert torch.equal(torch.cat(alone), got)  # whatever the company


@pytest.mark.parametrize("column", [5, 89])
def test_a_token_with_a_nan_poisons_only_itself(isa_here, column: int) -> None:
    native, isa = isa_here
    packed = Layer(1, 90, 40, Storage.INT8_CHANNEL).pack(native)
    x = torch.randn(3, 90).bfloat16()
    ids = torch.zeros(3, 1, dtype=torch.int32)
    clean = experts_rows(native, x, ids, None, *packed, mode=W8A8, isa=isa)
    x[1, column] = float("nan")
    y = experts_rows(native, x, ids, None, *packed, mode=W8A8, isa=isa)
    assert y[1].isnan().all() and torch.equal(y[0], clean[0]) and torch.equal(y[2], clean[2])


def test_what_cannot_be_multiplied_as_integers_is_refused_with_every_reason(native: Native) -> None:
    packed = Layer(1, 96, 40, Storage.MXFP4).pack(native)
    x, ids, _ = batch(2, 96, 1, 1)
    complaint = r"x is torch.bfloat16 with scales.*int8 with; x_scales is \(2, 3\).*only INT8 weights"
    with pytest.raises(ShapeError, match=complaint):
        experts_rows(native, x, ids, None, *packed, mode=W8A8, x_scales_RX=torch.ones(2, 3))
