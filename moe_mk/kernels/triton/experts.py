"""w13 -> activation -> w2 over all experts of a rank, one function for each layout of tokens; no host synchronisation.

    rows      align and quantise, w13 gathering its rows, w2 scattering weighted rows, combine  4 launches in decode;
              with one expert a row, w2 writes the output, and zeros where the expert is -1     3 launches in decode
    grouped   quantise, tile list, w13, w2
    batched   the same over blocks with padding: rows past the count of a block are computed or not, never stored

Biases and clamps are applied in the epilogues of the GEMMs. Rows are quantised for FP8 and INT8 products only; rows
with one scale per token are quantised between the GEMMs in a separate launch. Weight-only formats are decoded in the
GEMMs. Each launch may start while the previous one drains (`chain.py`). Intermediate tensors are allocated by `empty`.
Padding rows, and positions of dropped assignments, never contribute to a stored row.

For few assignments `align_and_quantize` sorts them and quantises their rows in one launch: program 0 computes `align`,
the others `quantize_rows`, eight groups each.

`combine` sums the rows of the assignments of each received row. It reads ids (R, K) and the rows of y (R * K, H) whose
id is not -1, and writes (R, H). Sums run in f32 in the order k = 0 ... K - 1 and are rounded once: equal inputs give
equal bits. It moves (K + 1) R H elements, without atomics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_mk.kernels.triton.align import COUNTS, SMALL, Alignment, align, choices, pointers, room_of, sizes, sort_small
from moe_mk.kernels.triton.grouped_w2 import grouped_w2
from moe_mk.kernels.triton.grouped_w13 import CLAMPED, grouped_w13
from moe_mk.kernels.triton.kernel_format import KERNEL_FORMATS, KernelFormat
from moe_mk.kernels.triton.launch import after_the_one_before, chained
from moe_mk.kernels.triton.numerics import to_dtype
from moe_mk.kernels.triton.permute import first_kept as first_kept
from moe_mk.kernels.triton.quantize_rows import (
    GROUPS_A_PROGRAM,
    quantize_part,
    quantize_rows_into,
    quantize_tokens,
)
from moe_mk.kernels.triton.tile import BLOCK, ENGINES, Tile
from moe_mk.kernels.triton.tile_map import Empty, TileMap, tile_map

COLUMNS = 1024
ROW_ALIGNMENT = 16
"""Bytes."""


def combine(y: Tensor, ids_RK: Tensor, weights_RK: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Sum the K rows of each received row, each times its weight if weights are given: (R, H) in the dtype of y.

    y: (R * K, H); row r * K + k belongs to choice k of received row r. out: the output, in any float
    dtype; None: allocated.
    """
    rows, top_k = ids_RK.shape
    out_RH = torch.empty((rows, y.shape[1]), dtype=y.dtype, device=y.device) if out is None else out
    if out_RH.numel():
        _combine[(rows, triton.cdiv(y.shape[1], COLUMNS))](
            y, ids_RK, weights_RK if weights_RK is not None else y, out_RH, y.shape[1], y.stride(0), out_RH.stride(0),
            TOP_K=top_k, WEIGHTED=weights_RK is not None, COLUMNS=COLUMNS, num_warps=4,
            **chained(),
        )  # fmt: skip
    return out_RH


