"""Packed weights: the layout the kernels read, one slot per expert, at 1.0x the bytes of the checkpoint.

A slot holds one projection of one expert and can be copied, sent or swapped as plain bytes. Packing is a permutation
of the values (documented in csrc/pack.cpp) and of their scales (scales.py), which `unpack_slot` inverts bit for bit.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from moe_mk.errors import ShapeError, WeightError
from moe_mk.kernels.native.layout import MatrixLayout
from moe_mk.kernels.native.library import Native
from moe_mk.kernels.native.scales import (
    Shard,
    gathered_blocks,
    gathered_groups,
    gathered_outputs,
    spread_blocks,
    spread_groups,
    spread_outputs,
)

HUGE_PAGE = 2 << 20


@dataclass(frozen=True)
class PackedMatrix:
    """One projection of every local expert, packed.

    values_LB: uint8, one slot a row. scales_LX: f32 of blocks or bytes of groups, None without. bias_LX: f32 per
    output, gate's then up's, or None. output_scales_LX: f32 factors of whole outputs, None without.
    """

    layout: MatrixLayout
    values_LB: torch.Tensor
    scales_LX: torch.Tensor | None
    bias_LX: torch.Tensor | None = None
    output_scales_LX: torch.Tensor | None = None

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return self.values_LB.shape[0]

    @property
    def num_bytes(self) -> int:
        """Memory of values and scales."""
        held = (self.values_LB, self.scales_LX, self.output_scales_LX)
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the packed expert of one slot to another."""
        for part in (self.values_LB, self.scales_LX, self.output_scales_LX, self.bias_LX):
            if part is not None:
                part[target].copy_(part[source])


def allocate(
    native: Native,
    layout: MatrixLayout,
    num_slots: int,
    bias_LX: torch.Tensor | None = None,
    *,
    touch: bool = True,
) -> PackedMatrix:
    """Allocate `num_slots` packed experts, on 2 MiB pages if the system provides them; values are undefined.

    touch=False: reserves addresses only; `touch_slot` allocates memory slot by slot while source pages are released.
    """
    needed = num_slots * layout.slot_bytes
    values_B = torch.empty(needed + HUGE_PAGE, dtype=torch.uint8, device="cpu")
    start = -values_B.data_ptr() % HUGE_PAGE
    values_LB = values_B[start : start + needed].view(num_slots, layout.slot_bytes)
    if touch:
        native.functions["advise_huge"](values_LB.data_ptr(), needed)
    of_blocks = torch.uint8 if layout.format.group else torch.float32
    scales_LX = _zeros(num_slots, layout.slot_scales, of_blocks)
    return PackedMatrix(
        layout, values_LB, scales_LX, bias_LX, _zeros(num_slots, layout.slot_output_scales, torch.float32)
    )


def _zeros(num_slots: int, each: int, dtype: torch.dtype) -> torch.Tensor | None:
    return torch.zeros(num_slots, each, dtype=dtype, device="cpu") if each else None


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
    shard: Shard | None = None,
    threads: int = 1,
    name: str = "weight",
) -> None:
    """Pack one expert's projection into its slot.

    sources: (gate, up) or (weight,), each [outputs, inputs] (four-bit codes: [outputs, inputs / 2]) in the format's
    dtype; they may be memory-mapped and strided between rows.
    scales: one tensor per source. f32 128x128 grids, whose block (0, 0) contains the shard's first value; f32
    (outputs, 1) or (1, 1) for a layout by output; else scales of the format, (outputs, inputs / group).
    above: NVFP4's f32 scale of each source, (1, 1).
    Raises WeightError for NaN codes and scales, ShapeError for shapes and alignments that cannot be packed.
    """
    layout = packed.layout
    _check_sources(layout, sources, name)
    plain = _same_strides(sources)
    num_nans = ctypes.c_int64(0)
    native.call(
        "pack",
        plain[0].data_ptr(),
        plain[1].data_ptr() if layout.gated else None,
        plain[0].stride(0) * plain[0].element_size(),
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
    _pack_scales(packed, slot, scales, above, shard or Shard(), name)


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
    shard: Shard,
    name: str,
) -> None:
    layout = packed.layout
    if packed.scales_LX is not None:
        grouped = layout.format.group > 0
        spread = spread_groups(layout, scales, name) if grouped else spread_blocks(layout, scales, shard, name)
        packed.scales_LX[slot].copy_(spread)
    if packed.output_scales_LX is not None:
        of_outputs = scales if layout.by_output else above
        packed.output_scales_LX[slot].copy_(spread_outputs(layout, of_outputs, name))


def unpack_slot(native: Native, packed: PackedMatrix, slot: int, *, threads: int = 1) -> tuple[torch.Tensor, ...]:
    """The values of one slot: (gate, up) or (weight,), bit-identical to the packed ones."""
    layout = packed.layout
    targets = [
        torch.empty(layout.source_shape, dtype=layout.format.dtype, device="cpu")
        for _ in range(2 if layout.gated else 1)
    ]
    native.call(
        "unpack",
        packed.values_LB[slot].data_ptr(),
        targets[0].data_ptr(),
        targets[1].data_ptr() if layout.gated else None,
        layout.source_shape[1] * targets[0].element_size(),
        layout.num_outputs,
        layout.num_inputs,
        int(layout.format),
        threads,
    )
    return tuple(targets)


def unpack_scales(packed: PackedMatrix, slot: int) -> tuple[torch.Tensor, ...]:
    """The scales of one slot as applied, per source.

    Blocks: [outputs / 16, k blocks] f32 (the grid, repeated per tile); groups: [outputs, groups] in their stored dtype.
    """
    if packed.scales_LX is None:
        return ()
    gathered = gathered_groups if packed.layout.format.group else gathered_blocks
    return gathered(packed.layout, packed.scales_LX[slot])


def unpack_output_scales(packed: PackedMatrix, slot: int) -> tuple[torch.Tensor, ...]:
    """The f32 factors of whole outputs of one slot, per source, [outputs, 1]; () without."""
    if packed.output_scales_LX is None:
        return ()
    return gathered_outputs(packed.layout, packed.output_scales_LX[slot])


def _same_strides(sources: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    rows = [source if source.stride(1) == 1 or source.shape[1] == 1 else source.contiguous() for source in sources]
    if len({row.stride(0) for row in rows}) > 1:
        rows = [row.contiguous() for row in rows]
    return rows


def release_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Release the pages of tensors that map a file; the next access reads them from the file again.

    Must not be called for other memory, whose contents would be lost. No effect on systems without madvise.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for tensor in tensors:
        start, size = tensor.data_ptr(), _extent(tensor)
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            advise(first, last - first, mmap.MADV_DONTNEED)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last one, gaps of a strided view included."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
