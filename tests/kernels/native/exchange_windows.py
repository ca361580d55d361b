"""Windows of several ranks in the memory of one test, as one of them sees them; and sums through them."""

from dataclasses import dataclass
from unittest.mock import Mock

import torch
from torch import Tensor

from moe_mk.kernels.native.exchange import Exchange, ExchangeCalls, RowFormat, WindowPlaces
from moe_mk.kernels.native.library import Isa, Native

RANK_OF_P = torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32)
SLOT_OF_P = torch.tensor([0, 1, 0, 1, 0, 1], dtype=torch.int32)
UNTOUCHED = 0xAA


def int32(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@dataclass
class Windows:
    """Windows of W ranks as the last of them sees them: values, tails and sums of each rank, and all flags."""

    exchange: Exchange
    values: list[Tensor]
    tails: list[Tensor]
    sums: list[Tensor]
    flags_to: Tensor
    flags_from: Tensor

    def calls(self, form: RowFormat) -> ExchangeCalls:
        """Of a layer with six experts on three ranks."""
        return ExchangeCalls(self.exchange, form, (RANK_OF_P, SLOT_OF_P), 2, 2, torch.float32)


def windows(
    native: Native, ranks: int, form: RowFormat, rows: int, *, sum_bytes: int = 4, isa: Isa | None = None
) -> Windows:
    """Room for so many rows at each rank, and one that nobody may touch."""
    tail = form.scale_bytes + 8 * form.top_k
    values, tails, sums = (
        [torch.full((rows + 1, width), UNTOUCHED, dtype=torch.uint8) for _ in range(ranks)]
        for width in (form.value_bytes, tail, sum_bytes)
    )
    to, back = torch.zeros((2, ranks), dtype=torch.int64), torch.zeros((2, ranks), dtype=torch.int64)
    peers = [rank for rank in range(ranks) if rank != ranks - 1]

    def flags(words: Tensor) -> list[int]:
        return [words[half, rank].data_ptr() if rank in peers else 0 for half in range(2) for rank in range(ranks)]

    data, none = [part.data_ptr() for part in values], [0] * ranks
    tails_at = [part.data_ptr() for part in tails]
    sent, received = (data, none, tails_at, flags(to)), (data, none, tails_at, flags(back))
    places = WindowPlaces(ranks - 1, *sent, *received, [s.data_ptr() for s in sums], rows)
    made = Windows(Exchange(native, places, isa=isa), values, tails, sums, to, back)
    made.exchange.room[:] = [rows] * ranks
    return made


def visits(ids_TK: Tensor, ranks: int) -> Tensor:
    """Which tokens go to each rank, (W, T)."""
    rank_TK = torch.where(ids_TK >= 0, RANK_OF_P[ids_TK.clamp_min(0).long()], -1)
    return torch.stack([(rank_TK == rank).any(dim=1) for rank in range(ranks)])


def summed(native: Native, ids_TK: Tensor, parts: list[Tensor], rank_of_P: Tensor, isa: Isa | None = None) -> Tensor:
    """Sums of each rank's rows, those of the last rank lying elsewhere and all others from number 1 on."""
    ranks, (_, hidden), dtype = len(parts), parts[0].shape, parts[0].dtype
    form = RowFormat(1, 0, ids_TK.shape[1])
    made = windows(native, ranks, form, len(ids_TK) + 1, sum_bytes=hidden * dtype.itemsize, isa=isa)
    routing, x_TX = (ids_TK, torch.ones(ids_TK.shape)), torch.zeros((len(ids_TK), 1), dtype=torch.uint8)
    calls = ExchangeCalls(made.exchange, form, (rank_of_P, torch.zeros_like(rank_of_P)), 1, hidden, dtype)
    assert calls.dispatch((x_TX, None), routing, 3) == [len(part) for part in parts]
    for part, sums in zip(parts[:-1], made.sums, strict=False):
        sums[1 : 1 + len(part)] = part.view(torch.uint8)
    made.flags_from[1, : ranks - 1] = 3 << 32 | 1  # the first sum for the last rank is number 1 everywhere
    return calls.collect(parts[-1].data_ptr(), 3, 0, nobody_waits)


nobody_waits = Mock(side_effect=AssertionError("all flags have come"))
