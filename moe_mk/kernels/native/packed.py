"""Packed weights: the layout the kernels read, one slot per expert, at 1.0x the bytes of the checkpoint.

A slot holds one projection of one expert and can be copied, sent or swapped as plain bytes. Packing is a permutation
of the values (documented in csrc/pack.cpp) and of their scales, which `unpack_slot` inverts bit for bit:
f32 block scales are repeated to one per 16-column tile and k block; group scales stay one byte each, those of 32
outputs adjacent for every group of k; f32 factors of whole outputs are applied to finished sums.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from moe_mk.errors import ShapeError, WeightError
from moe_mk.kernels.native.layout import PAIR, SCALE_BLOCK, TILE, MatrixLayout
from moe_mk.kernels.native.library import Native

HUGE_PAGE = 2 << 20


@dataclass(frozen=True)
class PackedMatrix:
    """One projection of every local expert, packed.

    values_LB: uint8, one slot a row. scales_LX: f32 of blocks, or bytes of groups and parts, None without. bias_LX: f32
    per output, gate's then up's, or None. output_scales_LX: f32 factors of whole outputs, None without. zeros_LX: uint8
    zero points of groups, None without; biases of groups are in scales_LX. row_of_L: int32, read at every call: the row
    of each slot; None: in order.
    """

    layout: MatrixLayout
    values_LB: torch.Tensor
    scales_LX: torch.Tensor | None
    bias_LX: torch.Tensor | None = None
    output_scales_LX: torch.Tensor | None = None
    zeros_LX: torch.Tensor | None = None
    row_of_L: torch.Tensor | None = None

    @property
    def num_slots(self) -> int:
        return (self.values_LB if self.row_of_L is None else self.row_of_L).shape[0]

    @property
    def num_bytes(self) -> int:
        held = (self.values_LB, self.scales_LX, self.output_scales_LX, self.zeros_LX)
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the packed expert of one slot to another."""
        for part in (self.values_LB, self.scales_LX, self.output_scales_LX, self.zeros_LX, self.bias_LX):
            if part is not None:
                part[target].copy_(part[source])


def allocate(
    native: Native, layout: MatrixLayout, num_slots: int, bias_LX: torch.Tensor | None = None, *, touch: bool = True
) -> PackedMatrix:
    """Allocate `num_slots` packed experts, on 2 MiB pages if the system provides them; values are undefined.

    touch=False: reserves addresses only; `touch_slot` allocates memory slot by slot while source pages are released.
    """
    values_LB = on_huge_pages(num_slots, layout.slot_bytes)
    if touch:
        native.functions["advise_huge"](values_LB.data_ptr(), values_LB.numel())
    scales_LX, output_scales_LX, zeros_LX = (
        torch.zeros(num_slots, each, dtype=dtype, device="cpu") if each else None
        for each, dtype in layout.parts_of_slot[1:]
    )
    return PackedMatrix(layout, values_LB, scales_LX, bias_LX, output_scales_LX, zeros_LX)


def on_huge_pages(rows: int, row_bytes: int) -> torch.Tensor:
    """Addresses of rows, uint8 [rows, bytes], as direct reads and 2 MiB pages need them; memory once it is written."""
    whole = torch.empty(rows * row_bytes + HUGE_PAGE, dtype=torch.uint8, device="cpu")
    return whole[-whole.data_ptr() % HUGE_PAGE :][: rows * row_bytes].view(rows, row_bytes)


def touch_slot(native: Native, packed: PackedMatrix, slot: int) -> bool:
    """Allocate memory of one slot on 2 MiB pages; False: the system is too slow, do not request them for more slots."""
    values_B = packed.values_LB[slot]
    return native.functions["advise_huge"](values_B.data_ptr(), values_B.numel()) == 0


