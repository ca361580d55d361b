"""The calls of a layer over an exchange: what is remembered between them, what is refused, sums that are late."""

import pytest
import torch

from moe_mk.errors import ShapeError
from moe_mk.kernels.native.exchange import ExchangeCalls, RowFormat
from moe_mk.kernels.native.experts_mode import Rounding
from moe_mk.kernels.native.library import Native
from tests.kernels.native.exchange_windows import RANK_OF_P, SLOT_OF_P, int32, nobody_waits, windows


def test_rows_that_pass_do_not_vouch_for_those_of_the_next_call(native: Native) -> None:
    # One layer's calls, one after the other: rows that are rounded here, rows with scales, and what is neither.
    form = RowFormat(128, 4, 1, Rounding.FP8)
    made = windows(native, 1, form, 2)
    calls, routing = made.calls(form), (torch.zeros((2, 1), dtype=torch.int32), torch.ones((2, 1)))
    x_TH, codes_TH = torch.full((2, 128), 448.0), torch.full((2, 128), 126, dtype=torch.uint8)
    for x in (x_TH, x_TH.bfloat16(), torch.full((2, 200), 448.0)[:, :128], x_TH.half()):
        assert calls.dispatch((x, None), routing, 1, rounding=True) == [2]
        assert torch.equal(made.values[0][:2], codes_TH), "448 is code 126 under a scale of 1"
    scales_TX = torch.tensor([[0.5], [0.25]])
    assert calls.dispatch((codes_TH - 1, scales_TX), routing, 2) == [2]
    assert torch.equal(made.values[0][:2], codes_TH - 1)
    assert torch.equal(made.tails[0][:2, :4].clone().view(torch.float32), scales_TX)
    for x, rounding, complaint in (
        ((codes_TH, None), False, r"rows have 128 \+ 0 bytes, expected 128 \+ 4"),
        ((codes_TH, scales_TX.repeat(1, 2)), False, r"rows have 128 \+ 8 bytes"),
        ((codes_TH, scales_TX.repeat(1, 2)[:, :1]), False, "scales contiguous"),
        ((x_TH.double(), None), True, "float64"),
        ((x_TH.repeat(1, 2)[:, ::2], None), True, "values must be contiguous within a row"),
    ):
        with pytest.raises(ShapeError, match=complaint):
            calls.dispatch(x, routing, 3, rounding=rounding)
    assert torch.equal(made.values[0][:2], codes_TH - 1), "nothing refused was written"
    wide = windows(native, 1, RowFormat(256, 4, 1, Rounding.FP8), 2)
    with pytest.raises(ShapeError, match=r"4 bytes of scales, 2 groups of 128"):
        wide.calls(RowFormat(256, 4, 1, Rounding.FP8)).dispatch((x_TH.repeat(1, 2), None), routing, 1, rounding=True)


def test_layers_that_take_turns_over_one_exchange_keep_their_own_tokens(native: Native) -> None:
    # Two layers with other tables: expert 0 is at home on rank 1 for the second. The sums of each find its own tokens.
    form, x_TX = RowFormat(1, 0, 1), torch.zeros((3, 1), dtype=torch.uint8)
    made = windows(native, 2, form, 3, sum_bytes=8)
    swapped = ExchangeCalls(made.exchange, form, (1 - RANK_OF_P.clamp_max(1), SLOT_OF_P), 2, 2, torch.float32)
    sums_XH = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    made.sums[0][:3] = sums_XH.view(torch.uint8)
    routing = int32([[0], [2], [0]]), torch.ones((3, 1))
    for epoch, calls, counts in ((1, made.calls(form), [2, 1]), (2, swapped, [1, 2])):
        assert calls.dispatch((x_TX, None), routing, epoch) == counts
        made.flags_from[1, 0] = epoch << 32
        y_TH = calls.collect(sums_XH.data_ptr(), epoch, 0, nobody_waits)
        # Tokens 0 and 2 get the first sums of one rank, token 1 the first of the other.
        assert y_TH.tolist() == [[1.0, 2.0], [1.0, 2.0], [3.0, 4.0]]


def test_sums_that_are_not_there_in_time_are_waited_for_elsewhere(native: Native) -> None:
    # Rank 1 of two; its only token goes to rank 0, whose sum comes while this rank waits by other means.
    form, waited = RowFormat(1, 0, 1), []
    made = windows(native, 2, form, 2, sum_bytes=8)
    calls, x_TX = made.calls(form), torch.zeros((1, 1), dtype=torch.uint8)
    assert calls.dispatch((x_TX, None), (int32([[0]]), torch.ones((1, 1))), 4) == [1, 0]
    made.flags_from[1, 0] = 3 << 32 | 1  # of the call before

    def wait() -> dict[int, int]:
        waited.append(made.flags_from[1, 0].item() >> 32)
        made.sums[0][1] = torch.tensor([2.0, 3.0]).view(torch.uint8)
        made.flags_from[1, 0] = 4 << 32 | 7  # changed after it was looked at: what was returned counts
        return {0: 1}

    assert calls.collect(0, 4, 10, wait).tolist() == [[2.0, 3.0]] and waited == [3]
