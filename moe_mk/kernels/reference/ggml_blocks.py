"""The blocks of ggml that GGUF files store: split into codes, scales and minima, and packed.

All of them read (..., blocks, bytes) uint8 and give integer codes int8 (..., k), f32 scales (..., k / group) and, for
types with minima, f32 minima of the same shape: value = scale * code - minimum, two f32 operations, each rounded.
Codes without minima are centred on 0. d and dmin are f16.

    type   values  bytes  group  block
    q4_0       32     18     32  d, 16 B: the low nibble of byte j is value j, the high one value j + 16; code - 8
    q8_0       32     34     32  d, 32 signed bytes
    q4_k      256    144     32  d, dmin, 12 B with eight 6-bit scales and minima, 128 B: 32 low, then 32 high nibbles
    q5_k      256    176     32  as q4_k, with 32 B of fifth bits before the nibbles: bit g is that of group g
    q6_k      256    210     16  128 B of low nibbles, 64 B of upper bit pairs, 16 signed scales, d; code - 32

Source: ggml's `ggml-common.h` and `ggml-quants.c` (`dequantize_row_*`), and the `gguf` package 0.19 (`quants.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.kernels.reference import e2m1

Split = tuple[Tensor, Tensor, Tensor | None]
"""Codes, scales, and minima or None."""
SUB_SCALES = 12
"""Bytes of the packed 6-bit scales and minima of q4_k and q5_k."""


@dataclass(frozen=True)
class BlockType:
    """One block format."""

    number: int
    """Of ggml's enumeration, as in files."""
    values: int
    num_bytes: int
    group: int
    """Values under one scale."""
    halves: tuple[int, ...]
    """Offsets of the f16 factors in a block."""
    split: Callable[[Tensor], Split]
    pack: Callable[[Tensor], Tensor]
    """f32 (..., blocks, values) to the nearest codes under scales computed from the extremes of each group."""


