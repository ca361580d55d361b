"""Expert weights in the layouts of the Triton kernels: supported formats, packing, biases, and shared experts.

Four-bit values are interleaved: the byte at column j of a step of 128 holds columns j (low) and j + 64 (high). Group
scales are stored as (expert, step, row, group). Columns are padded with zeros to whole steps. The conversion is exact
and can be reversed. Biases are f32, one row per slot, gate before up.

MXFP4 that is multiplied as FP8 has words of codes, a shift per group and a scale per 128 x 128 (`kernel_format.py`), if
the scales of all groups of each block, except groups of zeros, are within a factor of 2^11, so that no weight is
rounded; otherwise all experts are packed in the format that is decoded to bf16.

Shared experts are fused as one more slot behind the routed ones. A stack that is copied to the device gets a spare slot
if it has many slots. Stacks that are already on the device have no spare slot, and their shared experts are computed
separately.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_mk.config.problem import Problem, Reason
from moe_mk.errors import UnsupportedError
from moe_mk.kernels.reference import e2m1
from moe_mk.kernels.triton.kernel_format import KERNEL_FORMATS, KernelFormat
from moe_mk.kernels.triton.tile import BLOCK
from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.fp8 import Fp8Block
from moe_mk.quant.grouped import Grouped
from moe_mk.quant.int8 import Int8Block
from moe_mk.quant.plain import BF16, Plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.weights.expert_weights import ExpertWeights, SlotWeights, Weights, slot_biases
from moe_mk.weights.slices import narrow_rows, stacked_rows

Room = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Zeros for each slot, of a shape and a dtype."""


def zeros(num_slots: int, device: torch.device, *, spare: int = 0) -> Room:
    """A tensor of its own for each part, with `spare` more slots behind the last one."""

    def room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = (num_slots + spare, *shape[:-1], shape[-1] * dtype.itemsize)
        return torch.zeros(size, dtype=torch.uint8, device=device).view(dtype)[:num_slots]

    return room


LAYOUT, META = "triton", torch.device("meta")
ZEROS_MASK = ~0xFF
"""Of a word of an f32 scale and a zero point: the bits of the scale."""


@dataclass(frozen=True)
class PackedProjection:
    """One projection of all experts in a kernel format."""

    values: Tensor
    """(L, N, columns / values a byte)."""
    scales: Tensor | None
    """Of groups, (L, steps, N, groups per step): bytes, floats for integers, or words with zero points. Of blocks with
    no other scales: f32, as stored."""
    rows: Tensor | None
    """Row scales, f32, (L, N)."""
    blocks: Tensor | None
    """Scales of 128 x 128 weights, f32, (L, ceil(N / 128), steps)."""
    like: QuantTensor
    """The stored matrix of one expert, on the meta device."""
    bias: Tensor | None = None
    """f32, (L, N)."""

    @property
    def num_bytes(self) -> int:
        parts = (self.values, self.scales, self.rows, self.blocks, self.bias)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)


@dataclass(frozen=True)
class PackedWeights:
    """The experts of one rank in a kernel format."""

    w13: PackedProjection
    w2: PackedProjection
    format: KernelFormat
    gated: bool
    spare: int = 0
    """Free slots behind the last one."""
    layout: str = LAYOUT

    @property
    def num_slots(self) -> int:
        return self.w13.values.shape[0]

    @property
    def scheme(self) -> QuantScheme:
        return self.w13.like.scheme

    @property
    def num_bytes(self) -> int:
        """Bytes of values, scales and biases, padding included."""
        return self.w13.num_bytes + self.w2.num_bytes

    def slot(self, index: int) -> SlotWeights:
        """One expert in its stored format, bit for bit, with biases in f32; a copy."""
        w13, w2 = (_unpacked(matrix, self.format, index) for matrix in (self.w13, self.w2))
        b13, b2 = (None if matrix.bias is None else matrix.bias[index] for matrix in (self.w13, self.w2))
        biases = slot_biases(b13, b2, gated=self.gated)
        if not self.gated:
            return SlotWeights(None, w13, w2, biases)
        half = w13.shape[0] // 2
        return SlotWeights(narrow_rows(w13, 0, half), narrow_rows(w13, half, half), w2, biases)


