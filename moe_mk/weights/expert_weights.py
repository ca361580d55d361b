"""The weights of the experts of one rank, stacked or as views of the files of a checkpoint.

Both provide `slot(l)`: the matrices of one physical expert, in memory. A backend that needs another layout converts to
it in `relayout()` and sets `layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from moe_mk.errors import ConfigError, ShapeError, UnsupportedError
from moe_mk.quant.blocked import WHOLE, BlockedScheme
from moe_mk.quant.grouped import Grouped
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.quant.plain import Plain, plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.quant.wire import as_bytes
from moe_mk.registry import did_you_mean
from moe_mk.shapes import expect, expect_dense
from moe_mk.weights.completeness import expect_not_transposed
from moe_mk.weights.layer_spec import ORDERS, VALUE_DTYPES
from moe_mk.weights.packed_layouts import FLOATS
from moe_mk.weights.scan import Contents
from moe_mk.weights.slices import gate_and_up, halves_of
from moe_mk.weights.source import in_memory, is_mapped

CANONICAL = "canonical"
MAPPED = "mapped"


@dataclass(frozen=True)
class SlotBiases:
    """Biases of the three products of one expert, in a plain dtype."""

    gate_I: Tensor | None
    up_I: Tensor
    down_H: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(bias for bias in (self.gate_I, self.up_I, self.down_H) if bias is not None)

    def changed(self, change: Callable[[Tensor], Tensor]) -> SlotBiases:
        """Return the biases with a function applied to each."""
        return SlotBiases(None if self.gate_I is None else change(self.gate_I), change(self.up_I), change(self.down_H))


@dataclass(frozen=True)
class SlotWeights:
    """One physical expert: y = w2(act(gate(x)) * up(x)). An ungated expert has no gate."""

    gate_IH: QuantTensor | None
    """(I, H); None for an ungated expert."""
    up_IH: QuantTensor
    """(I, H)."""
    down_HI: QuantTensor
    """(H, I)."""
    biases: SlotBiases | None = None
    """None for experts without biases."""

    @property
    def matrices(self) -> dict[str, QuantTensor]:
        """The matrices that the expert has, by projection."""
        named = {"gate": self.gate_IH, "up": self.up_IH, "down": self.down_HI}
        return {projection: q for projection, q in named.items() if q is not None}

    def bias(self, projection: str) -> Tensor | None:
        """(I,) or (H,); None for an expert without biases, and for a gate that it does not have."""
        own = self.biases
        return None if own is None else {"gate": own.gate_I, "up": own.up_I, "down": own.down_H}[projection]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the expert: those of gate, up and down, then the biases."""
        return *(t for q in self.matrices.values() for t in q.tensors), *(self.biases.tensors if self.biases else ())

    def changed(self, change: Callable[[Tensor], Tensor]) -> SlotWeights:
        """Return the expert with a function applied to each of its tensors."""
        gate_IH = None if self.gate_IH is None else self.gate_IH.changed(change)
        biases = None if self.biases is None else self.biases.changed(change)
        return SlotWeights(gate_IH, self.up_IH.changed(change), self.down_HI.changed(change), biases)


