"""The blocks of ggml that GGUF files store: split into codes, scales and minima, and packed.

All of them read (..., blocks, bytes) uint8 and give integer codes int8 (..., k), f32 scales (..., k / group) and, for
types with minima, f32 minima of the same shape: value = scale * code - minimum, two f32 operations, each rounded.
Codes without minima are centred on 0. d and dmin are f16; scales are d times an integer where groups have their own.

    type    values  bytes  group  block
    q4_0        32     18     32  d, 16 B: the low nibble of byte j is value j, the high one value j + 16; code - 8
    q4_1        32     20     32  d, m, nibbles as q4_0; the minimum is -m
    q5_0        32     22     32  d, 4 B: bit j is the fifth bit of value j, nibbles as q4_0; code - 16
    q5_1        32     24     32  d, m, fifth bits and nibbles as q5_0; the minimum is -m
    q8_0        32     34     32  d, 32 signed bytes
    iq4_nl      32     18     32  as q4_0, and a code is the place of a value in `NON_LINEAR`
    q2_k       256     84     16  16 B: a scale in the low nibble, a minimum in the high one, 64 B of bit pairs, d, dmin
    q3_k       256    110     16  32 B of upper bits, 64 B of lower bit pairs, 12 B of 6-bit scales - 32, d; code - 4
    q4_k       256    144     32  d, dmin, 12 B with eight 6-bit scales and minima, 128 B: 32 low, then 32 high nibbles
    q5_k       256    176     32  as q4_k, with 32 B of fifth bits before the nibbles: bit g is that of group g
    q6_k       256    210     16  128 B of low nibbles, 64 B of upper bit pairs, 16 signed scales, d; code - 32
    iq4_xs     256    136     32  d, 2 B and 4 B: upper pairs and low nibbles of 6-bit scales - 32; codes as iq4_nl

Source: ggml's `ggml-common.h` and `ggml-quants.c` (`dequantize_row_*`), and the `gguf` package 0.19 (`quants.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Split = tuple[Tensor, Tensor, Tensor | None]
"""Codes, scales, and minima or None."""
NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of four-bit codes of iq4_nl and iq4_xs."""


