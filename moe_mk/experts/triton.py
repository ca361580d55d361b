"""Experts on NVIDIA GPUs from Hopper on, in Triton: FP8 blocks or bf16, no permuted copy, captured in a CUDA graph.

Choose it for every layout and every number of tokens on an H100 or H200. Tiles come from `configs/tuned` where the
device has been measured, else from a built-in table. Importing this file needs no triton; building the backend does.
"""

from __future__ import annotations

from threading import get_ident
from typing import ClassVar

import torch
from torch import Tensor

from moe_mk.config.problem import Problem, Reason
from moe_mk.experts.base import EXPERTS, ExpertsContext, ExpertsTraits, FusedExperts
from moe_mk.experts.triton_tuning import Case, load_tuned
from moe_mk.experts.triton_workspace import Workspace, workspace_of
from moe_mk.external.device import profile_here, stream_of
from moe_mk.kernels.triton.tile import Tile
from moe_mk.quant.fp8_block import Fp8Block
from moe_mk.quant.plain import BF16, Plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.tokens import BatchedTokens, ExpertOutput, GroupedTokens, OutputStage, RowTokens, Tokens
from moe_mk.weights.expert_weights import ExpertWeights, Weights

BLOCK = 128
BOX_BYTES = 16
"""Rows that the tensor memory accelerator reads start at multiples of this."""
MASKED_ROWS = 64
"""Mean rows an expert that are expected at most in blocks with padding: their counts are on the device, and transports
that deliver them serve decoding.
"""
FEWEST = 2.0**-10
"""Mean rows an expert that stand for fewer."""
INVARIANT = Tile(rows=64, swap=False, warps=8, stages=4)