@dataclass(frozen=True)
class ExpertWeights:
    """All experts of one rank in one stack: the canonical layout, or a backend's layout with its tag."""

    w13: QuantTensor
    """(L, 2I, H): gate rows, then up rows; (L, I, H) for ungated experts."""
    w2: QuantTensor
    """(L, H, I)."""
    layout: str = CANONICAL
    """"canonical", or the name that a backend's `relayout` gave."""
    gated: bool = True
    """Whether there is a gate projection."""

    @staticmethod
    def from_engine(
        w13: Tensor,
        w2: Tensor,
        *,
        quant: str = "",
        block: tuple[int, int] = (128, 128),
        w13_scale: Tensor | None = None,
        w2_scale: Tensor | None = None,
        w13_global_scale: Tensor | None = None,
        w2_global_scale: Tensor | None = None,
        w13_zeros: Tensor | None = None,
        w2_zeros: Tensor | None = None,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        order: str = "gate_up",
        gated: bool = True,
    ) -> ExpertWeights | MappedExpertWeights:
        """The experts of one rank as an engine holds them, already split over EP and TP ranks. Values are not copied.

        w13: (L, 2I, H), or (L, I, H) if not gated. w2: (L, H, I). I is this rank's slice. Four-bit values are stored
        two in a byte along the last axis, the even column in the low bits.
        quant: the name of the format, such as "fp8_block" or "mxfp4"; "" for weights without scales.
        block: (rows, columns) under one scale, of fp8_block and int8_block.
        w13_scale, w2_scale: (L, rows of blocks, columns of blocks); trailing axes of size 1 may be missing. Scales
        multiply. Gate and up each begin a block; formats with one scale a tensor have one (L, 1) or two (L, 2).
        w13_zeros, w2_zeros: of the shape of the scales: the code of zero in uint8, of int4_*_zp and int8_*_zp; the bias
        in the dtype of the scales, of int4_*_affine and int8_*_affine.
        w13_global_scale, w2_global_scale: f32 (L,), or (L, 2) for gate and up, of formats with a global scale.
        w13_bias, w2_bias: (L, 2I) and (L, H). Under TP, pass w2_bias on one rank and zeros on the others.
        order: of w13: "gate_up", "up_gate", or "interleaved" rows.
        Raises ShapeError naming the tensor, WeightError for values and scales that a checkpoint may not have, with the
        expert, ConfigError for an unknown format or order.
        """
        for name, tensor in tuple(locals().items()):
            if name not in ("quant", "block", "order", "gated") and (tensor is not None or name in ("w13", "w2")):
                expect_dense(name, tensor)
        scheme = _scheme_of_engine(quant, block, w2, w2_scale)
        _expect_order(order, scheme)
        halves = 2 if gated else 1
        expect_not_transposed(w13, w2, halves, scheme.logical_columns)
        slots, hidden = int(w2.shape[0]), int(w2.shape[1]) if w2.dim() == 3 else -1
        inner = scheme.logical_columns(int(w2.shape[-1]))
        down = _stack_of_engine("w2", (w2, w2_scale, w2_global_scale, w2_zeros), scheme, (slots, hidden, inner), 1)
        given = (w13, w13_scale, w13_global_scale, w13_zeros)
        first = _stack_of_engine("w13", given, scheme, (slots, inner, hidden), halves)
        for name, bias, width in (("w13_bias", w13_bias, halves * inner), ("w2_bias", w2_bias, hidden)):
            if bias is not None:
                expect(name, bias, "L I", FLOATS, w2.device, L=slots, I=width)
        if (w13_bias is None) != (w2_bias is None):
            raise ShapeError("w13_bias and w2_bias belong together; pass zeros for the one that does not exist")
        contents = Contents(stacked=True)
        for name, q, parts in (("w13", first, halves), ("w2", down, 1)):
            contents.note(q, name, f"{name}_scale", f"{name}_global_scale", parts)
        contents.values += [(n, b) for n, b in (("w13_bias", w13_bias), ("w2_bias", w2_bias)) if b is not None]
        if not w2.is_meta:
            contents.expect_valid("weights cannot be used")
        together = not isinstance(scheme, BlockedScheme) or scheme.rows == WHOLE or inner % scheme.rows == 0
        if w13_bias is None and (not gated or (order == "gate_up" and together)):
            return ExpertWeights(first, down, gated=gated)
        found = []
        for index in range(slots):
            gate, up = gate_and_up(first[index], order) if gated else (None, first[index])
            biases = None
            if w13_bias is not None and w2_bias is not None:
                gate_I, up_I = halves_of(w13_bias[index], order) if gated else (None, w13_bias[index])
                biases = SlotBiases(gate_I, up_I, w2_bias[index])
            found.append(SlotWeights(gate, up, down[index], biases))
        return MappedExpertWeights(tuple(found), scheme)

    @property
    def num_slots(self) -> int:
        return self.w13.shape[0]

    @property
    def scheme(self) -> QuantScheme:
        return self.w13.scheme

    @property
    def num_bytes(self) -> int:
        return self.w13.num_bytes + self.w2.num_bytes

    def slot(self, index: int) -> SlotWeights:
        """The matrices of one physical expert, as views. Only the canonical layout can be read this way."""
        assert self.layout == CANONICAL, f"layout {self.layout!r} is private to the backend that made it"
        w13, w2 = self.w13[index], self.w2[index]
        return SlotWeights(*gate_and_up(w13, "gate_up"), w2) if self.gated else SlotWeights(None, w13, w2)


