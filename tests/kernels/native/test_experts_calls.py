"""Calls of the fused experts: the same bits in any company, layout and thread, what is never read, and refusals."""

import copy
import ctypes
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moe_mk.errors import ShapeError, UnsupportedError
from moe_mk.experts.paged import slots_of_rows
from moe_mk.kernels.native.experts_mode import Activation, ExpertsMode, Rounding, Tuning
from moe_mk.kernels.native.library import Isa, Native, Status, release
from moe_mk.kernels.native.prepared import ExpertsCall, experts_rows
from moe_mk.kernels.reference.quantize import quantize_rows
from tests.kernels.native.conftest import IsaHere
from tests.kernels.native.layers import Layer, Storage, batch, spaced

INVARIANT = ExpertsMode(batch_invariant=True)
FP8_ROWS = ExpertsMode(quantize=Rounding.FP8)


@pytest.mark.parametrize("storage", list(Storage))
def test_batch_invariant_bits_do_not_depend_on_batch_mates(isa_here: IsaHere, storage: Storage) -> None:
    native, isa = isa_here
    layer = Layer(3, 256, 160, storage)
    w13, w2 = layer.pack(native)
    x, ids, weights = batch(40, 256, 3, 2)
    together = experts_rows(native, x, ids, weights, w13, w2, mode=INVARIANT, isa=isa, threads=2)
    for rows in (1, 2, 3, 8, 9, 33):
        part = slice(5, 5 + rows)
        y = experts_rows(native, x[part], ids[part], weights[part], w13, w2, mode=INVARIANT, isa=isa)
        assert torch.equal(y, together[part]), rows


@pytest.mark.parametrize("storage", [Storage.FP8, Storage.FP8_CHANNEL])
def test_bits_of_fp8_do_not_depend_on_batch_mates_in_any_mode(isa_here: IsaHere, storage: Storage) -> None:
    # Slot 2 has all 270 rows: two blocks of rows, and sums of one to nine tiles; the others have parts of a tile.
    native, isa = isa_here
    layer = Layer(3, 160, 96, storage)
    w13, w2 = layer.pack(native)
    x, ids, weights = batch(270, 160, 2, 1)
    ids = torch.cat([torch.full_like(ids, 2), ids], 1)
    ids[20:, 1] = -1
    weights = torch.cat([weights, weights + 0.5], 1)
    together = experts_rows(native, x, ids, weights, w13, w2, isa=isa, threads=2)
    for rows in (1, 2, 15, 16, 17, 33, 70, 140):
        part = slice(7, 7 + rows)
        y = experts_rows(native, x[part], ids[part], weights[part], w13, w2, isa=isa)
        assert torch.equal(y, together[part]), rows


@pytest.mark.row(47)
def test_unused_slots_of_a_batch_are_never_read(isa_here: IsaHere) -> None:
    native, isa = isa_here
    layer = Layer(3, 96, 64)
    w13, w2 = layer.pack(native)
    x = torch.randn(3, 6, 96).bfloat16()
    counts = torch.tensor([0, 4, 6])
    poisoned = x.clone()
    for slot, count in enumerate(counts.tolist()):
        poisoned[slot, count:] = float("nan")
    y = experts_rows(native, poisoned.flatten(0, 1), slots_of_rows(counts, x), None, w13, w2, isa=isa).view(x.shape)
    for slot, count in enumerate(counts.tolist()):
        ids = torch.full((count, 1), slot, dtype=torch.int32)
        assert torch.equal(y[slot, :count], experts_rows(native, x[slot, :count], ids, None, w13, w2, isa=isa))
        assert y[slot, count:].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "top_k"), [(0, 2), (1, 1), (1, 2), (5, 1), (5, 2)])
def test_rows_that_go_nowhere_come_out_zero_and_are_never_read(
    isa_here: IsaHere, rows: int, top_k: int, dtype: torch.dtype
) -> None:
    native, isa = isa_here
    layer = Layer(2, 96, 64)
    x, ids, weights = batch(rows, 96, 2, top_k)
    ids.fill_(-1)
    x.fill_(float("nan"))
    out = torch.full((rows, 96), float("nan"), dtype=dtype)
    assert experts_rows(native, x, ids, weights, *layer.pack(native), isa=isa, out_RH=out).eq(0).all()


def test_output_may_be_f32_and_strided(native: Native) -> None:
    layer = Layer(2, 72, 64)
    w13, w2 = layer.pack(native)
    x, ids, weights = batch(6, 72, 2, 2)
    wide = torch.full((6, 100), 7.0, dtype=torch.float32)
    experts_rows(native, x, ids, weights, w13, w2, out_RH=wide[:, :72])
    assert torch.equal(wide[:, :72].bfloat16(), experts_rows(native, x, ids, weights, w13, w2))
    assert wide[:, 72:].eq(7).all()


@pytest.mark.parametrize("columns", [False, True])
def test_strides_of_every_input_are_read(native: Native, columns: bool) -> None:
    # 200 columns have two scales a row, as they have where they were received in longer rows.
    call = ExpertsCall(native, *Layer(4, 200, 96).pack(native), None, FP8_ROWS)
    x, ids, weights = batch(6, 200, 4, 2)
    values, scales = quantize_rows(x, 128)
    wanted = call(values, scales, ids, weights, None, 1)
    assert torch.equal(call(spaced(x, columns=columns), None, ids, weights, None, 1), wanted)
    for at in range(4):
        given = [values, scales, ids, weights]
        given[at] = spaced(given[at], columns=columns)
        assert torch.equal(call(*given, None, 1), wanted)