def pack_weights(weights: Weights, format: KernelFormat, device: torch.device, *, spare: int = 0) -> PackedWeights:
    """Convert every expert to a kernel format, one at a time. spare: free slots at the end.

    MXFP4 to be multiplied as FP8 is packed as `w_mxfp4` if any expert cannot be represented exactly.
    """
    packed: PackedWeights | None = None
    for index in range(weights.num_slots):
        slot = weights.slot(index)
        packed = packed or empty_slots(slot, format, zeros(weights.num_slots, device, spare=spare), spare)
        if not fill_slot(packed, index, slot):
            del packed
            return pack_weights(weights, KERNEL_FORMATS["w_mxfp4"], device, spare=spare)
    assert packed is not None, "a rank has at least one expert"
    return packed


def empty_slots(slot: SlotWeights, format: KernelFormat, room: Room, spare: int = 0) -> PackedWeights:
    """Zeros for experts like one, in a kernel format. spare: free slots at the end."""
    w13, w2 = (_room(q, format, room) for q in _both(slot, META))
    if slot.biases is not None:
        w13, w2 = (replace(w, bias=room((w.like.shape[0],), torch.float32)) for w in (w13, w2))
    return PackedWeights(w13, w2, format, slot.gate_IH is not None, spare)


def fill_slot(packed: PackedWeights, index: int, slot: SlotWeights) -> bool:
    """Store one expert; False if the format cannot represent it."""
    if packed.w13.bias is not None and packed.w2.bias is not None:
        assert slot.biases is not None, "either every expert of a layer has biases or none"
        *first, down = slot.biases.tensors
        packed.w13.bias[index].copy_(torch.cat(first))
        packed.w2.bias[index].copy_(down)
    matrices = zip((packed.w13, packed.w2), _both(slot, packed.w13.values.device), strict=True)
    return all(_fill(matrix, q, packed.format, index) for matrix, q in matrices)


def ready(q: QuantTensor, device: torch.device) -> QuantTensor:
    """A stack on the device with f32 scales."""
    q = q.to(device)
    scales = None if q.scales is None else q.scales.to(torch.float32).contiguous()
    return QuantTensor(q.values.contiguous(), scales, q.scheme)


def _both(slot: SlotWeights, device: torch.device) -> tuple[QuantTensor, QuantTensor]:
    """w13 and w2 on a device."""
    *first, down = (q.to(device) for q in slot.matrices.values())
    return stacked_rows(first), down