@dataclass(frozen=True)
class MappedExpertWeights:
    """Experts in the checkpoint's format, each matrix a view of its file where its format allows it."""

    slots: Sequence[SlotWeights]
    scheme: QuantScheme
    layout: str = MAPPED
    passing: bool = False
    """Whether they are the placement of a live layer until the next one: files made of them are not kept."""

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    @property
    def gated(self) -> bool:
        return any(slot.gate_IH is not None for slot in self.slots)

    @property
    def num_bytes(self) -> int:
        """Bytes of values and scales behind the views; 0 once they were released."""
        return 0 if isinstance(self.slots, ReleasedSlots) else sum(slot.num_bytes for slot in self.slots)

    @cached_property
    def of_file(self) -> bool:
        """Whether a matrix is a view of a file."""
        return any(is_mapped(tensor) for slot in self.slots for tensor in slot.tensors)

    def slot(self, index: int) -> SlotWeights:
        """The matrices of one physical expert; views of a file are read. Raises WeightError if it was changed."""
        return self.slots[index].changed(in_memory) if self.of_file else self.slots[index]

    def changed(self, change: Callable[[Tensor], Tensor]) -> MappedExpertWeights:
        """Return the weights with a function applied to each tensor; replicas stay one."""
        made = {id(slot): slot.changed(change) for slot in self.slots}
        return replace(self, slots=tuple(made[id(slot)] for slot in self.slots))


@dataclass(frozen=True)
class ReleasedSlots(Sequence[SlotWeights]):
    """In place of experts that were freed, because a backend holds them in a layout of its own."""

    whose: str
    """The owner, for messages."""
    num_slots: int

    def __len__(self) -> int:
        return self.num_slots

    def __getitem__(self, index: object) -> NoReturn:
        """Raise UnsupportedError: mapped weights have no stacked tensor."""
        raise UnsupportedError(
            f"the experts of {self.whose} were released in the format of the checkpoint",
            ["load them again to move experts, or to copy or pickle the layer"],
        )


class Weights(Protocol):
    """The interface of every layout of a rank's experts; backends check the class of the layout they read."""

    @property
    def layout(self) -> str:
        """The tag of the layout."""

    @property
    def num_slots(self) -> int:
        """L, the physical experts of this rank."""

    @property
    def scheme(self) -> QuantScheme:
        """How all matrices are quantised."""

    @property
    def gated(self) -> bool:
        """Whether the experts have a gate projection."""

    @property
    def num_bytes(self) -> int:
        """Bytes of values and scales."""

    def slot(self, index: int) -> SlotWeights:
        """The matrices of one physical expert."""


def expect_one_width(weights: Weights, who: str) -> None:
    """Raise UnsupportedError if experts have different intermediate sizes. who: the backend, for the message.

    Backends that compute expert by expert (reference, torch_cpu) support them.
    """
    widths = {slot.up_IH.shape[0] for slot in weights.slots} if isinstance(weights, MappedExpertWeights) else ()
    if len(widths) > 1:
        text = f"experts have intermediate sizes {', '.join(map(str, sorted(widths)))}, {who} holds equal ones"
        raise UnsupportedError("the experts cannot be laid out", [f"{text}; use experts='reference' or 'torch_cpu'"])