def test_a_prepared_call_checks_every_batch(native: Native) -> None:
    call = ExpertsCall(native, *Layer(4, 96, 64).pack(native), None, ExpertsMode())
    x, ids, weights = batch(6, 96, 4, 2)
    wanted = call(x, None, ids, weights, None, 1)
    for given in (
        (x[:, :64], None, ids, weights), (x.float(), None, ids, weights), (x, torch.ones(6, 1), ids, weights),
        (x, None, ids.long(), weights), (x, None, ids[:5], weights[:5]), (x, None, ids[:, 0], weights[:, 0]),
        (x, None, ids, weights.double()), (x, None, ids, weights[:, :1]),
    ):  # fmt: skip
        with pytest.raises(ShapeError, match="cpu experts: "):
            call(*given, None, 1)
    assert torch.equal(call(x, None, ids, weights, None, 1), wanted)


@pytest.mark.parametrize("wrong", ["dtype", "shape", "stride"])
def test_a_bias_that_is_not_one_dense_f32_row_per_slot_is_refused(native: Native, wrong: str) -> None:
    w13, w2 = Layer(2, 96, 64, biases=True).pack(native)
    assert w13.bias_LX is not None and w13.bias_LX.shape == (2, 128)
    forms = {"dtype": w13.bias_LX.double(), "shape": w13.bias_LX[:, :64], "stride": spaced(w13.bias_LX, columns=True)}
    with pytest.raises(ShapeError, match=r"bias is \(2, \d+\) torch.float\d\d, expected \(2, 128\) dense float32"):
        experts_rows(native, *batch(3, 96, 2, 2), replace(w13, bias_LX=forms[wrong]), w2)


def test_scratch_memory_is_counted_and_can_be_given_back(native: Native) -> None:
    layer = Layer(2, 96, 64)
    experts_rows(native, *batch(12, 96, 2, 2), *layer.pack(native), threads=2)
    assert native.functions["scratch_bytes"]() > 0
    release(native)
    assert native.functions["scratch_bytes"]() == 0


def test_everything_wrong_with_a_call_is_listed(native: Native) -> None:
    w13, w2 = Layer(2, 96, 64).pack(native)
    with pytest.raises(ShapeError, match=r"float32 without scales.*H=100, the weights have H=96.*ids.*int64, expected"):
        experts_rows(native, torch.zeros(3, 100), torch.zeros(3, 1, dtype=torch.int64), None, w13, w2)


def test_shared_experts_that_do_not_fit_are_refused_with_every_reason(native: Native) -> None:
    packed, wrong = Layer(2, 96, 64).pack(native), Layer(2, 128, 64, gated=False).pack(native)
    complaint = r"2 and 2 slots.*H=128 in and 128 out.*gated=False, the routed ones gated=True"
    with pytest.raises(ShapeError, match=complaint):
        experts_rows(native, *batch(3, 96, 2, 2), *packed, shared=wrong)
    one, other = (Layer(1, 96, inter).pack(native) for inter in (64, 32))
    with pytest.raises(ShapeError, match=r"cpu experts, shared: their w13 has I=64, their w2 I=32$"):
        experts_rows(native, *batch(3, 96, 2, 2), *packed, shared=(one[0], other[1]))


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (Status.NO_MEMORY, MemoryError, "x: no memory for the kernel's scratch"),
        (Status.BAD_ID, ShapeError, "x: an id is neither -1 nor a local slot"),
        (Status.NO_ISA, UnsupportedError, "x: this instruction set is not on this machine"),
        (99, ShapeError, r"x: sizes do not fit together \(status 99\)"),
    ],
)
def test_every_status_is_a_typed_error(native: Native, status: int, error: type[Exception], text: str) -> None:
    calls = replace(native, functions={"x": lambda *given: status, "y": lambda *given: int(Status.OK)})
    calls.call("y", 1, 2)
    with pytest.raises(error, match=text):
        calls.call("x", 1)


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


def arguments(block: ctypes.Structure, prefix: str = "") -> Iterator[tuple[str, object, bool]]:
    """Names and values of all arguments of a native call, and whether each is an address."""
    for name, kind, *_ in block._fields_:
        value = getattr(block, name)
        if isinstance(value, ctypes.Structure):
            yield from arguments(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value, kind is ctypes.c_void_p


@pytest.mark.parametrize("with_shared", [False, True])
def test_a_copied_call_has_the_same_arguments_and_memory_of_its_own(isa_here: IsaHere, with_shared: bool) -> None:
    native, isa = isa_here
    w13, w2 = Layer(3, 96, 64, Storage.FP8).pack(native)
    shared = Layer(1, 96, 64, Storage.FP8).pack(native) if with_shared else None
    tuning = Tuning(2, 3, 128, 256, 32, 8)  # nothing is as by default
    mode = ExpertsMode(Activation.SWIGLU_OAI, 1.25, 3.5, Rounding.FP8, True, tuning)
    made = ExpertsCall(native, w13, w2, shared, mode, isa)
    pairs = zip(arguments(made._block), arguments(copy.deepcopy(made)._block), strict=True)
    for (name, mine, is_address), (_, copied, _) in pairs:
        assert (mine is None) == (copied is None) and (mine != copied) == (is_address and mine is not None), name
