"""Experts by FlashInfer's TRT-LLM kernels for Blackwell: one call from routed rows to weighted sums.

Use it on sm_100 for FP8 blocks, MXFP8, NVFP4, MXFP4 (with MXFP8 or bf16 rows) and bf16. The adapter uses the
entry points for routed tokens, which work with any router and transport; the library sorts rows and computes both
products, the activation, and the weighted sum. Read at FlashInfer 0.7.0 to 0.7.2 (github.com/flashinfer-ai/
flashinfer, flashinfer/fused_moe/core.py and csrc/trtllm_fused_moe_kernel_launcher.cu).

Weights lie up before gate, with rows shuffled for the tensor cores; the layout is invertible.

    type         rows of w13              shuffled by   columns                  scales
    bf16         up and gate alternate    32            128 bytes by 128 bytes   none
    fp8_block    up rows, then gate's     16            128 bytes by 128 bytes   f32, a block each, not shuffled
    mxfp8        up and gate alternate    32            as they are              rows shuffled alike, in tiles
    nvfp4        up and gate alternate    32            as they are              rows shuffled alike, in tiles
    mxfp4        up and gate alternate    32            as they are              rows shuffled alike, in tiles

Shuffled by 32: of every 32 rows, (0 4 8 ... 28) (1 5 ... 29) (2 ...) (3 ...); by 16: (0 2 4 ... 14) (1 3 ... 15).
w2 is shuffled in the same way, without halves. MXFP4 matrices are padded with zeros to whole tiles (gpt-oss: 2,880 to
3,072). Only bytes are moved, so `slot` restores every matrix bit for bit.
Source: flashinfer-ai/flashinfer, flashinfer/fused_moe/prepare.py at 0.7.2, and its tests for blocks of FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_mk.config.problem import Problem, Reason
from moe_mk.errors import LibraryMissing, UnsupportedError
from moe_mk.experts.base import EXPERTS, ExpertsContext, ExpertsTraits, FusedExperts
from moe_mk.experts.flashinfer.cutlass import Served, above, reasons_of_served, summed_rows
from moe_mk.external.library import installed_version, load
from moe_mk.quant.layouts import swizzled, unswizzled
from moe_mk.quant.nvfp4 import Nvfp4
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.tokens import ExpertOutput, OutputStage, RowTokens, Tokens
from moe_mk.weights.expert_weights import SlotBiases, SlotWeights, Weights, stacked_biases
from moe_mk.weights.scan import Progress
from moe_mk.weights.slices import narrow_columns, narrow_rows

LAYOUT = "flashinfer_trtllm"
LANES = 8
"""Rows of a stripe that are contiguous after shuffling."""
PANEL = 128
"""Bytes of a row in one column panel."""
FILL = 256
"""Sizes are padded to multiples of this, which every tile of the library divides, as in vLLM 0.33."""
ONE = 127
"""1.0 as an E8M0 byte."""


@dataclass(frozen=True)
class Order:
    """The byte order of a format."""

    alternate: bool
    """Whether rows of up and gate alternate; else up's come first, then gate's."""
    stripe: int
    """Number of rows of one shuffle."""
    panels: bool = False
    """Whether columns are split into contiguous panels."""
    tiled: bool = False
    """Whether scales are shuffled with their rows and stored in tiles."""
    fills: bool = False
    """Whether sizes are padded to whole tiles."""

    def room(self, size: int) -> int:
        return -(-size // FILL) * FILL if self.fills and size % PANEL else size


ORDERS: Mapping[str, Order] = {
    "plain": Order(alternate=True, stripe=32, panels=True),
    "fp8_block": Order(alternate=False, stripe=16, panels=True),
    "mxfp8": Order(alternate=True, stripe=32, tiled=True),
    "nvfp4": Order(alternate=True, stripe=32, tiled=True),
    "mxfp4": Order(alternate=True, stripe=32, tiled=True, fills=True),
}
"""By value of `quant.kind`."""


@dataclass(frozen=True)
class Stack:
    """One projection of all experts, as the library takes it."""

    values: Tensor
    scales: Tensor | None
    whole: Tensor | None
    """(L,) f32, the global scales; None if the format has none."""
    bias: Tensor | None
    """(L, rows) f32, in the order of the rows."""

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.values, self.scales, self.whole, self.bias) if t is not None)


@dataclass(frozen=True)
class TrtllmWeights:
    """The experts of one rank in the library's order."""

    w13: Stack
    w2: Stack
    scheme: QuantScheme
    kind: str
    shape: tuple[int, int]
    """(I, H)."""
    layout: str = LAYOUT
    gated: bool = True

    @property
    def room(self) -> tuple[int, int]:
        """The padded (I, H)."""
        order, (inner, hidden) = ORDERS[self.kind], self.shape
        return order.room(inner), order.room(hidden)

    @property
    def num_slots(self) -> int:
        return self.w13.values.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.w13.num_bytes + self.w2.num_bytes

    def slot(self, index: int) -> SlotWeights:
        """One expert in its stored format, bit for bit; a copy."""
        (inner, hidden), (tall, wide), order = self.shape, self.room, ORDERS[self.kind]
        both = _restored(self.w13, index, (2 * tall, wide), self.scheme, order, halves=True)
        down = _restored(self.w2, index, (wide, tall), self.scheme, order, halves=False)
        up, gate = (narrow_columns(narrow_rows(both, start, inner), 0, hidden) for start in (0, tall))
        down = narrow_columns(narrow_rows(down, 0, hidden), 0, inner)
        if self.w13.bias is None or self.w2.bias is None:
            return SlotWeights(gate, up, down)
        b13 = in_order(self.w13.bias[index, :, None], order, halves=True)[:, 0]
        b2 = in_order(self.w2.bias[index, :, None], order, halves=False)[:hidden, 0]
        return SlotWeights(gate, up, down, SlotBiases(b13[tall : tall + inner], b13[:inner], b2))


