"""Packed integers as checkpoints lay them out, converted to the layout of the scheme, exactly.

    compressed_tensors  weight_packed int32 (n, k/8): column 8j + i in bits 4i to 4i + 3 of word j, unsigned, 8 is zero.
                        Its bytes are the codes of our scheme, so that a view suffices. weight_scale (n, k/g),
                        weight_zero_point int32 (n/8, k/g): packed along the rows; weight_shape (n, k)
    int_quantized       weight int8 (n, k), signed; weight_scale (n, k/g). In vLLM, for weights with INT8 tokens
    gptq                qweight int32 (k/8, n): column 8j + i of row r in bits 4i of word (j, r). scales (k/g, n);
                        qzeros int32 (k/g, n/8): row 8j + i in bits 4i of word j, minus one; g_idx int32 (k)
    awq                 qweight int32 (k, n/8): row 8j + ORDER[i] of column c in bits 4i of word (c, j), ORDER is
                        0 2 4 6 1 3 5 7. scales (k/g, n); qzeros int32 (k/g, n/8) in the same order
    mlx                 weight uint32 (n, k/8): column 8j + i in bits 4i of word j, or (n, k/4). scales (n, k/g), biases
                        (n, k/g) of affine integers; scales uint8 (n, k/g) of mxfp4, mxfp8 and nvfp4
    gguf                the rows of the file, see `quant.gguf`

With 8 bits a word holds four codes. GPTQ that orders columns by activation (desc_act) permutes them: `order` of
`Unpacked` is the column of the checkpoint at each of our columns, so that groups are contiguous.
Sources: compressed-tensors 0.20 (`pack_to_int32`), AutoGPTQ 0.7 (`qlinear_cuda.py`), AutoAWQ 0.2 (`gemm.py`),
MLX (`mlx/ops.cpp`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.errors import ConfigError, ShapeError, WeightError
from moe_mk.external.library import find
from moe_mk.kernels.reference import e2m1
from moe_mk.kernels.reference.ggml_blocks import MXFP4_BYTES, MXFP4_VALUES
from moe_mk.quant import BF16, MXFP4, MXFP8, NVFP4, WHOLE, BlockedScheme, Plain, QuantScheme, QuantTensor
from moe_mk.quant.gguf import GGUF, Gguf, mxfp4_of_gguf
from moe_mk.quant.grouped import GROUPED, Grouped
from moe_mk.quant.grouped import SCALE_DTYPES as GROUP_SCALES
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.quant.wire import as_bytes

INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)
"""Rows of AWQ by the position of their nibble."""
WORD = 32
"""Bits."""
_WORDS, INTEGERS, FLOATS = (torch.int32,), (torch.int64, torch.int32), (torch.bfloat16, torch.float16, torch.float32)

Named = tuple[str, Tensor]
"""A tensor with its name for messages."""


@dataclass(frozen=True)
class Held:
    """The requirements of one tensor of a packed matrix."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False
    also: tuple[tuple[int, ...], ...] = ()
    """Equivalent shapes."""


@dataclass(frozen=True)
class Unpacked:
    """A matrix in the layout of its scheme."""

    q: QuantTensor
    order_K: Tensor | None = None
    """int64: the column of the checkpoint at each column; None where they are the same."""


