"""Matrices in every stored format, made from codes and scales, with their values in f64.

Nothing here is of the library: codes are drawn, values follow from the definition of each format, and the tensors are
those of a checkpoint. A reader, a packer or a kernel that is wrong about a format gives other values.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BLOCK = {"fp8_block": 32, "fp8_block_128": 128, "fp8_ue8m0": 32, "int8_block": 32, "int8_block_128": 128}
"""The sides of a block, by the name that a drawn configuration has for it."""
WHOLE = 10**9


@dataclass(frozen=True)
class Stored:
    """A matrix as a checkpoint has it, and what it means."""

    tensors: dict[str, Tensor]
    """By the last word of their names; "" for the values."""
    values: Tensor
    """(rows, columns) in f64."""
    held: int = 0
    """Bytes of codes, scales and zero points in memory, where files pack them otherwise; 0: those of the tensors."""

    @property
    def num_bytes(self) -> int:
        return self.held or sum(t.numel() * t.element_size() for t in self.tensors.values())


def spread(scales: Tensor, rows: int, columns: int, block: tuple[int, int]) -> Tensor:
    """Scales of blocks, the last of which may be partial, repeated for each element."""
    down, along = min(block[0], rows), min(block[1], columns)
    return scales.double().repeat_interleave(down, 0)[:rows].repeat_interleave(along, 1)[:, :columns]


def last(size: int, block: int) -> slice:
    """The last block of an axis, which may be partial."""
    block = min(block, size)
    return slice(size - (size % block or block), size)


@dataclass
class Draw:
    """Random codes and scales from one generator. The settings are what writers of checkpoints may choose."""

    seed: int | torch.Generator
    zero_block: bool = False
    """Whether the last block of each quantised matrix is zero, under a scale of 0."""
    scale_dtype: torch.dtype = torch.float32
    """Of FP8 and INT8."""
    less: int = 1
    """What GPTQ subtracts from zero points in a file: 0 in its second format."""

    def __post_init__(self) -> None:
        given = isinstance(self.seed, torch.Generator)
        self.of = self.seed if given else torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.of, dtype=torch.float64)

    def near(self, size: float, *shape: int) -> Tensor:
        """Positive numbers from half to one and a half of a size."""
        return size * (0.5 + torch.rand(shape, generator=self.of, dtype=torch.float64))

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers, both ends included."""
        return torch.randint(low, high + 1, shape, generator=self.of)

    def e4m3(self, *shape: int) -> Tensor:
        """Codes of all sizes, with the largest, subnormal ones and negative zero among them."""
        codes = (self.normal(*shape) * 90).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        some = torch.rand(shape, generator=self.of) < 0.05
        special = torch.tensor([0x80, 0x01, 0x87, 0x7E, 0xFE, 0x08], dtype=torch.uint8)
        return torch.where(some, special[self.whole(0, 5, *shape)], codes).view(torch.float8_e4m3fn)

    def matrix(self, kind: str, rows: int, columns: int, packing: str = "", order: bool = False) -> Stored:
        """A matrix of a kind whose products with normal numbers have a size of about one."""
        size = columns**-0.5
        if kind in PLAIN:
            values = (self.normal(rows, columns) * size * 1.3).to(PLAIN[kind])
            return Stored({"": values}, values.double())
        if packing == "gguf":
            return self.gguf(kind, rows, columns, size)
        if kind.startswith(("int4_", "int8_g", "int8_row")):
            return self.integers(kind, rows, columns, size, packing, order)
        return self.scaled(kind, rows, columns, size)

    def scaled(self, kind: str, rows: int, columns: int, size: float) -> Stored:
        """FP8, INT8, and the formats with shared exponents."""
        side = BLOCK.get(kind, 0)
        block = {"mxfp8": (1, 32), "mxfp4": (1, 32), "nvfp4": (1, 16), "fp8_tensor": (WHOLE, WHOLE)}.get(
            kind, (side, side) if side else (1, WHOLE)
        )
        tall, wide = -(-rows // min(block[0], rows)), -(-columns // min(block[1], columns))
        extra: dict[str, Tensor] = {}
        if kind in ("mxfp4", "nvfp4"):
            nibbles = self.whole(0, 15, rows, columns)
            values, numbers = (nibbles[:, 0::2] + 16 * nibbles[:, 1::2]).to(torch.uint8), E2M1[nibbles]
            unit = size / 2.5
        elif kind.startswith("int8"):
            values = self.whole(-127, 127, rows, columns).to(torch.int8)
            numbers, unit = values.double(), size / 70
        else:
            values = self.e4m3(rows, columns)
            numbers, unit = values.double(), size / 110
        if kind in ("mxfp8", "mxfp4", "fp8_ue8m0"):
            powers = self.whole(-1, 1, tall, wide) + round(float(torch.tensor(unit).log2()))
            scales = (powers + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
            factors = torch.exp2(powers.double())
            if kind == "fp8_ue8m0":
                scales = factors.float()
        elif kind == "nvfp4":
            scales = self.near(100.0, tall, wide).to(torch.float8_e4m3fn)
            above = self.near(unit / 100.0, 1).float()
            extra["global"] = above.reshape(())
            factors = scales.double() * above.double()
        else:
            scales = self.near(unit, tall, wide).to(self.scale_dtype)
            factors = scales.double()
        if self.zero_block and kind != "fp8_tensor":
            down, along = last(rows, block[0]), last(columns, block[1])
            each = columns // values.shape[1]
            values.view(torch.uint8)[down, along.start // each :], numbers[down, along] = 0, 0.0
            scales.view(torch.uint8 if scales.element_size() == 1 else scales.dtype)[-1, -1] = 0
        kept = scales.reshape(()) if kind == "fp8_tensor" else scales
        held = values.numel() + scales.numel() if kind == "fp8_ue8m0" else 0
        return Stored({"": values, "scale": kept, **extra}, numbers * spread(factors, rows, columns, block), held)

    def integers(self, kind: str, rows: int, columns: int, size: float, packing: str, order: bool) -> Stored:
        """Codes in groups along a row, packed as one of the writers does. order: GPTQ's columns by activation."""
        bits = int(kind[3])
        middle, most = 2 ** (bits - 1), 2**bits - 1
        group = columns if "_row" in kind else min(int(kind.split("_g")[1].split("_")[0]), columns)
        groups = -(-columns // group)
        codes = self.whole(0, most, rows, columns)
        unit = size / (most * 0.29)
        # Scales of two dtypes, as writers have them.
        dtype = torch.float16 if packing in ("gptq", "awq") else torch.bfloat16
        scales = self.near(unit, rows, groups).to(dtype)
        if kind.endswith("_affine"):
            scales = torch.where(self.whole(0, 1, rows, groups) > 0, scales, -scales)
            biases = (-scales.double() * middle * self.near(1.0, rows, groups)).to(dtype)
            if self.zero_block:
                codes[-1, last(columns, group)], scales[-1, -1], biases[-1, -1] = 0, 0.0, 0.0
            wide = [spread(part, rows, columns, (1, group)) for part in (scales, biases)]
            words = _words(codes, bits).view(torch.uint32)
            return Stored({"": words, "scale": scales, "zeros": biases}, codes.double() * wide[0] + wide[1])
        has_zeros = kind.endswith("_zp")
        zeros = self.whole(1, most, rows, groups) if has_zeros else torch.full((rows, groups), middle)
        of_column = torch.arange(columns) // group
        if order:
            of_column = of_column[torch.randperm(columns, generator=self.of)]
        if self.zero_block:
            codes[-1, of_column == groups - 1], scales[-1, -1] = zeros[-1, -1], 0.0
        values = (codes - zeros[:, of_column]).double() * scales.double()[:, of_column]
        if packing == "compressed_tensors":
            tensors = {"": _words(codes, bits), "scale": scales, "shape": torch.tensor([rows, columns])}
            if has_zeros:
                tensors["zeros"] = _words(_padded(zeros.T, 32 // bits), bits).T.contiguous()
        elif packing == "gptq":
            stored = {"zeros": _words((zeros - self.less).T, bits), "order": of_column.to(torch.int32)}
            tensors = {"": _words(codes, bits).T.contiguous(), "scale": scales.T.contiguous(), **stored}
        else:
            turned = {"": codes.T, "zeros": zeros.T}
            tensors = {name: _words(_awq(each), bits) for name, each in turned.items()}
            tensors["scale"] = scales.T.contiguous()
        held = codes.numel() * bits // 8 + scales.numel() * 2 + zeros.numel() * has_zeros
        return Stored(tensors, values, held)

    def gguf(self, kind: str, rows: int, columns: int, size: float) -> Stored:
        """Blocks of 32 values: an f16 factor, then codes; of q4_1 and q5_1 an f16 minimum between them."""
        blocks = columns // 32
        bits = int(kind[1])
        codes = self.whole(0, 2**bits - 1, rows, blocks, 32)
        factor = self.near(size / (2**bits * 0.29), rows, blocks, 1).half()
        parts, minimum = [factor.view(torch.uint8)], torch.zeros(rows, blocks, 1).half()
        if kind.endswith("_1"):
            minimum = (-factor.double() * 2 ** (bits - 1)).half()
            parts.append(minimum.view(torch.uint8))
            numbers = codes.double()
        else:
            numbers = codes.double() - 2 ** (bits - 1)
        if bits == 8:
            parts.append((codes - 128).to(torch.int8).view(torch.uint8))
        else:
            if bits == 5:
                high = (codes >> 4).view(rows, blocks, 4, 8)
                parts.append((high << torch.arange(8)).sum(-1).to(torch.uint8))
            low = codes % 16
            parts.append((low[..., :16] + 16 * low[..., 16:]).to(torch.uint8))
        values = numbers * factor.double() + minimum.double()
        return Stored({"": torch.cat(parts, -1).view(rows, -1)}, values.view(rows, columns))


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes along a row, the lowest bits of a 32-bit word first."""
    each = 32 // bits
    shifted = codes.to(torch.int64).view(codes.shape[0], -1, each) << (bits * torch.arange(each))
    total = shifted.sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def _padded(codes: Tensor, each: int) -> Tensor:
    return torch.nn.functional.pad(codes, (0, -codes.shape[1] % each))


def _awq(codes: Tensor) -> Tensor:
    eights = codes.reshape(codes.shape[0], -1, 8)
    return eights[..., list(AWQ_ORDER)].flatten(1)


# What activations are rounded to before a product, in f32 as kernels do it; returned in f64.


def _amax(x: Tensor, group: int) -> Tensor:
    """The largest magnitude of each group of a row, repeated for each element."""
    rows, columns = x.shape
    group = min(group, columns)
    padded = torch.nn.functional.pad(x.abs(), (0, -columns % group)).view(rows, -1, group)
    return padded.amax(-1).repeat_interleave(group, 1)[:, :columns]


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _e2m1(x: Tensor) -> Tensor:
    """To nearest, of two that are equally near the one with an even code; saturating."""
    sizes = E2M1[:8].float()
    distance = (x.abs()[..., None] - sizes).abs()
    near = distance.amin(-1, keepdim=True)
    # Of equally near ones the even code: codes 0, 2, 4, 6 are 0, 1, 2, 4.
    odd = torch.arange(8) % 2
    best = (distance + torch.where(distance == near, 0.0, 1e9) + 0.25 * odd).argmin(-1)
    return torch.copysign(sizes[best], x)


def _power_above(x: Tensor) -> Tensor:
    """The least power of two that is not below."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), torch.where(mantissa == 0.5, exponent - 1, exponent))


def rounded(x: Tensor, scheme: tuple[str, float]) -> Tensor:
    """(rows, columns) rounded to a scheme: its name, and the columns of a group or a fixed scale."""
    name, number = scheme
    x = x.float()
    if name == "plain" or not len(x):
        return x.double()
    if name == "fp8_static":
        return (_e4m3(x / number) * number).double()
    if name == "nvfp4":
        scale = (_amax(x, 16) / 6 / number).clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float()
        return (_e2m1(x / (scale * number)) * (scale * number)).double()
    amax = _amax(x, int(number))
    if name == "int8":
        scale = torch.where(amax > 0, amax / 127, 1.0)
        return ((x / scale).round().clamp(-127, 127) * scale).double()
    if name in ("fp8", "fp8_ue8m0"):
        scale = amax.clamp_min(1e-10) / 448
        scale = _power_above(scale) if name == "fp8_ue8m0" else scale
        return (_e4m3(x / scale) * scale).double()
    largest = {"mxfp8": 448.0, "mxfp4": 6.0}[name]
    scale = _power_above(torch.where(amax > 0, amax / largest, 1.0))
    encode: Callable[[Tensor], Tensor] = _e4m3 if name == "mxfp8" else _e2m1
    return (encode(x / scale) * scale).double()
