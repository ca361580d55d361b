"""Conversion of expert weights to and from the packed formats of the native CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from moe_mk.kernels.native.experts_mode import INT8_PART_FORMATS, ExpertsMode
from moe_mk.kernels.native.layout import BlockType, Format, MatrixLayout, PartScales
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.native.packed import (
    PackedMatrix,
    pack_slot,
    unpack_output_scales,
    unpack_scales,
    unpack_slot,
    unpack_zeros,
)
from moe_mk.kernels.native.prepared import ExpertsCall
from moe_mk.kernels.native.selfcheck import loaded
from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.gguf import Gguf
from moe_mk.quant.grouped import Grouped
from moe_mk.quant.plain import BF16, Plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.weights.expert_weights import MappedExpertWeights, SlotWeights, Weights, slot_biases

LAYOUT = "cpu_native"
TILE_ROWS = 16
"""Outputs that share one packed scale of a block; a block of 128 rows is eight of them."""
BLOCK = 128
_SCALED_ALIKE = {"fp8": Format.FP8, "int8": Format.INT8}
_GROUPED = {format.name.lower(): format for format in Format if format.group}


def native_kernels(
    *, own_threads: bool = False, cache_dir: Path | None = None, instruction_set: str = "auto"
) -> Native:
    """The compiled kernels of this process; compiled on the first use by this user. instruction_set: of `KernelConfig`.

    Raises UnsupportedError for an instruction set that cannot be used here.
    """
    return loaded(cache_dir).configured(own_threads=own_threads, instruction_set=instruction_set)


@dataclass(frozen=True)
class Storage:
    """The packed format of a weight scheme."""

    format: Format
    by_output: bool = False
    """One f32 scale per output channel, or for all of them, instead of one per block."""
    grouped: Grouped | None = None
    block_type: BlockType | None = None

    def layout(
        self, num_outputs: int, num_inputs: int, *, gated: bool, scale_dtype: torch.dtype = torch.bfloat16
    ) -> MatrixLayout:
        """The layout of one projection. scale_dtype: of weights with groups, as stored."""
        if self.block_type is not None:
            return MatrixLayout.of_blocks(num_outputs, num_inputs, gated, self.block_type)
        parts = None
        if self.grouped is not None:
            group = 0 if self.grouped.columns == WHOLE else self.grouped.columns
            parts = PartScales(group, scale_dtype, self.grouped.has_zeros, self.grouped.has_biases)
        return MatrixLayout(num_outputs, num_inputs, gated, self.format, by_output=self.by_output, parts=parts)


def storage_of(scheme: QuantScheme) -> Storage | None:
    """The packed format of a weight scheme; None if the kernels do not support it."""
    if isinstance(scheme, Plain):
        return Storage(Format.BF16) if scheme == BF16 else None
    if isinstance(scheme, Grouped):
        return Storage(Format.INT4 if scheme.bits == 4 else Format.INT8_GROUPS, grouped=scheme)
    if isinstance(scheme, Gguf):
        block_type = BlockType.__members__.get(scheme.name.upper())
        return None if block_type is None else Storage(block_type.format, block_type=block_type)
    if scheme.family in _GROUPED:
        return Storage(_GROUPED[scheme.family])
    if scheme.family not in _SCALED_ALIKE or scheme.block not in ((BLOCK, BLOCK), (1, WHOLE), (WHOLE, WHOLE)):
        return None
    return Storage(_SCALED_ALIKE[scheme.family], by_output=scheme.block != (BLOCK, BLOCK))


def multiplies_int8(scheme: QuantScheme) -> bool:
    """Whether weights of a scheme are multiplied as integers with tokens that are rounded to INT8 in their groups."""
    storage = storage_of(scheme)
    return storage is not None and storage.format in INT8_PART_FORMATS


@dataclass(frozen=True)
class PackedExpertWeights:
    """Experts in packed order; `slot` unpacks one, bit for bit."""

    w13: PackedMatrix
    w2: PackedMatrix
    scheme: QuantScheme
    layout: str = LAYOUT
    shared: PackedExpertWeights | None = None
    """One slot that is applied to every row with weight 1 in the same call."""
    down_scheme: QuantScheme | None = None
    """The scheme of w2 where it may differ from that of w13."""
    calls: dict[tuple[ExpertsMode, bool, Isa | None, bool], ExpertsCall] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def call(self, native: Native, mode: ExpertsMode, *, alone: bool = False, isa: Isa | None = None) -> ExpertsCall:
        """The prepared call of a mode, made once. alone: without the shared experts. isa: None: the chosen one."""
        key = mode, alone, native.pinned if isa is None else isa, native.own_threads
        found = self.calls.get(key)
        if found is None:
            shared = None if alone or self.shared is None else (self.shared.w13, self.shared.w2)
            found = self.calls[key] = ExpertsCall(native, self.w13, self.w2, shared, mode, isa)
        return found

    def sums(
        self, native: Native, mode: ExpertsMode, x_RH: Tensor, scales_RX: Tensor | None, ids_RK: Tensor,
        weights_RK: Tensor | None, out_RH: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the sums of an `ExpertsCall` with these weights, (R, H)."""
        return self.call(native, mode)(x_RH, scales_RX, ids_RK, weights_RK, out_RH, torch.get_num_threads())

    @property
    def num_slots(self) -> int:
        return self.w13.num_slots

    @property
    def gated(self) -> bool:
        return self.w13.layout.gated

    @property
    def num_bytes(self) -> int:
        return self.w13.num_bytes + self.w2.num_bytes

    def slot(self, index: int) -> SlotWeights:
        """One expert in its stored format; a copy."""
        first = self._matrices(self.w13, index)
        down = self._matrices(self.w2, index)[0]
        b13, b2 = (None if matrix.bias_LX is None else matrix.bias_LX[index] for matrix in (self.w13, self.w2))
        biases = slot_biases(b13, b2, gated=self.gated)
        return SlotWeights(first[0] if self.gated else None, first[-1], down, biases)

    def _matrices(self, packed: PackedMatrix, index: int) -> list[QuantTensor]:
        scheme = self.scheme if packed is self.w13 or self.down_scheme is None else self.down_scheme
        values = unpack_slot(native_kernels(), packed, index)
        scales = self._scales(packed, scheme, index)
        above: list[Tensor | None] = [None] * len(values)
        zeros = unpack_zeros(packed, index) or above
        if scheme.has_global_scale:
            above = [factors[:1] for factors in unpack_output_scales(packed, index)]
        parts = zip(values, scales, above, zeros, strict=True)
        return [QuantTensor(v, s, scheme, a, z) for v, s, a, z in parts]

    def _scales(self, packed: PackedMatrix, scheme: QuantScheme, index: int) -> list[Tensor | None]:
        layout = packed.layout
        if layout.by_output:
            whole = scheme.block == (WHOLE, WHOLE)
            return [factors[:1] if whole else factors for factors in unpack_output_scales(packed, index)]
        found = unpack_scales(packed, index)
        if not found:
            return [None] * (2 if layout.gated else 1)
        return [
            each if layout.format.group or layout.parts else each[:: BLOCK // TILE_ROWS].contiguous() for each in found
        ]


def stored_as(weights: Weights) -> tuple[tuple[QuantScheme, torch.dtype], tuple[QuantScheme, torch.dtype]]:
    """The scheme and the dtype of the scales of w13 and of w2, from the first expert; bf16 without scales."""
    if weights.num_slots == 0:
        return (weights.scheme, torch.bfloat16), (weights.scheme, torch.bfloat16)
    slot = weights.slots[0] if isinstance(weights, MappedExpertWeights) else weights.slot(0)
    first, second = (
        (q.scheme, torch.bfloat16 if q.scales is None else q.scales.dtype) for q in (slot.up_IH, slot.down_HI)
    )
    return first, second


def pack_matrix(
    packed: PackedMatrix, index: int, parts: list[QuantTensor], name: str, native: Native | None = None
) -> None:
    """Pack one projection of one expert: gate and up, or one matrix alone."""
    scales = [part.scales for part in parts if part.scales is not None]
    if not packed.layout.format.group and packed.layout.parts is None:
        scales = [each.to(torch.float32) for each in scales]
    pack_slot(
        native or native_kernels(),
        packed,
        index,
        tuple(part.values for part in parts),
        tuple(scales),
        above=tuple(part.global_scale for part in parts if part.global_scale is not None),
        zeros=tuple(part.zeros for part in parts if part.zeros is not None),
        threads=torch.get_num_threads(),
        name=f"{name} of slot {index}",
    )
