"""Experts on a CPU in native code: AMX, AVX-512 or AVX2, weights decoded in registers, sums in f32.

Recommended on every CPU with a C++ compiler. Weights are packed once into the order the matrix units read, at their
size in the checkpoint; one call computes w13, activation, w2, routing weights and the sum over experts. The kernels are
compiled on first use into the user's cache directory (`kernels/native`). For small
calls of a whole layer, `fuse_layer` adds the other stages to the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from itertools import count
from typing import ClassVar

import torch
from torch import Tensor

from moe_mk.config.moe import ResidencyConfig
from moe_mk.config.problem import Problem, Reason
from moe_mk.config.tuned import Tuned
from moe_mk.experts.base import EXPERTS, QUANTISED, WEIGHT_ONLY, ExpertsContext, ExpertsTraits, FusedExperts
from moe_mk.experts.cpu_native import tuning as tunings
from moe_mk.experts.cpu_native.paged import NativeCache, PagedExperts, PagedRows, RecordLayout
from moe_mk.experts.cpu_native.weights import (
    BLOCK,
    PackedExpertWeights,
    multiplies_int8,
    native_kernels,
    pack_matrix,
    storage_of,
    stored_as,
)
from moe_mk.experts.paged import open_store, pool_of, slots_of_rows
from moe_mk.experts.residency import POLICIES
from moe_mk.kernels.native.experts_mode import Activation, ExpertsMode, Rounding, Tuning, wrong_formats
from moe_mk.kernels.native.instruction_set import Choice, choice, not_of_processor
from moe_mk.kernels.native.layer import PreparedExperts, RowsOfExperts, Stack
from moe_mk.kernels.native.layout import MatrixLayout
from moe_mk.kernels.native.library import Isa
from moe_mk.kernels.native.packed import PackedMatrix, allocate, on_huge_pages, touch_slot
from moe_mk.kernels.native.prepared import ExpertsCall
from moe_mk.kernels.native.threads import described, engine_runtime
from moe_mk.quant.fp8 import FP8_1x128, FP8_1x128_UE8M0, Fp8Block
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.int8 import INT8_TOKEN, Int8Block
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.tokens import BatchedTokens, ExpertOutput, GroupedTokens, OutputStage, RowTokens, Tokens
from moe_mk.trace.clock import now
from moe_mk.weights.expert_weights import SlotWeights, Weights, expect_one_width, stacked_biases
from moe_mk.weights.scan import Progress

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU_ERF,
    "gelu_tanh": Activation.GELU_TANH,
    "relu2": Activation.RELU2,
    "swiglu_limit": Activation.SILU,
    "swiglu_oai": Activation.SWIGLU_OAI,
    "silu_limit": Activation.SILU_LIMIT,
    "situ": Activation.SITU,
}


@EXPERTS.register("cpu_native")
class CpuNativeExperts(FusedExperts):
    """C++ kernels behind a C interface; uses as many threads as torch."""

    traits: ClassVar[ExpertsTraits] = ExpertsTraits(
        summary="native CPU kernels (AMX, AVX-512, AVX2); the fast choice wherever a C++ compiler is",
        kinds=frozenset({"cpu"}),
        library="c++",
        extra="install a C++ compiler (Debian: apt install g++); torch_cpu serves without, several times slower",
        emits={RowTokens: OutputStage.REDUCED, GroupedTokens: OutputStage.RAW, BatchedTokens: OutputStage.RAW},
        weights=frozenset({"plain", *QUANTISED, *WEIGHT_ONLY}) - {name for name in GGUF if GGUF[name].blocks.held},
        mixed_weights=True,
        pages=True,
        computes=("plain", "fp8", "int8"),
        weight_only_computes=("plain", "int8"),
        dtypes=frozenset({"bf16"}),
        block_sides=frozenset({BLOCK}),
        copies_weights=True,
        batch_invariant=True,
        activations=frozenset(ACTIVATIONS),
        biases=True,
        graph_safe=False,
        deterministic=True,
        bandwidth=0.7,
        compute=0.4,
        launches=1,
        per_expert=False,
    )

    def __init__(self, context: ExpertsContext) -> None:
        super().__init__(context)
        if context.residency is not None:
            _ = POLICIES[context.residency.policy]  # raises ConfigError
        self.native = native_kernels(
            own_threads=context.own_threads, cache_dir=context.cache_dir, instruction_set=context.instruction_set
        )
        self.mode = ExpertsMode(
            ACTIVATIONS[context.activation],
            alpha=context.swiglu_alpha,
            limit=context.swiglu_limit or 0.0,
            quantize=_rounding(context.compute),
            batch_invariant=context.batch_invariant,
        )
        self.tuned: Tuned[Tuning] | None = None
        """Parameters by rows per expert; loaded when the scheme of the weights is known."""
        self._parameters = ""
        self.choice: Choice | None = None
        """Of the instruction set; None before the format of the weights is known."""

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Adds to the traits: plain weights in bf16, INT8 blocks of 128, FP8 tokens with a scale per 128 values."""
        reasons, stored = super().reasons_against(problem), problem.weights
        quant = problem.config.model.quant
        if problem.config.kernel.threads == "engine" and isinstance(missing := engine_runtime(), str):
            reasons.append(Reason("threads", f"kernel.threads = engine: {missing}", "kernel.threads = auto"))
        pinned = problem.config.kernel.instruction_set
        if pinned != "auto" and (lacks := not_of_processor(Isa[pinned.upper()])):
            usable = ", ".join(isa.name.lower() for isa in Isa if not not_of_processor(isa))
            text = f"kernel.instruction_set = {pinned}, but this processor lacks {', '.join(lacks)}; usable: {usable}"
            reasons.append(Reason("instruction_set", text, "kernel.instruction_set = auto"))
        if unread := {s.name for s in (stored, quant.down_scheme) if s.block is None and storage_of(s) is None}:
            reasons.append(
                Reason("weights", f"reads no {' and '.join(sorted(unread))} weights; of plain ones only bf16")
            )
        elif quant.weights == "int8_block" and storage_of(stored) is None:
            sides = "x".join(map(str, quant.block))
            reasons.append(Reason("block", f"reads INT8 blocks of {BLOCK}x{BLOCK}, the experts have {sides}"))
        rounded = problem.activations
        asked = problem.config.kernel.rounds and rounded is not None
        if (paging := problem.config.kernel.residency) is not None and paging.store is None:
            text = "reads experts from files, and kernel.residency.store names no folder"
            reasons.append(Reason("residency", text, "kernel.residency.store = the absolute path of a folder"))
        if asked and rounded is not None and rounded.family == "fp8" and rounded not in (FP8_1x128, FP8_1x128_UE8M0):
            text = f"rounds tokens to FP8 with a scale for {BLOCK} values only, not to {rounded.name}"
            reasons.append(Reason("activations", text, "kernel.activations = auto"))
        if asked and quant.weights in WEIGHT_ONLY and not multiplies_int8(stored):
            text = f"multiplies no {quant.weights} weights with tokens rounded to INT8"
            reasons.append(Reason("activations", text, "kernel.activations = auto"))
        return reasons

    @classmethod
    def workspace_bytes(cls, problem: Problem, rows: int) -> int:
        """Hidden rows of all assignments in bf16, and sums in f32; of paged experts the terms of the sums as well."""
        assignments = rows * problem.config.router.top_k
        if problem.config.kernel.residency is not None:
            terms = assignments * problem.config.model.hidden_size * (2 + 4 + 4)  # rows, outputs, terms
            return terms + assignments * problem.intermediate * 2
        return assignments * problem.intermediate * 2 + rows * problem.config.model.hidden_size * 4

    @classmethod
    def slot_bytes(cls, problem: Problem) -> int:
        """A record of the store; 0 for weights that are not packed."""
        model, inner = problem.config.model, problem.intermediate
        storage13, storage2 = storage_of(problem.weights), storage_of(model.quant.down_scheme)
        if storage13 is None or storage2 is None:
            return 0
        layout13 = storage13.layout(inner, model.hidden_size, gated=model.gated)
        layout2 = storage2.layout(model.hidden_size, inner, gated=False)
        return RecordLayout(layout13, layout2, biased=model.expert_bias).num_bytes

    @classmethod
    def tuning_space(cls, context: ExpertsContext, rows: int) -> list[dict[str, int | bool | str]]:
        """Memory access parameters to try for a number of tokens; none of them changes a bit of the result."""
        return tunings.candidates(context, rows)

    def tuned_with(self, parameters: Mapping[str, int | bool | str]) -> CpuNativeExperts:
        """A copy with fixed parameters. Raises ConfigError for parameters that the kernels do not have."""
        one = copy(self)
        one.tuned = Tuned.fixed(tunings.tuning_of(parameters))
        return one

    def relayout(self, weights: Weights, on_progress: Progress | None = None) -> Weights:
        """Pack every expert. Those of files are read one by one.

        on_progress: called with ("pack", bytes packed so far, total bytes) after each expert.
        """
        if isinstance(weights, PackedExpertWeights):
            self._choose_isa(weights.w13.layout)
            return weights
        expect_one_width(weights, "cpu_native")
        residency = self.context.residency
        if residency is not None and weights.num_slots:
            return self._page(weights, residency, on_progress)
        bias13, bias2 = stacked_biases(weights)
        (layout13, scheme13), (layout2, scheme2) = self._layouts(weights)
        packed = PackedExpertWeights(
            allocate(self.native, layout13, weights.num_slots, bias13, touch=False),
            allocate(self.native, layout2, weights.num_slots, bias2, touch=False),
            scheme13,
            down_scheme=scheme2,
        )
        large = True
        for index in range(weights.num_slots):
            large = large and all(touch_slot(self.native, matrix, index) for matrix in (packed.w13, packed.w2))
            self._pack(weights.slot(index), index, packed.w13, packed.w2)
            if on_progress is not None:
                on_progress("pack", packed.num_bytes * (index + 1) // weights.num_slots, packed.num_bytes)
        self._choose_parameters(packed)
        return packed

    def _layouts(self, weights: Weights) -> tuple[tuple[MatrixLayout, QuantScheme], tuple[MatrixLayout, QuantScheme]]:
        (scheme13, dtype13), (scheme2, dtype2) = stored_as(weights)
        storage13, storage2 = storage_of(scheme13), storage_of(scheme2)
        names = f"{scheme13.name} and {scheme2.name}"
        assert storage13 is not None and storage2 is not None, (
            f"{names} weights should have been rejected by the oracle"
        )
        hidden, inner = self.context.hidden_size, self.context.intermediate_size
        layout13 = storage13.layout(inner, hidden, gated=weights.gated, scale_dtype=dtype13)
        return (layout13, scheme13), (storage2.layout(hidden, inner, gated=False, scale_dtype=dtype2), scheme2)

    def _pack(self, slot: SlotWeights, index: int, w13: PackedMatrix, w2: PackedMatrix) -> None:
        pack_matrix(w13, index, [q for q in (slot.gate_IH, slot.up_IH) if q is not None], "w13", self.native)
        pack_matrix(w2, index, [slot.down_HI], "w2", self.native)

    def _page(self, weights: Weights, residency: ResidencyConfig, on_progress: Progress | None) -> PagedExperts:
        """Write the experts to a store unless it is there, and open it with empty slots."""
        (layout13, scheme13), (layout2, scheme2) = self._layouts(weights)
        biases = stacked_biases(weights)
        self._choose_isa(layout13)
        layout = RecordLayout(layout13, layout2, biased=biases[0] is not None)
        total = layout.num_bytes * weights.num_slots
        record_SB = on_huge_pages(1, layout.num_bytes).zero_()
        w13, w2 = layout.matrices(record_SB)

        def pack(expert: int) -> None:
            self._pack(weights.slot(expert), 0, w13, w2)
            for matrix, bias_LX in zip((w13, w2), biases, strict=True):
                if matrix.bias_LX is not None and bias_LX is not None:
                    matrix.bias_LX[0].copy_(bias_LX[expert])
            if on_progress is not None:
                on_progress("pack", layout.num_bytes * (expert + 1), total)

        pool = pool_of(residency, self.context.pool, layout.num_bytes, weights.num_slots)
        store = open_store(residency, weights, layout.facts(), record_SB[0], pack)
        cache = NativeCache(self.native, store, layout, residency, pool, limit_s=self.context.timeout_s)
        self._parameters = str(cache)
        return PagedExperts(*cache.matrices, scheme13, down_scheme=scheme2, cache=cache)

    def parameters(self) -> str:
        """Where the parameters are from, the cut-over that was measured, the instruction set, and the threads."""
        threads = described("own" if self.context.own_threads else "auto")
        return "; ".join(str(each) for each in (self._parameters, self.choice, threads) if each)

    def numerics(self, weights: Weights) -> str:
        """Return the name of the instruction set."""
        assert isinstance(weights, PackedExpertWeights)
        chosen = choice(self.native, weights.w13.layout.format, self.mode.quantize)
        return f"{chosen.isa.name} (kernel.instruction_set pins it)"

    def _choose_isa(self, layout13: MatrixLayout) -> Isa:
        self.choice = choice(self.native, layout13.format, self.mode.quantize)
        return self.choice.isa

    def _choose_parameters(self, packed: PackedExpertWeights) -> None:
        """Load the tuned file, or measure the cut-over between kernels if the experts are too large for the caches."""
        tuned = self._tuned(packed.scheme, min(tunings.CHOICES, packed.num_slots))
        isa = self._choose_isa(packed.w13.layout)
        cut_over = tunings.cut_over_of(isa, packed.w13.layout.format, self.mode)
        if tuned.points:
            self._parameters = f"as measured by moe-mk tune at {len(tuned.points)} numbers of rows"
        elif cut_over is None or packed.num_bytes < tunings.MEASURED_BYTES:
            self._parameters = "built in"
        else:
            found = tunings.measured(self._case(packed, isa), cut_over, self._clock(packed))
            self._parameters = f"measured at load: {found}"
            if found.tuning != Tuning():
                self.tuned = Tuned.fixed(found.tuning)

    def _case(self, packed: PackedExpertWeights, isa: Isa) -> str:
        shape = f"H{self.context.hidden_size} I{self.context.intermediate_size} {packed.scheme.name}"
        return f"{shape} {self.mode} {isa.name} {torch.get_num_threads()} threads"

    def _clock(self, packed: PackedExpertWeights) -> Callable[[int, Tuning], float]:
        """Seconds of a call with all rows on one expert, another one in each call."""
        slots, x_RH = count(), torch.ones((256, self.context.hidden_size), dtype=torch.bfloat16, device="cpu")

        def seconds(rows: int, tuning: Tuning) -> float:
            slot = next(slots) % packed.num_slots
            ids_RK = torch.full((rows, 1), slot, dtype=torch.int32, device="cpu")
            call = ExpertsCall(self.native, packed.w13, packed.w2, None, replace(self.mode, tuning=tuning))
            start = now()
            call(x_RH[:rows], None, ids_RK, None, None, torch.get_num_threads())
            return now() - start

        return seconds

    def fuse_shared_experts(self, weights: Weights, shared: Weights) -> Weights | None:
        """One native call for both: the threads continue from routed to shared experts without a separate sum."""
        if not isinstance(weights, PackedExpertWeights) or type(shared) is not PackedExpertWeights:
            return None
        matrices = (weights.w13, weights.w2, shared.w13, shared.w2)
        fits = shared.gated == weights.gated and not wrong_formats(self.mode, matrices)
        return replace(weights, shared=shared) if fits else None

    def fuse_layer(self, weights: Weights, top_k: int) -> PreparedExperts | None:
        """The packed weights, and the mode of each number of rows."""
        if not isinstance(weights, PackedExpertWeights):
            return None
        scheme, tuned, shared = weights.scheme, self._tuned(weights.scheme, top_k), weights.shared
        every = {point.parameters for point in tuned.points} | {parameters for _, parameters in tuned.built_in}
        by_rows = bool(tuned.points) and len(every) > 1

        def mode_of_rows(rows: int) -> ExpertsMode:
            return self._at(rows, top_k) if self._tuned(scheme, top_k).points else self.mode

        stack = Stack(weights.w13, weights.w2, None if shared is None else (shared.w13, shared.w2))
        takes_fp8 = self.mode.quantize is not Rounding.INT8
        rows = RowsOfExperts(self.native, stack, mode_of_rows, by_rows, takes_fp8)
        return PagedRows(rows, weights) if isinstance(weights, PagedExperts) else rows

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """Apply the experts in the layout of the tokens. Raises StoreError for paged experts that cannot be read."""
        assert isinstance(weights, PackedExpertWeights)
        tuned = self.tuned
        mode = self.mode if tuned is not None and not tuned.points else self._mode(tokens, weights)
        if isinstance(tokens, RowTokens):
            x_RH = tokens.x_RH
            plain = x_RH.scales is None and x_RH.values.dtype is torch.bfloat16
            x, scales = (x_RH.values, None) if plain else self._codes(x_RH)
            y = weights.sums(self.native, mode, x, scales, tokens.ids_RK, tokens.weights_RK, tokens.out_RH)
            return ExpertOutput(y, OutputStage.REDUCED)
        assert weights.shared is None, "shared experts are fused for RowTokens only"
        x, scales = self._codes(tokens.x_NH if isinstance(tokens, GroupedTokens) else tokens.x_LSH)
        scales, ids_R1 = None if scales is None else scales.flatten(0, -2), slots_of_rows(tokens.counts_L, x)
        y = weights.sums(self.native, mode, x.flatten(0, -2), scales, ids_R1, None)
        return ExpertOutput(y.view(*x.shape[:-1], self.context.hidden_size), OutputStage.RAW)

    def _mode(self, tokens: Tokens, weights: PackedExpertWeights) -> ExpertsMode:
        choices = tokens.ids_RK.shape[1] if isinstance(tokens, RowTokens) else 1
        tuned = self._tuned(weights.scheme, choices)
        return self._at(*_rows_and_choices(tokens)) if tuned.points else self.mode

    def _tuned(self, scheme: QuantScheme, choices: int) -> Tuned[Tuning]:
        if self.tuned is None:
            self.tuned = tunings.load_tuned(self.context, scheme, choices)
        return self.tuned

    def _at(self, rows: int, choices: int) -> ExpertsMode:
        if rows == 0 or self.tuned is None:
            return self.mode
        return replace(self.mode, tuning=self.tuned.at(rows * choices / self.context.num_slots))

    def _codes(self, x: QuantTensor) -> tuple[Tensor, Tensor | None]:
        """Rows as the kernels read them: codes with f32 scales if their scheme is supported, else bf16."""
        if self.mode.quantize in (Rounding.INT8, Rounding.INT8_PARTS):
            supported = x.scheme == self.context.compute
        else:
            supported = isinstance(x.scheme, Fp8Block) and x.scheme.block == (1, BLOCK)
        if x.scales is None or not supported:
            return x.dequantize(torch.bfloat16), None
        return x.values, x.scales.to(torch.float32)


def _rounding(compute: QuantScheme) -> Rounding:
    if compute.block is None:
        return Rounding.NONE
    if isinstance(compute, Int8Block):
        return Rounding.INT8 if compute == INT8_TOKEN else Rounding.INT8_PARTS
    return Rounding.FP8_UE8M0 if compute == FP8_1x128_UE8M0 else Rounding.FP8


def _rows_and_choices(tokens: Tokens) -> tuple[int, int]:
    if isinstance(tokens, RowTokens):
        return tokens.ids_RK.shape[0], tokens.ids_RK.shape[1]
    if isinstance(tokens, GroupedTokens):
        return tokens.x_NH.shape[0], 1
    return int(tokens.counts_L.sum()), 1