def _room(q: QuantTensor, format: KernelFormat, room: Room) -> PackedProjection:
    (n, k), scales = q.shape, None
    steps = -(-k // format.step)
    values = room((n, steps * format.box if format.per_byte > 1 else q.values.shape[1]), q.values.dtype)
    if format.group:
        assert q.scales is not None
        dtype = torch.int32 if format.has_zeros else q.scales.dtype if format.integer else torch.uint8
        scales = room((steps, n, format.groups), dtype)
    elif q.scales is not None and not format.row_scales:
        scales = room(tuple(q.scales.shape), torch.float32)
    rows = room((n,), torch.float32) if format.row_scales else None
    blocks = room((-(-n // BLOCK), steps), torch.float32) if format.block_scales else None
    return PackedProjection(values, scales, rows, blocks, q)


def _fill(matrix: PackedProjection, q: QuantTensor, format: KernelFormat, index: int) -> bool:
    if matrix.blocks is not None:
        return _fill_shifts(matrix, q, index)
    matrix.values[index].view(torch.uint8).copy_(
        _interleaved(q.values, format) if format.per_byte > 1 else q.values.contiguous().view(torch.uint8)
    )
    if matrix.scales is not None and format.group:
        codes = _scales_of(q, format)
        steps, n, groups = matrix.scales.shape[1:]
        padded = torch.nn.functional.pad(codes, (0, steps * groups - codes.shape[1]))
        matrix.scales[index].copy_(padded.view(n, steps, groups).permute(1, 0, 2))
    elif matrix.scales is not None:
        assert q.scales is not None
        matrix.scales[index].copy_(q.scales.to(torch.float32))
    if matrix.rows is not None:
        above = q.global_scale if format.group else q.scales
        assert above is not None
        each = matrix.rows.shape[1] // above.shape[0]
        matrix.rows[index].copy_(above[:, 0].to(torch.float32).repeat_interleave(each))
    return True


def _fill_shifts(matrix: PackedProjection, q: QuantTensor, index: int) -> bool:
    made = fp8_parts(q, matrix.values.shape[2])
    assert matrix.scales is not None and matrix.blocks is not None
    if made is not None:
        for target, part in zip((matrix.values, matrix.scales, matrix.blocks), made, strict=True):
            target[index].copy_(part)
    return made is not None


def _scales_of(q: QuantTensor, format: KernelFormat) -> Tensor:
    """The scales (n, groups) as the kernels read them; one that spans several steps is repeated for each."""
    assert q.scales is not None
    if not format.integer:
        return q.scales.contiguous().view(torch.uint8)
    scales = q.scales
    if format.has_zeros:
        assert q.zeros is not None
        words = scales.to(torch.float32).view(torch.int32)
        if bool((words & ~ZEROS_MASK).any()):
            text = f"scales of {q.scheme.name} are {scales.dtype}; with zero points the kernels read bf16 and f16"
            raise UnsupportedError("the triton experts", [text])
        scales = (words & ZEROS_MASK) | q.zeros.to(torch.int32)
    return scales[:, _group_of_step(q, format)]


def _group_of_step(q: QuantTensor, format: KernelFormat) -> list[int]:
    assert isinstance(q.scheme, Grouped)
    return [first // q.scheme.columns for first in range(0, q.shape[1], format.group)]


def _stored_scales(scales: Tensor, like: QuantTensor, format: KernelFormat) -> tuple[Tensor, Tensor | None]:
    """The inverse of `_scales_of`: scales and zero points."""
    assert like.scales is not None
    if not format.integer:
        return scales[:, : like.scales.shape[1]].contiguous().view(like.scales.dtype), None
    each = torch.empty((len(scales), like.scales.shape[1]), dtype=scales.dtype, device=scales.device)
    each[:, _group_of_step(like, format)] = scales[:, : -(-like.shape[1] // format.group)]
    if not format.has_zeros:
        return each, None
    return (each & ZEROS_MASK).view(torch.float32).to(like.scales.dtype), (each & 0xFF).to(torch.uint8)


def _interleaved(packed: Tensor, format: KernelFormat) -> Tensor:
    """(n, k / 2) bytes of adjacent columns to (n, steps x 64) bytes of columns half a step apart."""
    codes = e2m1.unpack(packed)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % format.step))
    both = codes.view(len(codes), -1, 2, format.box)
    return (both[:, :, 0] | (both[:, :, 1] << 4)).flatten(1)


def _deinterleaved(interleaved: Tensor, format: KernelFormat, columns: int) -> Tensor:
    steps = interleaved.view(len(interleaved), -1, 1, format.box)
    codes = torch.cat((steps & 0xF, steps >> 4), dim=2).flatten(1)
    return e2m1.pack(codes[:, :columns])


def _unpacked(matrix: PackedProjection, format: KernelFormat, index: int) -> QuantTensor:
    like, columns = matrix.like, matrix.like.shape[1]
    values = matrix.values[index].clone()
    scales, above, zeros = like.scales, like.global_scale, None
    if matrix.blocks is not None:
        assert matrix.scales is not None
        values, codes = stored_parts(values, matrix.scales[index], matrix.blocks[index], columns)
        return QuantTensor(values, _stored_scales(codes, like, format)[0], like.scheme)
    if format.per_byte > 1:
        values = _deinterleaved(values, format, columns)
    if matrix.scales is not None and not format.group:
        assert scales is not None
        scales = matrix.scales[index].to(scales.dtype)
    elif matrix.scales is not None:
        scales, zeros = _stored_scales(matrix.scales[index].permute(1, 0, 2).flatten(1), like, format)
    if matrix.rows is not None:
        target = above if format.group else scales
        assert target is not None
        one = matrix.rows[index][:: matrix.rows.shape[1] // target.shape[0], None].clone()
        above, scales = (one, scales) if format.group else (above, one)
    return QuantTensor(values, scales, like.scheme, above, zeros)


BOX_BYTES = 16
"""Rows that the tensor memory accelerator reads start at multiples of this."""


def kernel_format_of(weights: QuantScheme, compute: QuantScheme) -> KernelFormat:
    """The format of a weight scheme: FP8 and INT8 products where activations are rounded, else weight-only.

    MXFP4 with FP8 activations can be packed as `w_mxfp4` instead: see `pack_weights`.
    """
    prefix = "w_" if isinstance(compute, Plain) else ""
    if isinstance(weights, Plain):
        return KERNEL_FORMATS["plain"]
    if isinstance(weights, Grouped):
        name = "w_int4" if weights.bits == 4 else "w_int8_group"
        format = KERNEL_FORMATS[name.removesuffix("_group") + "_zero" if weights.has_zeros else name]
        return replace(format, group=min(weights.columns, format.step))
    if isinstance(weights, Fp8Block):
        return KERNEL_FORMATS[prefix + ("fp8_row" if weights.columns == WHOLE else "fp8")]
    if isinstance(weights, Int8Block):
        return KERNEL_FORMATS[prefix + ("int8" if weights.columns == WHOLE else "int8_block")]
    if weights.family == "mxfp4" and isinstance(compute, Fp8Block):
        return KERNEL_FORMATS["mxfp4"]
    return KERNEL_FORMATS[f"w_{weights.family}"]


def size_reasons(problem: Problem) -> list[Reason]:
    """Reasons against plain weights other than bf16, unsupported INT8 blocks, and sizes
    that are not multiples of blocks and TMA boxes.
    """
    model, stored, reasons = problem.config.model, problem.weights, []
    in_blocks = isinstance(stored, Int8Block) and stored.columns != WHOLE
    if in_blocks and set(model.quant.block) != {BLOCK}:
        sides = "x".join(map(str, model.quant.block))
        reasons.append(Reason("block", f"reads INT8 blocks with sides {BLOCK}, the experts have {sides}"))
    if isinstance(stored, Plain) and stored != BF16:
        reasons.append(Reason("weights", f"reads plain weights in bf16 alone, the experts are {stored.name}"))
    if (model.quant.is_fp8 or in_blocks) and problem.intermediate % BLOCK:
        text = f"reads hidden rows in groups of {BLOCK}, a rank has {problem.intermediate} columns of them"
        reasons.append(Reason("shape", text, f"a tp that leaves a multiple of {BLOCK}"))
    width = 2 if isinstance(stored, Plain) or stored.per_byte > 1 else 1  # bytes of what boxes read: rows or weights
    for name, size in (("hidden size", model.hidden_size), ("intermediate size", problem.intermediate)):
        if size * width % BOX_BYTES:
            text = f"reads rows in boxes that start at multiples of {BOX_BYTES} B, a {name} of {size} does not"
            reasons.append(Reason("shape", text))
    return reasons


WORTH_A_SPARE = 32
"""The number of slots from which one more slot costs little memory."""


def spare_of(num_slots: int) -> int:
    """The number of spare slots for a stack."""
    return 1 if num_slots >= WORTH_A_SPARE else 0


def joined(routed: Weights, shared: Weights) -> Weights | None:
    """Join routed and shared experts, if formats agree and the routed ones have a spare slot, which is overwritten."""
    if not isinstance(routed, PackedWeights) or not isinstance(shared, PackedWeights | ExpertWeights):
        return None
    is_same = routed.format == shared.format if isinstance(shared, PackedWeights) else routed.scheme == shared.scheme
    if not (routed.spare and is_same and routed.gated == shared.gated):
        return None
    w13, w2 = _joined(routed.w13, shared.w13), _joined(routed.w2, shared.w2)
    return None if w13 is None or w2 is None else replace(routed, w13=w13, w2=w2)


def _joined(routed: PackedProjection, shared: PackedProjection | QuantTensor) -> PackedProjection | None:
    made, bias = dict[str, Any](), getattr(shared, "bias", None)
    if bias is None and routed.bias is not None:  # zeros for shared experts without biases
        bias = torch.zeros_like(routed.bias[:1])
    if bias is not None and routed.bias is None:
        return None
    for name in ("values", "scales", "rows", "blocks", "bias"):
        own, other = getattr(routed, name), bias if name == "bias" else getattr(shared, name, None)
        if own is not None:
            made[name] = None if other is None else _behind(own, other)
    return None if any(part is None for part in made.values()) else replace(routed, **made)


def _behind(stack: Tensor, one: Tensor) -> Tensor | None:
    """A stack with `one` copied into its spare slot; None if the shapes or dtypes differ."""
    if stack.shape[1:] != one.shape[1:] or len(one) != 1 or stack.dtype != one.dtype:
        return None
    assert stack.storage_offset() == 0 and stack.untyped_storage().nbytes() > stack.nbytes, (
        "the stack has no spare slot"
    )
    both = stack.as_strided((len(stack) + 1, *stack.shape[1:]), stack.stride())
    both[-1].view(torch.uint8).copy_(one[0].contiguous().view(torch.uint8))
    return both


LARGEST_SHIFT = 11
UNSHIFTED = 122
"""The E8M0 code of a group with shift 0 in a block with scale 1: the kernels decode shift 0 to 2^-5."""
NAN_SCALE = 0xFF
"""E8M0."""
GROUPS, GROUP_BYTES = 4, 16
"""Groups of a row in a step, and bytes of 32 codes."""
WORDS = 16
"""Of eight codes, in a step of a row."""


def fp8_parts(q: QuantTensor, width: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Words (n, width) as bytes, shifts (steps, n, 4) and f32 scales (ceil(n / 128), steps) of a matrix (n, k).

    width: bytes of all steps of a row. None if a block needs a larger shift, or if a scale is NaN. Shifts of groups of
    zeros are arbitrary; they wrap around in a byte, so that their scales can be restored.
    """
    assert q.scales is not None
    n, steps = len(q.values), width // (GROUPS * GROUP_BYTES)
    stored = q.scales.contiguous().view(torch.uint8)
    # In whole blocks of rows and columns. Padding is zeros, which count for nothing.
    shape = (-1, BLOCK, steps, GROUPS)
    codes = _zero_padded(stored, -n % BLOCK, steps * GROUPS).to(torch.int16).view(shape)
    magnitudes = _zero_padded(q.values & 0x77, -n % BLOCK, width)
    used = magnitudes.view(*shape, GROUP_BYTES).amax(dim=4) > 0
    highest = torch.where(used, codes, -1).amax(dim=(1, 3))
    lowest = torch.where(used, codes, NAN_SCALE).amin(dim=(1, 3))
    base = torch.where(highest < 0, UNSHIFTED, highest - LARGEST_SHIFT)
    if bool((stored == NAN_SCALE).any()) or bool((lowest < base).any()):
        return None
    shifts = (codes - base[:, None, :, None]).to(torch.uint8).view(-1, steps, GROUPS)[:n]
    scales = torch.exp2((base - UNSHIFTED).to(torch.float64)).to(torch.float32)
    return in_words(q.values, width), shifts.permute(1, 0, 2), scales


def stored_parts(words: Tensor, shifts: Tensor, scales: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The inverse of `fp8_parts`: values of `columns` columns, and the E8M0 codes (n, steps x 4) of all steps."""
    base = torch.frexp(scales.to(torch.float64)).exponent - 1 + UNSHIFTED
    rows = base.repeat_interleave(BLOCK, dim=0)[: len(words)]
    codes = (shifts.permute(1, 0, 2) + rows[:, :, None]).to(torch.uint8)
    return _out_of_words(words, columns), codes.flatten(1)


def in_words(packed: Tensor, width: int) -> Tensor:
    """(n, k / 2) bytes of adjacent columns to (n, width) bytes of words of eight codes."""
    codes = e2m1.unpack(_zero_padded(packed, 0, width))
    halves = codes.view(len(codes), -1, 2, WORDS, 4)
    magnitudes = (halves & 7).transpose(2, 3).reshape(len(codes), -1, WORDS, 8)
    signs = (halves[:, :, 0] & 8) << 4 | halves[:, :, 1] & 8
    return (magnitudes[..., ::2] | magnitudes[..., 1::2] << 4 | signs).flatten(1)


def _out_of_words(words: Tensor, columns: int) -> Tensor:
    each = words.view(len(words), -1, WORDS, 4)
    magnitudes = torch.stack((each & 7, each >> 4 & 7), dim=4).view(len(words), -1, WORDS, 2, 4).transpose(2, 3)
    signs = torch.stack((each >> 4 & 8, each & 8), dim=2)
    return e2m1.pack((magnitudes | signs).flatten(1)[:, :columns])


def _zero_padded(part: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.pad(part, (0, columns - part.shape[1], 0, rows))
