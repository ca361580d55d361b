"""The fused experts against f64, in every layout, on every instruction set, and in any company."""

import multiprocessing
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk.errors import ShapeError, UnsupportedError
from moe_mk.kernels.native import (
    Activation,
    ExpertsMode,
    Format,
    Isa,
    MatrixLayout,
    Native,
    allocate,
    experts_batched,
    experts_grouped,
    experts_rows,
    pack_slot,
    quantize_1x128,
    release,
    scale_block,
    scratch_bytes,
)
from moe_mk.kernels.native.scales import Shard
from tests.kernels.native.layers import Layer, Storage, batch, error, spread

INVARIANT = ExpertsMode(batch_invariant=True)


def limit(isa: Isa, storage: Storage, inter: int = 64) -> float:
    """bf16 h and bf16 out cost 2.3e-3; AMX rounds code * block scale to bf16 as well. Small samples spread by a third.

    inter: the terms of an output. Of fewer than 16 the roundings of h hardly cancel: a third more.
    """
    spread = 4 / 3 if inter < 16 else 1.0
    return spread * (5e-3 if isa is Isa.AMX_BF16 and storage.folds_inexactly else 3.2e-3)


def test_one_row_worked_by_hand(isa_here) -> None:
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
@pytest.mark.parametrize(("slots", "hidden", "inter"), [(4, 256, 384), (3, 200, 72), (2, 96, 144), (1, 40, 8)])
def test_rows_equal_f64_whatever_their_number(isa_here, storage: Storage, slots: int, hidden: int, inter: int) -> None:
    native, isa = isa_here
    layer = Layer(slots, hidden, inter, storage)
    w13, w2 = layer.pack(native)
    for rows in (1, 2, 5, 9, 17, 40):
        x, ids, weights = batch(rows, hidden, slots, min(2, slots), seed=rows)
        ids[0, 0] = 0
        y = experts_rows(native, x, ids, weights, w13, w2, isa=isa, threads=2)
        assert error(y, layer.reference(x, ids, weights, ExpertsMode())) < limit(isa, storage, inter), rows


def test_more_rows_than_a_block_on_one_expert(isa_here) -> None:
    native, isa = isa_here
    layer = Layer(2, 96, 64)
    x, ids, weights = batch(300, 96, 2, 1)
    ids[:290] = 1
    y = experts_rows(native, x, ids, weights, *layer.pack(native), isa=isa, threads=2)
    assert error(y, layer.reference(x, ids, weights, ExpertsMode())) < limit(isa, Storage.FP8)


def test_a_hidden_size_whose_rows_outgrow_the_cache_share(isa_here) -> None:
    # 40 rows of 12 000 inputs are gathered in several chunks of k.
    native, isa = isa_here
    layer = Layer(1, 12000, 32)
    x, ids, weights = batch(40, 12000, 1, 1)
    ids.zero_()
    y = experts_rows(native, x, ids, weights, *layer.pack(native), isa=isa)
    assert error(y, layer.reference(x, ids, weights, ExpertsMode())) < limit(isa, Storage.FP8)


@pytest.mark.parametrize("storage", list(Storage))
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("clamp", [0.0, 0.7])
@pytest.mark.parametrize("kind", list(Activation))
def test_activations_and_biases_equal_f64(
    native: Native, kind: Activation, clamp: float, gated: bool, storage: Storage
) -> None:
    if kind is Activation.SWIGLU_OAI and not gated:
        pytest.skip("swiglu has two halves by its name")
    layer = Layer(2, 160, 144, storage, gated=gated, biases=True)
    w13, w2 = layer.pack(native)
    mode = ExpertsMode(kind, limit=clamp)
    x, ids, weights = batch(11, 160, 2, 2)
    wanted = layer.reference(x, ids, weights, mode)
    for isa in native.isas:
        y = experts_rows(native, x, ids, weights, w13, w2, mode=mode, isa=isa)
        assert error(y, wanted) < limit(isa, storage), isa


