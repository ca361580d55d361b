"""Sums of what came home: the bits of adding rank after rank in f32, however tokens are cut into segments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_mk.prepare_finalize.one_sided.rows_torch import TOKENS_AT_ONCE, add_up, segments

SHARES = {
    "some": (0.5, 1.0, 0.0, 0.9),
    "all of two": (1.0, 1.0),
    "nearly all of two": (0.99, 0.99),
    "all of three": (1.0, 1.0, 1.0),
    "nearly all of four": (0.995, 0.99, 1.0, 0.98),
    "one": (1.0,),
    "nobody": (0.0, 0.0),
}


def one_by_one(parts: list[Tensor], token_of_W: list[Tensor], tokens: int, dtype: torch.dtype) -> Tensor:
    total_TH = torch.zeros((tokens, 8))
    for token_X, part_XH in zip(token_of_W, parts, strict=True):
        for token, row in zip(token_X.tolist(), part_XH, strict=True):
            total_TH[token] += row
    return total_TH.to(dtype)


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_sums_have_the_bits_of_adding_rank_after_rank(
    tokens: int, dtype: torch.dtype, shares: tuple[float, ...]
) -> None:
    draw = torch.Generator("cpu").manual_seed(tokens)
    token_of_W = [torch.nonzero(torch.rand(tokens, generator=draw) < share).flatten() for share in shares]
    parts = [torch.randn((len(token_X), 8), generator=draw).to(dtype) for token_X in token_of_W]
    assert torch.equal(add_up(parts, token_of_W, tokens), one_by_one(parts, token_of_W, tokens, dtype))


def test_f32_keeps_the_order_of_ranks() -> None:
    # (1e8 + 1) - 1e8 + 1 is 1 in rank order; every other order gives 2 or 0.
    parts = [torch.full((1, 1), number) for number in (1e8, 1.0, -1e8, 1.0)]
    assert add_up(parts, [torch.zeros(1, dtype=torch.int64)] * 4, 1).item() == 1.0


def test_segments_by_hand() -> None:
    # Tokens 0..79; rank 1 lacks token 70: cut at every 64, and around 70. With many gaps only at every 64.
    everybody = torch.arange(80)
    assert segments([everybody, everybody], 80).tolist() == [0, TOKENS_AT_ONCE, 80]
    assert segments([everybody, everybody[everybody != 70]], 80).tolist() == [0, 64, 70, 71, 80]
    assert segments([everybody, everybody[::2]], 80).tolist() == [0, 64, 80]
    assert segments([everybody[:0], everybody[:0]], 0).tolist() == [0]
