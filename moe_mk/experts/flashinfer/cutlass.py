"""Experts by FlashInfer's `cutlass_fused_moe`: one library call from routed rows to weighted sums.

Use it for four-bit weights on Blackwell, or for comparisons on Hopper, if FlashInfer is installed. It reads up rows
before gate rows: weights are reordered once, at load. Tokens are passed in the layer's dtype and quantised by the
library, except for formats it takes as codes (calibrated FP8, MXFP8). Read at FlashInfer 0.6.18 to 0.7.2
(github.com/flashinfer-ai/ flashinfer, flashinfer/fused_moe/core.py) and at its call in vLLM 0.33. The library writes
bf16 rows, directly into the output tensor if possible.

Weights lie up rows before gate rows, with a list of scales per format:

    bf16         no scales
    fp8_block    w13 (L, 2I / 128, H / 128) and w2 (L, H / 128, I / 128), f32
    fp8_tensor   w13's times the input's (L), 1 / that of hidden rows, w2's times the hidden rows' (L), the input's
    nvfp4        1 / the input's, w13's in tiles, both global ones multiplied (L); the same for hidden rows and w2
    mxfp4        w13's in tiles, ones (L), w2's in tiles, ones (L)

Four-bit values are passed as int64, tiles of scales (128 x 4 bytes) as int32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_mk.config.problem import Problem, Reason
from moe_mk.errors import UnsupportedError
from moe_mk.experts.base import EXPERTS, ExpertsContext, ExpertsTraits, FusedExperts
from moe_mk.external.library import load
from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.fp8 import Fp8Static
from moe_mk.quant.layouts import TILE_COLUMNS, TILE_ROWS, swizzled
from moe_mk.quant.nvfp4 import Nvfp4
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.tokens import ExpertOutput, OutputStage, RowTokens, Tokens
from moe_mk.weights.expert_weights import SlotWeights, Weights
from moe_mk.weights.scan import Progress
from moe_mk.weights.slices import stacked_rows

LOGGER = logging.getLogger(__name__)
LAYOUT = "flashinfer_cutlass"


@dataclass(frozen=True)
class CutlassWeights:
    """The experts of one rank in the library's order."""

    w13: Tensor
    """(L, 2I, H) of values: up rows, then gate rows; (L, I, H) without a gate."""
    w2: Tensor
    quant_scales: tuple[Tensor, ...]
    scheme: QuantScheme
    kind: str
    """Key of SERVED."""
    activation: str
    """The name of the activation in the library."""
    gated: bool
    layout: str = LAYOUT

    @property
    def num_slots(self) -> int:
        return self.w13.shape[0]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.w13, self.w2, *self.quant_scales))

    def slot(self, index: int) -> SlotWeights:
        """Not supported: rows are reordered and scales multiplied."""
        raise UnsupportedError(
            f"expert {index} cannot be read back", [f"layout {self.layout!r} belongs to its backend"]
        )


def reordered(weights: Weights, context: ExpertsContext) -> CutlassWeights:
    """Copy every expert in the library's order. Raises UnsupportedError for an unsupported activation."""
    name = ACTIVATIONS.get((context.activation, weights.gated))
    if name is None:
        served = ", ".join(f"{act} {'with' if gated else 'without'} a gate" for act, gated in ACTIVATIONS)
        form = f"{context.activation} experts {'with' if weights.gated else 'without'} a gate"
        raise UnsupportedError(f"flashinfer_cutlass cannot compute {form}", [f"it has {served}"])
    slots = [weights.slot(index) for index in range(weights.num_slots)]
    first = [
        above([q for q in (s.up_IH, s.gate_IH) if q is not None], i).to(context.device) for i, s in enumerate(slots)
    ]
    second = [above([slot.down_HI], index).to(context.device) for index, slot in enumerate(slots)]
    kind, scales = _scales(first, second, context)
    return CutlassWeights(_values(first), _values(second), scales, weights.scheme, kind, name, weights.gated)


def above(parts: list[QuantTensor], index: int) -> QuantTensor:
    """Concatenated matrices with one scale, for formats with one scale per matrix.

    If the scales differ, the matrices are requantised with a common one, because the library takes one per expert.
    """
    scheme, whole = parts[0].scheme, [q.scales if q.scheme.block == (WHOLE, WHOLE) else q.global_scale for q in parts]
    if any(one is not None and not torch.equal(one.reshape(-1)[:1], whole[0].reshape(-1)[:1]) for one in whole[1:]):  # type: ignore[union-attr]
        LOGGER.warning("gate and up of expert %d have different scales; requantised to one scale", index)
        return scheme.quantize(torch.cat([q.dequantize(torch.float32) for q in parts]))
    return stacked_rows(parts)


def _values(stack: list[QuantTensor]) -> Tensor:
    values = torch.stack([q.values.view(torch.uint8) for q in stack])
    return values.view(torch.int64 if stack[0].scheme.per_byte == 2 else stack[0].values.dtype)