def shuffled_weights(weights: Weights, kind: str, context: ExpertsContext) -> TrtllmWeights:
    """Copy every expert in the library's order. Raises UnsupportedError for experts without a gate."""
    if not weights.gated:
        raise UnsupportedError(
            "flashinfer_trtllm cannot compute experts without a gate", ["use experts='flashinfer_cutlass'"]
        )
    slots, device, order = [weights.slot(index) for index in range(weights.num_slots)], context.device, ORDERS[kind]
    shape = (slots[0].up_IH.shape[0], slots[0].up_IH.shape[1])
    tall, wide = order.room(shape[0]), order.room(shape[1])
    first = [
        above([filled(q, tall, wide) for q in (s.up_IH, s.gate_IH) if q is not None], index).to(device)
        for index, s in enumerate(slots)
    ]
    second = [filled(s.down_HI, wide, tall).to(device) for s in slots]
    b13, b2 = stacked_biases(weights)
    if b13 is not None and b2 is not None:
        gate, up = (pad(half, (0, tall - shape[0])) for half in b13.chunk(2, dim=1))
        b13, b2 = torch.cat([up, gate], dim=1), pad(b2, (0, wide - shape[1]))
    return TrtllmWeights(
        _stack(first, b13, order, device, halves=True), _stack(second, b2, order, device, halves=False),
        weights.scheme, kind, shape,
    )  # fmt: skip


