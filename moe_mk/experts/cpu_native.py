"""Experts on a CPU in native code: AMX, AVX-512 or AVX2, weights decoded in registers, sums in f32.

The choice on every CPU with a C++ compiler. Weights are packed once into the order the matrix units read, at the size
they have in the checkpoint; one call does w13, activation, w2, routing weights and the sum over an expert's rows.
Compiled on first use into the user's cache directory (`kernels/native`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from moe_mk.config.problem import Problem, Reason
from moe_mk.experts.base import EXPERTS, ExpertsContext, ExpertsTraits, FusedExperts
from moe_mk.kernels.native import (
    Activation,
    ExpertsMode,
    Format,
    MatrixLayout,
    Native,
    PackedMatrix,
    allocate,
    experts_batched,
    experts_grouped,
    experts_rows,
    loaded,
    pack_slot,
    touch_slot,
    unpack_scales,
    unpack_slot,
)
from moe_mk.kernels.native.pages import release_pages
from moe_mk.quant.plain import BF16
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.tokens import BatchedTokens, ExpertOutput, GroupedTokens, OutputStage, RowTokens, Tokens
from moe_mk.weights.expert_weights import MappedExpertWeights, SlotBiases, SlotWeights, Weights

LAYOUT = "cpu_native"
TILE_ROWS = 16
"""Outputs that share one packed scale; a block of 128 rows is eight of them."""
BLOCK = 128

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU_ERF,
    "gelu_tanh": Activation.GELU_TANH,
    "relu2": Activation.RELU2,
    "swiglu_limit": Activation.SILU,
    "swiglu_oai": Activation.SWIGLU_OAI,
}


def native_kernels() -> Native:
    """The compiled kernels of this process; compiled the first time anybody on this machine asks."""
    return loaded()


@dataclass(frozen=True)
class PackedExpertWeights:
    """Experts in the order the kernels read; `slot` unpacks one, bit for bit."""

    w13: PackedMatrix
    w2: PackedMatrix
    scheme: QuantScheme
    layout: str = LAYOUT
    shared: PackedExpertWeights | None = None
    """One slot that every row visits with weight 1, computed in the same pass."""

    @property
    def num_slots(self) -> int:
        """L, the physical experts of this rank."""
        return self.w13.num_slots

    @property
    def gated(self) -> bool:
        """Whether the experts have a gate projection."""
        return self.w13.layout.gated

    @property
    def num_bytes(self) -> int:
        """Bytes of packed values and scales."""
        return self.w13.num_bytes + self.w2.num_bytes

    def slot(self, index: int) -> SlotWeights:
        """One expert as it was before packing; a copy."""
        first = self._matrices(self.w13, index)
        down = self._matrices(self.w2, index)[0]
        return SlotWeights(first[0] if self.gated else None, first[-1], down, self._biases(index))

    def _biases(self, index: int) -> SlotBiases | None:
        """f32, whatever they were stored in."""
        if self.w13.bias_LX is None or self.w2.bias_LX is None:
            return None
        halves = self.w13.bias_LX[index].chunk(2 if self.gated else 1)
        return SlotBiases(halves[0].clone() if self.gated else None, halves[-1].clone(), self.w2.bias_LX[index].clone())

    def _matrices(self, packed: PackedMatrix, index: int) -> list[QuantTensor]:
        values = unpack_slot(native_kernels(), packed, index)
        if packed.scales_LX is None:
            return [QuantTensor(value, None, self.scheme) for value in values]
        grids = [spread[:: BLOCK // TILE_ROWS].contiguous() for spread in unpack_scales(packed, index)]
        return [QuantTensor(value, grid, self.scheme) for value, grid in zip(values, grids, strict=True)]


@EXPERTS.register("cpu_native")
class CpuNativeExperts(FusedExperts):
    """C++ kernels behind a plain C interface; as many threads as torch uses."""

    traits: ClassVar[ExpertsTraits] = ExpertsTraits(
        summary="native CPU kernels (AMX, AVX-512, AVX2); the fast choice wherever a C++ compiler is",
        kinds=frozenset({"cpu"}),
        library="c++",
        extra="install a C++ compiler (Debian: apt install g++); torch_cpu serves without, several times slower",
        emits={
            RowTokens: OutputStage.REDUCED,
            GroupedTokens: OutputStage.RAW,
            BatchedTokens: OutputStage.RAW,
        },
        weights=frozenset({"plain", "fp8_block"}),
        computes=("plain", "fp8"),
        dtypes=frozenset({"bf16"}),
        block_sides=frozenset({BLOCK}),
        copies_weights=True,
        batch_invariant=True,
        activations=frozenset(ACTIVATIONS),
        biases=True,
        graph_safe=False,
        bandwidth=0.7,
        compute=0.4,
        launches=1,
    )

    def __init__(self, context: ExpertsContext) -> None:
        super().__init__(context)
        self.native = native_kernels()
        self.mode = ExpertsMode(
            ACTIVATIONS[context.activation],
            alpha=context.swiglu_alpha,
            limit=context.swiglu_limit or 0.0,
            quantize=context.compute.block is not None,
            batch_invariant=context.batch_invariant,
        )

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Plain weights must be bf16 as well: the kernels read no other float."""
        reasons = super().reasons_against(problem)
        if problem.weights.block is None and problem.weights != BF16:
            reasons.append(Reason("weights", f"reads bf16 or FP8 weights, the experts are {problem.weights.name}"))
        return reasons

    @classmethod
    def workspace_bytes(cls, problem: Problem, rows: int) -> int:
        """Hidden rows of all assignments in bf16, and sums in f32."""
        assignments = rows * problem.config.router.top_k
        return assignments * problem.intermediate * 2 + rows * problem.config.model.hidden_size * 4

    def relayout(self, weights: Weights) -> Weights:
        """Pack every expert; the pages of a mapped checkpoint are given back expert by expert."""
        return self.relayout_telling(weights, lambda stage, done, total: None)

    def relayout_telling(self, weights: Weights, on_progress: Callable[[str, int, int], None]) -> Weights:
        """`relayout`, with the bytes packed so far after each expert."""
        if isinstance(weights, PackedExpertWeights):
            return weights
        layout13, layout2 = self._layouts(weights)
        bias13, bias2 = _stacked_biases(weights)
        packed = PackedExpertWeights(
            allocate(self.native, layout13, weights.num_slots, bias13, touch=False),
            allocate(self.native, layout2, weights.num_slots, bias2, touch=False),
            weights.scheme,
        )
        large = True
        for index in range(weights.num_slots):
            slot = weights.slot(index)
            large = large and all(touch_slot(self.native, matrix, index) for matrix in (packed.w13, packed.w2))
            self._pack(packed.w13, index, [q for q in (slot.gate_IH, slot.up_IH) if q is not None], "w13")
            self._pack(packed.w2, index, [slot.down_HI], "w2")
            if isinstance(weights, MappedExpertWeights) and weights.file_backed:
                release_pages(q.values for q in (slot.gate_IH, slot.up_IH, slot.down_HI) if q is not None)
            on_progress("pack", packed.num_bytes * (index + 1) // weights.num_slots, packed.num_bytes)
        return packed

    def beside(self, weights: Weights, shared: Weights) -> Weights | None:
        """One native pass over both: the same threads go from routed experts to the shared ones, no sum in between."""
        if not isinstance(weights, PackedExpertWeights) or not isinstance(shared, PackedExpertWeights):
            return None
        return replace(weights, shared=shared) if shared.gated == weights.gated else None

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """Multiply in the layout the tokens have."""
        assert isinstance(weights, PackedExpertWeights)
        w13, w2, threads = weights.w13, weights.w2, torch.get_num_threads()
        if isinstance(tokens, RowTokens):
            x, scales = _codes(tokens.x_RH)
            shared = None if weights.shared is None else (weights.shared.w13, weights.shared.w2)
            y = experts_rows(
                self.native, x, tokens.ids_RK, tokens.weights_RK, w13, w2, shared=shared,
                mode=self.mode, x_scales_RX=scales, out_RH=tokens.out_RH, threads=threads,
            )  # fmt: skip
            return ExpertOutput(y, OutputStage.REDUCED)
        assert weights.shared is None, "shared experts are added to rows only; the layer asks `beside` for rows alone"
        if isinstance(tokens, GroupedTokens):
            x, scales = _codes(tokens.x_NH)
            y = experts_grouped(
                self.native, x, tokens.counts_L, None, w13, w2, mode=self.mode, x_scales_NX=scales, threads=threads
            )
            return ExpertOutput(y, OutputStage.RAW)
        x, scales = _codes(tokens.x_LSH)
        y = experts_batched(
            self.native, x, tokens.counts_L, w13, w2, mode=self.mode, x_scales_LSX=scales, threads=threads
        )
        return ExpertOutput(y, OutputStage.RAW)

    def _layouts(self, weights: Weights) -> tuple[MatrixLayout, MatrixLayout]:
        storage = Format.BF16 if weights.scheme.block is None else Format.FP8
        hidden, inner = self.context.hidden_size, self.context.intermediate_size
        return (
            MatrixLayout(num_outputs=inner, num_inputs=hidden, gated=weights.gated, format=storage),
            MatrixLayout(num_outputs=hidden, num_inputs=inner, gated=False, format=storage),
        )

    def _pack(self, packed: PackedMatrix, index: int, parts: list[QuantTensor], name: str) -> None:
        values = tuple(part.values for part in parts)
        scales = tuple(part.scales.to(torch.float32) for part in parts if part.scales is not None)
        threads = torch.get_num_threads()
        pack_slot(self.native, packed, index, values, scales, threads=threads, name=f"{name} of slot {index}")


def _stacked_biases(weights: Weights) -> tuple[Tensor | None, Tensor | None]:
    """Biases of w13 (gate's, then up's) and of w2 in f32, one row a slot; None for experts without."""
    found = [weights.slot(index).biases for index in range(weights.num_slots)]
    biases = [slot for slot in found if slot is not None]
    if not biases:
        return None, None
    assert len(biases) == len(found), "either every expert of a layer has biases or none"
    first = [torch.cat([b.up_I] if b.gate_I is None else [b.gate_I, b.up_I]) for b in biases]
    return torch.stack(first).to(torch.float32), torch.stack([b.down_H for b in biases]).to(torch.float32)


def _codes(x: QuantTensor) -> tuple[Tensor, Tensor | None]:
    """Rows as the kernels read them: bf16, or FP8 codes with f32 scales."""
    return x.values, None if x.scales is None else x.scales.to(torch.float32)
