"""Checks of the tensors that callers pass to a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_mk.errors import ShapeError, UnsupportedError
from moe_mk.shapes import expect, expect_dense
from moe_mk.tokens import Routing

if TYPE_CHECKING:
    from moe_mk.layer.moe_layer import MoELayer

IDS = (torch.int32, torch.int64)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
    expect_inference("the layer", hidden_states)


def expect_inference(through: str, tensor: Tensor) -> None:
    """Raise UnsupportedError if gradients or tangents of a tensor are followed."""
    if isinstance(tensor, Tensor) and ((tensor.requires_grad and torch.is_grad_enabled()) or has_tangent(tensor)):
        raise UnsupportedError(f"gradients through {through}", ["it serves inference; call it under torch.no_grad()"])


def has_tangent(tensor: Tensor) -> bool:
    """Whether forward-mode differentiation (`torch.func.jvp`) follows a tensor, which a kernel would drop."""
    unpack_dual: Any = forward_ad.unpack_dual  # has no annotations
    return forward_ad._current_level >= 0 and unpack_dual(tensor).tangent is not None


def checked_tokens(layer: MoELayer, hidden_states: Tensor) -> Tensor:
    """The tokens if the layer can run on them, contiguous and not negated lazily: a kernel reads their memory."""
    config = layer.state.backends.config
    hidden_size, max_num_tokens = config.model.hidden_size, config.kernel.max_num_tokens
    if type(hidden_states) is not Tensor:
        expect_dense("hidden_states", hidden_states)
    if (
        hidden_states.dtype is not layer.dtype
        or hidden_states.layout is not torch.strided
        or hidden_states.device != layer.device
        or hidden_states.dim() != 2
        or hidden_states.shape[1] != hidden_size
        or hidden_states.shape[0] > max_num_tokens
        or hidden_states.requires_grad
        or forward_ad._current_level >= 0
        or (not torch.compiler.is_compiling() and not hidden_states.data_ptr())  # no tokens, or memory that was freed
    ):
        if layer.device.type == "meta":
            _ = layer.weights  # raises WeightError
        check_hidden_states(hidden_states, layer.dtype, layer.device, hidden_size, max_num_tokens)
    return hidden_states.resolve_neg().contiguous()


def checked_routing(layer: MoELayer, x_TH: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Routing:
    """Return an engine's own routing of tokens as the stages of a layer read it.

    Ids other than those that the last `route` returned are read on the host. Raises ShapeError unless it fits,
    UnsupportedError for experts that route inside. On a GPU the choices of a token must be distinct: rows there have
    room for as many as a rank has experts.
    """
    _expect_choices(layer, x_TH.shape[0], topk_weights, topk_ids)
    if layer.kernel.routes_inside:
        chosen = layer.decision.chosen.experts
        raise UnsupportedError(f"{chosen} routes inside", ["pin kernel.experts to another backend"])
    return Routing(topk_ids.to(torch.int32).resolve_neg(), topk_weights.float().masked_fill(topk_ids < 0, 0.0))


def _expect_choices(layer: MoELayer, num_tokens: int, topk_weights: Tensor, topk_ids: Tensor) -> None:
    device, top_k, num_experts = layer.device, layer.config.router.top_k, layer.config.model.scored_experts
    expect_dense("topk_ids", topk_ids)
    expect_dense("topk_weights", topk_weights)
    expect("topk_ids", topk_ids, "T K", IDS, device, T=num_tokens, K=top_k)
    expect("topk_weights", topk_weights, "T K", FLOATS, device, T=num_tokens, K=top_k)
    expect_inference("topk_weights", topk_weights)
    if layer.routing.has_chosen(topk_ids) or not topk_ids.numel():
        return
    lowest, highest = torch.aminmax(topk_ids)
    if lowest.item() >= -1 and highest.item() < num_experts:
        if device.type == "cuda" and (repeats := tokens_with_repeats(topk_ids)):
            raise ShapeError(
                f"topk_ids holds an expert twice for {len(repeats)} tokens, for example token {repeats[0]}: "
                f"{topk_ids[repeats[0]].tolist()}; add the weights up and use -1 for the second"
            )
        return
    wrong = topk_ids[(topk_ids < -1) | (topk_ids >= num_experts)]
    raise ShapeError(
        f"topk_ids holds {wrong.numel()} ids outside [-1, {num_experts}), for example {wrong[:5].tolist()}; "
        "use -1 for an assignment that goes nowhere"
    )


def expect_routing(x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, names: tuple[str, str]) -> None:
    """Raise ShapeError unless these are weights and ids of the tokens. names: of the two arguments."""
    expect(names[1], ids_TK, "T K", IDS, x_TH.device, T=x_TH.shape[0])
    expect(names[0], weights_TK, "T K", FLOATS, x_TH.device)
    if weights_TK.shape != ids_TK.shape:
        raise ShapeError(f"{names[0]} is {tuple(weights_TK.shape)}, {names[1]} is {tuple(ids_TK.shape)}")


def tokens_with_repeats(topk_ids: Tensor) -> list[int]:
    """Tokens that choose an expert more than once; -1 is no choice. Read on the host."""
    sorted_TK = topk_ids.sort(dim=1).values
    repeats_TK = (sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] >= 0)
    found: list[int] = repeats_TK.any(dim=1).nonzero().flatten().tolist()
    return found