def stacked_biases(weights: Weights) -> tuple[Tensor | None, Tensor | None]:
    """Biases of w13 (gate's, then up's) and of w2 in f32, one row a slot; None for experts without."""
    slots = weights.slots if isinstance(weights, MappedExpertWeights) else ()
    if not (biases := [slot.biases for slot in slots if slot.biases is not None]):
        return None, None
    assert len(biases) == len(slots), "either every expert of a layer has biases or none"
    first = [torch.cat([b.up_I] if b.gate_I is None else [b.gate_I, b.up_I]) for b in biases]
    return torch.stack(first).to(torch.float32), torch.stack([b.down_H for b in biases]).to(torch.float32)


def slot_biases(b13_X: Tensor | None, b2_H: Tensor | None, *, gated: bool) -> SlotBiases | None:
    """Copies of the biases of one expert, from those of w13 (gate's, then up's) and of w2; None without."""
    if b13_X is None or b2_H is None:
        return None
    halves = b13_X.clone().chunk(1 + gated)
    return SlotBiases(halves[0] if gated else None, halves[-1], b2_H.clone())


def digest(weights: Weights) -> str:
    """SHA-256 of all experts in their stored format, as hex: the same in whatever layout a backend holds them.

    Reads one expert at a time. Raises WeightError where a backend has released what it would be undone from.
    """
    total = sha256(f"{weights.scheme.name} {weights.num_slots}".encode())
    for index in range(weights.num_slots):
        for tensor in weights.slot(index).tensors:
            total.update(as_bytes(tensor if tensor.dim() == 2 else tensor[None]).cpu().numpy().data)
    return total.hexdigest()


def on_device(weights: Weights, device: torch.device) -> Weights:
    """Move all tensors of weights to a device; tensors that are there already are not copied."""
    if isinstance(weights, ExpertWeights):
        return replace(weights, w13=weights.w13.to(device), w2=weights.w2.to(device))
    if isinstance(weights, MappedExpertWeights) and device.type != "cpu":
        return weights.changed(lambda part: in_memory(part).to(device))
    return weights


def _expect_order(order: str, scheme: QuantScheme) -> None:
    """Raise ConfigError unless gate and up can be stored in one tensor in that order."""
    if order not in ORDERS:
        raise ConfigError(f"order {order!r} is unknown{did_you_mean(order, ORDERS)}")
    if order == "interleaved" and scheme.block is not None and scheme.block[0] not in (1, WHOLE):
        raise ConfigError(f"rows of gate and up alternate, but {scheme.block[0]} rows of {scheme.name} share a scale")


def _scheme_of_engine(quant: str, block: tuple[int, int], values: Tensor, scales: Tensor | None) -> QuantScheme:
    if not quant:
        if values.dtype not in FLOATS:
            raise ShapeError(f"w2 has dtype {values.dtype}; state its format with quant=, for instance 'fp8_block'")
        return plain(values.dtype)
    ue8m0 = quant == "fp8_block" and scales is not None and scales.dtype is torch.float8_e8m0fnu
    return scheme_of_kind(quant, block, ue8m0=ue8m0)