def filled(q: QuantTensor, rows: int, columns: int) -> QuantTensor:
    """Rows and columns of MXFP4 or MXFP8 padded with zeros; other formats need no padding."""
    down, across = rows - q.shape[0], columns - q.shape[1]
    if not down and not across:
        return q
    assert q.scales is not None and q.scheme.block is not None and q.global_scale is None
    groups = -(-columns // q.scheme.block[1]) - q.scales.shape[1]
    values = pad(q.values.view(torch.uint8), (0, across // q.scheme.per_byte, 0, down)).view(q.values.dtype)
    scales = pad(q.scales.view(torch.uint8), (0, groups, 0, down), value=ONE).view(q.scales.dtype)
    return replace(q, values=values, scales=scales)


def out_of_order(rows: Tensor, order: Order, *, halves: bool) -> Tensor:
    """Rows of (M, B) in the library's order. halves: whether they are up rows, then gate rows."""
    if halves and order.alternate:
        rows = torch.stack(rows.chunk(2), dim=1).flatten(0, 1)
    stripes = rows.reshape(-1, LANES, order.stripe // LANES, rows.shape[1])
    return stripes.transpose(1, 2).reshape(rows.shape)


def in_order(rows: Tensor, order: Order, *, halves: bool) -> Tensor:
    """The inverse of `out_of_order`."""
    stripes = rows.reshape(-1, order.stripe // LANES, LANES, rows.shape[1])
    rows = stripes.transpose(1, 2).reshape(rows.shape)
    return torch.cat([rows[0::2], rows[1::2]]) if halves and order.alternate else rows


def _stack(
    matrices: list[QuantTensor], bias: Tensor | None, order: Order, device: torch.device, *, halves: bool
) -> Stack:
    values = torch.stack([_values(q, order, halves=halves) for q in matrices])
    scales = [_scales(q, order, halves=halves) for q in matrices if q.scales is not None]
    whole = [q.global_scale.reshape(-1)[0] for q in matrices if q.global_scale is not None]
    if bias is not None:
        bias = torch.stack([out_of_order(row[:, None], order, halves=halves)[:, 0] for row in bias.to(device)])
    return Stack(
        values.view(matrices[0].values.dtype), torch.stack(scales) if scales else None,
        torch.stack(whole).to(torch.float32) if whole else None, bias,
    )  # fmt: skip


def _values(q: QuantTensor, order: Order, *, halves: bool) -> Tensor:
    octets = out_of_order(q.values.contiguous().view(torch.uint8), order, halves=halves)
    return octets.reshape(len(octets), -1, PANEL).transpose(0, 1).contiguous() if order.panels else octets


def _scales(q: QuantTensor, order: Order, *, halves: bool) -> Tensor:
    """f32 for blocks; bytes in tiles for groups, in a tensor of the shape they had."""
    assert q.scales is not None
    if not order.tiled:
        return q.scales.to(torch.float32).contiguous()
    mixed = out_of_order(q.scales.contiguous().view(torch.uint8), order, halves=halves)
    return swizzled(mixed).view(mixed.shape)


def _restored(
    stack: Stack, index: int, shape: tuple[int, int], scheme: QuantScheme, order: Order, *, halves: bool
) -> QuantTensor:
    rows, dtype = shape[0], stack.values.dtype
    octets = stack.values[index].view(torch.uint8)
    if order.panels:
        octets = octets.transpose(0, 1).reshape(rows, -1)
    values = in_order(octets, order, halves=halves).contiguous().view(dtype)
    whole = None if stack.whole is None else stack.whole[index].reshape(1, 1).clone()
    restored = QuantTensor(values, None, scheme, whole)
    if stack.scales is None:
        return restored
    held = stack.scales[index]
    scale_dtype = scheme.scale_dtype  # type: ignore[attr-defined]
    if not order.tiled:
        return replace(restored, scales=held.to(scale_dtype))
    octets = unswizzled(held.flatten(), rows, held.shape[1])
    return replace(restored, scales=in_order(octets, order, halves=halves).contiguous().view(scale_dtype))


BLACKWELL, NEWEST = (10, 0), (10, 9)
"""The library has kernels for sm_100, sm_103 and sm_107; built for sm_120 they fail at run time."""

SERVED: Mapping[str, Served] = {
    "plain": Served(("plain",), 128, BLACKWELL, NEWEST),
    "fp8_block": Served(("fp8",), 128, BLACKWELL, NEWEST),
    "mxfp8": Served(("mxfp8",), 128, BLACKWELL, NEWEST),
    "nvfp4": Served(("nvfp4",), 128, BLACKWELL, NEWEST),
    "mxfp4": Served(("mxfp8", "plain"), 32, BLACKWELL, NEWEST),
}
"""By value of `quant.kind`. MXFP4 experts are padded to multiples of the tile size."""

NO_BF16_ROWS = (10, 3)
"""Architectures that support MXFP4 weights only with MXFP8 rows (FlashInfer issue 1754)."""
MOST_CHOICES, MOST_EXPERTS = 32, 2048
"""Limits of the library's row sorting: experts per token, and experts of a call including the unassigned one."""
OLDEST_LIBRARY = (0, 7)
"""First version with separate ids and f32 weights; before, bf16 weights were in the lower halves of the ids."""


@EXPERTS.register("flashinfer_trtllm")
class FlashInferTrtllmExperts(FusedExperts):
    """One call for routed rows; weights are shuffled once, at load, and can be restored."""

    traits: ClassVar[ExpertsTraits] = ExpertsTraits(
        summary="FlashInfer's TRT-LLM experts on Blackwell: FP8 blocks, MXFP8, NVFP4, MXFP4 and bf16",
        kinds=frozenset({"cuda"}),
        min_arch=BLACKWELL,
        library="flashinfer",
        extra="pip install 'moe-mk[flashinfer]'",
        emits={RowTokens: OutputStage.REDUCED},
        weights=frozenset(SERVED),
        computes=("fp8", "nvfp4", "mxfp8", "plain"),
        activations=frozenset({"silu", "swiglu_limit", "swiglu_oai"}),
        biases=True,
        dtypes=frozenset({"bf16"}),
        block_sides=frozenset({128}),
        bandwidth=0.8,  # vLLM 0.33 prefers it on Blackwell
        compute=0.7,
        launches=6,
        per_expert=False,
        estimate="model; never run on a device",
        graph_safe=True,
        deterministic=False,  # not guaranteed by the library, whose tuner may select other kernels
    )

    def __init__(self, context: ExpertsContext) -> None:
        """Raises LibraryMissing if FlashInfer 0.7 is not installed; on a CPU the emulation is used, if allowed."""
        super().__init__(context)
        self.library: Any = load("flashinfer.fused_moe.core", allow_emulated=context.device.type == "cpu")
        _expect_recent(installed_version("flashinfer"))
        self.clamp = _clamp(context)

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Adds to the traits: activations and architectures of a format, sizes, choices, clamps and biases."""
        reasons, kind = super().reasons_against(problem), problem.config.model.quant.kind
        if kind in SERVED:
            is_old = any(reason.code == "arch" for reason in reasons)
            served = reasons_of_served(problem, SERVED[kind])
            reasons += [reason for reason in served if not is_old or reason.code != "arch"]
            reasons += _own_reasons(problem, kind)
        return reasons

    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> TrtllmWeights:
        """Up before gate, rows shuffled. Raises UnsupportedError for experts without a gate."""
        if isinstance(weights, TrtllmWeights):
            return weights
        kind = "plain" if isinstance(weights.scheme, Plain) else weights.scheme.family
        return shuffled_weights(weights, "fp8_block" if kind == "fp8" else kind, self.context)

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """One call; -1 is replaced by an expert of another rank, which the library ignores."""
        assert isinstance(tokens, RowTokens) and isinstance(weights, TrtllmWeights)
        return summed_rows(tokens, weights.room[1], lambda out: self._call(tokens, weights, out))

    def _call(self, tokens: RowTokens, weights: TrtllmWeights, out: Tensor) -> None:
        ids_RK = torch.where(tokens.ids_RK < 0, weights.num_slots, tokens.ids_RK).to(torch.int32).contiguous()
        routing = (ids_RK, tokens.weights_RK.to(torch.float32).contiguous())
        common = self._common(weights, top_k=ids_RK.shape[1]) | {"output": out}
        w13, w2, core = weights.w13, weights.w2, self.library
        if weights.kind == "plain":
            x = tokens.x_RH.dequantize(torch.bfloat16).contiguous()
            layout = int(core.WeightLayout.BlockMajorK)
            core.trtllm_bf16_routed_moe(
                routing, x, w13.values, w2.values, use_shuffled_weight=True, weight_layout=layout, **common
            )
            return
        x, scales = self._input(tokens.x_RH, weights)
        if weights.kind in ("fp8_block", "mxfp8"):
            layout = core.WeightLayout.BlockMajorK if ORDERS[weights.kind].panels else core.WeightLayout.MajorK
            types = core.Fp8QuantizationType
            format = types.DeepSeekFp8 if weights.kind == "fp8_block" else types.MxFp8
            core.trtllm_fp8_block_scale_routed_moe(
                routing, None, x, scales, w13.values, w13.scales, w2.values, w2.scales, use_shuffled_weight=True,
                fp8_quantization_type=format, weight_layout=int(layout), **common,
            )  # fmt: skip
            return
        assert w13.scales is not None and w2.scales is not None
        core.trtllm_fp4_block_scale_routed_moe(
            routing, None, x, scales, w13.values, w13.scales.view(torch.float8_e4m3fn), w13.bias,
            common.pop("gemm1_alpha"), common.pop("gemm1_beta"), common.pop("gemm1_clamp_limit"),
            w2.values, w2.scales.view(torch.float8_e4m3fn), w2.bias, *self._wholes(weights),
            hidden_states_scale_layout=core.SfLayout.layout_linear, **common,
        )  # fmt: skip

    def _common(self, weights: TrtllmWeights, *, top_k: int) -> dict[str, Any]:
        """Common arguments of all entry points: this rank's experts come first, then one unassigned expert."""
        slots = weights.num_slots
        return self.clamp | {
            "num_experts": -(-max(slots + 1, top_k + 1) // 4) * 4, "top_k": top_k, "n_group": None, "topk_group": None,
            "intermediate_size": weights.room[0], "local_expert_offset": 0, "local_num_experts": slots,
            "routed_scaling_factor": None, "routing_method_type": int(self.library.RoutingMethodType.Renormalize),
            "activation_type": int(self.library.ActivationType.Swiglu),
        }  # fmt: skip

    def _wholes(self, weights: TrtllmWeights) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Factors of up, gate and the output for each expert; None if groups have all scales.

        Hidden rows are quantised with the global scale of rows; only up is divided by it, because silu is not linear.
        """
        compute, first, second = self.context.compute, weights.w13.whole, weights.w2.whole
        if first is None or second is None:
            return None, None, None
        rows = compute.fixed_scale if isinstance(compute, Nvfp4) and compute.fixed_scale is not None else 1.0
        return first.clone(), first * rows, second * rows

    def _input(self, x: QuantTensor, weights: TrtllmWeights) -> tuple[Tensor, Tensor | None]:
        """Codes and group scales, or bf16 rows, as required by the format; codes are not quantised again."""
        compute, kind, wide = self.context.compute, weights.kind, weights.room[1]
        if isinstance(compute, Plain):
            plain = x.dequantize(torch.bfloat16)
            return pad(plain, (0, wide - plain.shape[1])).contiguous(), None
        q = x if x.scheme == compute else compute.quantize(x.dequantize(torch.bfloat16))
        q = filled(q, q.shape[0], wide)
        assert q.scales is not None
        values = q.values.contiguous()
        if kind == "fp8_block":  # a row of scales for each group of columns
            return values, q.scales.to(torch.float32).T.contiguous()
        octets = q.scales.contiguous()
        return values, octets.view(torch.uint8 if kind == "mxfp8" else torch.float8_e4m3fn)


def _clamp(context: ExpertsContext) -> dict[str, Tensor | None]:
    oai = context.activation == "swiglu_oai"
    asked = {
        "gemm1_alpha": context.swiglu_alpha if oai else None,
        "gemm1_beta": 1.0 if oai else None,
        "gemm1_clamp_limit": None if context.activation == "silu" else context.swiglu_limit,
    }
    shape = (context.num_slots,)
    return {
        name: None if value is None else torch.full(shape, value, dtype=torch.float32, device=context.device)
        for name, value in asked.items()
    }


def _own_reasons(problem: Problem, kind: str) -> list[Reason]:
    model, device, name, reasons = problem.config.model, problem.device, problem.weights.name, []
    plain = problem.activations is None or problem.config.kernel.activations == "plain"
    if kind == "mxfp4" and plain and device.kind == "cuda" and device.arch == NO_BF16_ROWS:
        fix = "" if problem.activations is None else "kernel.activations = auto"
        reasons.append(Reason("arch", f"has no {name} kernels with bf16 rows for sm_103", fix))
    if problem.config.router.top_k > MOST_CHOICES:
        text = f"sorts at most {MOST_CHOICES} choices a token, router.top_k is {problem.config.router.top_k}"
        reasons.append(Reason("top_k", text))
    if problem.slots >= MOST_EXPERTS:
        text = f"has room for {MOST_EXPERTS - 1} experts a rank, there are {problem.slots}"
        reasons.append(Reason("experts", text, "use more ranks"))
    if kind == "nvfp4" and model.activation != "silu":
        reasons.append(
            Reason("activation", f"computes silu alone for {name} weights, the model needs {model.activation}")
        )
    if model.expert_bias and kind != "mxfp4":
        reasons.append(Reason("bias", f"adds biases to mxfp4 experts only, these are {name}"))
    return reasons


def _expect_recent(found: str | None) -> None:
    parts = (found or "").split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        return
    if (int(parts[0]), int(parts[1])) < OLDEST_LIBRARY:
        wanted = ".".join(map(str, OLDEST_LIBRARY))
        raise LibraryMissing(
            f"flashinfer_trtllm needs FlashInfer {wanted} or newer",
            [f"{found} is installed", f"pip install 'flashinfer-python>={wanted}'"],
        )
