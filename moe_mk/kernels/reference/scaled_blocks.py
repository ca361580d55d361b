"""One scale per block of rows x columns: largest magnitudes, and scales repeated over their blocks.

Reads (..., n, k), writes (..., ceil(n / rows), ceil(k / columns)), and back. Blocks at the edges may be smaller; a side
longer than the matrix spans it. NaN and infinity make the largest magnitude of their block NaN or infinite.
"""

from __future__ import annotations

import torch
from torch import Tensor

Block = tuple[int, int]


def blocks_of(n: int, k: int, block: Block) -> Block:
    """The numbers of blocks of an (n, k) matrix, partial ones included."""
    return -(-n // block[0]), -(-k // block[1])


def fitted(n: int, k: int, block: Block) -> Block:
    """The sides of a block inside an (n, k) matrix: never longer than it, never zero."""
    return max(1, min(block[0], n)), max(1, min(block[1], k))


def block_amax(x: Tensor, block: Block) -> Tensor:
    """The largest magnitude of each block, in f32."""
    *leading, n, k = x.shape
    rows, columns = fitted(n, k, block)
    tall, wide = blocks_of(n, k, (rows, columns))
    size = x.to(torch.float32).abs()
    if (tall * rows, wide * columns) != (n, k):
        size = torch.nn.functional.pad(size, (0, wide * columns - k, 0, tall * rows - n))
    return size.reshape(*leading, tall, rows, wide, columns).amax(dim=(-3, -1))


def divided(x: Tensor, scales: Tensor, block: Block) -> Tensor:
    """f32 x over the f32 scale of its block; whole blocks need no scale for each number."""
    *leading, n, k = x.shape
    (rows, columns), (tall, wide) = fitted(n, k, block), scales.shape[-2:]
    if (tall * rows, wide * columns) != (n, k):
        return x / spread(scales, n, k, block)
    blocks = x.reshape(*leading, tall, rows, wide, columns)
    return (blocks / scales[..., :, None, :, None]).reshape(x.shape)


def spread(scales: Tensor, n: int, k: int, block: Block) -> Tensor:
    """(..., tall, wide) scales as f32 that broadcast over (..., n, k): a scale of whole rows keeps one column."""
    rows, columns = fitted(n, k, block)
    wide = scales.to(torch.float32)
    if rows > 1:
        wide = wide.repeat_interleave(rows, dim=-2)[..., :n, :]
    if scales.shape[-1] > 1 or columns < k:
        wide = wide.repeat_interleave(columns, dim=-1)[..., :k]
    return wide