def _stack_of_engine(
    name: str,
    given: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    scheme: QuantScheme,
    sizes: tuple[int, int, int],
    halves: int,
) -> QuantTensor:
    """Checked values and scales of a stack of (rows, columns), `halves` of them above each other, as views."""
    values, scales, above, zeros = given
    slots, rows, columns = sizes
    letters = "L H I" if name == "w2" else "L R H"
    shape = (slots, halves * rows, scheme.held_columns(columns))
    dtypes = (scheme.dtype,) if isinstance(scheme, Plain) else VALUE_DTYPES[torch.uint8]
    if isinstance(scheme, BlockedScheme):
        dtypes = VALUE_DTYPES[scheme.element.dtype]
    expect(name, values, letters, dtypes, None, **dict(zip(letters.split(), shape, strict=True)))
    values = values.detach().resolve_neg()
    if not isinstance(scheme, BlockedScheme):
        if scales is not None or above is not None:
            without = "a format; state it with quant=" if isinstance(scheme, Plain) else "separate scales"
            raise ShapeError(f"{name} has a scale but {values.dtype} values without {without}")
        return QuantTensor(values.view(torch.uint8) if values.dtype is torch.int8 else values, None, scheme)
    tall, wide = scheme.scale_shape(rows, columns)
    talls = [halves * tall] if scheme.rows != WHOLE or halves == 1 else [halves, 1]
    scales = _scales_of_engine(f"{name}_scale", scales, scheme.stored_scale_dtypes, slots, talls, wide)
    if scales.dtype is torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    zeros = _zeros_of_engine(f"{name}_zeros", zeros, scales, scheme)
    if scales.dtype not in scheme.scale_dtypes:
        scales = scales.to(torch.float32).to(scheme.scale_dtype)
    if scheme.has_global_scale:
        above = _scales_of_engine(f"{name}_global_scale", above, (torch.float32,), slots, [halves, 1], 1)
    elif above is not None:
        raise ShapeError(f"{scheme.name} has no global scale, but {name}_global_scale is given")
    return QuantTensor(values.view(scheme.element.dtype), scales, scheme, above, zeros)


def _zeros_of_engine(name: str, zeros: Tensor | None, scales: Tensor, scheme: BlockedScheme) -> Tensor | None:
    """Checked zero points of the shape of the scales. Raises ShapeError for missing, unwanted and impossible ones."""
    wanted = isinstance(scheme, Grouped) and not scheme.is_symmetric
    if (zeros is not None) != wanted:
        given, has = ("missing", "has") if wanted else ("given", "has no")
        what = "biases" if isinstance(scheme, Grouped) and scheme.has_biases else "zero points"
        raise ShapeError(f"{name} is {given}, and {scheme.name} {has} {what}")
    if zeros is None:
        return None
    assert isinstance(scheme, Grouped)
    dtype = scales.dtype if scheme.has_biases else torch.uint8
    if zeros.dtype is not dtype or zeros.numel() != scales.numel():
        raise ShapeError(
            f"{name} is {zeros.dtype} {list(zeros.shape)}, expected {dtype} {list(scales.shape)}, one for each scale"
        )
    if scheme.has_zeros and not zeros.is_meta and zeros.numel() and int(zeros.amax()) >= 2**scheme.bits:
        raise ShapeError(f"{name} holds {int(zeros.amax())}, zero points of {scheme.name} are below {2**scheme.bits}")
    return zeros.detach().reshape(scales.shape)


def _scales_of_engine(
    name: str, scales: Tensor | None, dtypes: tuple[torch.dtype, ...], slots: int, talls: Sequence[int], wide: int
) -> Tensor:
    """(L, tall, wide) scales, from a shape that may lack axes of size 1."""
    wanted = [[slots, tall, wide] for tall in talls]
    if scales is None:
        raise ShapeError(f"{name} is missing, expected {' or '.join(map(str, wanted))}")
    for shape in wanted:
        shorter = [shape] + ([shape[:2]] if wide == 1 else []) + ([shape[:1]] if wide == shape[1] == 1 else [])
        if list(scales.shape) in shorter:
            if scales.dtype not in dtypes:
                raise ShapeError(f"{name} has dtype {scales.dtype}, expected {' or '.join(map(str, dtypes))}")
            return scales.detach().reshape(shape)
    raise ShapeError(f"{name} is {list(scales.shape)}, expected {' or '.join(map(str, wanted))}")
