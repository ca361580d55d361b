"""Scales of packed codes in the order the kernels read them; every conversion has an inverse.

f32 block scales are repeated to one per 16-column tile and k block, so that any shard whose edges are multiples of 16
columns and 32 inputs can be packed. Group scales stay one byte each, those of 32 outputs adjacent for every group of k.
f32 factors of whole outputs are applied to finished sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd

import torch
from torch import Tensor

from moe_mk.errors import ShapeError, UnsupportedError, WeightError
from moe_mk.kernels.native.layout import PAIR, SCALE_BLOCK, STEP, TILE, Format, MatrixLayout

_ONE_E8M0 = 127


@dataclass(frozen=True)
class Shard:
    """The start of a tensor-parallel shard in its expert, which determines the scale block of a value."""

    first_output: int = 0
    first_input: int = 0


def scale_block(shard: Shard) -> int:
    """The packed scale block a shard needs: 128, or less when it starts inside a block.

    Raises UnsupportedError if a tile of 16 outputs or a step of 32 inputs would have two scales.
    """
    outputs, inputs = shard.first_output % SCALE_BLOCK, shard.first_input % SCALE_BLOCK
    wrong = []
    if outputs % TILE:
        wrong.append(f"it starts at output {shard.first_output}, not at a multiple of {TILE}")
    if inputs % STEP:
        wrong.append(f"it starts at input {shard.first_input}, not at a multiple of {STEP}")
    if wrong:
        raise UnsupportedError(
            "a shard cannot be packed with its block scales", [*wrong, "use another tp, or bf16 weights"]
        )
    return gcd(SCALE_BLOCK, inputs)


def spread_blocks(layout: MatrixLayout, scales: tuple[Tensor, ...], shard: Shard, name: str) -> Tensor:
    """[pairs, 2, blocks] flat: the scale of every tile and packed block, from one 128x128 grid per source."""
    if layout.block != scale_block(shard):
        raise ShapeError(f"{name}: packed with k blocks of {layout.block}, but its shard needs {scale_block(shard)}")
    rows, columns = shard.first_output % SCALE_BLOCK, shard.first_input % SCALE_BLOCK
    grid = (ceil((rows + layout.num_outputs) / SCALE_BLOCK), ceil((columns + layout.num_inputs) / SCALE_BLOCK))
    _expect(scales, [grid], layout, name, "block scales", torch.float32)
    tiles = layout.pairs if layout.gated else layout.pairs * 2
    # A padding tile repeats the last scale: its weights are zero.
    of_tile = ((rows + TILE * torch.arange(tiles, dtype=torch.int64, device="cpu")) // SCALE_BLOCK).clamp_(
        max=grid[0] - 1
    )
    starts = columns + layout.block * torch.arange(layout.blocks, dtype=torch.int64, device="cpu")
    of_block = (starts // SCALE_BLOCK).clamp_(max=grid[1] - 1)
    spread = [s.to(device="cpu")[of_tile][:, of_block] for s in scales]
    if layout.gated:
        return torch.stack(spread, dim=1).reshape(-1)
    return spread[0].reshape(-1)


def gathered_blocks(layout: MatrixLayout, packed_X: Tensor) -> tuple[Tensor, ...]:
    """Per source, [outputs / 16, k blocks]: the grid, spread to tiles."""
    spread = packed_X.view(layout.pairs, 2, layout.blocks)
    if layout.gated:
        return spread[:, 0].clone(), spread[:, 1].clone()
    return (spread.reshape(layout.pairs * 2, layout.blocks)[: ceil(layout.num_outputs / TILE)].clone(),)


def spread_groups(layout: MatrixLayout, scales: tuple[Tensor, ...], name: str) -> Tensor:
    """[pairs, groups, 32 outputs] flat, as bytes; those of padding are 1 (E8M0) or 0 (e4m3).

    Raises WeightError for scales that are NaN.
    """
    dtype, given = layout.format.scale_dtype, ceil(layout.num_inputs / layout.format.group)
    _expect(scales, [(layout.num_outputs, given)], layout, name, "group scales", dtype)
    octets = [s.to(device="cpu").contiguous().view(torch.uint8) for s in scales]
    bad = sum(int(_is_nan(o, layout.format).sum()) for o in octets)
    if bad:
        raise WeightError(f"{name}: {bad} of its {layout.format.name} scales are NaN; the checkpoint is damaged")
    fill = 0 if layout.format is Format.NVFP4 else _ONE_E8M0
    padded = [torch.nn.functional.pad(o, (0, layout.groups - given), value=fill) for o in octets]
    return _side_by_side(layout, padded, fill).transpose(1, 2).reshape(-1)


def gathered_groups(layout: MatrixLayout, packed_X: Tensor) -> tuple[Tensor, ...]:
    """Per source, [outputs, groups] in the format's own dtype."""
    given = ceil(layout.num_inputs / layout.format.group)
    columns = packed_X.view(layout.pairs, layout.groups, PAIR).transpose(1, 2)
    parts = _apart(layout, columns)
    return tuple(part[:, :given].contiguous().view(layout.format.scale_dtype) for part in parts)


def spread_outputs(layout: MatrixLayout, scales: tuple[Tensor, ...], name: str) -> Tensor:
    """[pairs, 32 outputs] flat, f32, from one scale an output, (N, 1), or one for all, (1, 1), of each source."""
    _expect(scales, [(layout.num_outputs, 1), (1, 1)], layout, name, "scales of outputs", torch.float32)
    wide = [s.to(device="cpu").expand(layout.num_outputs, 1) for s in scales]
    return _side_by_side(layout, wide).reshape(-1)


def gathered_outputs(layout: MatrixLayout, packed_X: Tensor) -> tuple[Tensor, ...]:
    """Per source, [outputs, 1] f32."""
    return tuple(part.clone() for part in _apart(layout, packed_X.view(layout.pairs, PAIR, 1)))


def _side_by_side(layout: MatrixLayout, sources: list[Tensor], fill: int = 0) -> Tensor:
    """[N, X] of each source -> [pairs, 32, X]: 16 outputs of gate and the same of up, or 32 neighbours."""
    share = PAIR // len(sources)
    missing = layout.pairs * share - layout.num_outputs
    padded = [torch.nn.functional.pad(s, (0, 0, 0, missing), value=fill).view(layout.pairs, share, -1) for s in sources]
    return torch.cat(padded, dim=1)


def _apart(layout: MatrixLayout, columns: Tensor) -> tuple[Tensor, ...]:
    """The inverse of `_side_by_side`."""
    halves = 2 if layout.gated else 1
    return tuple(part.reshape(-1, columns.shape[-1])[: layout.num_outputs] for part in columns.chunk(halves, dim=1))


def _is_nan(octets: Tensor, storage: Format) -> Tensor:
    return octets == 0xFF if storage.scale_dtype is torch.float8_e8m0fnu else (octets & 0x7F) == 0x7F


def _expect(
    scales: tuple[Tensor, ...],
    shapes: list[tuple[int, int]],
    layout: MatrixLayout,
    name: str,
    what: str,
    dtype: torch.dtype,
) -> None:
    halves = 2 if layout.gated else 1
    if len(scales) == halves and all(tuple(s.shape) in shapes and s.dtype == dtype for s in scales):
        return
    given = ", ".join(f"{tuple(s.shape)} {s.dtype}" for s in scales) or "none"
    wanted = " or ".join(map(str, shapes))
    raise ShapeError(f"{name}: {what} are {given}; expected {halves} of {wanted} {dtype}")