def _scales(
    first: list[QuantTensor], second: list[QuantTensor], context: ExpertsContext
) -> tuple[str, tuple[Tensor, ...]]:
    scheme, compute = first[0].scheme, context.compute
    if isinstance(scheme, Plain):
        return "plain", ()
    if scheme.family == "mxfp4":
        ones = torch.ones((len(first),), dtype=torch.float32, device=context.device)
        return "mxfp4", (_tiles(first), ones, _tiles(second), ones)
    if isinstance(scheme, Nvfp4):
        above = compute.fixed_scale if isinstance(compute, Nvfp4) and compute.fixed_scale is not None else 1.0
        inverse = _scalar(1.0 / above, context)
        return "nvfp4", (
            inverse, _tiles(first), _wholes(first, above), inverse, _tiles(second), _wholes(second, above)
        )  # fmt: skip
    if scheme.block == (WHOLE, WHOLE):
        assert isinstance(compute, Fp8Static)
        inner = compute.hidden.scale
        scale, inverse = _scalar(compute.scale, context), _scalar(1.0 / inner, context)
        return "fp8_tensor", (_wholes(first, compute.scale), inverse, _wholes(second, inner), scale)
    return "fp8_block", (_blocks(first), _blocks(second))


def _blocks(stack: list[QuantTensor]) -> Tensor:
    return torch.stack([q.scales.to(torch.float32) for q in stack if q.scales is not None]).contiguous()


def _wholes(stack: list[QuantTensor], factor: float) -> Tensor:
    found = [q.scales if q.scheme.block == (WHOLE, WHOLE) else q.global_scale for q in stack]
    return torch.stack([one.reshape(-1)[0] for one in found if one is not None]).to(torch.float32) * factor


def _tiles(stack: list[QuantTensor]) -> Tensor:
    scales = [q.scales for q in stack if q.scales is not None]
    rows, groups = scales[0].shape
    tall, wide = -(-rows // TILE_ROWS) * TILE_ROWS, -(-groups // TILE_COLUMNS) * TILE_COLUMNS
    return torch.stack([swizzled(each).view(tall, wide) for each in scales]).view(torch.int32)


def _scalar(value: float, context: ExpertsContext) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=context.device)


Arch = tuple[int, int]


@dataclass(frozen=True)
class Served:
    """The support of one weight format by the library, with its limits."""

    activations: tuple[str, ...]
    """Activation families of the products: "plain", or a quantised family."""
    multiple: int
    """The hidden and the intermediate size must be multiples of this."""
    oldest: Arch = (9, 0)
    newest: Arch | None = None
    """First and last compute capability with kernels for it; None: all newer ones."""
    calibrated: bool = False
    """Whether activations need a static scale."""
    flags: Mapping[str, bool] | None = None
    """Keyword arguments of a call besides the tensors."""


def reasons_of_served(problem: Problem, served: Served) -> Iterator[Reason]:
    """Reasons of architecture, plain weights, activations and sizes, in this order."""
    yield from _arch_reasons(problem, served)
    if isinstance(problem.weights, Plain) and problem.weights != problem.dtype:
        text = f"reads plain weights in the layer's {problem.dtype.name} alone, the experts are {problem.weights.name}"
        yield Reason("weights", text)
    yield from _activation_reasons(problem, served)
    for name, size in (("hidden", problem.config.model.hidden_size), ("intermediate", problem.intermediate)):
        if size % served.multiple:
            text = f"needs sizes that are multiples of {served.multiple} for {problem.weights.name} weights"
            yield Reason("shape", f"{text}, the {name} size is {size}")


def _arch_reasons(problem: Problem, served: Served) -> Iterator[Reason]:
    arch, name = problem.device.arch, problem.weights.name
    if problem.device.kind != "cuda" or arch is None:
        return
    if arch < served.oldest:
        text = f"has {name} kernels from sm_{_digits(served.oldest)} on, this device is sm_{_digits(arch)}"
        yield Reason("arch", text)
    if served.newest is not None and arch > served.newest:
        text = f"has {name} kernels up to sm_{_digits(served.newest)}, this device is sm_{_digits(arch)}"
        yield Reason("arch", text)


def _activation_reasons(problem: Problem, served: Served) -> Iterator[Reason]:
    given, wants_plain = problem.activations, problem.config.kernel.activations == "plain"
    family = "plain" if given is None or wants_plain else given.family
    if family not in served.activations:
        only = " or ".join(each.upper() if each != "plain" else each for each in served.activations)
        text = f"multiplies {problem.weights.name} weights with {only} activations only"
        yield Reason("activations", text, "kernel.activations = auto" if wants_plain and given is not None else "")
    elif served.calibrated and not isinstance(given, Fp8Static):
        text = "needs a calibrated scale of activations, the checkpoint finds one a token"
        yield Reason("activations", text, "model.quant.input_scale = ...")


def _digits(arch: Arch) -> str:
    return "".join(map(str, arch))


