"""Experts by DeepGEMM's grouped FP8 GEMMs, contiguous and masked, with our activation and quantisation between them.

Choose it on Hopper for prefill where DeepGEMM is installed: its contiguous GEMM pads each expert to 128 rows, so that
many rows an expert are needed to fill it. Written for sgl-deep-gemm 0.1.5 (github.com/deepseek-ai/DeepGEMM), which
compiles a kernel a shape at its first call.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from moe_mk.config.problem import Problem, Reason
from moe_mk.experts.base import EXPERTS, ExpertsContext, ExpertsTraits, FusedExperts
from moe_mk.external.library import load
from moe_mk.kernels.reference.activation import activation
from moe_mk.kernels.reference.quantize_rows import quantize_rows
from moe_mk.quant.fp8_block import Fp8Block
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.tokens import BatchedTokens, ExpertOutput, GroupedTokens, OutputStage, Tokens
from moe_mk.weights.expert_weights import ExpertWeights, Weights, expect_one_width

BLOCK = 128
MASKED_ROWS = 64
"""Blocks of the masked GEMM hold a multiple of this (DeepGEMM issue 268)."""


@EXPERTS.register("deep_gemm")
class DeepGemmExperts(FusedExperts):
    """Contiguous grouped GEMMs for grouped tokens, masked ones for batched tokens."""

    traits: ClassVar[ExpertsTraits] = ExpertsTraits(
        summary="DeepGEMM's grouped FP8 GEMMs on Hopper; for many rows an expert",
        kinds=frozenset({"cuda"}),
        min_arch=(9, 0),
        library="deep_gemm",
        extra="pip install sgl-deep-gemm, or build it from its repository",
        emits={GroupedTokens: OutputStage.RAW, BatchedTokens: OutputStage.RAW},
        weights=frozenset({"fp8_block"}),
        computes=("fp8",),
        dtypes=frozenset({"bf16"}),
        block_sides=frozenset({BLOCK}),
        bandwidth=0.55,
        compute=0.8,
        launches=8,
    )

    def __init__(self, context: ExpertsContext) -> None:
        """Raises LibraryMissing where DeepGEMM is not installed; a CPU gets the emulation that the oracle allowed."""
        super().__init__(context)
        self.library = load("deep_gemm", allow_emulated=context.device.type == "cpu")
        self.power_of_two = bool(getattr(context.compute, "ue8m0", False))

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Beside the traits: whole blocks in both directions."""
        reasons = super().reasons_against(problem)
        for name, size in (("hidden", problem.config.model.hidden_size), ("intermediate", problem.intermediate)):
            if isinstance(problem.weights, Fp8Block) and size % BLOCK:
                reasons.append(Reason("shape", f"multiplies whole blocks of {BLOCK}, the {name} size is {size}"))
        return reasons

    @classmethod
    def priced(cls, problem: Problem, compute: QuantScheme) -> tuple[float | None, str]:
        """A model of the library's published rates; the adapter has met the emulation only."""
        return None, "model; not yet measured"

    @classmethod
    def workspace_bytes(cls, problem: Problem, rows: int) -> int:
        """Padded rows in FP8, gate and up in bf16, hidden rows in FP8 and outputs, of all assignments."""
        padded = rows * problem.config.router.top_k + problem.slots * BLOCK
        return padded * (3 * problem.config.model.hidden_size + 5 * problem.intermediate)

    def relayout(self, weights: Weights) -> ExpertWeights:
        """One stack on the device with f32 scales. Raises UnsupportedError for experts of different sizes."""
        expect_one_width(weights, "deep_gemm")
        if not isinstance(weights, ExpertWeights):
            weights = _stacked(weights)
        return ExpertWeights(self._ready(weights.w13), self._ready(weights.w2), weights.layout, weights.gated)

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """Multiply in the layout the tokens have; nothing is read on the host."""
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
            self.library.m_grouped_fp8_gemm_nt_contiguous(a, (w.values, w.scales), d, expert_X)
            return d

        aligned = self.library.get_mn_major_tma_aligned_tensor
        wide = multiply((x.view(torch.float8_e4m3fn), aligned(spread)), weights.w13)
        # Rows of padding hold whatever was there; they are rounded with the others and never read again.
        hidden, made = self._between(wide, gated=weights.gated)
        return multiply((hidden, aligned(made)), weights.w2)[place_N]

    def _masked(self, tokens: BatchedTokens, weights: ExpertWeights) -> Tensor:
        slots, given = tokens.x_LSH.shape[:2]
        values, scales = self._rounded(tokens.x_LSH)
        room = max(-(-given // MASKED_ROWS), 1) * MASKED_ROWS
        if room != given:
            values, scales = (_widened(part, room) for part in (values, scales))
        counts = tokens.counts_L.to(torch.int32)

        def multiply(a: tuple[Tensor, Tensor], w: QuantTensor) -> Tensor:
            d = torch.empty((slots, room, w.shape[1]), dtype=torch.bfloat16, device=values.device)
            self.library.m_grouped_fp8_gemm_nt_masked(a, (w.values, w.scales), d, counts, room)
            return d

        aligned = self.library.get_mn_major_tma_aligned_tensor
        wide = multiply((values, aligned(scales)), weights.w13)
        hidden, made = self._between(wide.flatten(0, 1), gated=weights.gated)
        made = aligned(made.reshape(slots, room, -1))
        return multiply((hidden.view(slots, room, -1), made), weights.w2)[:, :given]

    def _between(self, wide: Tensor, *, gated: bool) -> tuple[Tensor, Tensor]:
        """Activation and quantisation of hidden rows: one kernel on a GPU, the reference elsewhere."""
        name = self.context.activation
        if wide.is_cuda and gated:
            from moe_mk.kernels.triton.activation_quantize import activation_quantize

            return activation_quantize(wide, name, BLOCK, power_of_two=self.power_of_two)
        gate, up = wide.float().chunk(2, dim=1) if gated else (None, wide.float())
        return quantize_rows(activation(name, gate, up), BLOCK, power_of_two=self.power_of_two)

    def _rounded(self, x: QuantTensor) -> tuple[Tensor, Tensor]:
        """Codes and f32 scales; tokens that came in the scheme are not rounded twice."""
        q = x if x.scheme == self.context.compute else self.context.compute.quantize(x.dequantize(torch.bfloat16))
        assert q.scales is not None
        return q.values, q.scales.to(torch.float32)

    def _ready(self, q: QuantTensor) -> QuantTensor:
        q = q.to(self.context.device)
        assert q.scales is not None
        return QuantTensor(q.values.contiguous(), q.scales.to(torch.float32).contiguous(), q.scheme)


def padded_places(counts_L: Tensor, num_rows: int, alignment: int) -> tuple[Tensor, Tensor]:
    """Where grouped rows go if each expert starts at a multiple of `alignment`, and whose row every place is.

    Returns int64 (N,) and int32 (room,), -1 for padding; the room is that of the worst routing, known from shapes.

        counts 3 0 2, alignment 4      rows 0 1 2 3 4 -> places 0 1 2 4 5      experts 0 0 0 -1 2 2 -1 -1 ...
    """
    room = -(-(num_rows + len(counts_L) * (alignment - 1)) // alignment) * alignment
    ends_L = torch.cumsum(counts_L, 0)
    padded_L = (counts_L + alignment - 1) // alignment * alignment
    padded_ends_L = torch.cumsum(padded_L, 0)
    row_N = torch.arange(num_rows, dtype=torch.int64, device=counts_L.device)
    expert_N = torch.searchsorted(ends_L, row_N, right=True)
    place_N = row_N - (ends_L - counts_L)[expert_N] + (padded_ends_L - padded_L)[expert_N]
    expert_X = torch.full((room,), -1, dtype=torch.int32, device=counts_L.device)
    expert_X[place_N] = expert_N.to(torch.int32)
    return place_N, expert_X


def _widened(part: Tensor, rows: int) -> Tensor:
    """Blocks of more rows; what is added is zero."""
    made = torch.zeros((part.shape[0], rows, part.shape[2]), dtype=part.dtype, device=part.device)
    if part.element_size() == 1:
        made.view(torch.uint8)[:, : part.shape[1]] = part.view(torch.uint8)
    else:
        made[:, : part.shape[1]] = part
    return made


def _stacked(weights: Weights) -> ExpertWeights:
    """Mapped matrices as one stack."""
    slots = [weights.slot(index) for index in range(weights.num_slots)]
    first = [[q for q in (slot.gate_IH, slot.up_IH) if q is not None] for slot in slots]

    def stack(parts: list[list[QuantTensor]]) -> QuantTensor:
        values = torch.stack([torch.cat([q.values.view(torch.uint8) for q in part]) for part in parts])
        scales = torch.stack([torch.cat([_scales(q) for q in part]) for part in parts])
        return QuantTensor(values.view(torch.float8_e4m3fn), scales, weights.scheme)

    return ExpertWeights(stack(first), stack([[slot.down_HI] for slot in slots]), gated=weights.gated)


def _scales(q: QuantTensor) -> Tensor:
    assert q.scales is not None
    return q.scales.to(torch.float32)
