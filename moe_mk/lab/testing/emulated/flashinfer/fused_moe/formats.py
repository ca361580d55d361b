"""Arguments of `cutlass_fused_moe` for each type of weights, checked as strictly as the library's binding checks it.

The type follows from the dtypes of weights and rows and from the flags, as in the library. Scales are taken by their
place in the list: a list in another order has other shapes or dtypes and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.kernels.reference import e2m1
from moe_mk.kernels.reference.quantize import block_amax, fp8_scales, power_of_two_scales, quantize_rows, spread

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
Matrix = Callable[[int], Tensor]


@dataclass(frozen=True)
class Products:
    """Everything in f32: the rows as they are multiplied, both weights by expert, hidden rows as they are rounded."""

    x: Tensor
    first: Matrix
    second: Matrix
    between: Callable[[Tensor], Tensor]


def products_of(
    x: Tensor, input_sf: Tensor | None, w13: Tensor, w2: Tensor, scales: list[Tensor], output_dtype: torch.dtype,
    *, halves: int, block_scale: bool, mxfp8: bool,
) -> Products:  # fmt: skip
    """Check a call and decode it."""
    assert w13.dtype is w2.dtype and w13.is_contiguous() and w2.is_contiguous() and w13.shape[0] == w2.shape[0]
    four = 16 if w13.dtype is torch.int64 else 1
    assert w13.shape[1] == halves * four * w2.shape[2], f"{tuple(w13.shape)} and {tuple(w2.shape)} do not meet"
    hidden = w13.shape[2] * four
    assert w2.shape[1] == hidden, "the second weight has a row for every column of the first"
    if four == 16:
        given = (x, input_sf, w13, w2, scales)
        return _mxfp4(*given) if mxfp8 else _nvfp4(*given)
    assert input_sf is None and not mxfp8 and x.shape[1] == hidden, "input"
    if w13.dtype is not E4M3:
        assert x.dtype is w13.dtype is output_dtype and not scales and not block_scale, "plain weights have no scales"
        return Products(x.float(), lambda e: w13[e].float(), lambda e: w2[e].float(), lambda h: h.to(x.dtype).float())
    return _fp8_block(x, w13, w2, scales) if block_scale else _fp8_tensor(x, w13, w2, scales)


def _fp8_block(x: Tensor, w13: Tensor, w2: Tensor, scales: list[Tensor]) -> Products:
    assert x.dtype is torch.bfloat16, "rows come in bf16, the library rounds them"
    first, second = scales
    for w, own in ((w13, first), (w2, second)):
        shape = (w.shape[0], -(-w.shape[1] // 128), -(-w.shape[2] // 128))
        assert own.dtype is torch.float32 and own.shape == shape and own.is_contiguous(), f"block scales {own.shape}"

    def matrix(w: Tensor, own: Tensor) -> Matrix:
        return lambda e: w[e].float() * spread(own[e], w.shape[1], w.shape[2], (128, 128))

    return Products(in_fp8(x.float()), matrix(w13, first), matrix(w2, second), in_fp8)


def _fp8_tensor(x: Tensor, w13: Tensor, w2: Tensor, scales: list[Tensor]) -> Products:
    assert x.dtype is E4M3, "rows come as codes"
    first, hidden, second, given = scales
    _check_scales(each=((first, w13), (second, w2)), one=(hidden, given))
    return Products(
        x.float(), lambda e: w13[e].float() * first[e], lambda e: w2[e].float() * second[e],
        lambda h: (h * hidden).clamp(-448.0, 448.0).to(E4M3).float(),
    )  # fmt: skip


def _nvfp4(x: Tensor, input_sf: Tensor | None, w13: Tensor, w2: Tensor, scales: list[Tensor]) -> Products:
    given, first_tiles, first, hidden, second_tiles, second = scales
    _check_scales(each=((first, w13), (second, w2)), one=(given, hidden))
    if x.dtype is torch.uint8:
        assert input_sf is not None and x.shape[1] * 2 == w2.shape[1], "four-bit rows bring their scales"
        rows = four_bits(x, untiled(input_sf, x.shape[0], x.shape[1] // 8, E4M3), 16)
    else:
        assert x.dtype is torch.bfloat16 and input_sf is None and x.shape[1] == w2.shape[1], "input"
        rows = in_nvfp4(x.float(), given)

    def matrix(w: Tensor, tiles: Tensor, alpha: Tensor) -> Matrix:
        _check_tiles(w, tiles, 16)
        # alpha holds the global scales of both sides, so rows are left under the scales of their groups alone.
        return lambda e: (
            alpha[e] * four_bits(w[e].view(torch.uint8), untiled(tiles[e], w.shape[1], w.shape[2], E4M3), 16)
        )

    return Products(
        rows, matrix(w13, first_tiles, first), matrix(w2, second_tiles, second), lambda h: in_nvfp4(h, hidden)
    )


def _mxfp4(x: Tensor, input_sf: Tensor | None, w13: Tensor, w2: Tensor, scales: list[Tensor]) -> Products:
    assert x.dtype is E4M3 and input_sf is not None and x.shape[1] == w2.shape[1], "MXFP8 rows bring their scales"
    first, one, second, two = scales
    _check_scales(each=((one, w13), (two, w2)))
    tokens, width = x.shape
    rows = x.float() * over(untiled(input_sf, tokens, width // 32, E8M0), x, 32)

    def matrix(w: Tensor, tiles: Tensor) -> Matrix:
        _check_tiles(w, tiles, 32)
        return lambda e: four_bits(w[e].view(torch.uint8), untiled(tiles[e], w.shape[1], w.shape[2] // 2, E8M0), 32)

    return Products(rows, matrix(w13, first), matrix(w2, second), in_mxfp8)


def in_fp8(x: Tensor) -> Tensor:
    """Rounded to FP8 under f32 scales of 128 columns, and decoded."""
    values, scales = quantize_rows(x, 128)
    return values.float() * over(scales, x, 128)


def in_mxfp8(x: Tensor) -> Tensor:
    """Rounded to MXFP8 and decoded."""
    scales = over(power_of_two_scales(block_amax(x, (1, 32)), 448.0), x, 32)
    return (x / scales).clamp(-448.0, 448.0).to(E4M3).float() * scales


def in_nvfp4(x: Tensor, inverse: Tensor) -> Tensor:
    """Rounded under a global scale of 1 / inverse, which is then left out."""
    above = 1.0 / float(inverse)
    scales = over(fp8_scales(block_amax(x, (1, 16)), e2m1.E2M1_MAX, above), x, 16)
    return e2m1.decode(e2m1.encode(x / (scales * above))) * scales


def over(scales: Tensor, like: Tensor, group: int) -> Tensor:
    """The scale of every element of rows, f32."""
    return spread(scales, like.shape[0], like.shape[1], (1, group))


def four_bits(packed: Tensor, scales: Tensor, group: int) -> Tensor:
    """Two values a byte, times the scales of their groups."""
    values = e2m1.decode(e2m1.unpack(packed))
    return values * over(scales, values, group)


def _check_tiles(w: Tensor, tiles: Tensor, group: int) -> None:
    tall, wide = -(-w.shape[1] // 128) * 128, -(-w.shape[2] * 16 // group // 4)
    assert tiles.dtype is torch.int32 and tiles.shape == (w.shape[0], tall, wide), f"tiles of scales {tiles.shape}"
    assert tiles.is_contiguous()


def untiled(tiles: Tensor, rows: int, groups: int, dtype: torch.dtype) -> Tensor:
    """Scales (rows, groups) out of tiles of 128 x 4 bytes: in a tile, row r is at 16 (r mod 32) + 4 (r div 32)."""
    flat = tiles.contiguous().view(torch.uint8).reshape(-1)
    tall, wide = -(-rows // 128), -(-groups // 4)
    assert len(flat) == tall * wide * 512, (
        f"scales of rows are {len(flat)} bytes, tiles of 128 x 4 make {tall * wide * 512}"
    )
    row = torch.arange(rows, dtype=torch.int64, device=flat.device)[:, None]
    column = torch.arange(groups, dtype=torch.int64, device=flat.device)[None]
    inside = 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
    return flat[(row // 128 * wide + column // 4) * 512 + inside].view(dtype)


def _check_scales(each: tuple[tuple[Tensor, Tensor], ...], one: tuple[Tensor, ...] = ()) -> None:
    for scales, w in each:
        good = scales.dtype is torch.float32 and scales.shape == w.shape[:1]
        assert good, f"one scale an expert, got {tuple(scales.shape)}"
    for scale in one:
        assert scale.dtype is torch.float32 and scale.dim() == 0, f"one scale for all, got {tuple(scale.shape)}"
