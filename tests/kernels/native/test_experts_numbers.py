"""What the fused experts compute: against f64 from the same weights, on every instruction set."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk.kernels.native.experts_mode import Activation, ExpertsMode, Rounding
from moe_mk.kernels.native.layout import Format, MatrixLayout
from moe_mk.kernels.native.library import Native
from moe_mk.kernels.native.packed import allocate, pack_slot
from moe_mk.kernels.native.prepared import experts_rows
from moe_mk.kernels.reference.quantize import quantize_rows
from tests.kernels.native.conftest import IsaHere
from tests.kernels.native.layers import Layer, Storage, batch, error
from tests.support.tiers import slow

FP8_ROWS = ExpertsMode(quantize=Rounding.FP8)


def limit(inter: int = 64) -> float:
    """bf16 h and bf16 out cost 2.3e-3; small samples spread by a third. inter: the terms of an output. Of fewer than 16
    the roundings of h hardly cancel: a third more."""
    return (4 / 3 if inter < 16 else 1.0) * 3.2e-3


def test_one_row_worked_by_hand(isa_here: IsaHere) -> None:
    # H = I = 32. gate = 2 x, up = 3 x, down = 0.5 h (identity matrices with block scales 2, 3, 0.5), x = 1 everywhere:
    # h = silu(2) * 3 = 1.7615942 * 3 = 5.2847824 -> bf16 5.28125; y = 0.5 * h = 2.640625; weight 0.5: 1.3203125.
    native, isa = isa_here
    eye = torch.eye(32).to(torch.float8_e4m3fn)
    w13 = allocate(native, MatrixLayout(32, 32, True, Format.FP8), 1)
    w2 = allocate(native, MatrixLayout(32, 32, False, Format.FP8), 1)
    pack_slot(native, w13, 0, (eye, eye), (torch.tensor([[2.0]]), torch.tensor([[3.0]])))
    pack_slot(native, w2, 0, (eye,), (torch.tensor([[0.5]]),))
    x, ids = torch.ones(1, 32, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int32)
    y = experts_rows(native, x, ids, torch.tensor([[0.5]]), w13, w2, isa=isa)
    assert y.tolist() == [[1.3203125] * 32]


@pytest.mark.row(96)
@pytest.mark.parametrize("storage", list(Storage))
@pytest.mark.parametrize(("slots", "hidden", "inter"), [(3, 200, 72), (1, 40, 8), *slow((4, 256, 384), (2, 96, 144))])
def test_rows_equal_f64_whatever_their_number(
    native: Native, isas: list[IsaHere], storage: Storage, slots: int, hidden: int, inter: int
) -> None:
    layer = Layer(slots, hidden, inter, storage)
    w13, w2 = layer.pack(native)
    for rows in (1, 2, 5, 9, 17, 40):
        x, ids, weights = batch(rows, hidden, slots, min(2, slots), seed=rows)
        ids[0, 0] = 0
        wanted = layer.reference(x, ids, weights, ExpertsMode())
        for library, isa in isas:
            y = experts_rows(library, x, ids, weights, w13, w2, isa=isa, threads=2)
            assert error(y, wanted) < limit(inter), (isa, rows)


@pytest.mark.parametrize("storage", [Storage.FP8, Storage.MXFP8])
def test_zeros_and_subnormals_alone_equal_f64(native: Native, isas: list[IsaHere], storage: Storage) -> None:
    # Among codes of all sizes a wrong subnormal is smaller than the roundings. Scales bring them to the size of others.
    # With them the smallest normal codes, which share their tables on AVX2.
    layer, draw = Layer(2, 96, 64, storage), torch.Generator("cpu").manual_seed(0)
    for name in ("gate", "up", "down"):
        values, scales = layer.parts[name], layer.scales[name]
        assert scales is not None
        sizes, signs = (torch.randint(0, most, values.shape, generator=draw) for most in (16, 2))
        layer.parts[name] = (sizes + 128 * signs).to(torch.uint8).view(values.dtype)
        larger = scales * 512 if scales.dtype is torch.float32 else (scales.view(torch.uint8) + 9).view(scales.dtype)
        layer.scales[name] = larger
    w13, w2 = layer.pack(native)
    for rows in (1, 5, 40):
        x, ids, weights = batch(rows, 96, 2, 2, seed=rows)
        wanted = layer.reference(x, ids, weights, ExpertsMode())
        for library, isa in isas:
            assert error(experts_rows(library, x, ids, weights, w13, w2, isa=isa), wanted) < limit(), (isa, rows)


@pytest.mark.parametrize("storage", [Storage.FP8, Storage.FP8_CHANNEL, Storage.INT8])
def test_scales_of_blocks_and_channels_are_exact_for_few_and_many_rows(
    native: Native, isas: list[IsaHere], storage: Storage
) -> None:
    # Weights rounded to bf16 after multiplication by their scales give 3.5e-3 to 3.9e-3 here.
    layer = Layer(1, 384, 256, storage)
    w13, w2 = layer.pack(native)
    for rows in (8, 40, 100):
        x, ids, weights = batch(rows, 384, 1, 1, seed=rows)
        wanted = layer.reference(x, ids, weights, ExpertsMode())
        for library, isa in isas:
            assert error(experts_rows(library, x, ids, weights, w13, w2, isa=isa), wanted) < 2.6e-3, (isa, rows)


def test_every_fp8_code_is_exact_at_every_position(isa_here: IsaHere) -> None:
    # w13[o, k] is code o + k; x selects one k with +1 or -1; relu2 squares four significant bits, exactly in bf16,
    # and w2 is the identity: y is the square of each value that is positive after the sign, subnormal codes included.
    native, isa = isa_here
    codes = (torch.arange(256).unsqueeze(1) + torch.arange(64)) % 256
    codes[codes % 128 == 127] = 0  # NaN
    weight, eye = codes.to(torch.uint8).view(torch.float8_e4m3fn), torch.eye(256).to(torch.float8_e4m3fn)
    w13 = allocate(native, MatrixLayout(256, 64, False, Format.FP8), 1)
    w2 = allocate(native, MatrixLayout(256, 256, False, Format.FP8), 1)
    pack_slot(native, w13, 0, (weight,), (torch.ones(2, 1),))
    pack_slot(native, w2, 0, (eye,), (torch.ones(2, 2),))
    x = torch.cat([torch.eye(64), -torch.eye(64)]).bfloat16()
    wanted = (x.float() @ weight.float().T).relu().square()
    for rows in (slice(None), slice(0, 5), slice(60, 80)):
        ids = torch.zeros(x[rows].shape[0], 1, dtype=torch.int32)
        y = experts_rows(native, x[rows], ids, None, w13, w2, mode=ExpertsMode(Activation.RELU2), isa=isa)
        assert torch.equal(y.float(), wanted[rows])


@pytest.mark.parametrize(
    ("slots", "hidden", "inter", "rows"),
    [(2, 96, 64, 300), (1, 12000, 32, 40)],
    ids=["more rows than a block", "gathered in several chunks of k"],
)
def test_many_rows_or_many_inputs_on_one_expert(
    isa_here: IsaHere, slots: int, hidden: int, inter: int, rows: int
) -> None:
    native, isa = isa_here
    layer = Layer(slots, hidden, inter)
    x, ids, weights = batch(rows, hidden, slots, 1)
    ids[:290] = slots - 1
    y = experts_rows(native, x, ids, weights, *layer.pack(native), isa=isa, threads=2)
    assert error(y, layer.reference(x, ids, weights, ExpertsMode())) < limit()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("clamp", [0.0, 0.7])
@pytest.mark.parametrize("kind", list(Activation))
def test_activations_and_biases_equal_f64(
    native: Native, isas: list[IsaHere], kind: Activation, clamp: float, gated: bool
) -> None:
    if kind in (Activation.SWIGLU_OAI, Activation.SILU_LIMIT, Activation.SITU) and not gated:
        pytest.skip("its limits are those of a gate and of up")
    agree_with_biases(native, isas, Storage.FP8, ExpertsMode(kind, limit=clamp), gated=gated)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("storage", [storage for storage in Storage if storage is not Storage.FP8])
def test_biases_beside_every_kind_of_scales_equal_f64(
    native: Native, isas: list[IsaHere], storage: Storage, gated: bool
) -> None:
    agree_with_biases(native, isas, storage, ExpertsMode(limit=0.7), gated=gated)


def agree_with_biases(native: Native, isas: list[IsaHere], storage: Storage, mode: ExpertsMode, *, gated: bool) -> None:
    layer = Layer(2, 160, 144, storage, gated=gated, biases=True)
    w13, w2 = layer.pack(native)
    x, ids, weights = batch(11, 160, 2, 2)
    wanted = layer.reference(x, ids, weights, mode)
    for library, isa in isas:
        y = experts_rows(library, x, ids, weights, w13, w2, mode=mode, isa=isa)
        assert error(y, wanted) < limit(), isa


SIZES = st.tuples(st.integers(0, 40), st.integers(1, 5), st.integers(1, 300), st.integers(1, 200))
"""Rows, slots, hidden and intermediate size."""


@settings(max_examples=40)
@given(SIZES, st.sampled_from(list(Storage)), st.booleans(), st.booleans(), st.integers(0, 1000))
def test_any_shape_equals_f64(
    native: Native, isas: list[IsaHere], sizes: tuple[int, ...], storage: Storage, gated: bool, biases: bool, seed: int
) -> None:
    rows, slots, hidden, inter = sizes
    if storage.format.bits == 4:  # two inputs share a byte
        hidden, inter = hidden + hidden % 2, inter + inter % 2
    layer = Layer(slots, hidden, inter, storage, gated, biases, seed=seed)
    w13, w2 = layer.pack(native)
    x, ids, weights = batch(rows, hidden, slots, min(3, slots), seed=seed)
    wanted = layer.reference(x, ids, weights, ExpertsMode())
    for library, isa in isas:
        y = experts_rows(library, x, ids, weights, w13, w2, isa=isa, threads=2)
        # One element may carry a whole bf16 rounding of h and of the output (2^-8 each), and of what cancelled.
        assert (y.double() - wanted).abs().max() <= 0.02 * wanted.abs().max() if rows else y.shape == (0, hidden)


def test_powers_of_two_worked_by_hand(isa_here: IsaHere) -> None:
    # H = I = 32, no gate, relu2, identity matrices. x = (900, 17, 0, ...): 900 / 448 = 2.009 -> scale 4, codes
    # 225 -> 224 and 4.25 -> 4 (even): 896 and 16. h = (802816, 256), / 448 = 1792 -> scale 2048: 392 -> 384 (even) and
    # 0.125: y = (786432, 256, 0, ...). With exact scales it were (900^2, 16.07^2) or so.
    native, isa = isa_here
    eye, one = torch.eye(32).to(torch.float8_e4m3fn), torch.ones(1, 1)
    w13, w2 = (allocate(native, MatrixLayout(32, 32, False, Format.FP8), 1) for _ in range(2))
    for packed in (w13, w2):
        pack_slot(native, packed, 0, (eye,), (one,))
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, :2] = torch.tensor([900.0, 17.0])
    mode = ExpertsMode(Activation.RELU2, quantize=Rounding.FP8_UE8M0)
    y = experts_rows(native, x, torch.zeros(1, 1, dtype=torch.int32), None, w13, w2, mode=mode, isa=isa)
    assert y.tolist() == [[786432.0, 256.0, *[0.0] * 30]]


@pytest.mark.parametrize("rounding", [Rounding.FP8, Rounding.FP8_UE8M0])
def test_quantised_activations_equal_the_fp8_reference(isa_here: IsaHere, rounding: Rounding) -> None:
    # h that differs by one bf16 rounding may take the neighbouring e4m3 code (2^-4 of it): the bound is that of FP8.
    native, isa = isa_here
    layer, mode = Layer(3, 320, 272), ExpertsMode(quantize=rounding)
    w13, w2 = layer.pack(native)
    other = ExpertsMode(quantize=Rounding.FP8 if rounding is Rounding.FP8_UE8M0 else Rounding.FP8_UE8M0)
    for rows in (1, 3, 20, 120):
        x, ids, weights = batch(rows, 320, 3, 2)
        ids[0, 0] = 0
        wanted = layer.reference(x, ids, weights, mode)
        got, plain, otherwise = (
            error(experts_rows(native, x, ids, weights, w13, w2, mode=which, isa=isa, threads=2), wanted)
            for which in (mode, ExpertsMode(), other)
        )
        assert got < 8e-3 < min(plain, otherwise), rows


@pytest.mark.parametrize("rounding", [Rounding.FP8, Rounding.FP8_UE8M0])
def test_rows_that_arrive_quantised_equal_rows_quantised_here(isa_here: IsaHere, rounding: Rounding) -> None:
    native, isa = isa_here
    layer = Layer(2, 320, 64)
    w13, w2 = layer.pack(native)
    x, ids, weights = batch(12, 320, 2, 2)
    values, scales = quantize_rows(x, 128, power_of_two=rounding is Rounding.FP8_UE8M0)
    mode = ExpertsMode(quantize=rounding)
    here = experts_rows(native, x, ids, weights, w13, w2, mode=mode, isa=isa)
    sent = experts_rows(native, values, ids, weights, w13, w2, mode=mode, x_scales_RX=scales, isa=isa)
    assert torch.equal(here, sent)


@pytest.mark.parametrize("storage", list(Storage))
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_shared_experts_in_the_same_pass_equal_f64(
    native: Native, isas: list[IsaHere], storage: Storage, rows: int
) -> None:
    # Their intermediate size is their own, every row visits them, also one that no routed expert wants.
    routed, common = Layer(3, 160, 272, storage), Layer(1, 160, 96, storage, seed=7)
    x, ids, weights = batch(rows, 160, 3, 2)
    if rows:
        ids[-1] = -1
    everybody, packed, beside = torch.zeros(rows, 1, dtype=torch.int32), routed.pack(native), common.pack(native)
    calls = [  # top_k = 1 has its own way out
        (ids, weights, ExpertsMode(), None),
        (ids[:, :1], None, ExpertsMode(), None),
        (ids, weights, FP8_ROWS, 9e-3),
    ]
    for chosen, factors, mode, bound in calls:
        wanted = routed.reference(x, chosen, factors, mode) + common.reference(x, everybody, None, mode)
        for library, isa in isas:
            y = experts_rows(library, x, chosen, factors, *packed, shared=beside, mode=mode, isa=isa, threads=2)
            assert y.shape == wanted.shape
            assert rows == 0 or error(y, wanted) < (bound or limit()), (isa, mode)