def pack_slot(
    native: Native,
    packed: PackedMatrix,
    slot: int,
    sources: tuple[torch.Tensor, ...],
    scales: tuple[torch.Tensor, ...] = (),
    *,
    above: tuple[torch.Tensor, ...] = (),
    zeros: tuple[torch.Tensor, ...] = (),
    threads: int = 1,
    name: str = "weight",
) -> None:
    """Pack one expert's projection into its slot.

    sources: (gate, up) or (weight,), each [outputs, inputs] (four-bit codes: [outputs, inputs / 2]) in the format's
    dtype; they may be memory-mapped and strided between rows.
    scales: one tensor per source. f32 128x128 grids; f32 (outputs, 1) or (1, 1) for a layout by output; else scales of
    the format, (outputs, inputs / group), of INT4 and INT8_GROUPS in the dtype of `PartScales`. ggml blocks have none.
    above: a global f32 scale of each source, (1, 1). zeros: uint8 zero points, or biases of the dtype of the scales, of
    the shape of the scales.
    Raises WeightError for NaN codes and, of blocks and formats with parts, for scales that are not finite (others are
    checked when weights are loaded); ShapeError for shapes and alignments that cannot be packed.
    """
    layout = packed.layout
    _check_sources(layout, sources, name)
    plain = _same_strides(sources)
    num_nans = ctypes.c_int64(0)
    if layout.block_type is not None:
        assert packed.scales_LX is not None
        native.call(
            "pack_blocks", plain[0].data_ptr(), plain[1].data_ptr() if layout.gated else None, plain[0].stride(0),
            layout.num_outputs, layout.num_inputs, int(layout.block_type), packed.values_LB[slot].data_ptr(),
            packed.scales_LX[slot].data_ptr(), native.threads(threads), ctypes.byref(num_nans),
        )  # fmt: skip
        _expect_finite(num_nans.value, f"{layout.block_type.name} scales", name)
        return
    native.call(
        "pack", plain[0].data_ptr(), plain[1].data_ptr() if layout.gated else None,
        plain[0].stride(0) * plain[0].element_size(), layout.num_outputs, layout.num_inputs, int(layout.format),
        packed.values_LB[slot].data_ptr(), native.threads(threads), ctypes.byref(num_nans),
    )  # fmt: skip
    if num_nans.value:
        raise WeightError(
            f"{name}: {num_nans.value} of its FP8 codes are NaN (0x7f or 0xff); the checkpoint is damaged"
        )
    if layout.parts is not None:
        _pack_parts(packed, slot, scales, zeros, name)
    else:
        _pack_scales(packed, slot, scales, above, name)


def _expect_finite(bad: int, storage: str, name: str) -> None:
    if bad:
        raise WeightError(f"{name}: {bad} of its {storage} are NaN or infinite; the checkpoint is damaged")


def _pack_parts(
    packed: PackedMatrix, slot: int, scales: tuple[torch.Tensor, ...], zeros: tuple[torch.Tensor, ...], name: str
) -> None:
    layout, parts = packed.layout, packed.layout.parts
    assert parts is not None and packed.scales_LX is not None
    shape = (layout.num_outputs, parts.of_row(layout.num_inputs))
    for what, each in (("scales", scales), *((("biases", zeros),) if parts.biases else ())):
        _expect(each, [shape], layout, name, what, parts.dtype)
        _expect_finite(sum(int((~s.isfinite()).sum()) for s in each), f"{layout.format.name} {what}", name)
    packed.scales_LX[slot].copy_(_of_pairs(layout, scales, zeros if parts.biases else ()).view(torch.uint8))
    if packed.zeros_LX is not None:
        _expect(zeros, [shape], layout, name, "zero points", torch.uint8)
        top = 2**layout.format.bits
        largest = max(int(z.max()) for z in zeros)
        if largest > top:
            raise WeightError(f"{name}: a zero point of {largest} for codes below {top}; the checkpoint is damaged")
        packed.zeros_LX[slot].copy_(_of_pairs(layout, zeros))
    elif zeros and not parts.biases:
        raise ShapeError(f"{name}: zero points for a layout without them; use PartScales(zeros=True)")


