"""Reference implementation of the experts: f32, one expert at a time, every layout, every format.

Use it to verify other backends, or where no faster one is available. It dequantises every active expert at each call.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from moe_mk.config.problem import Problem
from moe_mk.config.traits import DEVICES
from moe_mk.experts.base import EXPERTS, QUANTISED, WEIGHT_ONLY, ExpertsTraits, FusedExperts
from moe_mk.experts.monolithic import MONOLITHIC, MonolithicExperts
from moe_mk.kernels.reference.activation import ACTIVATIONS, CLAMPED, activation
from moe_mk.kernels.reference.topk import grouped_topk
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import BatchedTokens, ExpertOutput, GroupedTokens, OutputStage, RowTokens, Tokens
from moe_mk.weights.expert_weights import SlotWeights, Weights


@EXPERTS.register("reference")
class ReferenceExperts(FusedExperts):
    """Plain torch in f32; quantises activations to `context.compute` before each GEMM."""

    traits: ClassVar[ExpertsTraits] = ExpertsTraits(
        summary="the definition: f32 torch, one expert at a time; to check others with",
        kinds=DEVICES,
        emits={RowTokens: OutputStage.REDUCED, GroupedTokens: OutputStage.RAW, BatchedTokens: OutputStage.RAW},
        weights=frozenset({"plain", *QUANTISED, *WEIGHT_ONLY}),
        decodes=True,
        mixed_weights=True,
        weight_only_computes=("int8", "plain"),
        computes=("fp8", "int8", "mxfp8", "mxfp4", "nvfp4", "plain"),
        activations=frozenset({*ACTIVATIONS, *CLAMPED}),
        biases=True,
        definition=True,
        graph_safe=False,
        deterministic=True,
        bandwidth=0.01,
        compute=0.02,
        launches=12,
        per_expert=True,
    )

    @classmethod
    def workspace_bytes(cls, problem: Problem, rows: int) -> int:
        """The sums, the intermediate rows of one expert, and that expert in f32."""
        hidden, inner = problem.config.model.hidden_size, problem.intermediate
        return 4 * (rows * (3 * hidden + 3 * inner) + 3 * hidden * inner)

    def run(self, tokens: Tokens, weights: Weights) -> ExpertOutput:
        if isinstance(tokens, RowTokens):
            return ExpertOutput.reduced(self._rows(tokens, weights), self.context.dtype.dtype, tokens.out_RH)
        y = self._grouped(tokens, weights) if isinstance(tokens, GroupedTokens) else self._batched(tokens, weights)
        return ExpertOutput(y, OutputStage.RAW)

    def _rows(self, tokens: RowTokens, weights: Weights) -> Tensor:
        y_RH = torch.zeros(tokens.x_RH.shape, dtype=torch.float32, device=self.context.device)
        for slot in torch.unique(tokens.ids_RK[tokens.ids_RK >= 0]).tolist():
            row_N, k_N = torch.nonzero(tokens.ids_RK == slot, as_tuple=True)
            y_NH = self._ffn(tokens.x_RH[row_N], weights.slot(slot))
            y_RH.index_add_(0, row_N, y_NH * tokens.weights_RK[row_N, k_N][:, None])
        return y_RH

    def _grouped(self, tokens: GroupedTokens, weights: Weights) -> Tensor:
        y_NH = torch.empty(tokens.x_NH.shape, dtype=self.context.dtype.dtype, device=self.context.device)
        start = 0
        for slot, count in enumerate(tokens.counts_L.tolist()):
            if count:
                part = torch.arange(start, start + count, dtype=torch.int64, device=self.context.device)
                y_NH[start : start + count] = self._ffn(tokens.x_NH[part], weights.slot(slot)).to(y_NH.dtype)
            start += count
        return y_NH

    def _batched(self, tokens: BatchedTokens, weights: Weights) -> Tensor:
        y_LSH = torch.empty(tokens.x_LSH.shape, dtype=self.context.dtype.dtype, device=self.context.device)
        for slot, count in enumerate(tokens.counts_L.tolist()):
            if count:
                part = torch.arange(count, dtype=torch.int64, device=self.context.device)
                y_LSH[slot, :count] = self._ffn(tokens.x_LSH[slot][part], weights.slot(slot)).to(y_LSH.dtype)
        return y_LSH

    def _ffn(self, x_NH: QuantTensor, slot: SlotWeights) -> Tensor:
        x, c = self._rounded(x_NH), self.context
        gate = None if slot.gate_IH is None else _product(x, slot.gate_IH, slot.bias("gate"))
        up = _product(x, slot.up_IH, slot.bias("up"))
        h = activation(c.activation, gate, up, alpha=c.swiglu_alpha, limit=c.swiglu_limit)
        return _product(self._rounded(h, hidden=True), slot.down_HI, slot.bias("down"))

    def _rounded(self, x: Tensor | QuantTensor, *, hidden: bool = False) -> Tensor:
        """Activations quantised to the compute scheme, in f32; tokens received in that scheme are not quantised
        again.
        """
        compute = self.context.compute.hidden if hidden else self.context.compute
        if isinstance(x, QuantTensor):
            if x.scheme == compute:
                return x.dequantize(torch.float32)
            x = x.dequantize(torch.float32)
        return x if isinstance(compute, Plain) else compute.quantize(x).dequantize(torch.float32)


def _product(x: Tensor, weight: QuantTensor, bias: Tensor | None) -> Tensor:
    y = x @ weight.dequantize(torch.float32).T
    return y if bias is None else y + bias.to(torch.float32)


@MONOLITHIC.register("reference_monolithic")
class ReferenceMonolithic(MonolithicExperts):
    """The reference router kernel and the reference experts in one call."""

    traits = ReferenceExperts.traits

    @classmethod
    def workspace_bytes(cls, problem: Problem, rows: int) -> int:
        """Logits, ids and weights of all rows, and the workspace of the reference experts."""
        logits = rows * (problem.config.model.num_experts + 2 * problem.config.router.top_k) * 4
        return logits + ReferenceExperts.workspace_bytes(problem, rows)

    def run(self, x_RH: Tensor, router_logits_RE: Tensor, bias_E: Tensor | None, weights: Weights) -> Tensor:
        """Route, keep the assignments of this rank, multiply."""
        r, tables = self.context.router, self.context.tables
        score_dtype = router_logits_RE.dtype if r.router_dtype == "model" else torch.float32
        weights_RK, ids_RK = grouped_topk(
            router_logits_RE, r.top_k, r.num_expert_group, r.topk_group, r.scoring_func, bias_E,
            r.renormalize, r.routed_scaling_factor, score_dtype,
        )  # fmt: skip
        slots_RK = tables.local_slots(tables.to_physical(ids_RK, salt=0), self.context.rank)
        x = self.context.experts.dtype.quantize(x_RH)
        tokens = RowTokens(x, slots_RK, weights_RK, self.context.experts.num_slots)
        return ReferenceExperts(self.context.experts)(tokens, weights).y