@settings(max_examples=40)
@given(
    rows=st.integers(0, 40),
    slots=st.integers(1, 5),
    hidden=st.integers(1, 300),
    inter=st.integers(1, 200),
    storage=st.sampled_from(list(Storage)),
    gated=st.booleans(),
    biases=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape_equals_f64(
    native: Native,
    rows: int,
    slots: int,
    hidden: int,
    inter: int,
    storage: Storage,
    gated: bool,
    biases: bool,
    seed: int,
) -> None:
    if storage.format.bits == 4:  # two inputs share a byte
        hidden, inter = hidden + hidden % 2, inter + inter % 2
    layer = Layer(slots, hidden, inter, storage, gated, biases, seed=seed)
    w13, w2 = layer.pack(native)
    x, ids, weights = batch(rows, hidden, slots, min(3, slots), seed=seed)
    wanted = layer.reference(x, ids, weights, ExpertsMode())
    for isa in native.isas:
        y = experts_rows(native, x, ids, weights, w13, w2, isa=isa, threads=2)
        # One element may carry a whole bf16 rounding of h and of the output (2^-8 each), and of what cancelled.
        assert (y.double() - wanted).abs().max() <= 0.02 * wanted.abs().max() if rows else y.shape == (0, hidden)


@pytest.mark.parametrize("storage", list(Storage))
def test_bits_do_not_depend_on_the_number_of_threads(isa_here, storage: Storage) -> None:
    native, isa = isa_here
    layer = Layer(4, 256, 384, storage)
    w13, w2 = layer.pack(native)
    x, ids, weights = batch(37, 256, 4, 3)
    alone = experts_rows(native, x, ids, weights, w13, w2, isa=isa, threads=1)
    for threads in (2, 3, 7):
        assert torch.equal(experts_rows(native, x, ids, weights, w13, w2, isa=isa, threads=threads), alone)


@pytest.mark.parametrize("storage", list(Storage))
def test_batch_invariant_bits_do_not_depend_on_batch_mates(isa_here, storage: Storage) -> None:
    native, isa = isa_here
    layer = Layer(3, 256, 160, storage)
    w13, w2 = layer.pack(native)
    x, ids, weights = batch(70, 256, 3, 2)
    together = experts_rows(native, x, ids, weights, w13, w2, mode=INVARIANT, isa=isa, threads=2)
    for rows in (1, 2, 3, 8, 9, 31):
        part = slice(5, 5 + rows)
        y = experts_rows(native, x[part], ids[part], weights[part], w13, w2, mode=INVARIANT, isa=isa)
        assert torch.equal(y, together[part]), rows


def test_quantised_activations_equal_the_fp8_reference(isa_here) -> None:
    # h that differs by one bf16 rounding may take the neighbouring e4m3 code (2^-4 of it): the bound is that of FP8.
    native, isa = isa_here
    layer = Layer(3, 320, 272)
    w13, w2 = layer.pack(native)
    mode = ExpertsMode(quantize=True)
    for rows in (1, 3, 20):
        x, ids, weights = batch(rows, 320, 3, 2)
        ids[0, 0] = 0
        got = error(
            experts_rows(native, x, ids, weights, w13, w2, mode=mode, isa=isa, threads=2),
            layer.reference(x, ids, weights, mode),
        )
        plain = error(experts_rows(native, x, ids, weights, w13, w2, isa=isa), layer.reference(x, ids, weights, mode))
        assert got < 8e-3 < plain, rows


def test_rows_that_arrive_quantised_equal_rows_quantised_here(isa_here) -> None:
    native, isa = isa_here
    layer = Layer(2, 320, 64)
    w13, w2 = layer.pack(native)
    x, ids, weights = batch(12, 320, 2, 2)
    values, scales = quantize_1x128(native, x)
    mode = ExpertsMode(quantize=True)
    here = experts_rows(native, x, ids, weights, w13, w2, mode=mode, isa=isa)
    sent = experts_rows(native, values, ids, weights, w13, w2, mode=mode, x_scales_RX=scales, isa=isa)
    assert torch.equal(here, sent)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_rows_that_go_nowhere_come_out_zero_and_are_never_read(isa_here, rows: int) -> None:
    native, isa = isa_here
    layer = Layer(2, 96, 64)
    x, ids, weights = batch(rows, 96, 2, 2)
    ids.fill_(-1)
    x.fill_(float("nan"))
    out = torch.full((rows, 96), float("nan"), dtype=torch.bfloat16)
    assert experts_rows(native, x, ids, weights, *layer.pack(native), isa=isa, out_RH=out).eq(0).all()


@pytest.mark.row(47)
def test_unused_slots_of_a_batch_are_never_read(isa_here) -> None:
    native, isa = isa_here
    layer = Layer(3, 96, 64)
    w13, w2 = layer.pack(native)
    x = torch.randn(3, 6, 96).bfloat16()
    counts = torch.tensor([0, 4, 6])
    poisoned = x.clone()
    for slot, count in enumerate(counts.tolist()):
        poisoned[slot, count:] = float("nan")
    y = experts_batched(native, poisoned, counts, w13, w2, isa=isa)
    for slot, count in enumerate(counts.tolist()):
        ids = torch.full((count, 1), slot, dtype=torch.int32)
        assert torch.equal(y[slot, :count], experts_rows(native, x[slot, :count], ids, None, w13, w2, isa=isa))
        assert y[slot, count:].eq(0).all()


def test_grouped_rows_equal_the_same_assignments_as_rows(isa_here) -> None:
    native, isa = isa_here
    layer = Layer(3, 96, 64)
    w13, w2 = layer.pack(native)
    x, weights = torch.randn(7, 96).bfloat16(), torch.rand(7)
    counts = torch.tensor([2, 0, 4])
    ids = torch.tensor([0, 0, 2, 2, 2, 2, -1], dtype=torch.int32).unsqueeze(1)
    y = experts_grouped(native, x, counts, weights, w13, w2, isa=isa)
    assert torch.equal(y, experts_rows(native, x, ids, weights.unsqueeze(1), w13, w2, isa=isa))
    raw = experts_grouped(native, x, counts, None, w13, w2, isa=isa)
    assert torch.equal(raw, experts_rows(native, x, ids, None, w13, w2, isa=isa))
    with pytest.raises(ShapeError, match="sums to 8, but there are 7 rows"):
        experts_grouped(native, x, torch.tensor([2, 0, 6]), None, w13, w2)


@pytest.mark.parametrize("storage", list(Storage))
def test_batch_invariant_bits_are_the_same_in_every_layout(isa_here, storage: Storage) -> None:
    # One assignment a row: the same sixteen products as rows, sorted by expert, and in padded blocks.
    native, isa = isa_here
    layer = Layer(3, 160, 96, storage)
    w13, w2 = layer.pack(native)
    counts = torch.tensor([5, 0, 11])
    x = torch.randn(16, 160).bfloat16()
    ids = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), counts).unsqueeze(1)
    rows = experts_rows(native, x, ids, None, w13, w2, mode=INVARIANT, isa=isa, threads=2)
    assert torch.equal(experts_grouped(native, x, counts, None, w13, w2, mode=INVARIANT, isa=isa), rows)
    blocks = torch.zeros(3, 12, 160, dtype=torch.bfloat16)
    blocks[0, :5], blocks[2, :11] = x[:5], x[5:]
    y = experts_batched(native, blocks, counts, w13, w2, mode=INVARIANT, isa=isa)
    assert torch.equal(torch.cat([y[0, :5], y[2, :11]]), rows)
    alone = torch.cat(
        [experts_rows(native, x[r : r + 1], ids[r : r + 1], None, w13, w2, mode=INVARIANT, isa=isa) for r in range(16)]
    )
    assert torch.equal(alone, rows)