def divided(x: Tensor, *sizes: int) -> Tensor:
    """The last dimension in several of these sizes; the first may be -1."""
    if sizes[0] == -1:
        sizes = (x.shape[-1] // math.prod(sizes[1:]), *sizes[1:])
    return x.reshape(*x.shape[:-1], *sizes)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The f16 at an offset of each block as f32 (..., blocks, 1)."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).to(torch.float32)


def _half_bytes(x: Tensor) -> Tensor:
    """f32 (..., blocks, 1) as the bytes of an f16."""
    return x.to(torch.float16).contiguous().view(torch.uint8)


def _flat(groups: Tensor) -> Tensor:
    """(..., blocks, X...) flattened after the leading dimensions of the blocks."""
    return groups.flatten(-2)


def split_q4_0(blocks: Tensor) -> Split:
    """See the table above."""
    codes = torch.cat((blocks[..., 2:] & 0xF, blocks[..., 2:] >> 4), dim=-1)
    return _flat(codes.view(torch.int8) - 8), _flat(_half(blocks, 0)), None


def pack_q4_0(x: Tensor) -> Tensor:
    """The value of largest magnitude becomes code -8: its sign is that of -d."""
    d, inverse = _signed_scale(x, 8.0)
    codes = ((x * inverse).round().clamp(-8.0, 7.0) + 8.0).to(torch.uint8)
    return torch.cat((_half_bytes(d), codes[..., :16] | (codes[..., 16:] << 4)), dim=-1)


def split_q8_0(blocks: Tensor) -> Split:
    """See the table above."""
    return _flat(blocks[..., 2:].contiguous().view(torch.int8)), _flat(_half(blocks, 0)), None


def pack_q8_0(x: Tensor) -> Tensor:
    """d is amax / 127."""
    d = (x.abs().amax(dim=-1, keepdim=True) / 127.0).to(torch.float16).to(torch.float32)
    codes = (x * _inverse(d)).round().clamp(-127.0, 127.0).to(torch.int8)
    return torch.cat((_half_bytes(d), codes.view(torch.uint8)), dim=-1)


def split_q4_k(blocks: Tensor) -> Split:
    """See the table above."""
    scales, minima = _scales_and_minima(blocks)
    return _flat(_nibbles(blocks[..., 16:]).flatten(-2).view(torch.int8)), scales, minima


def pack_q4_k(x: Tensor) -> Tensor:
    """Scales from the range of each group, minima from its least value if that is negative."""
    codes, header = _pack_k(x, 15.0)
    return torch.cat((header, _from_nibbles(codes)), dim=-1)


def split_q5_k(blocks: Tensor) -> Split:
    """See the table above."""
    scales, minima = _scales_and_minima(blocks)
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    fifth = (blocks[..., 16:48].unsqueeze(-2) >> bits[:, None]) & 1
    codes = _nibbles(blocks[..., 48:]) | (fifth << 4)
    return _flat(codes.flatten(-2).view(torch.int8)), scales, minima


def pack_q5_k(x: Tensor) -> Tensor:
    """As q4_k."""
    codes, header = _pack_k(x, 31.0)
    bits = torch.arange(8, dtype=torch.uint8, device=x.device)
    fifth = ((codes >> 4) << bits[:, None]).sum(dim=-2, dtype=torch.uint8)
    return torch.cat((header, fifth, _from_nibbles(codes & 0xF)), dim=-1)


def split_q6_k(blocks: Tensor) -> Split:
    """See the table above."""
    low = divided(blocks[..., :128], 2, 1, 2, 32)
    shifts = torch.tensor([0, 4], dtype=torch.uint8, device=blocks.device)
    low = (low >> shifts[:, None, None]) & 0xF  # half, nibble, part, value
    pairs = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    high = (divided(blocks[..., 128:192], 2, 1, 32) >> pairs[:, None]) & 3
    codes = (low.flatten(-3, -2) | (high << 4)).flatten(-3).view(torch.int8) - 32
    signed = blocks[..., 192:208].contiguous().view(torch.int8).to(torch.float32)
    return _flat(codes), _flat(_half(blocks, 208) * signed), None


def pack_q6_k(x: Tensor) -> Tensor:
    """The value of largest magnitude of a group becomes code -32."""
    groups = divided(x, 16, 16)
    exact, _ = _signed_scale(groups, 32.0)
    exact = exact.squeeze(-1)
    d = (exact.abs().amax(dim=-1, keepdim=True) / 127.0).to(torch.float16).to(torch.float32)
    signed = (exact * _inverse(d)).round().clamp(-127.0, 127.0)
    codes = (groups * _inverse(d * signed).unsqueeze(-1)).round().clamp(-32.0, 31.0) + 32.0
    codes = divided(codes.to(torch.uint8).flatten(-2), 2, 2, 2, 32)  # half, nibble, part, value
    low = codes[..., 0, :, :] & 0xF | ((codes[..., 1, :, :] & 0xF) << 4)
    pairs = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=x.device)
    high = ((codes.flatten(-3, -2) >> 4) << pairs[:, None]).sum(dim=-2, dtype=torch.uint8)
    parts = (low.flatten(-3), high.flatten(-2), signed.to(torch.int8).view(torch.uint8), _half_bytes(d))
    return torch.cat(parts, dim=-1)


def _nibbles(bytes_128: Tensor) -> Tensor:
    """(..., 128) bytes to (..., 8, 32) codes: the low nibbles of 32 bytes, then their high ones."""
    chunks = divided(bytes_128, 4, 1, 32)
    shifts = torch.tensor([0, 4], dtype=torch.uint8, device=bytes_128.device)
    return ((chunks >> shifts[:, None]) & 0xF).flatten(-3, -2)


