"""A small layer in packed form and what it must compute, in f64 from the very same weights."""

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

from moe_mk.kernels.native.experts_mode import Activation, ExpertsMode, Rounding
from moe_mk.kernels.native.layout import Format, MatrixLayout
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.native.packed import PackedMatrix, allocate, pack_slot
from moe_mk.kernels.native.prepared import RouteCall, RouteMode
from moe_mk.quant import (
    BF16,
    FP8_CHANNEL,
    FP8_TENSOR,
    INT8_CHANNEL,
    MXFP4,
    MXFP8,
    NVFP4,
    FP8_128x128,
    INT8_128x128,
    QuantScheme,
    QuantTensor,
)

FP8 = torch.float8_e4m3fn


class Storage(Enum):
    """Every way to store weights: the packed format, and the scheme they come in."""

    BF16 = (Format.BF16, BF16)
    FP8 = (Format.FP8, FP8_128x128)
    FP8_CHANNEL = (Format.FP8, FP8_CHANNEL)
    FP8_TENSOR = (Format.FP8, FP8_TENSOR)
    INT8 = (Format.INT8, INT8_128x128)
    INT8_CHANNEL = (Format.INT8, INT8_CHANNEL)
    MXFP8 = (Format.MXFP8, MXFP8)
    MXFP4 = (Format.MXFP4, MXFP4)
    NVFP4 = (Format.NVFP4, NVFP4)

    @property
    def format(self) -> Format:
        return self.value[0]

    @property
    def scheme(self) -> QuantScheme:
        return self.value[1]

    @property
    def by_output(self) -> bool:
        return self in (Storage.FP8_CHANNEL, Storage.FP8_TENSOR, Storage.INT8_CHANNEL)


def spread(weight: Tensor, scales: Tensor | None) -> Tensor:
    if scales is None:
        return weight.double()
    wide = scales.double().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return weight.double() * wide[..., : weight.shape[-2], : weight.shape[-1]]


def through_fp8(x: Tensor, rounding: Rounding = Rounding.FP8) -> Tensor:
    """Values after 1x128 quantisation, f64; scales as they are, or the powers of two above them."""
    groups = functional.pad(x.float(), (0, -x.shape[1] % 128)).view(x.shape[0], -1, 128)
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    if rounding is Rounding.FP8_UE8M0:
        scales = scales.double().log2().ceil().exp2().float()
    values = (groups / scales).clamp(-448, 448).to(FP8).double() * scales.double()
    return values.view(x.shape[0], -1)[:, : x.shape[1]]


def activate(mode: ExpertsMode, gate: Tensor, up: Tensor | None) -> Tensor:
    if mode.activation is Activation.SITU:
        assert up is not None
        soft = mode.alpha * torch.tanh(gate / mode.alpha) * torch.sigmoid(gate)
        return soft * (mode.limit * torch.tanh(up / mode.limit) if mode.limit > 0 else up)
    if mode.activation is Activation.SILU_LIMIT:
        gate = functional.silu(gate)
    if mode.limit > 0:
        gate = gate.clamp(max=mode.limit)
        up = None if up is None else up.clamp(-mode.limit, mode.limit)
    kinds = {
        Activation.SILU: functional.silu,
        Activation.GELU_ERF: functional.gelu,
        Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
        Activation.RELU2: lambda x: functional.relu(x).square(),
        Activation.SWIGLU_OAI: lambda x: x * torch.sigmoid(mode.alpha * x),
        Activation.SILU_LIMIT: lambda x: x,
    }
    acted = kinds[mode.activation](gate)
    if up is None:
        return acted
    return acted * (up + 1 if mode.activation is Activation.SWIGLU_OAI else up)


