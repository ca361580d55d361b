"""Shared experts: one MLP that every token visits, computed by the same backend as the routed ones, as one slot."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_mk.experts.base import EXPERTS, FusedExperts
from moe_mk.experts.monolithic import MONOLITHIC
from moe_mk.layer.checks import FLOATS
from moe_mk.oracle.assemble import Parts, build_experts, experts_context
from moe_mk.oracle.verdict import Decision
from moe_mk.permute import permute, weight_and_reduce
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantTensor
from moe_mk.shapes import expect, expect_dense
from moe_mk.tokens import OutputStage, RowTokens
from moe_mk.trace.recorder import Spans
from moe_mk.weights.expert_weights import MappedExpertWeights, SlotWeights, Weights


class SharedExperts:
    """All shared experts of a layer together; under TP this rank's slice, so that its output is a partial sum."""

    def __init__(self, experts: FusedExperts, dtype: Plain, spans: Spans, scale: float = 1.0) -> None:
        """scale: the factor of the output."""
        self.experts, self.dtype, self.spans, self.scale = experts, dtype, spans, scale
        self.weights: Weights | None = None
        self.gate_H: Tensor | None = None
        """f32. The sigmoid of its product with a token multiplies the output; None: the output is added as it is."""
        self.is_weighted = scale != 1
        """Whether the factor or a gate multiplies the output."""

    def load(self, weights: SlotWeights, gate_H: Tensor | None = None) -> None:
        """Take the matrices, in the layout the backend reads, and the gate."""
        self.gate_H = None if gate_H is None else gate_H.to(device=self.experts.context.device, dtype=torch.float32)
        self.is_weighted = gate_H is not None or self.scale != 1
        self.weights = self.experts.relayout(MappedExpertWeights((weights,), weights.up_IH.scheme))

    def row_weights(self, x_TH: Tensor) -> Tensor:
        """(T, 1), f32, of the gate: row by row, so that the bits of a token do not depend on the batch."""
        if self.gate_H is None:
            return torch.full((x_TH.shape[0], 1), self.scale, dtype=torch.float32, device=x_TH.device)
        return self.scale * torch.sigmoid((x_TH.to(torch.float32) * self.gate_H).sum(1, keepdim=True))

    def __call__(self, x_TH: Tensor) -> Tensor:
        """(T, H) to (T, H). Raises ShapeError for other tensors."""
        assert self.weights is not None
        c, dtype = self.experts.context, self.dtype.dtype
        dense = type(x_TH) is Tensor and x_TH.layout is torch.strided and x_TH.dim() == 2
        dense = dense and (x_TH.data_ptr() != 0 or not len(x_TH))
        if not (dense and x_TH.dtype is dtype and x_TH.shape[1] == c.hidden_size and x_TH.device == c.device):
            expect_dense("hidden_states", x_TH)
            expect("hidden_states", x_TH, "T H", FLOATS, c.device, H=c.hidden_size)
        with self.spans.span("shared"):
            ids_TK = torch.zeros((x_TH.shape[0], 1), dtype=torch.int32, device=x_TH.device)
            same = x_TH.dtype is self.dtype.dtype
            x = QuantTensor(x_TH.resolve_neg(), None, self.dtype) if same else self.dtype.quantize(x_TH)
            tokens = permute(RowTokens(x, ids_TK, self.row_weights(x_TH), 1), self.experts.traits.consumes)
            output = self.experts(tokens, self.weights)
            return weight_and_reduce(output, tokens, until=OutputStage.REDUCED).y


def shared_experts(decision: Decision, parts: Parts) -> SharedExperts:
    """Build them for a decision; beside monolithic experts, which cannot compute one slot, the reference does it."""
    chosen, problem = decision.chosen.experts, decision.problem
    config, quant = problem.config, problem.config.model.quant
    backend = "reference" if chosen in MONOLITHIC else chosen
    context = experts_context(decision, parts, 1, config.model.shared_size // config.parallel.tp)
    own_model = config.model.of_shared()
    kernel = config.kernel.model_copy(update={"residency": None})
    config = config.model_copy(update={"model": own_model, "kernel": kernel})
    context = replace(
        context,
        hidden_size=problem.token_size,
        activation=own_model.activation,
        swiglu_limit=own_model.swiglu_limit,
        residency=None,
    )
    alone = config
    if quant.shared_scheme is not None:
        # Activations of plain weights are not rounded, and those of FP8 weights only where the routed ones' are.
        own = None if isinstance(decision.compute, Plain) else quant.shared_activations
        context = replace(context, compute=own or problem.dtype)
        stored = {"weights": quant.shared, "block": quant.block, "scale": quant.scale}
        alone = config.with_(quant=stored, activations="checkpoint" if own else "plain", wire="auto")
    if quant.shared_scheme is not None or config.model.shared_activation is not None:
        backends = (backend, "torch_cpu", "reference")
        able = (b for b in backends if not EXPERTS[b].reasons_against(replace(problem, config=alone)))
        backend = next(able, "reference")
    built, scale = build_experts(decision, backend, context), config.model.shared_scale
    return SharedExperts(built, decision.problem.dtype, parts.spans, scale)