def _from_nibbles(codes: Tensor) -> Tensor:
    """(..., 8, 32) codes to (..., 128) bytes."""
    pairs = codes.reshape(*codes.shape[:-2], 4, 2, 32)
    return (pairs[..., 0, :] | (pairs[..., 1, :] << 4)).flatten(-2)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and minima of eight groups of each block, multiplied by d and dmin: f32 (..., 8 blocks).

    Bytes 0 to 3 hold scales 0 to 3, bytes 4 to 7 minima 0 to 3, in six bits. Bytes 8 to 11 hold the low nibbles of
    scales and minima 4 to 7; their upper two bits are the upper bits of bytes 0 to 3 and 4 to 7.
    """
    packed = blocks[..., 4 : 4 + SUB_SCALES]
    first, second, low = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, (low & 0xF) | ((first >> 6) << 4)), dim=-1)
    minima = torch.cat((second & 63, (low >> 4) | ((second >> 6) << 4)), dim=-1)
    return _flat(_half(blocks, 0) * scales.to(torch.float32)), _flat(_half(blocks, 2) * minima.to(torch.float32))


def _pack_k(x: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """Codes (..., 8, 32) of a block of 256 values, and its first 16 bytes."""
    groups = divided(x, 8, 32)
    least = (-groups.amin(dim=-1)).clamp_min(0.0)
    spacing = ((groups.amax(dim=-1) + least) / top).clamp_min(0.0)
    d, scales = _six_bits(spacing)
    dmin, minima = _six_bits(least)
    inverse, offset = _inverse(d * scales).unsqueeze(-1), (dmin * minima).unsqueeze(-1)
    codes = ((groups + offset) * inverse).round().clamp(0.0, top).to(torch.uint8)
    s, m = scales.to(torch.uint8), minima.to(torch.uint8)
    first, second = s[..., :4] | ((s[..., 4:] >> 4) << 6), m[..., :4] | ((m[..., 4:] >> 4) << 6)
    packed = torch.cat((first, second, (s[..., 4:] & 0xF) | ((m[..., 4:] & 0xF) << 4)), dim=-1)
    return codes, torch.cat((_half_bytes(d), _half_bytes(dmin), packed), dim=-1)


def _six_bits(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Eight non-negative numbers as integers up to 63 times one f16: that factor in f32, and the integers."""
    d = (wanted.amax(dim=-1, keepdim=True) / 63.0).to(torch.float16).to(torch.float32)
    return d, (wanted * _inverse(d)).round().clamp(0.0, 63.0)


def _signed_scale(x: Tensor, steps: float) -> tuple[Tensor, Tensor]:
    """d in f16 as f32, with which the value of largest magnitude of each group has the code -steps, and 1 / d."""
    at = x.abs().argmax(dim=-1, keepdim=True)
    d = (x.gather(-1, at) / -steps).to(torch.float16).to(torch.float32)
    return d, _inverse(d)


def _inverse(d: Tensor) -> Tensor:
    """1 / d, and 0 where d is 0."""
    return torch.where(d == 0, torch.zeros_like(d), 1.0 / d)


BLOCK_TYPES: Mapping[str, BlockType] = {
    "q4_0": BlockType(2, 32, 18, 32, (0,), split_q4_0, pack_q4_0),
    "q8_0": BlockType(8, 32, 34, 32, (0,), split_q8_0, pack_q8_0),
    "q4_k": BlockType(12, 256, 144, 32, (0, 2), split_q4_k, pack_q4_k),
    "q5_k": BlockType(13, 256, 176, 32, (0, 2), split_q5_k, pack_q5_k),
    "q6_k": BlockType(14, 256, 210, 16, (208,), split_q6_k, pack_q6_k),
}

MXFP4_NUMBER, MXFP4_BYTES, MXFP4_VALUES = 39, 17, 32
"""MXFP4 in GGUF: an E8M0 scale, then 16 bytes whose low nibbles are values 0 to 15 and high nibbles values 16 to 31."""


def split_mxfp4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(..., bytes of a row) to packed e2m1 codes (..., k / 2), the even column in the low nibble, and E8M0 scales.

    Exact: both hold the same codes and the same scale, only the order of the nibbles differs.
    """
    blocks = divided(rows, -1, MXFP4_BYTES)
    codes = torch.cat((blocks[..., 1:] & 0xF, blocks[..., 1:] >> 4), dim=-1)
    return e2m1.pack(codes.flatten(-2)), blocks[..., 0].contiguous().view(torch.float8_e8m0fnu)


def join_mxfp4(values: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `split_mxfp4`."""
    codes = divided(e2m1.unpack(values), -1, MXFP4_VALUES)
    half = MXFP4_VALUES // 2
    nibbles = codes[..., :half] | (codes[..., half:] << 4)
    return torch.cat((scales.contiguous().view(torch.uint8).unsqueeze(-1), nibbles), dim=-1).flatten(-2)