@EXPERTS.register("triton")
class TritonExperts(FusedExperts):
    """Two persistent grouped GEMMs; the first quantises its output, the second weighs and scatters it."""

    traits: ClassVar[ExpertsTraits] = ExpertsTraits(
        summary="our Triton kernels for Hopper: FP8 blocks and bf16, every layout; compiled for sm_90 in CI",
        kinds=frozenset({"cuda"}),
        min_arch=(9, 0),
        library="triton",
        extra="pip install 'moe-mk[cuda]'",
        emits={
            RowTokens: OutputStage.REDUCED,
            GroupedTokens: OutputStage.RAW,
            BatchedTokens: OutputStage.RAW,
        },
        weights=frozenset({"plain", "fp8_block"}),
        computes=("fp8", "plain"),
        dtypes=frozenset({"bf16"}),
        block_sides=frozenset({BLOCK}),
        bandwidth=0.75,
        compute=0.6,
        launches=5,
        batch_invariant=True,
    )

    def __init__(self, context: ExpertsContext, workspace: Workspace | None = None) -> None:
        """workspace: scratch memory; None shares that of all layers of the device.

        Raises ImportError where triton is not installed; the oracle refuses the backend there.
        """
        from moe_mk.kernels.triton import experts as kernels

        super().__init__(context)
        self.kernels = kernels
        self.workspace = workspace or workspace_of(context.device)
        self.tuned = load_tuned(profile_here(context.device).name, _case(context))

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Beside the traits: bf16 weights, or FP8 ones with FP8 activations; sizes that fill blocks and boxes."""
        return [*super().reasons_against(problem), *_size_reasons(problem)]

    @classmethod
    def priced(cls, problem: Problem, compute: QuantScheme) -> tuple[float | None, str]:
        """What tuning measured at this number of rows an expert; without it a model, of kernels that never ran here."""
        rows = problem.num_tokens * problem.config.router.top_k / problem.slots
        case = Case(problem.config.model.hidden_size, problem.intermediate, problem.slots, compute.name)
        measured = load_tuned(problem.device.name, case, log=False).microseconds(rows)
        return measured, "model; compiled, not yet measured" if measured is None else "measured"

    @classmethod
    def workspace_bytes(cls, problem: Problem, rows: int) -> int:
        """Rounded rows, the hidden row and the output row of every assignment, and their order."""
        hidden, inner, assignments = (
            problem.config.model.hidden_size, problem.intermediate, rows * problem.config.router.top_k,
        )  # fmt: skip
        return rows * (hidden + 4 * hidden // BLOCK) + assignments * (2 * inner + 2 * hidden + 16)

    def relayout(self, weights: Weights) -> ExpertWeights:
        """One stack on the device with f32 scales; a stack that is there already is not copied."""
        if isinstance(weights, ExpertWeights):
            return ExpertWeights(self._ready(weights.w13), self._ready(weights.w2), weights.layout, weights.gated)
        return ExpertWeights(*self._stacked(weights), gated=weights.gated)

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        """Multiply in the layout the tokens have; queued on the current stream, nothing is waited for."""
        assert isinstance(weights, ExpertWeights)
        experts = self.kernels.Experts(
            (weights.w13.values, weights.w13.scales),
            (weights.w2.values, weights.w2.scales),
            self.context.activation,
            weights.gated,
            getattr(self.context.compute, "ue8m0", False),
        )
        lane = self.workspace.lane((stream_of(self.context.device), get_ident()))
        with lane.frame(self.context.device) as empty:
            if isinstance(tokens, RowTokens):
                x, ids, share = self._readable(tokens.x_RH), tokens.ids_RK.to(torch.int32), tokens.weights_RK
                tile = self._tile(ids.numel() / self.context.num_slots)
                y = self.kernels.experts_rows(
                    x, ids.contiguous(), share.contiguous(), experts, tile, empty, out=tokens.out_RH
                )
                return ExpertOutput(y, OutputStage.REDUCED)
            if isinstance(tokens, GroupedTokens):
                x = self._readable(tokens.x_NH)
                tile = self._tile(len(x[0]) / self.context.num_slots)
                return ExpertOutput(
                    self.kernels.experts_grouped(x, tokens.counts_L, experts, tile, empty), OutputStage.RAW
                )
            x = self._readable(tokens.x_LSH)
            tile = self._tile(min(x[0].shape[1], MASKED_ROWS))
            return ExpertOutput(self.kernels.experts_batched(x, tokens.counts_L, experts, tile, empty), OutputStage.RAW)

    def _tile(self, rows_an_expert: float) -> Tile:
        """The tile for a mean number of rows, known from shapes alone: dropped assignments count.

        One tile for all where a row must get the same bits in any company: inside a tile no row meets another.
        """
        return INVARIANT if self.context.batch_invariant else self.tuned.tile(max(rows_an_expert, FEWEST))

    def _readable(self, x: QuantTensor) -> tuple[Tensor, Tensor | None]:
        """Tokens in the scheme they came in if the experts compute in it, else in bf16, to be rounded on the device."""
        if x.scheme == self.context.compute:
            return x.values, x.scales
        return x.dequantize(torch.bfloat16), None

    def _ready(self, q: QuantTensor) -> QuantTensor:
        q = q.to(self.context.device)
        scales = None if q.scales is None else q.scales.to(torch.float32).contiguous()
        return QuantTensor(q.values.contiguous(), scales, q.scheme)

    def _stacked(self, weights: Weights) -> tuple[QuantTensor, QuantTensor]:
        """Copy mapped matrices to the device one expert after the other; the host holds no second copy."""
        slots = [weights.slot(index) for index in range(weights.num_slots)]
        parts13 = [[q for q in (slot.gate_IH, slot.up_IH) if q is not None] for slot in slots]
        return self._stack(parts13, weights.scheme), self._stack([[slot.down_HI] for slot in slots], weights.scheme)

    def _stack(self, parts: list[list[QuantTensor]], scheme: QuantScheme) -> QuantTensor:
        def fill(name: str, dtype: torch.dtype) -> Tensor:
            pieces = [[getattr(q, name) for q in part] for part in parts]
            shape = (len(pieces), sum(len(piece) for piece in pieces[0]), pieces[0][0].shape[1])
            stack = torch.empty(shape, dtype=dtype, device=self.context.device)
            for index, piece in enumerate(pieces):
                start = 0
                for matrix in piece:
                    _copy(stack[index, start : start + len(matrix)], matrix)
                    start += len(matrix)
            return stack

        first = parts[0][0]
        scales = None if first.scales is None else fill("scales", torch.float32)
        return QuantTensor(fill("values", first.values.dtype), scales, scheme)


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy with a conversion; FP8 values travel as bytes."""
    if target.element_size() == 1:
        target.view(torch.uint8).copy_(source.view(torch.uint8))
    else:
        target.copy_(source.to(target.dtype))


def _case(context: ExpertsContext) -> Case:
    return Case(context.hidden_size, context.intermediate_size, context.num_slots, context.compute.name)


def _size_reasons(problem: Problem) -> list[Reason]:
    model, stored, reasons = problem.config.model, problem.weights, []
    if isinstance(stored, Plain):
        if stored != BF16:
            reasons.append(Reason("weights", f"reads bf16 or FP8 weights, the experts are {stored.name}"))
    elif isinstance(stored, Fp8Block):
        if problem.config.kernel.activations == "plain":
            fix = "kernel.activations = auto"
            reasons.append(Reason("activations", "multiplies FP8 weights with FP8 activations only", fix))
        if problem.intermediate % BLOCK:
            text = f"quantises hidden rows in groups of {BLOCK}, a rank has {problem.intermediate} columns of them"
            reasons.append(Reason("shape", text, f"a tp that leaves a multiple of {BLOCK}"))
    width = 1 if isinstance(stored, Fp8Block) else 2
    for name, size in (("hidden size", model.hidden_size), ("intermediate size", problem.intermediate)):
        if size * width % BOX_BYTES:
            text = f"reads rows in boxes that start at multiples of {BOX_BYTES} B, a {name} of {size} does not"
            reasons.append(Reason("shape", text))
    return reasons