@triton.jit
def _combine(
    y_ptr, ids_ptr, weights_ptr, out_ptr, width, y_stride, out_stride,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    after_the_one_before()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([COLUMNS], tl.float32)
    for k in tl.static_range(TOP_K):
        kept = tl.load(ids_ptr + row * TOP_K + k) >= 0
        part = tl.load(y_ptr + (row * TOP_K + k) * y_stride + column, mask=inside & kept, other=0.0).to(tl.float32)
        if WEIGHTED:
            part *= tl.load(weights_ptr + row * TOP_K + k)
        total += part
    tl.store(out_ptr + row * out_stride + column, to_dtype(total, out_ptr.dtype.element_ty), mask=inside)


def align_and_quantize(
    ids_RK: Tensor,
    x: Tensor,
    num_slots: int,
    tile_rows: int,
    *,
    power_of_two: bool,
    empty: Empty,
    fuse_shared: Tensor | None,
) -> tuple[Alignment, tuple[Tensor, Tensor]]:
    """The alignment of at most SMALL assignments, and rows (R, H) in FP8 with f32 scales of 128 columns."""
    aligned = room_of(ids_RK, num_slots, tile_rows, empty, fuse_shared)
    (rows, hidden), num = x.shape, aligned.ids_RK.numel()
    codes = empty((rows, hidden), dtype=torch.float8_e4m3fn, device=x.device)
    scales = empty((rows, triton.cdiv(hidden, BLOCK)), dtype=torch.float32, device=x.device)
    parts = triton.cdiv(triton.cdiv(hidden, BLOCK), GROUPS_A_PROGRAM)
    _prologue[(1 + rows * parts,)](
        *pointers(aligned, (ids_RK, fuse_shared)), num, num_slots, aligned.tiles.tiles_3X.stride(0),
        x, codes, scales, parts, hidden, x.stride(0), codes.stride(0), scales.stride(0), scales.stride(1),
        **sizes(num_slots), **choices(ids_RK, fuse_shared), TILE=tile_rows, GROUP=BLOCK, GROUPS=GROUPS_A_PROGRAM,
        POWER_OF_TWO=power_of_two, num_warps=8, **chained(),
    )  # fmt: skip
    return aligned, (codes, scales)


@triton.jit(do_not_specialize=COUNTS)
def _prologue(
    ids_ptr, weights_ptr, all_ids_ptr, all_weights_ptr, order_ptr, tiles_ptr, count_ptr, num, num_slots, stride,
    x_ptr, codes_ptr, scales_ptr, parts, hidden, x_stride, codes_stride, scales_m, scales_k,
    STEP: tl.constexpr, SLOTS: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
    TILE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    after_the_one_before()
    if tl.program_id(0) == 0:
        sort_small(
            ids_ptr, weights_ptr, all_ids_ptr, all_weights_ptr, order_ptr, tiles_ptr, count_ptr, num, num_slots,
            stride, STEP, TILE, SLOTS, TOP_K, SHARED,
        )  # fmt: skip
    else:
        part = tl.program_id(0) - 1
        quantize_part(
            (part // parts).to(tl.int64), part % parts, x_ptr, codes_ptr, scales_ptr, hidden, x_stride, codes_stride,
            scales_m, scales_k, GROUP, GROUPS, POWER_OF_TWO,
        )  # fmt: skip


Scaled = tuple[Tensor, Tensor | None]
"""Values and scales; scales are None for plain values."""


@dataclass(frozen=True)
class Experts:
    """The experts of one rank and their parameters."""

    w13: Scaled
    """(L, 2I, H) and, in FP8, f32 (L, 2I / 128, ceil(H / 128)); (L, I, H) without a gate. Other formats: as packed."""
    w2: Scaled
    """(L, H, I) and f32 (L, ceil(H / 128), I / 128)."""
    activation: str = "silu"
    gated: bool = True
    power_of_two: bool = False
    """Whether activation scales are powers of two (UE8M0)."""
    format: KernelFormat = KERNEL_FORMATS["plain"]
    """Of the weights."""
    w13_rows: Tensor | None = None
    """f32 (L, 2I): row scales, for formats with row scales; of mxfp4 (L, 2I / 128, ceil(H / 128)), of blocks."""
    w2_rows: Tensor | None = None
    b13: Tensor | None = None
    """f32 (L, 2I), or (L, I) without a gate: added to the first products."""
    b2: Tensor | None = None
    """f32 (L, H)."""
    alpha: float = 1.0
    limit: float | None = None
    """Parameters of the clamped activations."""
    fixed: tuple[float, float] | None = None
    """Calibrated scales of FP8 rows before both products; None: dynamic scales per row."""

    @property
    def inner(self) -> int:
        """Return I, the intermediate size of this shard."""
        return self.w13[0].shape[1] // (2 if self.gated else 1)

    @property
    def num_slots(self) -> int:
        return self.w2[0].shape[0]


def experts_rows(
    x: Scaled, ids_RK: Tensor, weights_RK: Tensor, experts: Experts, tile: Tile, empty: Empty,
    *, out: Tensor | None = None, fuse_shared: bool = False,
) -> Tensor:  # fmt: skip
    """The weighted sum of the experts of every row: (R, H) in bf16.

    x: (R, H) bf16, or FP8 with scales of 128 columns. ids_RK: int32, -1: dropped. out: the output; None: allocated.
    fuse_shared: whether the last slot is applied to every row with weight 1 (shared experts).
    """
    rows, hidden = x[0].shape
    if rows == 0:
        return torch.empty((0, hidden), dtype=torch.bfloat16, device=x[0].device) if out is None else out
    shared, num = weights_RK if fuse_shared else None, rows * (ids_RK.shape[1] + fuse_shared)
    if num <= SMALL and x[1] is None and experts.format.by_group:
        aligned, x = align_and_quantize(
            ids_RK, _contiguous(x[0]), experts.num_slots, tile.rows, power_of_two=experts.power_of_two, empty=empty,
            fuse_shared=shared,
        )  # fmt: skip
    else:
        aligned = align(ids_RK, experts.num_slots, tile.rows, empty=empty, fuse_shared=shared)
        x = _rounded(x, experts, empty)
    ids, weights = aligned.ids_RK, weights_RK if aligned.weights_RK is None else aligned.weights_RK
    one_term = ids.shape[1] == 1 and (out is None or (out.dtype is torch.bfloat16 and out.is_contiguous()))
    room = torch.empty if one_term else empty
    y = out if one_term and out is not None else room((num, hidden), dtype=torch.bfloat16, device=x[0].device)
    _both(
        x, experts, y, aligned.tiles, tile, empty, order=aligned.order_N, top_k=ids.shape[1], weights=weights,
        reduced=one_term,
    )  # fmt: skip
    return y if one_term else combine(y, ids, out=out)


def experts_in_waves(
    x: Scaled, ids_RK: Tensor, weights_RK: Tensor | None, experts: Experts, waves: Iterable[Tensor], tile: Tile,
    empty: Empty, *, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`experts_rows` where not all experts are in memory at a time; without weights the rows (R * K, H).

    ids_RK: -1: dropped, others may be any number. waves: the slots, int32 (R, K), of the assignments that are
    multiplied next, -1: of the others; what is in these slots must stay there until the next one is asked for.
    """
    num, top_k, made = ids_RK.numel(), ids_RK.shape[1], list[Tensor]()
    x = _rounded(x, experts, empty)
    y = (torch.empty if weights_RK is None else empty)((num, x[0].shape[1]), dtype=torch.bfloat16, device=ids_RK.device)
    for slots_RK in waves:
        given = iter(made.copy())  # every wave asks for the same tensors

        def again(shape: tuple[int, ...], given: Iterator[Tensor] = given, **kind: Any) -> Tensor:
            if (one := next(given, None)) is None:
                made.append(one := empty(shape, **kind))
            return one

        aligned = align(slots_RK, experts.num_slots, tile.rows, empty=again)
        _both(x, experts, y, aligned.tiles, tile, again, order=aligned.order_N, top_k=top_k, weights=weights_RK)
    return y if weights_RK is None else combine(y, ids_RK, out=out)


def experts_grouped(x: Scaled, counts_L: Tensor, experts: Experts, tile: Tile, empty: Empty) -> Tensor:
    """Experts on rows sorted by expert, without routing weights: (N, H) in bf16."""
    y = torch.empty(x[0].shape, dtype=torch.bfloat16, device=x[0].device)
    if y.shape[0]:
        tiles = tile_map(counts_L, y.shape[0], tile.rows, empty=empty)
        _both(_rounded(x, experts, empty), experts, y, tiles, tile, empty)
    return y


def experts_batched(x: Scaled, counts_L: Tensor, experts: Experts, tile: Tile, empty: Empty) -> Tensor:
    """Experts on one padded block each, without routing weights: (L, S, H) in bf16; padding is undefined."""
    slots, block, hidden = x[0].shape
    y = torch.empty((slots, block, hidden), dtype=torch.bfloat16, device=x[0].device)
    if y.numel():
        tiles = tile_map(counts_L, slots * block, tile.rows, block=block, empty=empty)
        flat = (x[0].reshape(-1, hidden), None if x[1] is None else x[1].reshape(slots * block, -1))
        _both(_rounded(flat, experts, empty), experts, y.view(-1, hidden), tiles, tile, empty)
    return y


def _both(
    x: Scaled, experts: Experts, y: Tensor, tiles: TileMap, tile: Tile, empty: Empty,
    *, order: Tensor | None = None, top_k: int = 1, weights: Tensor | None = None, reduced: bool = False,
) -> None:  # fmt: skip
    positions, format = y.shape[0], experts.format
    h: Scaled = (empty((positions, experts.inner), dtype=torch.bfloat16, device=y.device), None)
    if format.by_group:
        h = _empty_codes(positions, experts.inner, torch.float8_e4m3fn, BLOCK, empty, y.device)
    w13, w2 = _kernels(tile, experts, y.shape[1])
    arguments = _format_arguments(format, experts.w13_rows, experts.b13)
    if experts.activation in CLAMPED:
        arguments |= {"alpha": experts.alpha, "limit": experts.limit}
    w13(
        x, experts.w13, h, tiles, tile, order=order, top_k=top_k, activation=experts.activation,
        power_of_two=experts.power_of_two, **arguments,
    )  # fmt: skip
    if format.by_token:
        h = _by_token(h[0], experts, 1, empty)
    arguments = _format_arguments(format, experts.w2_rows, experts.b2)
    w2(h, experts.w2, y, tiles, tile, order=order, weights=weights, reduced=reduced, **arguments)


def _kernels(tile: Tile, experts: Experts, hidden: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return both GEMMs of the engine of a tile, or ours for those that it does not compute."""
    first, second = ENGINES[tile.engine].gemms(experts, hidden)
    return first or partial(grouped_w13, gated=experts.gated), second or grouped_w2


def _format_arguments(format: KernelFormat, row_scales: Tensor | None, bias: Tensor | None) -> dict[str, Any]:
    """Keyword arguments of a GEMM for a format and biases; formats that follow from the scales of rows need none."""
    arguments = {} if format.name in ("plain", "fp8") else {"format": format, "row_scales": row_scales}
    return arguments if bias is None else arguments | {"bias": bias}


def _rounded(x: Scaled, experts: Experts, empty: Empty) -> Scaled:
    """Rows as the first GEMM reads them: plain rows are quantised if the products are in FP8 or INT8."""
    values, scales = _contiguous(x[0]), x[1]
    if scales is not None or not (experts.format.by_group or experts.format.by_token):
        return values, scales
    if experts.format.by_token:
        return _by_token(values, experts, 0, empty)
    rows, hidden = values.shape
    codes, made = _empty_codes(rows, hidden, torch.float8_e4m3fn, BLOCK, empty, values.device)
    quantize_rows_into(values, codes, made, BLOCK, power_of_two=experts.power_of_two)
    return codes, made


def _contiguous(values: Tensor) -> Tensor:
    """Rows as the kernels read them: contiguous columns, every row at a multiple of 16 bytes; copied if they are not.

    Asynchronous copies and boxes move 16 bytes at a time. The first element of an allocation is aligned.
    """
    pitch, start = values.stride(0) * values.element_size(), values.storage_offset() * values.element_size()
    if values.stride(-1) == 1 and pitch % ROW_ALIGNMENT == 0 and start % ROW_ALIGNMENT == 0:
        return values
    return values.clone(memory_format=torch.contiguous_format)


def _by_token(values: Tensor, experts: Experts, product: int, empty: Empty) -> tuple[Tensor, Tensor]:
    """Codes with one scale per row, of the input of the first product (0) or the second (1)."""
    (rows, columns), int8 = values.shape, experts.format.name.startswith("int8")
    dtype = torch.int8 if int8 else torch.float8_e4m3fn
    codes, scales = _empty_codes(rows, columns, dtype, columns, empty, values.device)
    quantize_tokens(values, codes, scales, fixed=None if experts.fixed is None else experts.fixed[product])
    return codes, scales


def _empty_codes(
    rows: int, columns: int, dtype: torch.dtype, group: int, empty: Empty, device: torch.device
) -> tuple[Tensor, Tensor]:
    codes = empty((rows, columns), dtype=dtype, device=device)
    return codes, empty((rows, -(-columns // group)), dtype=torch.float32, device=device)