@dataclass(frozen=True)
class Bits:
    """Numbers of `width` bits in `num_bytes` bytes from `start`: of every `by` bytes all lowest bits, then the next."""

    start: int
    num_bytes: int
    width: int
    by: int = 1

    def _shifts(self, device: torch.device) -> Tensor:
        return torch.arange(0, 8, self.width, dtype=torch.uint8, device=device).unsqueeze(1)

    def get(self, blocks: Tensor) -> Tensor:
        """The numbers, uint8 (..., blocks, n)."""
        held = divided(blocks[..., self.start : self.start + self.num_bytes], -1, 1, self.by)
        numbers: Tensor = (held >> self._shifts(blocks.device)) & (2**self.width - 1)
        return numbers.flatten(-3)

    def put(self, blocks: Tensor, numbers: Tensor) -> None:
        """Write the numbers, of which upper bits are ignored, into bytes that are zero."""
        low = divided(numbers & (2**self.width - 1), -1, 8 // self.width, self.by)
        held = (low << self._shifts(blocks.device)).sum(dim=-2, dtype=torch.uint8)
        blocks[..., self.start : self.start + self.num_bytes] = held.flatten(-2)


class SixBits(Bits):
    """The 12 bytes with scales and minima of eight groups of q4_k and q5_k.

    Bytes 0 to 3 hold scales 0 to 3, bytes 4 to 7 minima 0 to 3, in six bits. Bytes 8 to 11 hold the low nibbles of
    scales and minima 4 to 7; their upper two bits are the upper bits of bytes 0 to 3 and 4 to 7.
    """

    def get(self, blocks: Tensor) -> Tensor:
        """Eight scales, then eight minima."""
        first, second, low = divided(blocks[..., self.start : self.start + self.num_bytes], 3, 4).unbind(-2)
        scales, minima = (low & 0xF) | ((first >> 6) << 4), (low >> 4) | ((second >> 6) << 4)
        return torch.cat((first & 63, scales, second & 63, minima), dim=-1)

    def put(self, blocks: Tensor, numbers: Tensor) -> None:
        s, more, m, most = divided(numbers, 4, 4).unbind(-2)
        packed = (s | ((more >> 4) << 6), m | ((most >> 4) << 6), (more & 0xF) | ((most & 0xF) << 4))
        blocks[..., self.start : self.start + self.num_bytes] = torch.cat(packed, dim=-1)


@dataclass(frozen=True)
class BlockType:
    """A block format of GGUF."""

    number: int
    """Of ggml's enumeration, as in files."""
    values: int
    num_bytes: int
    group: int
    """Values under one scale."""
    halves: tuple[int, ...]
    """Offsets of the f16 factors in a block: d, and dmin or m."""
    codes: tuple[Bits, ...]
    """The fields of a code, the lowest bits first."""
    zero: int = 0
    """The code of 0, of types without minima; eight bits are signed."""
    scales: tuple[Bits, ...] = ()
    """The fields of the integers of all groups: scales, then minima if there are any."""
    scale_zero: int = 0
    is_linear: bool = True
    """Whether a code is a number, else the place of one in `NON_LINEAR`."""
    held: str = ""
    """The type in which native kernels hold the values, exactly but for bf16, to which they round; empty: as stored."""

    @property
    def bits(self) -> int:
        return sum(each.width for each in self.codes)

    @property
    def has_minima(self) -> bool:
        return len(self.halves) == 2

    def factors(self, blocks: Tensor) -> list[Tensor]:
        """The f16 factors, copied, each (..., blocks, 1)."""
        return [blocks[..., at : at + 2].contiguous().view(torch.float16) for at in self.halves]

    def split(self, blocks: Tensor) -> Split:
        """See the head of the file."""
        table, codes = torch.tensor(NON_LINEAR, dtype=torch.int8, device=blocks.device), _joined(self.codes, blocks)
        codes = codes.view(torch.int8) - self.zero if self.is_linear else table[codes.long()]
        scales, *minima = (half.to(torch.float32) for half in self.factors(blocks))
        if self.scales:
            whole = _joined(self.scales, blocks).view(torch.int8) - self.scale_zero
            both = whole.to(torch.float32).chunk(len(self.halves), dim=-1)
            scales, *minima = (d * each for d, each in zip((scales, *minima), both, strict=True))
        elif minima:
            minima = [-minima[0]]
        return codes.flatten(-2), scales.flatten(-2), minima[0].flatten(-2) if minima else None

    def pack(self, x: Tensor) -> Tensor:
        """f32 (..., blocks, values) to the nearest codes under scales computed from the extremes of each group.

        Without minima the value of largest magnitude of a group has the code farthest from 0: its sign is that of
        -scale; signed bytes have the scale amax / 127.
        """
        groups, (low, high) = divided(x, -1, self.group), _range(self.codes, self.zero)
        if self.has_minima:
            least = (-groups.amin(dim=-1)).clamp_min(0.0 if self.scales else -math.inf)
            wanted = [((groups.amax(dim=-1) + least) / high).clamp_min(0.0), least]
        elif low == -high:
            wanted = [groups.abs().amax(dim=-1) / high]
        else:
            farthest = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True)).squeeze(-1)
            wanted = [(farthest / (low if self.is_linear else NON_LINEAR[0])).to(torch.float16).to(torch.float32)]
        blocks = torch.zeros((*x.shape[:-1], self.num_bytes), dtype=torch.uint8, device=x.device)
        scales, *minima = self._put_scales(blocks, *wanted)
        spaced = (groups + minima[0].unsqueeze(-1) if minima else groups) * _inverse(scales).unsqueeze(-1)
        if self.is_linear:
            codes = (spaced.round().clamp(low, high) + self.zero).to(torch.int8).view(torch.uint8)
        else:
            table = torch.tensor(NON_LINEAR, dtype=torch.float32, device=x.device)
            codes = torch.bucketize(spaced.contiguous(), (table[1:] + table[:-1]) / 2).to(torch.uint8)
        _put(self.codes, blocks, codes.flatten(-2))
        return blocks

    def _put_scales(self, blocks: Tensor, *wanted: Tensor) -> list[Tensor]:
        """Write the scales, and minima if there are any, of all groups of each block; returns them as they are read."""
        if not self.scales:
            for at, each, sign in zip(self.halves, wanted, (1, -1), strict=False):
                blocks[..., at : at + 2] = (sign * each).to(torch.float16).contiguous().view(torch.uint8)
            return [each.to(torch.float16).to(torch.float32) for each in wanted]
        low, high = _range(self.scales, self.scale_zero)
        whole, read = [], []
        for at, each in zip(self.halves, wanted, strict=True):
            half = (each.abs().amax(dim=-1, keepdim=True) / high).to(torch.float16)
            blocks[..., at : at + 2] = half.view(torch.uint8)
            d = half.to(torch.float32)
            whole.append((each * _inverse(d)).round().clamp(low, high))
            read.append(d * whole[-1])
        _put(self.scales, blocks, (torch.cat(whole, dim=-1) + self.scale_zero).to(torch.int8).view(torch.uint8))
        return read


