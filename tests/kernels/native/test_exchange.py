"""Rows to windows and sums of rows in native code: by hand, bit for bit against torch, on every instruction set."""

import threading

import pytest
import torch
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.kernels.native import exchange
from moe_mk.kernels.native.exchange import (
    BYTES_FOR_THREADS,
    ROW_TYPES,
    Exchange,
    ExchangeCalls,
    Rounding,
    RowFormat,
    WindowPlaces,
)
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.reference.quantize import quantize_rows
from tests.kernels.native.conftest import IsaHere
from tests.kernels.native.exchange_windows import (
    RANK_OF_P,
    SLOT_OF_P,
    UNTOUCHED,
    int32,
    nobody_waits,
    summed,
    visits,
    windows,
)


def sent(
    native: Native, x: tuple[Tensor, Tensor | None], form: RowFormat, ids_TK: Tensor, ranks: int, isa: Isa | None = None
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Tokens, values and tails as they lie at each rank."""
    weights_TK = torch.arange(ids_TK.numel(), dtype=torch.float32).view(ids_TK.shape) + 0.5
    made = windows(native, ranks, form, len(ids_TK), isa=isa)
    rounding = form.rounding is not Rounding.NONE
    counts = made.calls(form).dispatch(x, (ids_TK, weights_TK), 1, rounding=rounding)
    visits_WT = visits(ids_TK, ranks)
    assert counts == visits_WT.sum(dim=1).tolist()
    for part, count in zip((*made.values, *made.tails), (*counts, *counts), strict=True):
        assert bool((part[count:] == UNTOUCHED).all()), "nothing is written behind the rows"
    rows = [[part[:count] for part, count in zip(parts, counts, strict=True)] for parts in (made.values, made.tails)]
    return [visits_T.nonzero().flatten() for visits_T in visits_WT], *rows


@pytest.mark.usefixtures("native")
def test_the_library_is_looked_for_until_it_is_found_and_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange._found.cache_clear()
    asked: list[bool] = []
    monkeypatch.setattr(exchange, "is_compiled", lambda: asked.append(len(asked) == 2) or asked[-1])
    answers = [exchange.ready() for _ in range(5)]
    assert answers[:2] == [None, None]
    assert answers[2] is not None and answers[3] is answers[4] is answers[2]
    assert asked == [False, False, True]


def test_rows_tails_and_flags_by_hand(native: Native) -> None:
    # Experts 0 1 | 2 3 | 4 5 on three ranks. Token 0 visits rank 0 twice, token 1 nobody, token 2 ranks 2 and 0.
    x_TX = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.uint8)
    scales_TX = torch.tensor([[10], [11], [12]], dtype=torch.uint8)
    form, ids_TK = RowFormat(3, 1, 2), int32([[0, 1], [-1, -1], [5, 0]])
    routing = ids_TK, torch.tensor([[0.5, 1.5], [2.5, 3.5], [4.5, 5.5]])
    made = windows(native, 3, form, 3)
    calls = made.calls(form)
    assert calls.dispatch((x_TX, scales_TX), routing, 7) == [2, 0, 1]
    rows = [made.values[0][:2], made.values[1][:0], made.values[2][:1]]
    assert [part.tolist() for part in rows] == [[[1, 2, 3], [7, 8, 9]], [], [[7, 8, 9]]]
    # A flag is epoch << 32 | rows, for the two peers of rank 2; those for sums are still down.
    assert made.flags_to.tolist() == [[7 << 32 | 2, 7 << 32 | 0, 0], [0, 0, 0]]
    made.flags_from[0, :2] = torch.tensor([7 << 32 | 2, 7 << 32])
    assert made.exchange.arrived(7, 0) == [2, 0, 1]
    scales_RB, ids_RK, weights_RK = calls.receive(3, made.values[0].data_ptr())
    assert scales_RB is not None and scales_RB.tolist() == [[10], [12], [12]]
    # Token 0 has slots 0 and 1 at rank 0; token 2 has slot 1 at rank 2 (its first choice), slot 0 at rank 0.
    assert ids_RK.tolist() == [[0, 1], [-1, 0], [1, -1]]
    assert weights_RK.tolist() == [[0.5, 1.5], [0.0, 5.5], [4.5, 0.0]]
    made.exchange.show(8)  # sums of rank 0 are numbers 0 and 1, then comes rank 1 with none
    assert made.flags_to[1].tolist() == [8 << 32 | 0, 8 << 32 | 2, 0]


def test_no_tokens_raise_flags_all_the_same(native: Native) -> None:
    form, nothing = RowFormat(3, 0, 2), torch.empty((0, 2), dtype=torch.int32)
    made = windows(native, 3, form, 1)
    x_TX = torch.empty((0, 3), dtype=torch.uint8)
    calls = made.calls(form)
    assert calls.dispatch((x_TX, None), (nothing, nothing.float()), 1) == [0] * 3
    assert made.flags_to[0].tolist() == [1 << 32, 1 << 32, 0]
    made.flags_from[:, :2] = 1 << 32
    assert made.exchange.arrived(1, 0) == [0] * 3
    scales_RB, ids_RK, weights_RK = calls.receive(0, 0)
    assert scales_RB is None and ids_RK.shape == weights_RK.shape == (0, 2)
    assert calls.collect(0, 1, 0, nobody_waits).shape == (0, 2)


def test_nothing_is_written_where_there_is_no_room_or_no_such_expert(native: Native) -> None:
    form, x_TX = RowFormat(3, 0, 1), torch.ones((2, 3), dtype=torch.uint8)
    made = windows(native, 3, form, 2)
    made.exchange.room[1] = 1
    for ids_TK, error in ((int32([[2], [3]]), False), (int32([[0], [6]]), True)):
        call = (x_TX, None), (ids_TK, torch.ones((2, 1))), 1
        if error:
            with pytest.raises(ShapeError, match="an id is neither -1 nor"):
                made.calls(form).dispatch(*call)
        else:
            assert made.calls(form).dispatch(*call) is None and list(made.exchange.counts) == [0, 2, 0]
        assert all(bool((part == UNTOUCHED).all()) for part in (*made.values, *made.tails))
        assert not made.flags_to.any()


def test_rows_that_lie_apart_are_put_in_order(native: Native) -> None:
    # Values of rank 0 (two rows) and of rank 1 (one row) lie apart; in a second call those of rank 1 are there already.
    form = RowFormat(4, 0, 1)
    made = windows(native, 2, form, 2)
    made.values[0][:2], made.values[1][0] = 1, 2
    for tails in made.tails:
        tails.fill_(0xFF)  # slots of -1
    window = torch.zeros((3, 4), dtype=torch.uint8)
    made.exchange.received[:] = [2, 1]
    made.calls(form).receive(3, window.data_ptr())
    assert window.tolist() == [[1] * 4, [1] * 4, [2] * 4]
    made.values[1][0] = 9
    made.exchange.received[:] = [0, 1]
    made.calls(form).receive(1, made.values[1].data_ptr())
    assert made.values[1][0].tolist() == [9] * 4 and window.tolist()[2] == [2] * 4


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("hidden", [7168, 200, 96])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_rows_rounded_on_the_way_have_the_bits_of_the_reference(
    isa_here: IsaHere, dtype: torch.dtype, hidden: int, ue8m0: bool, generator: torch.Generator
) -> None:
    native, isa = isa_here
    spread = 10.0 ** torch.randint(-6, 4, (24, 1), generator=generator)
    x_TH = (torch.randn((24, hidden), generator=generator) * spread).to(dtype)
    x_TH[3] = 0.0
    x_TH[4, ::3] *= 1e-5  # below the smallest normal code
    x_TH[5] = torch.arange(hidden).sub(hidden // 2).to(dtype)  # many quotients right between two codes
    groups = -(-hidden // 128)
    rounding, width = (Rounding.FP8_UE8M0, 1) if ue8m0 else (Rounding.FP8, 4)
    form = RowFormat(hidden, groups * width, 1, rounding)
    ids_TK = torch.arange(24, dtype=torch.int32)[:, None] % 4
    tokens_of_W, values, tails = sent(native, (x_TH, None), form, ids_TK, 2, isa)
    codes, scales = quantize_rows(x_TH, 128, power_of_two=ue8m0)
    expected = scales.to(torch.float8_e8m0fnu) if ue8m0 else scales
    for rank in range(2):
        tokens = tokens_of_W[rank]
        assert torch.equal(values[rank], codes.view(torch.uint8)[tokens])
        assert torch.equal(tails[rank][:, : groups * width], expected.view(torch.uint8).view(24, -1)[tokens])


@pytest.mark.stress
def test_all_bf16_numbers_under_many_scales_have_the_bits_of_the_reference(isa_here: IsaHere) -> None:
    native, isa = isa_here
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    finite = every[every.isfinite() & (every.abs() < 1e30) & (every.abs() > 1e-30)]
    finite = finite[: len(finite) // 127 * 127].view(-1, 127)
    for largest in torch.linspace(1.0, 2.0, 33).tolist():
        near = finite[(finite.abs() <= 1.0).all(dim=1)]
        x_TH = torch.cat((near, torch.full((len(near), 1), largest)), dim=1).bfloat16().view(len(near), 128)
        ids_TK = torch.zeros((len(near), 1), dtype=torch.int32)
        form = RowFormat(128, 4, 1, Rounding.FP8)
        _, values, _ = sent(native, (x_TH, None), form, ids_TK, 1, isa)
        assert torch.equal(values[0], quantize_rows(x_TH, 128)[0].view(torch.uint8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ROW_TYPES)
def test_a_group_with_a_nan_or_an_infinity_becomes_nan(isa_here: IsaHere, dtype: torch.dtype, value: float) -> None:
    (native, isa), x_TH = isa_here, torch.ones((1, 256), dtype=dtype)
    x_TH[0, 130] = value
    _, values, tails = sent(native, (x_TH, None), RowFormat(256, 8, 1, Rounding.FP8), int32([[0]]), 1, isa)
    scales = tails[0][0, :8].clone().view(torch.float32)
    back = values[0].view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128)
    assert not back[0, :128].isnan().any() and back[0, 128:].isnan().all()


def test_threads_change_nothing(native: Native, generator: torch.Generator) -> None:
    x_TH = torch.randn((300, 7168), generator=generator).bfloat16()
    assert x_TH.nbytes > BYTES_FOR_THREADS
    ids_TK = (torch.arange(600, dtype=torch.int32).view(300, 2) * 7) % 6
    before = torch.get_num_threads()
    made = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            tokens_of_W, values, tails = sent(native, (x_TH, None), RowFormat(7168, 224, 2, Rounding.FP8), ids_TK, 3)
            draw = generator.manual_seed(5)
            y = [torch.randn((len(tokens), 7168), generator=draw).bfloat16() for tokens in tokens_of_W]
            made.append([*values, *tails, summed(native, ids_TK, y, RANK_OF_P)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


def test_waiting_ends_with_the_epoch_or_with_the_time(native: Native) -> None:
    made = windows(native, 3, RowFormat(1, 0, 1), 7)
    made.exchange.counts[2] = 5  # what this rank keeps
    made.flags_from[0, :2] = torch.tensor([3 << 32 | 7, 4 << 32])
    assert made.exchange.arrived(3, 10**9) == [7, 0, 5], "a fast peer is not missed"
    assert made.exchange.arrived(4, 100) is None
    made.flags_from[0, :2] = torch.tensor([-(1 << 32) + 6, -(1 << 32)])  # epoch 2^32 - 1: behind what comes after it
    assert made.exchange.arrived(1 << 32, 100) is None
    assert made.exchange.arrived((1 << 32) - 1, 0) == [6, 0, 5]


def test_a_flag_is_raised_after_all_rows_and_tails_are_written(native: Native) -> None:
    # Flags that lie where the last row, or its tail, is written: whatever comes later is what is found there.
    form, x_TX = RowFormat(8, 0, 1), torch.full((2, 8), 3, dtype=torch.uint8)
    routing = int32([[0], [0]]), torch.ones((2, 1))
    for of in ("values", "tails"):
        made = windows(native, 2, form, 2)
        last = getattr(made, of)[0][1]
        parts = [[part.data_ptr() for part in rows] for rows in (made.values, made.tails, made.sums)]
        values, tails, sums = parts
        flags, none = [last.data_ptr(), 0, 0, 0], [0, 0]
        places = WindowPlaces(1, values, none, tails, flags, values, none, tails, [0] * 4, sums, 2)
        exchange = Exchange(native, places)
        exchange.room[:] = [2, 2]
        calls = ExchangeCalls(exchange, form, (RANK_OF_P, SLOT_OF_P), 2, 2, torch.float32)
        assert calls.dispatch((x_TX, None), routing, 9) == [2, 0]
        assert last.view(torch.int64).tolist() == [9 << 32 | 2], of


def test_what_was_written_before_a_flag_is_there_when_it_is_seen(native: Native) -> None:
    # Two threads as two ranks: one sends call after call, the other looks at rows as soon as their flag has come.
    form, calls = RowFormat(4096, 0, 1), 300
    made, done, nowhere = windows(native, 2, form, 4), torch.zeros(1, dtype=torch.int64), [0, 0]
    flags = [made.flags_to[0].data_ptr(), 0, 0, 0]
    places = WindowPlaces(1, nowhere, nowhere, nowhere, [0] * 4, nowhere, nowhere, nowhere, flags, nowhere, 4)
    reader, wrong = Exchange(native, places), []

    def read() -> None:
        for epoch in range(1, calls):
            while reader.arrived(epoch, 1000) is None:
                pass
            wrong.append(bool((made.values[0][:4] != epoch % 256).any()))
            done[0] = epoch

    thread = threading.Thread(target=read)
    thread.start()
    routing, calls_of = (torch.zeros((4, 1), dtype=torch.int32), torch.ones((4, 1))), made.calls(form)
    for epoch in range(1, calls):
        x_TX = torch.full((4, 4096), epoch % 256, dtype=torch.uint8)
        assert calls_of.dispatch((x_TX, None), routing, epoch) == [4, 0]
        while int(done[0]) < epoch:
            thread.join(0.0)
    thread.join()
    assert wrong == [False] * (calls - 1)
