"""Checks of the tensors that callers pass to a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.errors import ShapeError, UnsupportedError
from moe_mk.shapes import expect


def check_hidden_states(
    hidden_states: Tensor, dtype: torch.dtype, device: torch.device, hidden_size: int, max_num_tokens: int
) -> None:
    """Raise ShapeError or UnsupportedError unless a layer can run on these tokens."""
    expect("hidden_states", hidden_states, "T H", dtype, device, H=hidden_size)
    if hidden_states.shape[0] > max_num_tokens:
        raise ShapeError(
            f"hidden_states has T={hidden_states.shape[0]} tokens, kernel.max_num_tokens={max_num_tokens}; "
            "raise the setting or split the batch"
        )
    if hidden_states.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError("gradients through the layer", ["it serves inference; call it under torch.no_grad()"])


def check_routing(
    topk_weights: Tensor,
    topk_ids: Tensor,
    device: torch.device,
    sizes: tuple[int, int, int],
    *,
    read_ids: bool = True,
) -> None:
    """Raise ShapeError unless an engine's own routing fits. sizes: T, K, E. read_ids: check the ids, on the host."""
    num_tokens, top_k, num_experts = sizes
    expect("topk_ids", topk_ids, "T K", (torch.int32, torch.int64), device, T=num_tokens, K=top_k)
    expect("topk_weights", topk_weights, "T K", torch.float32, device, T=num_tokens, K=top_k)
    if not read_ids or not topk_ids.numel():
        return
    lowest, highest = torch.aminmax(topk_ids)
    if lowest.item() >= -1 and highest.item() < num_experts:
        return
    wrong = topk_ids[(topk_ids < -1) | (topk_ids >= num_experts)]
    raise ShapeError(
        f"topk_ids holds {wrong.numel()} ids outside [-1, {num_experts}), for example {wrong[:5].tolist()}; "
        "use -1 for an assignment that goes nowhere"
    )
