"""Experts by DeepGEMM's grouped GEMMs, contiguous and masked, with our activation and quantisation between them.

Use it on Hopper for prefill if DeepGEMM is installed: its contiguous GEMM pads each expert to 128 rows, so that it is
efficient only with many rows per expert. On Blackwell it also multiplies FP8 rows with MXFP4 weights, and supports only
power-of-two scales: it packs the exponents of f32 scales and ignores their mantissas. Read at DeepGEMM 2.6.1
(github.com/ deepseek-ai/DeepGEMM, csrc/apis) and sgl-deep-gemm 0.1.5, which compile one kernel per shape at its first
call.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_mk.config.problem import Problem, Reason
from moe_mk.errors import LibraryMissing
from moe_mk.experts.base import EXPERTS, ExpertsContext, ExpertsTraits, FusedExperts
from moe_mk.experts.triton.weights import pack_weights
from moe_mk.external.library import installed_version, load
from moe_mk.kernels.reference.activation import CLAMPED, activation
from moe_mk.kernels.reference.quantize import quantize_rows
from moe_mk.kernels.triton.kernel_format import KERNEL_FORMATS
from moe_mk.quant.fp8 import Fp8Block
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.tokens import BatchedTokens, ExpertOutput, GroupedTokens, OutputStage, Tokens
from moe_mk.weights.expert_weights import ExpertWeights, Weights, expect_one_width
from moe_mk.weights.scan import Progress


def padded_places(counts_L: Tensor, num_rows: int, alignment: int) -> tuple[Tensor, Tensor]:
    """Positions of grouped rows if each expert starts at a multiple of `alignment`, and the expert of every position.

    Returns int64 (N,) and int32 (positions,), -1 for padding; sized for the worst routing, from shapes only. Rows
    behind the counted ones are padding too, behind that of all experts.

        counts 3 0 2, alignment 4      rows 0 1 2 3 4 -> places 0 1 2 4 5      experts 0 0 0 -1 2 2 -1 -1 ...
    """
    room = -(-(num_rows + len(counts_L) * (alignment - 1)) // alignment) * alignment
    ends_L = torch.cumsum(counts_L, 0)
    padded_ends_L = torch.cumsum((counts_L + alignment - 1) // alignment * alignment, 0)
    # Where each expert starts, and behind the last one where the rows of none do.
    starts, padded_starts = (pad(each_L, (1, 0)) for each_L in (ends_L, padded_ends_L))
    row_N = torch.arange(num_rows, dtype=torch.int64, device=counts_L.device)
    expert_N = torch.searchsorted(ends_L, row_N, right=True)
    place_N = row_N - starts[expert_N] + padded_starts[expert_N]
    expert_X = torch.full((room,), -1, dtype=torch.int32, device=counts_L.device)
    expert_X[place_N] = torch.where(expert_N < len(counts_L), expert_N, -1).to(torch.int32)
    return place_N, expert_X


def widened(part: Tensor, rows: int) -> Tensor:
    """Blocks padded with zero rows."""
    return pad(part.contiguous().view(torch.uint8), (0, 0, 0, rows - part.shape[1])).view(part.dtype)


BLOCK = 128
MASKED_ROWS = 64
"""Blocks of the masked GEMM hold a multiple of this (DeepGEMM issue 268)."""
LAYOUT = "deep_gemm"
"""Layout of weights with packed scales, used only on Blackwell."""
HOPPER, BLACKWELL = 9, 10
"""Major compute capabilities with kernels."""
NEEDED = (
    "m_grouped_fp8_fp4_gemm_nt_contiguous", "m_grouped_fp8_fp4_gemm_nt_masked", "transform_sf_into_required_layout",
)  # fmt: skip
"""Functions of both the library and its fork; older versions have neither FP4 nor these."""


@EXPERTS.register("deep_gemm")
class DeepGemmExperts(FusedExperts):
    """Contiguous grouped GEMMs for grouped tokens, masked ones for batched tokens."""

    traits: ClassVar[ExpertsTraits] = ExpertsTraits(
        summary="DeepGEMM's grouped GEMMs: FP8 blocks on Hopper and Blackwell, MXFP4 on Blackwell; for many rows an "
        "expert",
        graph_safe=True,
        deterministic=True,
        kinds=frozenset({"cuda"}),
        min_arch=(9, 0),
        library="deep_gemm",
        extra="pip install sgl-deep-gemm, or build it from its repository",
        emits={GroupedTokens: OutputStage.RAW, BatchedTokens: OutputStage.RAW},
        weights=frozenset({"fp8_block", "mxfp4"}),
        computes=("fp8", "mxfp8"),
        activations=frozenset({"silu", "gelu", "gelu_tanh", "relu2", *CLAMPED}),
        dtypes=frozenset({"bf16"}),
        block_sides=frozenset({BLOCK}),
        bandwidth=0.55,
        compute=0.8,
        launches=8,
        per_expert=False,
        estimate="model; not yet measured",
    )

    def __init__(self, context: ExpertsContext) -> None:
        """Raises LibraryMissing if DeepGEMM is not installed; on a CPU the emulation is used, if the oracle allowed
        it.
        """
        super().__init__(context)
        self.library: Any = load("deep_gemm", allow_emulated=context.device.type == "cpu")
        _expect_recent(self.library)
        self.fused = context.device.type == "cuda" and installed_version("triton") is not None
        """Whether activation and quantisation are one kernel."""
        self.group = int(getattr(context.compute, "columns", BLOCK))
        self.power_of_two = context.compute.family == "mxfp8" or bool(getattr(context.compute, "ue8m0", False))

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Adds to the traits: whole blocks in both dimensions, and the formats of each architecture."""
        reasons, kind = super().reasons_against(problem), problem.config.model.quant.kind
        if kind in cls.traits.weights:
            reasons += _arch_reasons(problem)
            family = "mxfp8" if kind == "mxfp4" else "fp8"
            given = problem.activations
            if given is not None and given.family in cls.traits.computes and given.family != family:
                text = f"multiplies {problem.weights.name} weights with {family.upper()} activations only"
                reasons.append(Reason("activations", text))
            for name, size in (("hidden", problem.config.model.hidden_size), ("intermediate", problem.intermediate)):
                if size % BLOCK:
                    reasons.append(Reason("shape", f"multiplies whole blocks of {BLOCK}, the {name} size is {size}"))
        return reasons

    @classmethod
    def workspace_bytes(cls, problem: Problem, rows: int) -> int:
        """Padded rows in FP8, gate and up in bf16, hidden rows in FP8 and outputs, of all assignments."""
        padded = rows * min(problem.config.router.top_k, problem.slots) + problem.slots * BLOCK
        return padded * (3 * problem.config.model.hidden_size + 5 * problem.intermediate)

    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> ExpertWeights:
        """One stack on the device, with scales in the layout of the architecture.

        Raises UnsupportedError for experts of different sizes.
        """
        if isinstance(weights, ExpertWeights) and weights.layout == LAYOUT:
            return weights
        expect_one_width(weights, "deep_gemm")
        if not isinstance(weights, ExpertWeights):
            made = pack_weights(weights, KERNEL_FORMATS["fp8"], self.context.device)
            first, second = (QuantTensor(w.values, w.scales, weights.scheme) for w in (made.w13, made.w2))
            weights = ExpertWeights(first, second, gated=weights.gated)
        w13, w2 = self._ready(weights.w13), self._ready(weights.w2)
        packed = w13.scales is not None and w13.scales.dtype is torch.int32
        return ExpertWeights(w13, w2, LAYOUT if packed else weights.layout, weights.gated)

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """Apply the experts in the layout of the tokens, without host synchronisation."""
        assert isinstance(weights, ExpertWeights)
        if isinstance(tokens, GroupedTokens):
            return ExpertOutput(self._contiguous(tokens, weights), OutputStage.RAW)
        assert isinstance(tokens, BatchedTokens)
        return ExpertOutput(self._masked(tokens, weights), OutputStage.RAW)

    def _contiguous(self, tokens: GroupedTokens, weights: ExpertWeights) -> Tensor:
        values, scales = self._rounded(tokens.x_NH)
        if not len(values):
            return torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
        place_N, expert_X = padded_places(
            tokens.counts_L, len(values), self.library.get_mk_alignment_for_contiguous_layout()
        )
        x = torch.zeros((len(expert_X), values.shape[1]), dtype=torch.uint8, device=values.device)
        x[place_N] = values.view(torch.uint8)
        spread = torch.ones((len(expert_X), scales.shape[1]), dtype=torch.float32, device=values.device)
        spread[place_N] = scales

        def multiply(a: tuple[Tensor, Tensor], w: QuantTensor) -> Tensor:
            d = torch.empty((len(expert_X), w.shape[1]), dtype=torch.bfloat16, device=values.device)
            self.library.m_grouped_fp8_fp4_gemm_nt_contiguous(
                a, (w.values, w.scales), d, expert_X, **self._recipes(w.scheme)
            )
            return d

        wide = multiply((x.view(torch.float8_e4m3fn), self._of_rows(spread)), weights.w13)
        # Padding rows are undefined; they are quantised with the others and not read again.
        hidden, made = self._between(wide, gated=weights.gated)
        return multiply((hidden, self._of_rows(made)), weights.w2)[place_N]

    def _masked(self, tokens: BatchedTokens, weights: ExpertWeights) -> Tensor:
        slots, given = tokens.x_LSH.shape[:2]
        values, scales = self._rounded(tokens.x_LSH)
        room = max(-(-given // MASKED_ROWS), 1) * MASKED_ROWS
        if room != given:
            values, scales = (widened(part, room) for part in (values, scales))
        counts = tokens.counts_L.to(torch.int32)

        def multiply(a: tuple[Tensor, Tensor], w: QuantTensor) -> Tensor:
            d = torch.empty((slots, room, w.shape[1]), dtype=torch.bfloat16, device=values.device)
            self.library.m_grouped_fp8_fp4_gemm_nt_masked(
                a, (w.values, w.scales), d, counts, room, **self._recipes(w.scheme)
            )
            return d

        wide = multiply((values, self._of_rows(scales)), weights.w13)
        hidden, made = self._between(wide.flatten(0, 1), gated=weights.gated)
        made = self._of_rows(made.reshape(slots, room, -1))
        return multiply((hidden.view(slots, room, -1), made), weights.w2)[:, :given]

    def _between(self, wide: Tensor, *, gated: bool) -> tuple[Tensor, Tensor]:
        """Activation and quantisation of hidden rows: one Triton kernel on GPUs, else the reference."""
        context, name = self.context, self.context.activation
        alpha, limit = context.swiglu_alpha, context.swiglu_limit
        if self.fused and gated:
            from moe_mk.kernels.triton.quantize_rows import activation_quantize

            return activation_quantize(wide, name, self.group, power_of_two=self.power_of_two, alpha=alpha, limit=limit)
        gate, up = wide.float().chunk(2, dim=1) if gated else (None, wide.float())
        hidden = activation(name, gate, up, alpha=alpha, limit=limit)
        return quantize_rows(hidden, self.group, power_of_two=self.power_of_two)

    def _rounded(self, x: QuantTensor) -> tuple[Tensor, Tensor]:
        q = x if x.scheme == self.context.compute else self.context.compute.quantize(x.dequantize(torch.bfloat16))
        assert q.scales is not None
        return q.values, q.scales.to(torch.float32)

    def _of_rows(self, scales: Tensor) -> Tensor:
        """Scales of rows (m, k / group) or (L, m, k / group) f32, in the layout of the architecture."""
        batch, (m, groups) = scales.shape[:-2], scales.shape[-2:]
        recipe = ((1, BLOCK, BLOCK), True) if self.group == BLOCK else ((1, self.group), None)
        made: Tensor = self.library.transform_sf_into_required_layout(
            scales.contiguous(), m, groups * self.group, recipe[0], batch[0] if batch else None, recipe[1]
        )
        return made

    def _ready(self, q: QuantTensor) -> QuantTensor:
        q = q.to(self.context.device)
        assert q.scales is not None
        slots, n, k = q.shape
        four = q.scheme.per_byte == 2
        scales = self.library.transform_sf_into_required_layout(
            q.scales.to(torch.float32).contiguous(),
            n,
            k,
            (1, self.group) if four else (1, BLOCK, BLOCK),
            slots,
            None if four else False,
        )
        values = q.values.contiguous()
        return QuantTensor(values.view(torch.int8) if four else values, scales, q.scheme)

    def _recipes(self, scheme: QuantScheme) -> dict[str, tuple[int, int]]:
        """Rows and columns per scale; omitted for FP8 blocks, which are the library's default."""
        each = (1, self.group)
        return {"recipe_a": each, "recipe_b": each} if scheme.per_byte == 2 else {}


def _arch_reasons(problem: Problem) -> list[Reason]:
    arch, name = problem.device.arch, problem.weights.name
    if problem.device.kind != "cuda" or arch is None or arch[0] < HOPPER:
        return []
    if arch[0] > BLACKWELL:
        return [Reason("arch", f"has kernels for sm_90 and sm_100, this device is sm_{arch[0]}{arch[1]}")]
    if arch[0] == HOPPER:
        four = problem.weights.per_byte == 2
        return [Reason("arch", f"has {name} kernels for sm_100, this device is sm_90")] if four else []
    given = problem.activations
    exact = all(isinstance(each, Fp8Block) and each.ue8m0 for each in (problem.weights, given) if each is not None)
    if problem.weights.per_byte == 2 or exact:
        return []
    return [Reason("scales", f"takes scales as powers of two on sm_100, those of {name} are f32")]


def _expect_recent(library: Any) -> None:
    lacking = [name for name in NEEDED if not hasattr(library, name)]
    if lacking:
        raise LibraryMissing(
            "this DeepGEMM is too old", [f"it has no {', '.join(lacking)}", "build one of April 2026 on"]
        )