def _of_pairs(layout: MatrixLayout, *parts: Sequence[torch.Tensor], fill: int = 0) -> torch.Tensor:
    """[pairs, groups, parts, 32 outputs] flat, from [outputs, groups] of each source of each part.

    The 32 are 16 outputs of gate and the same of up, or neighbours; fill: of padding.
    """
    share = PAIR // (2 if layout.gated else 1)
    columns, missing = [], layout.pairs * share - layout.num_outputs
    for sources in filter(None, parts):
        padded = (torch.nn.functional.pad(s.to(device="cpu"), (0, 0, 0, missing), value=fill) for s in sources)
        columns.append(torch.cat([s.view(layout.pairs, share, -1) for s in padded], dim=1))
    return torch.stack(columns, dim=-1).permute(0, 2, 3, 1).reshape(-1)


def _check_sources(layout: MatrixLayout, sources: tuple[torch.Tensor, ...], name: str) -> None:
    if len(sources) != (2 if layout.gated else 1):
        raise ShapeError(
            f"{name}: {len(sources)} source tensors for a {'gated' if layout.gated else 'plain'} projection"
        )
    if layout.format.bits == 4 and layout.num_inputs % 2:
        raise ShapeError(f"{name}: {layout.num_inputs} inputs of four bits do not fill whole bytes; make them even")
    for source in sources:
        if tuple(source.shape) != layout.source_shape or source.dtype != layout.format.dtype:
            raise ShapeError(
                f"{name} is {tuple(source.shape)} {source.dtype}, expected {layout.source_shape} {layout.format.dtype}"
            )


def _pack_scales(
    packed: PackedMatrix,
    slot: int,
    scales: tuple[torch.Tensor, ...],
    above: tuple[torch.Tensor, ...],
    name: str,
) -> None:
    layout = packed.layout
    if packed.scales_LX is not None:
        grouped = layout.format.group > 0
        spread = spread_groups(layout, scales, name) if grouped else spread_blocks(layout, scales, name)
        packed.scales_LX[slot].copy_(spread)
    if packed.output_scales_LX is not None:
        of_outputs = scales if layout.by_output else above
        packed.output_scales_LX[slot].copy_(spread_outputs(layout, of_outputs, name))


def unpack_slot(native: Native, packed: PackedMatrix, slot: int, *, threads: int = 1) -> tuple[torch.Tensor, ...]:
    """The values of one slot: (gate, up) or (weight,), bit-identical to the packed ones; ggml blocks as such."""
    layout = packed.layout
    targets = [
        torch.empty(layout.source_shape, dtype=layout.format.dtype, device="cpu")
        for _ in range(2 if layout.gated else 1)
    ]
    if layout.block_type is not None:
        assert packed.scales_LX is not None
        native.call(
            "unpack_blocks", packed.values_LB[slot].data_ptr(), packed.scales_LX[slot].data_ptr(),
            targets[0].data_ptr(), targets[1].data_ptr() if layout.gated else None, layout.source_shape[1],
            layout.num_outputs, layout.num_inputs, int(layout.block_type), native.threads(threads),
        )  # fmt: skip
        return tuple(targets)
    native.call(
        "unpack", packed.values_LB[slot].data_ptr(), targets[0].data_ptr(),
        targets[1].data_ptr() if layout.gated else None, layout.source_shape[1] * targets[0].element_size(),
        layout.num_outputs, layout.num_inputs, int(layout.format), native.threads(threads),
    )  # fmt: skip
    return tuple(targets)


def unpack_scales(packed: PackedMatrix, slot: int) -> tuple[torch.Tensor, ...]:
    """The scales of one slot as applied, per source.

    Blocks: [outputs / 16, k blocks] f32 (the grid, repeated per tile); groups: [outputs, groups] in their stored dtype.
    () without, and for ggml blocks, which contain theirs.
    """
    layout = packed.layout
    if packed.scales_LX is None or layout.block_type is not None:
        return ()
    if layout.parts is not None:
        return _of_sources(layout, _scales_and_biases(packed, slot)[0])
    if not layout.format.group:
        return gathered_blocks(layout, packed.scales_LX[slot])
    given, dtype = ceil(layout.num_inputs / layout.format.group), layout.format.scale_dtype
    return tuple(part[:, :given].contiguous().view(dtype) for part in _of_sources(layout, packed.scales_LX[slot]))