def divided(x: Tensor, *sizes: int) -> Tensor:
    """The last dimension in several of these sizes; the first may be -1."""
    if sizes[0] == -1:
        sizes = (x.shape[-1] // math.prod(sizes[1:]), *sizes[1:])
    return x.reshape(*x.shape[:-1], *sizes)


def _joined(fields: tuple[Bits, ...], blocks: Tensor) -> Tensor:
    """Numbers of which each field holds some bits, the lowest first."""
    first, *others = fields
    numbers, at = first.get(blocks), first.width
    for each in others:
        numbers, at = numbers | (each.get(blocks) << at), at + each.width
    return numbers


def _put(fields: tuple[Bits, ...], blocks: Tensor, numbers: Tensor) -> None:
    """The inverse of `_joined`."""
    for each in fields:
        each.put(blocks, numbers)
        numbers = numbers >> each.width if each.width < 8 else numbers


def _range(fields: tuple[Bits, ...], zero: int) -> tuple[float, float]:
    """The least and the largest number of some fields, less the zero; eight bits are signed, and symmetric."""
    bits = sum(each.width for each in fields)
    return (-127.0, 127.0) if bits == 8 else (-float(zero), 2.0**bits - 1 - zero)


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d == 0, torch.zeros_like(d), 1.0 / d)


def of_q3_k(blocks: Tensor) -> Tensor:
    """Blocks of q3_k as such of q6_k, exactly: their codes and scales are among those of q6_k."""
    three, six = BLOCK_TYPES["q3_k"], BLOCK_TYPES["q6_k"]
    found = torch.zeros((*blocks.shape[:-1], six.num_bytes), dtype=torch.uint8, device=blocks.device)
    _put(six.codes, found, _joined(three.codes, blocks) + (six.zero - three.zero))
    _put(six.scales, found, _joined(three.scales, blocks) - three.scale_zero)
    found[..., 208:] = blocks[..., 108:]
    return found


BLOCK_TYPES: Mapping[str, BlockType] = {
    "q4_0": BlockType(2, 32, 18, 32, (0,), (Bits(2, 16, 4, 16),), 8),
    "q4_1": BlockType(3, 32, 20, 32, (0, 2), (Bits(4, 16, 4, 16),)),
    "q5_0": BlockType(6, 32, 22, 32, (0,), (Bits(6, 16, 4, 16), Bits(2, 4, 1)), 16, held="int8_g32"),
    "q5_1": BlockType(7, 32, 24, 32, (0, 2), (Bits(8, 16, 4, 16), Bits(4, 4, 1))),
    "q8_0": BlockType(8, 32, 34, 32, (0,), (Bits(2, 32, 8),)),
    "iq4_nl": BlockType(20, 32, 18, 32, (0,), (Bits(2, 16, 4, 16),), is_linear=False, held="int8_g32"),
    "q2_k": BlockType(10, 256, 84, 16, (80, 82), (Bits(16, 64, 2, 32),), 0, (Bits(0, 16, 4, 16),), held="bf16"),
    "q3_k": BlockType(11, 256, 110, 16, (108,), (Bits(32, 64, 2, 32), Bits(0, 32, 1, 32)), 4,
                      (Bits(96, 8, 4, 8), Bits(104, 4, 2, 4)), 32, held="q6_k"),
    "q4_k": BlockType(12, 256, 144, 32, (0, 2), (Bits(16, 128, 4, 32),), 0, (SixBits(4, 12, 6),)),
    "q5_k": BlockType(13, 256, 176, 32, (0, 2), (Bits(48, 128, 4, 32), Bits(16, 32, 1, 32)), 0, (SixBits(4, 12, 6),)),
    "q6_k": BlockType(14, 256, 210, 16, (208,), (Bits(0, 128, 4, 64), Bits(128, 64, 2, 32)), 32, (Bits(192, 16, 8),)),
    "iq4_xs": BlockType(23, 256, 136, 32, (0,), (Bits(8, 128, 4, 16),), 0, (Bits(4, 4, 4), Bits(2, 2, 2)), 32,
                        is_linear=False, held="int8_g32"),
}  # fmt: skip

MXFP4_BYTES, MXFP4_VALUES, MXFP4_CODES = 17, 32, Bits(1, 16, 4, 16)
"""MXFP4 in GGUF: an E8M0 scale, then 16 bytes whose low nibbles are values 0 to 15 and high nibbles values 16 to 31."""