def packed_shapes(
    packing: str, scheme: QuantScheme, rows: int, columns: int, *, any_type: bool = False
) -> dict[str, Held]:
    """The tensors of a (rows, columns) matrix: "" for the codes, "scale", "zeros", "order" and "shape".

    any_type: blocks of GGUF may have any type, because they are decoded. Raises ConfigError for sizes that do not fill
    words or blocks.
    """
    if packing == "gguf":
        return {"": _gguf_rows(scheme, rows, columns, any_type=any_type)}
    if packing == "mlx":
        return _mlx_shapes(scheme, rows, columns)
    if not isinstance(scheme, Grouped) or scheme.has_biases or (packing == "awq" and scheme.bits != 4):
        held = "int4" if packing == "awq" else "integers"
        raise ConfigError(f"{packing} checkpoints hold {held} in groups, not {scheme.name}")
    each = WORD // scheme.bits
    wide = scheme.scale_shape(rows, columns)[1]
    across = rows if packing == "awq" else columns
    if across % each or (packing != "compressed_tensors" and rows % each):
        raise ConfigError(
            f"{packing} packs {each} numbers of {scheme.bits} bits into a word, which a matrix of {rows} x {columns} "
            "does not fill"
        )
    short = -(-rows // each)
    if packing == "compressed_tensors":
        found = {"": Held((rows, columns // each), _WORDS), "scale": Held((rows, wide), GROUP_SCALES)}
        if scheme.has_zeros:
            found["zeros"] = Held((short, wide), _WORDS)
        return found | {"shape": Held((2,), INTEGERS, True), "order": Held((columns,), INTEGERS, True)}
    shape = (columns // each, rows) if packing == "gptq" else (columns, rows // each)
    found = {"": Held(shape, _WORDS), "scale": Held((wide, rows), GROUP_SCALES), "zeros": Held((wide, short), _WORDS)}
    return found | ({"order": Held((columns,), INTEGERS[::-1], True)} if packing == "gptq" else {})


def unpack(packing: str, scheme: QuantScheme, parts: Mapping[str, Named]) -> Unpacked:
    """The matrix of the tensors of `packed_shapes`, of one expert. Raises WeightError naming the tensor at fault.

    packing: one of PACKINGS, int_quantized, or gptq_v2, which stores zero points without subtracting one.
    """
    if packing == "gguf":
        return Unpacked(of_gguf(scheme, parts[""][1]))
    if packing == "mlx":
        return Unpacked(_of_mlx(scheme, parts))
    assert isinstance(scheme, Grouped)
    return _UNPACK[packing](scheme, parts)


def is_of_mlx(scheme: QuantScheme) -> bool:
    """Whether MLX has a mode with this format."""
    return (isinstance(scheme, Grouped) and scheme.has_biases) or scheme in (MXFP4, MXFP8, NVFP4)


def _mlx_shapes(scheme: QuantScheme, rows: int, columns: int) -> dict[str, Held]:
    assert isinstance(scheme, BlockedScheme) and is_of_mlx(scheme)
    if columns % scheme.columns:
        raise ConfigError(f"MLX has groups of {scheme.columns} columns, which do not divide {columns}")
    groups, words = (rows, columns // scheme.columns), (rows, columns // (4 * scheme.per_byte))
    if isinstance(scheme, Grouped):
        return {"": Held(words, (torch.uint32,)), **dict.fromkeys(("scale", "zeros"), Held(groups, GROUP_SCALES))}
    return {"": Held(words, (torch.uint32,)), "scale": Held(groups, (torch.uint8,))}


def _of_mlx(scheme: QuantScheme, parts: Mapping[str, Named]) -> QuantTensor:
    assert isinstance(scheme, BlockedScheme)
    values, (_, scales) = viewed(parts[""][1], torch.uint8).view(scheme.element.dtype), parts["scale"]
    if isinstance(scheme, Grouped):
        return QuantTensor(values, scales, scheme, zeros=parts["zeros"][1])
    above = torch.ones((1, 1), dtype=torch.float32, device=values.device) if scheme.has_global_scale else None
    return QuantTensor(values, scales.view(scheme.scale_dtype), scheme, above)


def _of_compressed_tensors(scheme: Grouped, parts: Mapping[str, Named]) -> Unpacked:
    name, words = parts[""]
    values = viewed(words, torch.uint8)
    n, k = values.shape[0], scheme.logical_columns(values.shape[1])
    if "shape" in parts and parts["shape"][1].tolist() != [n, k]:
        raise WeightError(f"{parts['shape'][0]} is {parts['shape'][1].tolist()}, and {name} has {[n, k]} codes")
    if "order" in parts and _order(parts["order"], _group_of(scheme, k)) is not None:
        order = parts["order"][0]
        raise WeightError(f"{order} orders columns by activation (actorder 'group'), which is not supported")
    zeros = None
    if scheme.has_zeros:
        zeros = _codes(parts["zeros"][1].T, scheme.bits).T[:n].contiguous()
    return Unpacked(QuantTensor(values, parts["scale"][1], scheme, zeros=zeros))


def _of_int_quantized(scheme: Grouped, parts: Mapping[str, Named]) -> Unpacked:
    name, values = parts[""]
    codes = values.view(torch.uint8) + scheme.middle
    if bool((codes >= 2**scheme.bits).any()):
        raise WeightError(f"{name} has {int(values.min())} to {int(values.max())}, beyond {scheme.bits} bits with sign")
    return Unpacked(QuantTensor(e2m1.pack(codes) if scheme.bits == 4 else codes, parts["scale"][1], scheme))


def _of_gptq(scheme: Grouped, parts: Mapping[str, Named], less: int = 1) -> Unpacked:
    """less: what zero points are stored less."""
    values = viewed(parts[""][1].T, torch.uint8)
    stored = _codes(parts["zeros"][1], scheme.bits).to(torch.int32)
    zeros = _zeros_of_gptq(scheme, parts["zeros"][0], stored, less)
    q = QuantTensor(values, parts["scale"][1].T.contiguous(), scheme, zeros=zeros)
    if "order" not in parts:
        return Unpacked(q)
    order_K = _order(parts["order"], _group_of(scheme, q.shape[1]))
    if order_K is None:
        return Unpacked(q)
    codes = scheme.codes(q)[:, order_K]
    return Unpacked(QuantTensor(scheme.pack(codes.to(torch.float32)), q.scales, scheme, zeros=zeros), order_K)


def _zeros_of_gptq(scheme: Grouped, name: str, stored: Tensor, less: int) -> Tensor | None:
    """(n, k/g) zero points. Without zero points all must be the middle, minus one or (`gptq_v2`) as they are."""
    if not scheme.has_zeros:
        if not (bool((stored == scheme.middle - 1).all()) or bool((stored == scheme.middle).all())):
            raise WeightError(f"{name}: zero points differ from {scheme.middle}, and the weights are to be symmetric")
        return None
    if less and bool((stored == 2**scheme.bits - 1).any()):
        raise WeightError(
            f"{name}: a zero point of {2**scheme.bits} is out of range (0 <= zero < {2**scheme.bits}); zero points are "
            "stored minus one, and quantisers that wrapped 0 around wrote this"
        )
    return (stored + less).to(torch.uint8).T.contiguous()


def _of_awq(scheme: Grouped, parts: Mapping[str, Named]) -> Unpacked:
    codes = _from_interleaved(_codes(parts[""][1], scheme.bits)).T
    zeros = _from_interleaved(_codes(parts["zeros"][1], scheme.bits)).T.contiguous()
    if not scheme.has_zeros and bool((zeros != scheme.middle).any()):
        name = parts["zeros"][0]
        raise WeightError(f"{name}: zero points differ from {scheme.middle}, and the weights are to be symmetric")
    packed = e2m1.pack(codes.contiguous()) if scheme.bits == 4 else codes.contiguous()
    scales = parts["scale"][1].T.contiguous()
    return Unpacked(QuantTensor(packed, scales, scheme, zeros=zeros if scheme.has_zeros else None))


_UNPACK: Mapping[str, Callable[[Grouped, Mapping[str, Named]], Unpacked]] = {
    "compressed_tensors": _of_compressed_tensors,
    "int_quantized": _of_int_quantized,
    "gptq": _of_gptq,
    "gptq_v2": partial(_of_gptq, less=0),
    "awq": _of_awq,
}
PACKINGS = ("compressed_tensors", "gptq", "awq", "mlx", "gguf")


def _codes(words: Tensor, bits: int) -> Tensor:
    """(m, w) int32 to (m, w * 32 / bits) uint8: the lowest bits first."""
    octets = viewed(words, torch.uint8)
    return e2m1.unpack(octets) if bits == 4 else octets


def viewed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix as another integer type."""
    octets = as_bytes(x)
    return octets.view(-1).view(dtype).view(x.shape[0], octets.shape[1] // dtype.itemsize)


def _from_interleaved(codes: Tensor) -> Tensor:
    """Columns of eight in AWQ's order to their own order."""
    eights = codes.reshape(codes.shape[0], -1, len(INTERLEAVED))
    inverse = sorted(range(len(INTERLEAVED)), key=INTERLEAVED.__getitem__)
    return eights[..., inverse].flatten(1)


def _group_of(scheme: Grouped, columns: int) -> int:
    return columns if scheme.columns == WHOLE else scheme.columns


def _order(named: Named, group: int) -> Tensor | None:
    """The permutation that makes the groups of g_idx contiguous, stable; None if they are. WeightError if none does."""
    name, idx = named
    k = len(idx)
    trivial = torch.arange(k, dtype=idx.dtype, device=idx.device) // group
    if torch.equal(idx, trivial):
        return None
    order_K = torch.argsort(idx, stable=True)
    if not torch.equal(idx[order_K], trivial):
        counts = torch.unique(idx, return_counts=True)[1]
        raise WeightError(
            f"{name} puts {int(counts.min())} to {int(counts.max())} of {k} columns into a group of {group}; "
            "all groups of a matrix must have the size of quantization_config.group_size"
        )
    return order_K


@dataclass(frozen=True)
class Decoded:
    """A type of GGUF whose blocks of 256 values the `gguf` package decodes at load."""

    num_bytes: int
    """Of a block. Its first two are the f16 factor d."""
    held: str
    """int8_g32, where 32 values have one scale: exactly; or bf16."""


DECODED: Mapping[str, Decoded] = {
    "iq3_xxs": Decoded(98, "int8_g32"), "iq3_s": Decoded(110, "int8_g32"), "iq2_xxs": Decoded(66, "int8_g32"),
    "iq2_xs": Decoded(74, "bf16"), "iq2_s": Decoded(82, "bf16"), "iq1_s": Decoded(50, "int8_g32"),
    "iq1_m": Decoded(56, "bf16"),
}  # fmt: skip
IN_GGUF: Mapping[str, QuantScheme] = {
    **GGUF, "mxfp4": MXFP4, **{name: scheme_of_kind(each.held) for name, each in DECODED.items()},
}  # fmt: skip
"""The scheme of each type of GGUF that is read."""


def dequantized(type_name: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Rows of blocks as f32. type_name: as ggml spells it. Raises LibraryMissing without the package."""
    gguf = find("gguf")
    values: NDArray[np.float32] = gguf.dequantize(rows, gguf.GGMLQuantizationType[type_name])
    return values


def decoded(name: str, rows: Tensor) -> QuantTensor:
    """Rows of a type of `DECODED`, uint8 (n, bytes), in the scheme that holds them. Raises LibraryMissing.

    d / 8 divides every value, and the scale of 32 values is d / 8 times the greatest common divisor of their quotients.
    """
    kind, n = DECODED[name], rows.shape[0]
    values = torch.from_numpy(dequantized(name.upper(), rows.cpu().numpy()))
    if kind.held == "bf16":
        return BF16.quantize(values)
    d = rows.cpu().view(n, -1, kind.num_bytes)[..., :2].contiguous().view(torch.float16).to(torch.float32)
    unit = (d / 8.0).unsqueeze(-1)
    whole = (values.view(n, -1, 8, 32) / unit).nan_to_num(0.0).to(torch.int32)
    common = whole
    while common.shape[-1] > 1:
        common = torch.gcd(*common.chunk(2, dim=-1))
    common = common.clamp_min(1)
    codes, scales = whole // common, unit * common
    assert not codes.numel() or int(codes.abs().max()) <= 127, f"{name} has more than one scale for 32 values"
    return QuantTensor((codes + 128).to(torch.uint8).view(n, -1), scales.flatten(1), GROUPED[kind.held])


def _gguf_rows(scheme: QuantScheme, rows: int, columns: int, *, any_type: bool) -> Held:
    """The rows of a tensor of a GGUF file."""
    if any_type:
        wide = [each for each in (*GGUF.values(), MXFP4) if columns % (each.block[1] if each.block else 1) == 0]
        blocks, rest = divmod(columns, 256)
        also = tuple((rows, blocks * each.num_bytes) for each in DECODED.values() if not rest)
        also += tuple((rows, _row_bytes(each, columns)) for each in wide)
        return Held((rows, columns), (*FLOATS, torch.uint8), also=also)
    if isinstance(scheme, Plain):
        return Held((rows, columns), (scheme.dtype,))
    return Held((rows, _row_bytes(scheme, columns)), (torch.uint8,))


def _row_bytes(scheme: QuantScheme, columns: int) -> int:
    if isinstance(scheme, Gguf):
        try:
            return scheme.held_columns(columns)
        except ShapeError as problem:
            raise ConfigError(str(problem)) from problem
    if scheme != MXFP4 or columns % MXFP4_VALUES:
        raise ConfigError(f"GGUF files hold no {scheme.name} of {columns} columns")
    return columns // MXFP4_VALUES * MXFP4_BYTES


def of_gguf(scheme: QuantScheme, rows: Tensor) -> QuantTensor:
    """Rows of a file in a scheme: a view, for MXFP4 a copy in the order of its scheme."""
    return mxfp4_of_gguf(rows) if scheme == MXFP4 else QuantTensor(rows, None, scheme)