def summed_rows(tokens: RowTokens, wide: int, call: Callable[[Tensor], None]) -> ExpertOutput:
    """Run a call that fills (R, wide) rows, unless there are none, and return the columns of the tokens."""
    (rows, hidden), asked = tokens.x_RH.shape, tokens.out_RH
    fits = asked is not None and asked.dtype is torch.bfloat16 and asked.is_contiguous() and wide == hidden
    out = (
        asked
        if asked is not None and fits
        else torch.empty((rows, wide), dtype=torch.bfloat16, device=tokens.ids_RK.device)
    )
    if rows:
        call(out)
    if not fits and asked is not None:
        out = asked.copy_(out[:, :hidden])
    elif wide != hidden:
        out = out[:, :hidden].contiguous()
    return ExpertOutput(out, OutputStage.REDUCED)


SERVED: Mapping[str, Served] = {
    "plain": Served(("plain",), 8),
    "fp8_block": Served(("fp8",), 128, newest=(9, 0), flags={"use_deepseek_fp8_block_scale": True}),
    "fp8_tensor": Served(("fp8",), 16, calibrated=True),
    "nvfp4": Served(("nvfp4",), 128, oldest=(10, 0)),
    "mxfp4": Served(("mxfp8",), 128, oldest=(10, 0), flags={"use_mxfp8_act_scaling": True}),
}
"""By value of `quant.kind`. Not here: MXFP4 with bf16 rows on sm_90, whose weights the library itself interleaves."""

ACTIVATIONS: Mapping[tuple[str, bool], str] = {("silu", True): "Swiglu", ("relu2", False): "Relu2"}
"""Names in the library, by activation and whether there is a gate."""


@EXPERTS.register("flashinfer_cutlass")
class FlashInferCutlassExperts(FusedExperts):
    """One call for routed rows: gather, both grouped GEMMs, activation, weights and the sum."""

    traits: ClassVar[ExpertsTraits] = ExpertsTraits(
        summary="FlashInfer's CUTLASS experts: bf16 and calibrated FP8 from Hopper, FP8 blocks on Hopper alone, "
        "NVFP4 and MXFP4 on Blackwell",
        graph_safe=True,
        kinds=frozenset({"cuda"}),
        min_arch=(9, 0),
        library="flashinfer",
        extra="pip install 'moe-mk[flashinfer]'",
        emits={RowTokens: OutputStage.REDUCED},
        weights=frozenset(SERVED),
        computes=("fp8", "nvfp4", "mxfp8", "plain"),
        activations=frozenset(name for name, _ in ACTIVATIONS),
        dtypes=frozenset({"bf16"}),
        block_sides=frozenset({128}),
        bandwidth=0.6,
        compute=0.6,
        launches=6,
        per_expert=False,
        estimate="model; never run on a device",
        deterministic=False,  # the fused epilogue adds by atomics
    )

    def __init__(self, context: ExpertsContext) -> None:
        """Raises LibraryMissing if FlashInfer is not installed; on a CPU the emulation is used, if allowed."""
        super().__init__(context)
        self.library = load("flashinfer.fused_moe.core", allow_emulated=context.device.type == "cpu")

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Adds to the traits: the architectures, activations and sizes of a weight format."""
        reasons, served = super().reasons_against(problem), SERVED.get(problem.config.model.quant.kind)
        if served is not None:
            reasons += reasons_of_served(problem, served)
        return reasons

    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> CutlassWeights:
        """Up before gate, scales in the layout and order of the library.

        Raises UnsupportedError for an activation that the library supports only with, or only without, a gate.
        """
        if isinstance(weights, CutlassWeights):
            return weights
        return reordered(weights, self.context)

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """One call; -1 is replaced by the number of experts, which is out of range and ignored."""
        assert isinstance(tokens, RowTokens) and isinstance(weights, CutlassWeights)
        return summed_rows(tokens, self.context.hidden_size, lambda out: self._call(tokens, weights, out))

    def _call(self, tokens: RowTokens, weights: CutlassWeights, out: Tensor) -> None:
        x, input_scales = self._input(tokens.x_RH)
        ids_RK = torch.where(tokens.ids_RK < 0, self.context.num_slots, tokens.ids_RK).to(torch.int32)
        self.library.cutlass_fused_moe(
            x, ids_RK.contiguous(), tokens.weights_RK.to(torch.float32).contiguous(), weights.w13, weights.w2,
            torch.bfloat16, list(weights.quant_scales), input_sf=input_scales, output=out,
            activation_type=getattr(self.library.ActivationType, weights.activation),
            **(SERVED[weights.kind].flags or {}),
        )  # fmt: skip

    def _input(self, x: QuantTensor) -> tuple[Tensor, Tensor | None]:
        """Codes with group scales in tiles, or bf16 rows, which the library quantises.

        NVFP4 rows are passed unchanged; others are quantised by the library with the same global scale.
        """
        compute = self.context.compute
        arrived = x.scheme == compute
        if isinstance(compute, Fp8Static):
            return (x if arrived else compute.quantize(x.dequantize(torch.bfloat16))).values.contiguous(), None
        if compute.family != "mxfp8" and not (compute.family == "nvfp4" and arrived):
            return x.dequantize(torch.bfloat16).contiguous(), None
        q = x if arrived else compute.quantize(x.dequantize(torch.bfloat16))
        assert q.scales is not None
        return q.values.contiguous(), swizzled(q.scales)