def unpack_zeros(packed: PackedMatrix, slot: int) -> tuple[torch.Tensor, ...]:
    """The zero points of one slot, uint8, or the biases of its groups, per source, [outputs, groups]; () without."""
    parts = packed.layout.parts
    if parts is not None and parts.biases and packed.layout.block_type is None:
        return _of_sources(packed.layout, _scales_and_biases(packed, slot)[1])
    return () if packed.zeros_LX is None else _of_sources(packed.layout, packed.zeros_LX[slot])


def _scales_and_biases(packed: PackedMatrix, slot: int) -> tuple[Tensor, ...]:
    """Each [pairs, groups, 32] of their dtype, for `_of_sources`; without biases the scales alone."""
    layout, parts = packed.layout, packed.layout.parts
    assert parts is not None and packed.scales_LX is not None
    return packed.scales_LX[slot].view(parts.dtype).view(layout.pairs, -1, 1 + parts.biases, PAIR).unbind(2)


def _of_sources(layout: MatrixLayout, packed_X: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The inverse of `_of_pairs`."""
    halves = packed_X.reshape(layout.pairs, -1, PAIR).transpose(1, 2).chunk(2 if layout.gated else 1, dim=1)
    parts = (half.reshape(-1, half.shape[-1])[: layout.num_outputs] for half in halves)
    # A copy: contiguous() keeps the strides of a single group.
    return tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)


def unpack_output_scales(packed: PackedMatrix, slot: int) -> tuple[torch.Tensor, ...]:
    """The f32 factors of whole outputs of one slot, per source, [outputs, 1]; () without."""
    return () if packed.output_scales_LX is None else _of_sources(packed.layout, packed.output_scales_LX[slot])


def _same_strides(sources: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    rows = [source if source.stride(1) == 1 or source.shape[1] == 1 else source.contiguous() for source in sources]
    if len({row.stride(0) for row in rows}) > 1:
        rows = [row.contiguous() for row in rows]
    return rows


_ONE_E8M0 = 127


def spread_blocks(layout: MatrixLayout, scales: tuple[Tensor, ...], name: str) -> Tensor:
    """[pairs, 2, blocks] flat: the scale of every tile and block of k, from one 128x128 grid per source."""
    grid = ceil(layout.num_outputs / SCALE_BLOCK), layout.blocks
    _expect(scales, [grid], layout, name, "block scales", torch.float32)
    tiles = torch.arange(layout.pairs if layout.gated else layout.pairs * 2, dtype=torch.int64, device="cpu")
    # A padding tile repeats the last scale: its weights are zero.
    of_tile = (TILE * tiles // SCALE_BLOCK).clamp_(max=grid[0] - 1)
    spread = [s.to(device="cpu")[of_tile] for s in scales]
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
    powers = layout.format.scale_dtype is torch.float8_e8m0fnu
    bad = sum(int((o == 0xFF if powers else (o & 0x7F) == 0x7F).sum()) for o in octets)
    if bad:
        raise WeightError(f"{name}: {bad} of its {layout.format.name} scales are NaN; the checkpoint is damaged")
    fill = _ONE_E8M0 if powers else 0
    padded = [torch.nn.functional.pad(o, (0, layout.groups - given), value=fill) for o in octets]
    return _of_pairs(layout, padded, fill=fill)


def spread_outputs(layout: MatrixLayout, scales: tuple[Tensor, ...], name: str) -> Tensor:
    """[pairs, 32 outputs] flat, f32, from one scale an output, (N, 1), or one for all, (1, 1), of each source."""
    _expect(scales, [(layout.num_outputs, 1), (1, 1)], layout, name, "scales of outputs", torch.float32)
    return _of_pairs(layout, [s.expand(layout.num_outputs, 1) for s in scales])


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