@pytest.mark.parametrize("storage", list(Storage))
@pytest.mark.parametrize("rows", [0, 1, 9, 40])
def test_shared_experts_in_the_same_pass_equal_f64(isa_here, storage: Storage, rows: int) -> None:
    # Their intermediate size is their own, every row visits them, also one that no routed expert wants.
    native, isa = isa_here
    routed, common = Layer(3, 160, 144, storage), Layer(1, 160, 96, storage, seed=7)
    x, ids, weights = batch(rows, 160, 3, 2)
    if rows:
        ids[-1] = -1
    everybody = torch.zeros(rows, 1, dtype=torch.int32)
    plain = ExpertsMode()
    wanted = routed.reference(x, ids, weights, plain) + common.reference(x, everybody, None, plain)
    packed, beside = routed.pack(native), common.pack(native)
    y = experts_rows(native, x, ids, weights, *packed, shared=beside, isa=isa, threads=2)
    assert y.shape == wanted.shape and (rows == 0 or error(y, wanted) < limit(isa, storage))
    one = experts_rows(native, x, ids[:, :1], None, *packed, shared=beside, isa=isa)  # top_k = 1 has its own way out
    wanted = routed.reference(x, ids[:, :1], None, plain) + common.reference(x, everybody, None, plain)
    assert rows == 0 or error(one, wanted) < limit(isa, storage)
    rounded = experts_rows(native, x, ids, weights, *packed, shared=beside, mode=ExpertsMode(quantize=True), isa=isa)
    fp8 = ExpertsMode(quantize=True)
    wanted = routed.reference(x, ids, weights, fp8) + common.reference(x, everybody, None, fp8)
    assert rows == 0 or error(rounded, wanted) < 9e-3


def test_shared_experts_that_do_not_fit_are_refused_with_every_reason(native: Native) -> None:
    packed, wrong = Layer(2, 96, 64).pack(native), Layer(2, 128, 64, gated=False).pack(native)
    with pytest.raises(
        ShapeError, match=r"2 and 2 slots.*H=128 in and 128 out.*gated=False, the routed ones gated=True"
    ):
        experts_rows(native, *batch(3, 96, 2, 2), *packed, shared=wrong)


def test_output_may_be_f32_and_strided(native: Native) -> None:
    layer = Layer(2, 72, 64)
    w13, w2 = layer.pack(native)
    x, ids, weights = batch(6, 72, 2, 2)
    wide = torch.full((6, 100), 7.0, dtype=torch.float32)
    experts_rows(native, x, ids, weights, w13, w2, out_RH=wide[:, :72])
    assert torch.equal(wide[:, :72].bfloat16(), experts_rows(native, x, ids, weights, w13, w2))
    assert wide[:, 72:].eq(7).all()


