"""Packed weights: the layout the kernels read, one slot an expert, at 1.0x the bytes of the checkpoint.

A slot holds one projection of one expert and can be copied, sent or swapped as plain bytes. Packing is a permutation
of the values (csrc/pack.cpp draws it): `unpack_slot` gives them back bit for bit. f32 block scales are spread to one a
16-column tile and k block, so that any shard whose edges are multiples of 16 columns and 32 inputs can be packed.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from math import ceil, gcd

import torch

from moe_mk.errors import ShapeError, UnsupportedError, WeightError
from moe_mk.kernels.native.library import Native

TILE, PAIR, STEP, SCALE_BLOCK = 16, 32, 32, 128
HUGE_PAGE = 2 << 20


class Format(IntEnum):
    """How a packed weight is stored: `Format` of csrc/abi.h."""

    FP8 = 0
    BF16 = 1


@dataclass(frozen=True)
class MatrixLayout:
    """The logical shape of one projection and how it is packed.

    num_outputs: output columns of ONE half when gated (I), else all of them. num_inputs: k.
    gated: packed from two sources, gate and up, whose tiles lie side by side.
    block: inputs covered by one packed scale, a multiple of 32 up to 128.
    """

    num_outputs: int
    num_inputs: int
    gated: bool
    format: Format
    block: int = SCALE_BLOCK

    @property
    def pairs(self) -> int:
        """Pairs of 16-column tiles."""
        return ceil(self.num_outputs / (TILE if self.gated else PAIR))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one expert's packed values, padding included."""
        return self.pairs * ceil(self.num_inputs / STEP) * PAIR * STEP * (1 if self.format is Format.FP8 else 2)

    @property
    def blocks(self) -> int:
        """Scale blocks along k."""
        return ceil(ceil(self.num_inputs / STEP) / (self.block // STEP))

    @property
    def slot_scales(self) -> int:
        """f32 scales of one expert."""
        return self.pairs * 2 * self.blocks if self.format is Format.FP8 else 0


@dataclass(frozen=True)
class PackedMatrix:
    """One projection of every local expert, packed.

    values_LB: uint8, one slot a row. scales_LX: f32, None for bf16. bias_LX: f32 per output, gate's then up's, or None.
    """

    layout: MatrixLayout
    values_LB: torch.Tensor
    scales_LX: torch.Tensor | None
    bias_LX: torch.Tensor | None = None

    @property
    def num_slots(self) -> int:
        """Experts there is room for."""
        return self.values_LB.shape[0]

    @property
    def num_bytes(self) -> int:
        """Memory of values and scales."""
        scales = 0 if self.scales_LX is None else self.scales_LX.numel() * 4
        return self.values_LB.numel() + scales


@dataclass(frozen=True)
class Shard:
    """Where a tensor-parallel shard starts inside its expert: what decides which scale block a value lies in."""

    first_output: int = 0
    first_input: int = 0


def allocate(
    native: Native,
    layout: MatrixLayout,
    num_slots: int,
    bias_LX: torch.Tensor | None = None,
    *,
    touch: bool = True,
) -> PackedMatrix:
    """Make room for `num_slots` packed experts, on 2 MiB pages where the system gives them; values are undefined.

    touch=False: takes addresses only; `touch_slot` takes memory slot by slot, as what is packed gives its own back.
    """
    needed = num_slots * layout.slot_bytes
    values_B = torch.empty(needed + HUGE_PAGE, dtype=torch.uint8, device="cpu")
    start = -values_B.data_ptr() % HUGE_PAGE
    values_LB = values_B[start : start + needed].view(num_slots, layout.slot_bytes)
    if touch:
        native.functions["advise_huge"](values_LB.data_ptr(), needed)
    scales_LX = None
    if layout.format is Format.FP8:
        scales_LX = torch.zeros(num_slots, layout.slot_scales, dtype=torch.float32, device="cpu")
    return PackedMatrix(layout, values_LB, scales_LX, bias_LX)


def touch_slot(native: Native, packed: PackedMatrix, slot: int) -> bool:
    """Take memory for one slot on 2 MiB pages; False: they come too slowly, better not to ask for the next slots."""
    values_B = packed.values_LB[slot]
    return native.functions["advise_huge"](values_B.data_ptr(), values_B.numel()) == 0


def pack_slot(
    native: Native,
    packed: PackedMatrix,
    slot: int,
    sources: tuple[torch.Tensor, ...],
    scales: tuple[torch.Tensor, ...] = (),
    *,
    shard: Shard | None = None,
    threads: int = 1,
    name: str = "weight",
) -> None:
    """Pack one expert's projection into its slot.

    sources: (gate, up) or (weight,), each [outputs, inputs], e4m3 or bf16; they may be memory-mapped and strided
    between rows. scales: f32 block scales, one 128x128 grid per source, whose block
    (0, 0) is the one the shard's first value lies in.
    Raises WeightError for NaN codes, ShapeError for shapes and alignments that cannot be packed.
    """
    layout = packed.layout
    dtype = torch.float8_e4m3fn if layout.format is Format.FP8 else torch.bfloat16
    if len(sources) != (2 if layout.gated else 1):
        raise ShapeError(
            f"{name}: {len(sources)} source tensors for a {'gated' if layout.gated else 'plain'} projection"
        )
    for source in sources:
        if tuple(source.shape) != (layout.num_outputs, layout.num_inputs) or source.dtype != dtype:
            raise ShapeError(
                f"{name} is {tuple(source.shape)} {source.dtype}, "
                f"expected {(layout.num_outputs, layout.num_inputs)} {dtype}"
            )
    plain = _same_strides(sources)
    num_nans = ctypes.c_int64(0)
    native.call(
        "pack",
        plain[0].data_ptr(),
        plain[1].data_ptr() if layout.gated else None,
        plain[0].stride(0),
        layout.num_outputs,
        layout.num_inputs,
        int(layout.format),
        packed.values_LB[slot].data_ptr(),
        threads,
        ctypes.byref(num_nans),
    )
    if num_nans.value:
        raise WeightError(
            f"{name}: {num_nans.value} of its FP8 codes are NaN (0x7f or 0xff); the checkpoint is damaged"
        )
    if packed.scales_LX is not None:
        packed.scales_LX[slot].copy_(_spread(layout, scales, shard or Shard(), name))


def unpack_slot(native: Native, packed: PackedMatrix, slot: int, *, threads: int = 1) -> tuple[torch.Tensor, ...]:
    """Give one slot's values back: (gate, up) or (weight,), bit-equal to what was packed."""
    layout = packed.layout
    dtype = torch.float8_e4m3fn if layout.format is Format.FP8 else torch.bfloat16
    shape = (layout.num_outputs, layout.num_inputs)
    targets = [torch.empty(shape, dtype=dtype, device="cpu") for _ in range(2 if layout.gated else 1)]
    native.call(
        "unpack",
        packed.values_LB[slot].data_ptr(),
        targets[0].data_ptr(),
        targets[1].data_ptr() if layout.gated else None,
        layout.num_inputs,
        layout.num_outputs,
        layout.num_inputs,
        int(layout.format),
        threads,
    )
    return tuple(targets)


def unpack_scales(packed: PackedMatrix, slot: int) -> tuple[torch.Tensor, ...]:
    """Give one slot's scales as they are applied: per source, [outputs / 16, k blocks] (the grid, spread to tiles)."""
    if packed.scales_LX is None:
        return ()
    layout = packed.layout
    spread = packed.scales_LX[slot].view(layout.pairs, 2, layout.blocks)
    if layout.gated:
        return spread[:, 0].clone(), spread[:, 1].clone()
    return (spread.reshape(layout.pairs * 2, layout.blocks)[: ceil(layout.num_outputs / TILE)].clone(),)


def scale_block(shard: Shard) -> int:
    """The packed scale block a shard needs: 128, or less when it starts inside a block.

    Raises UnsupportedError when a tile of 16 outputs or a step of 32 inputs would meet two scales.
    """
    outputs, inputs = shard.first_output % SCALE_BLOCK, shard.first_input % SCALE_BLOCK
    wrong = []
    if outputs % TILE:
        wrong.append(f"it starts at output {shard.first_output}, not at a multiple of {TILE}")
    if inputs % STEP:
        wrong.append(f"it starts at input {shard.first_input}, not at a multiple of {STEP}")
    if wrong:
        raise UnsupportedError(
            "a shard cannot be packed with its FP8 block scales", [*wrong, "use another tp, or bf16 weights"]
        )
    return gcd(SCALE_BLOCK, inputs)


def _same_strides(sources: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    rows = [source if source.stride(1) == 1 or source.shape[1] == 1 else source.contiguous() for source in sources]
    if len({row.stride(0) for row in rows}) > 1:
        rows = [row.contiguous() for row in rows]
    return rows


def _spread(layout: MatrixLayout, scales: tuple[torch.Tensor, ...], shard: Shard, name: str) -> torch.Tensor:
    """[pairs, 2, blocks] flat: the scale of every tile and packed block, from one 128x128 grid per source."""
    if layout.block != scale_block(shard):
        raise ShapeError(f"{name}: packed with k blocks of {layout.block}, but its shard needs {scale_block(shard)}")
    rows, columns = shard.first_output % SCALE_BLOCK, shard.first_input % SCALE_BLOCK
    grid = (ceil((rows + layout.num_outputs) / SCALE_BLOCK), ceil((columns + layout.num_inputs) / SCALE_BLOCK))
    halves = 2 if layout.gated else 1
    if len(scales) != halves or any(tuple(s.shape) != grid or s.dtype != torch.float32 for s in scales):
        given = ", ".join(f"{tuple(s.shape)} {s.dtype}" for s in scales) or "none"
        raise ShapeError(f"{name}: block scales are {given}; expected {halves} of {grid} torch.float32")
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
