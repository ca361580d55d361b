"""The same tensor in other memory: what code that reads memory as if it were dense gets wrong."""

from collections.abc import Iterator

import torch
from torch import Tensor

FILL = 0x3B
"""Of bytes between those of a tensor: a number in every dtype, and not the one that belongs there."""


def restrided(x: Tensor) -> Iterator[Tensor]:
    """Tensors equal to `x`, of one to three dimensions, each with strides and a first element that `x` may not have."""
    *rows, columns = x.shape
    yield _within(x, (*rows, 2 * columns))[..., ::2].copy_(x)
    yield _within(x, (*rows, columns + 3))[..., 3:].copy_(x)
    if rows:
        yield _within(x, (2 * rows[0], *rows[1:], columns))[1::2].copy_(x)
        yield _within(x, (*rows[:-1], columns, rows[-1])).transpose(-1, -2).copy_(x)


def _within(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    wide = torch.empty(shape, dtype=x.dtype)
    wide.view(torch.uint8).fill_(FILL)
    return wide