@dataclass
class Layer:
    """Experts of a layer: plain weights (L first) and their packed form."""

    slots: int
    hidden: int
    inter: int
    storage: Storage = Storage.FP8
    gated: bool = True
    biases: bool = False
    seed: int = 0
    parts: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[str, Tensor | None] = field(default_factory=dict)
    above: dict[str, Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        g = torch.Generator("cpu").manual_seed(self.seed)
        shapes = {"gate": (self.inter, self.hidden), "up": (self.inter, self.hidden), "down": (self.hidden, self.inter)}
        for name, (rows, columns) in shapes.items():
            w = torch.randn(self.slots, rows, columns, generator=g) * columns**-0.5
            self.above[name] = None
            if self.storage is Storage.FP8:  # scales that are no powers of two and unlike each other
                grid = torch.rand(self.slots, -(-rows // 128), -(-columns // 128), generator=g) + 0.5
                self.parts[name], self.scales[name] = (w * 40).to(FP8), grid / 40
            else:
                q = self.storage.scheme.quantize(w)
                self.parts[name], self.scales[name], self.above[name] = q.values, q.scales, q.global_scale
            self.parts[name + "_bias"] = torch.randn(self.slots, rows, generator=g) * 0.3

    def layouts(self) -> tuple[MatrixLayout, MatrixLayout]:
        kind = {"format": self.storage.format, "by_output": self.storage.by_output}
        return MatrixLayout(self.inter, self.hidden, self.gated, **kind), MatrixLayout(
            self.hidden, self.inter, False, **kind
        )

    def pack(self, native: Native) -> tuple[PackedMatrix, PackedMatrix]:
        names = ("gate", "up") if self.gated else ("gate",)
        bias13 = torch.cat([self.parts[n + "_bias"] for n in names], 1) if self.biases else None
        layout13, layout2 = self.layouts()
        w13 = allocate(native, layout13, self.slots, bias13)
        w2 = allocate(native, layout2, self.slots, self.parts["down_bias"] if self.biases else None)
        for slot in range(self.slots):
            for packed, parts in ((w13, names), (w2, ("down",))):
                grids, above = ([held[n] for n in parts] for held in (self.scales, self.above))
                pack_slot(
                    native, packed, slot, tuple(self.parts[n][slot] for n in parts),
                    tuple(s[slot] for s in grids if s is not None),
                    above=tuple(a[slot] for a in above if a is not None),
                )  # fmt: skip
        return w13, w2

    def weight(self, name: str, slot: int) -> Tensor:
        scales, above = self.scales[name], self.above[name]
        if self.storage is Storage.FP8:
            return spread(self.parts[name][slot], None if scales is None else scales[slot])
        q = QuantTensor(self.parts[name], scales, self.storage.scheme, above)[slot]
        return q.dequantize(torch.float32).double()

    def reference(self, x: Tensor, ids: Tensor, weights: Tensor | None, mode: ExpertsMode) -> Tensor:
        out = torch.zeros(x.shape[0], self.hidden, dtype=torch.float64)
        for slot in range(self.slots):
            rows, places = (ids == slot).nonzero(as_tuple=True)
            if rows.numel() == 0:
                continue
            a = through_fp8(x[rows], mode.quantize) if mode.quantize else x[rows].double()
            first, second = (self.product(a, n, slot) for n in ("gate", "up"))
            h = activate(mode, first, second if self.gated else None)
            if mode.quantize:
                h = through_fp8(h.bfloat16(), mode.quantize)
            y = self.product(h, "down", slot)
            factor = torch.ones(rows.numel(), 1) if weights is None else weights[rows, places, None]
            out.index_add_(0, rows, y * factor.double())
        return out

    def product(self, a: Tensor, name: str, slot: int) -> Tensor:
        y = a @ self.weight(name, slot).T
        return y + self.parts[name + "_bias"][slot].double() if self.biases else y


def spaced(x: Tensor, *, columns: bool) -> Tensor:
    """The same matrix in memory with ones between its columns, or behind its rows."""
    rows, wide = x.shape
    view = torch.ones((rows, 2 * wide), dtype=torch.float32).to(x.dtype)
    view = view[:, ::2] if columns else view[:, :wide]
    return view.copy_(x)


def batch(rows: int, hidden: int, slots: int, top_k: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids (each row's differ, about one in five goes nowhere), weights."""
    g = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(rows, hidden, generator=g).bfloat16()
    ids = (
        torch.stack([torch.randperm(slots, generator=g)[:top_k] for _ in range(rows)])
        if rows
        else torch.zeros(0, top_k)
    )
    ids = ids.to(torch.int32)
    ids[torch.rand(ids.shape, generator=g) < 0.2] = -1
    return x, ids, torch.rand(rows, top_k, generator=g)


def route(
    native: Native, x: Tensor, gate: Tensor, bias: Tensor | None, mode: RouteMode, threads: int = 1,
    isa: Isa | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return RouteCall(native, gate, bias, mode, isa)(x, threads)


def error(got: Tensor, wanted: Tensor) -> float:
    """L2 of the difference over L2 of what is wanted."""
    return ((got.double() - wanted).norm() / wanted.norm()).item()
