"""Weights of one expert as the replay reads them: only the rows that are wanted, decoded to f64.

Large matrices are decoded in parts of `AT_ONCE` values. Temporaries of that size come from memory that the allocator
keeps; larger ones are mapped and cleared by the system each time, which took half of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from moe_mk.lab.verify.dense import decoded
from moe_mk.quant.blocked import BlockedScheme
from moe_mk.quant.tensor import QuantTensor

AT_ONCE = 1 << 21
"""Values decoded at a time."""
KEPT = 1 << 20
"""Values of a matrix up to which it stays decoded."""
Range = tuple[int, int]


@dataclass(frozen=True)
class Matrix:
    """gate above up, or down, of one expert. ranges: the rows that are wanted, in multiples of 128; all of them."""

    parts: tuple[QuantTensor, ...]
    bias: Tensor | None
    ranges: tuple[Range, ...] | None = None

    @cached_property
    def values(self) -> Tensor:
        """Decoded weights, (n, k) f64."""
        return torch.cat([w for _, w in self._decoded(unscaled=False)])

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k), of the wanted rows."""
        n = sum(q.shape[0] for q in self.parts) if self.ranges is None else sum(b - a for a, b in self.ranges)
        return n, int(self.parts[0].shape[1])

    @property
    def has_scales(self) -> bool:
        """Whether scales multiply codes."""
        return all(q.scales is not None and (q.zeros is None or not q.zeros.is_floating_point()) for q in self.parts)

    @property
    def wanted_bias(self) -> Tensor | None:
        return None if self.bias is None else self.wanted(self.bias)

    def wanted(self, rows: Tensor) -> Tensor:
        """The wanted ones of all rows."""
        return rows if self.ranges is None else torch.cat([rows[a:b] for a, b in self.ranges])

    def blocks(self, *, unscaled: bool = False) -> Iterator[tuple[slice, Tensor]]:
        """Decoded rows and their places among the wanted ones; a small matrix at once, which then stays decoded.

        unscaled: the values without scales, if the format has separate ones.
        """
        n, k = self.shape
        if n * k <= KEPT and not unscaled:
            yield slice(0, n), self.values
        else:
            yield from self._decoded(unscaled=unscaled)

    def _decoded(self, *, unscaled: bool) -> Iterator[tuple[slice, Tensor]]:
        place = 0
        for q in self.parts:
            n, k = q.shape
            step = max(128, AT_ONCE // k // 128 * 128)
            whole = [(0, n)] if self.ranges is None else self.ranges
            source = _unscaled(q) if unscaled else q
            for start, end in ((a, min(a + step, last)) for first, last in whole for a in range(first, last, step)):
                yield slice(place, place + end - start), _rows(source, start, end)
                place += end - start


def _rows(q: QuantTensor, start: int, end: int) -> Tensor:
    """Decoded rows. start: a multiple of 128."""
    n = q.shape[0]
    if (start, end) == (0, n):
        return decoded(q)
    side = q.scheme.sides_of(q)[0] if q.scales is not None and isinstance(q.scheme, BlockedScheme) else n
    is_split = q.global_scale is not None and q.global_scale.numel() > 1
    if is_split or (side < n and start % side):
        return decoded(q)[start:end]
    at = slice(start, end)

    def of_blocks(part: Tensor | None) -> Tensor | None:
        return part if part is None or len(part) == 1 else part[start // side : -(-end // side)]

    return decoded(replace(q, values=q.values[at], scales=of_blocks(q.scales), zeros=of_blocks(q.zeros)))


def _unscaled(q: QuantTensor) -> QuantTensor:
    if q.scales is None or (q.zeros is not None and q.zeros.is_floating_point()):
        return q
    return replace(q, scales=torch.ones_like(q.scales, dtype=torch.float32), global_scale=None)


def scales_of(q: QuantTensor) -> Tensor:
    """(tall, wide) f64, with the global scale."""
    assert q.scales is not None
    scales = q.scales.to(torch.float32).double()
    if q.global_scale is not None:
        above = q.global_scale.double().reshape(-1)
        scales = scales * above.repeat_interleave(max(1, scales.shape[0] // len(above)))[:, None]
    return scales


def over_segments(scales: Tensor, q: QuantTensor, width: int) -> Tensor:
    """(n, segments): the scale of each row in each segment of `width` columns."""
    assert isinstance(q.scheme, BlockedScheme)
    n, k = q.shape
    rows, columns = (min(side, size) for side, size in zip(q.scheme.sides_of(q), (n, k), strict=True))
    row_n = (torch.arange(n, dtype=torch.int64, device="cpu") // rows).clamp(max=scales.shape[0] - 1)
    column_s = (torch.arange(-(-k // width), dtype=torch.int64, device="cpu") * width // columns).clamp(
        max=scales.shape[1] - 1
    )
    return scales[row_n][:, column_s]
