"""What the imitated TRT-LLM entry points share: routing as it may be given, clamps, and the sum over experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.testing.emulated.flashinfer.fused_moe.trtllm_formats import Rows
from moe_mk.testing.emulated.flashinfer.tllm_enums import ActivationType, RoutingMethodType

MOST_CHOICES, MOST_EXPERTS = 32, 2048


@dataclass(frozen=True)
class Call:
    """The numbers of one call."""

    num_experts: int
    top_k: int
    offset: int
    local: int
    routing_method: int
    activation: int


@dataclass(frozen=True)
class Clamp:
    """Of SwiGLU: the slope of its sigmoid, what is added to up, and where both are clamped."""

    alpha: Tensor | None
    beta: Tensor | None
    limit: Tensor | None

    def gated(self, wide: Tensor, expert: int) -> Tensor:
        """gate sigmoid(alpha gate) (up + beta); `wide` holds up, then gate."""
        up, gate = wide.chunk(2, dim=1)
        if self.limit is not None:
            limit = float(self.limit[expert])
            up, gate = up.clamp(-limit, limit), gate.clamp(max=limit)
        alpha = 1.0 if self.alpha is None else float(self.alpha[expert])
        beta = 0.0 if self.beta is None else float(self.beta[expert])
        return gate * torch.sigmoid(alpha * gate) * (up + beta)


def run(
    call: Call, topk_ids: Tensor | tuple[Tensor, Tensor], products: Rows, clamp: Clamp, output: Tensor | None
) -> Tensor:
    """Check routing and output, and compute: (T, H) in bf16."""
    tokens, hidden = products.x.shape[0], products.x.shape[1]
    ids, weights = _routing(call, topk_ids, tokens)
    for each in (clamp.alpha, clamp.beta, clamp.limit):
        assert each is None or (each.dtype is torch.float32 and each.shape == (call.local,) and each.is_contiguous())
    assert call.activation == ActivationType.Swiglu, "only Swiglu is imitated"
    if output is None:
        output = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=ids.device)
    assert output.dtype is torch.bfloat16 and output.shape == (tokens, hidden) and output.is_contiguous(), "output"
    total = torch.zeros((tokens, hidden), dtype=torch.float32, device=ids.device)
    for expert in range(call.local):
        token_X, k_X = torch.nonzero(ids == call.offset + expert, as_tuple=True)
        if len(token_X):
            made = products.between(clamp.gated(products.wide(token_X, expert), expert))
            rows = products.out(made, expert).to(torch.bfloat16).float()
            total.index_add_(0, token_X, rows * weights[token_X, k_X, None])
    return output.copy_(total)


def _routing(call: Call, topk_ids: Tensor | tuple[Tensor, Tensor], tokens: int) -> tuple[Tensor, Tensor]:
    """Ids and f32 weights. One tensor holds an id in the upper, a bf16 weight in the lower half of each element."""
    assert 0 < call.top_k <= call.num_experts and 0 < call.local <= call.num_experts
    assert call.offset >= 0 and call.offset + call.local <= call.num_experts, "expert offset and count"
    assert call.top_k <= MOST_CHOICES and call.num_experts <= MOST_EXPERTS, "no tier of the routing kernel is so large"
    assert call.routing_method == RoutingMethodType.Renormalize, "the method whose kernel sorts most experts"
    if isinstance(topk_ids, tuple):
        ids, weights = topk_ids
        assert weights.dtype in (torch.bfloat16, torch.float32) and weights.is_contiguous(), "topk_weights"
    else:
        assert topk_ids.dtype is torch.int32, "packed topk_ids must be int32"
        lower = (topk_ids & 0xFFFF).to(torch.int32).contiguous().view(torch.bfloat16)
        ids, weights = topk_ids >> 16, lower.view(*topk_ids.shape, 2)[..., 0]
    assert ids.dtype is torch.int32 and ids.is_contiguous() and ids.shape == (tokens, call.top_k), "topk_ids"
    assert weights.shape == ids.shape, "expert_weights dim1 must match top_k"
    assert bool(((ids >= 0) & (ids < call.num_experts)).all()), "an id that is no expert's"
    return ids, weights.to(torch.float32)


def refuse(**asked: object) -> None:
    """Raise NotImplementedError for what is asked for and not imitated."""
    wanted = [name for name, given in asked.items() if given is not None and given is not False]
    if wanted:
        raise NotImplementedError(f"not imitated: {', '.join(wanted)}")