def test_a_shard_inside_a_scale_block_equals_f64(isa_here) -> None:
    # Inputs 96..255 of w2 and outputs 96..255 of w13 belong to this rank: blocks start in their middle.
    native, isa = isa_here
    layer, part = Layer(2, 128, 384), slice(96, 256)
    w13 = allocate(native, MatrixLayout(160, 128, True, Format.FP8), 2)
    w2 = allocate(native, MatrixLayout(128, 160, False, Format.FP8, scale_block(Shard(0, 96))), 2)
    for s in range(2):
        halves = tuple(layer.parts[n][s, part] for n in ("gate", "up"))
        pack_slot(native, w13, s, halves, tuple(layer.scales[n][s, 0:2] for n in ("gate", "up")), shard=Shard(96, 0))
        pack_slot(
            native, w2, s, (layer.parts["down"][s, :, part],), (layer.scales["down"][s, :, 0:2],), shard=Shard(0, 96)
        )
    x, ids, weights = batch(9, 128, 2, 2)
    wanted = torch.zeros(9, 128, dtype=torch.float64)
    for s in range(2):
        rows, places = (ids == s).nonzero(as_tuple=True)
        gate, up, down = (spread(layer.parts[n][s], layer.scales[n][s]) for n in ("gate", "up", "down"))
        h = torch.nn.functional.silu(x[rows].double() @ gate[part].T) * (x[rows].double() @ up[part].T)
        wanted.index_add_(0, rows, (h @ down[:, part].T) * weights[rows, places, None])
    assert error(experts_rows(native, x, ids, weights, w13, w2, isa=isa), wanted) < limit(isa, Storage.FP8)


def test_two_calls_at_once_do_not_disturb_each_other(native: Native) -> None:
    layer = Layer(4, 256, 256)
    w13, w2 = layer.pack(native)
    inputs = [batch(20 + 7 * i, 256, 4, 2, seed=i) for i in range(4)]
    alone = [experts_rows(native, *given, w13, w2) for given in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            if not torch.equal(experts_rows(native, *inputs[i], w13, w2, threads=2), alone[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_child_computes_too(native: Native) -> None:
    layer = Layer(2, 96, 64)
    w13, w2 = layer.pack(native)
    given = batch(12, 96, 2, 2)
    wanted = experts_rows(native, *given, w13, w2, threads=3)

    def child() -> None:
        same = torch.equal(experts_rows(native, *given, w13, w2, threads=3), wanted)
        raise SystemExit(0 if same else 1)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert torch.equal(experts_rows(native, *given, w13, w2, threads=3), wanted)


def test_scratch_memory_is_counted_and_can_be_given_back(native: Native) -> None:
    layer = Layer(2, 96, 64)
    experts_rows(native, *batch(12, 96, 2, 2), *layer.pack(native), threads=2)
    assert scratch_bytes(native) > 0
    release(native)
    assert scratch_bytes(native) == 0


def test_inputs_are_left_as_they_were(native: Native) -> None:
    layer = Layer(2, 100, 64)
    packed = layer.pack(native)
    given = batch(12, 100, 2, 2)
    before = [t.clone() for t in (*given, packed[0].values_LB, packed[1].values_LB)]
    experts_rows(native, *given, *packed, mode=ExpertsMode(quantize=True))
    assert all(
        torch.equal(a, b) for a, b in zip(before, (*given, packed[0].values_LB, packed[1].values_LB), strict=True)
    )


def test_everything_wrong_with_a_call_is_listed(native: Native) -> None:
    w13, w2 = Layer(2, 96, 64).pack(native)
    with pytest.raises(ShapeError, match=r"float32 without scales.*H=100, the weights have H=96.*ids.*int64, expected"):
        experts_rows(native, torch.zeros(3, 100), torch.zeros(3, 1, dtype=torch.int64), None, w13, w2)


@pytest.mark.parametrize("bad", [2, -2])
def test_an_id_that_is_no_local_slot_is_refused(native: Native, bad: int) -> None:
    packed = Layer(2, 96, 64).pack(native)
    x, ids, weights = batch(3, 96, 2, 2)
    ids[1, 1] = bad
    with pytest.raises(ShapeError, match="neither -1 nor a local slot"):
        experts_rows(native, x, ids, weights, *packed)


def test_an_instruction_set_that_is_not_here_is_refused_with_its_reason(native: Native) -> None:
    missing = [isa for isa in Isa if isa not in native.isas]
    if not missing:
        pytest.skip("this machine has every instruction set")
    with pytest.raises(UnsupportedError, match=rf"cannot use {missing[0].name} here\n.*\n.*usable: SCALAR"):
        experts_rows(native, *batch(3, 96, 2, 2), *Layer(2, 96, 64).pack(native), isa=missing[0])
