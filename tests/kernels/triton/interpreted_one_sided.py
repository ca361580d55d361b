"""One-sided kernels on virtual ranks: all send, then all wait; run by test_one_sided.py with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.kernels.triton.one_sided import LATE, ON_TIME, Windows, await_flags, pull_sums, send_rows, show, slots_of

HIDDEN, MAX_ROWS = 24, 8


class Rank:
    """One virtual rank: its window, and what it knows of those of the others."""

    def __init__(self, rank: int, memories: list[Tensor], dtype: torch.dtype) -> None:
        bases_W = torch.tensor([memory.data_ptr() for memory in memories])
        size = HIDDEN * dtype.itemsize
        self.windows, self.own, self.dtype = Windows(bases_W, rank, MAX_ROWS, size, size), memories[rank], dtype
        self.call, self.done = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)

    def send(self, x_TH: Tensor, visits_WT: Tensor) -> None:
        self.slots_WT = slots_of(visits_WT)
        rows_TB = x_TH.contiguous().view(torch.uint8)
        send_rows(self.windows, rows_TB.expand(len(visits_WT), -1, -1), self.slots_WT, self.call, self.done)

    def compute(self, factor: float) -> tuple[list[int], list[int]]:
        """Experts that scale rows in place of the window, and report."""
        counts_W, status_W = await_flags(self.windows, self.call, sums=False, looks=3)
        rows, sums = (part(self.own).view(self.dtype) for part in (self.windows.rows, self.windows.sums))
        for source, count in enumerate(counts_W.tolist()):
            sums[source, :count] = rows[source, :count] * factor
        show(self.windows, self.call)
        return counts_W.tolist(), status_W.tolist()

    def receive(self) -> Tensor:
        _, status_W = await_flags(self.windows, self.call, sums=True, looks=3)
        return pull_sums(self.windows, self.slots_WT, status_W, HIDDEN, self.dtype)


def ranks(count: int, dtype: torch.dtype = torch.float32) -> list[Rank]:
    num_bytes = Windows(torch.zeros(count), 0, MAX_ROWS, *[HIDDEN * dtype.itemsize] * 2).num_bytes
    memories = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(count)]
    made = [Rank(rank, memories, dtype) for rank in range(count)]
    for rank, memory in enumerate(memories):  # sums of an earlier life: nobody may read them unasked
        made[rank].windows.sums(memory).view(dtype).fill_(float("nan"))
    return made


def test_slots_are_counted_in_token_order() -> None:
    visits_WT = torch.tensor([[True, False, True, True], [False, False, False, True]])
    assert slots_of(visits_WT).tolist() == [[0, -1, 1, 2], [-1, -1, -1, 0]]
    assert slots_of(visits_WT[:, :0]).shape == (2, 0)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_flags_and_sums_of_several_calls_are_exact(size: int, dtype: torch.dtype) -> None:
    world, draw = ranks(size, dtype), torch.Generator().manual_seed(size)
    for call in range(1, 4):
        counts = [int(torch.randint(0, MAX_ROWS + 1, (), generator=draw)) for _ in range(size)]
        x = [torch.randn((count, HIDDEN), generator=draw).to(dtype) for count in counts]
        visits = [torch.rand((size, count), generator=draw) < 0.7 for count in counts]
        for rank, own, visits_WT in zip(world, x, visits, strict=True):
            rank.send(own, visits_WT)
        for number, rank in enumerate(world):
            arrived, status = rank.compute(float(number + 1))
            assert arrived == [int(visits_WT[number].sum()) for visits_WT in visits]
            assert status == [ON_TIME] * size and int(rank.call) == call and int(rank.done) == 0
        for rank, own, visits_WT in zip(world, x, visits, strict=True):
            total_TH = torch.zeros(own.shape)
            for number in range(size):
                total_TH += torch.where(visits_WT[number, :, None], own * (number + 1), 0.0).float()
            assert torch.equal(rank.receive(), total_TH.to(dtype))


def test_a_late_rank_is_named_and_adds_nothing() -> None:
    first, second = ranks(2)
    x_TH, everywhere = torch.ones(3, HIDDEN), torch.ones((2, 3), dtype=torch.bool)
    first.send(x_TH, everywhere)
    assert first.compute(2.0) == ([3, 0], [ON_TIME, LATE])
    assert torch.equal(first.receive(), 2 * x_TH), "of its own experts alone"
    second.send(x_TH[:0], everywhere[:, :0])
    assert second.compute(5.0) == ([3, 0], [ON_TIME, ON_TIME]), "it was not missed meanwhile"


def test_rows_that_are_no_multiple_of_sixteen_bytes_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"units of 16 bytes: \{'sum_bytes': 50\}"):
        Windows(torch.zeros(2), 0, 4, 48, 50)
