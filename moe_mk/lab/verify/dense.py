"""The independent reference: a dense computation without permutation or communication.

It shares no arithmetic with the layer: separate dequantisation in f32 (numpy; four-bit values bit by bit, scales by
block, each product rounded to f32 once), separate routing (numpy, token by token), and a separate MLP. Sums run in f64,
because two f32 sums with the same library could make the same errors. Inputs are weights as mapped by the checkpoint
reader, and a config.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.config.moe import ModelConfig, MoEConfig
from moe_mk.config.router import RouterConfig
from moe_mk.errors import ConfigError, ShapeError, UnsupportedError
from moe_mk.quant.blocked import WHOLE, BlockedScheme, Element
from moe_mk.quant.tensor import QuantTensor
from moe_mk.weights.expert_weights import SlotWeights
from moe_mk.weights.layer_weights import LayerWeights
from moe_mk.weights.source import in_memory

F32 = NDArray[np.float32]


def decoded(q: QuantTensor) -> Tensor:
    """A matrix as f64 on the CPU: values times the scale of their block, rounded to f32."""
    if q.scheme.family == "gguf":
        return torch.from_numpy(ggml_values(q.scheme.name, q.values.cpu().numpy()).astype(np.float64))
    if q.scheme.family == "wna16":
        return torch.from_numpy(_whole_numbers(q).astype(np.float64))
    values = _elements(q)
    if q.scales is not None:
        scales = _f32(q.scales)
        if q.global_scale is not None:  # the scale of each block times that of its part of the rows
            above = _f32(q.global_scale)
            scales = scales * np.repeat(above, scales.shape[0] // above.shape[0], axis=0)
        values = values * _over_blocks(scales, q)
    return torch.from_numpy(values.astype(np.float64))


def _elements(q: QuantTensor) -> F32:
    if isinstance(q.scheme, BlockedScheme) and type(q.scheme.element) is not Element:
        return _f32(q.scheme.element.decode(q.values))  # of another distribution, which alone defines its codes
    return _four_bits(q.values) if q.scheme.per_byte == 2 else _f32(q.values)


def _f32(tensor: Tensor) -> F32:
    return np.asarray(tensor.cpu().to(torch.float32).numpy(), dtype=np.float32)


def _four_bits(packed: Tensor) -> F32:
    """Sign, two bits of exponent with a bias of 1, one bit of mantissa; the low half of a byte comes first."""
    octets = packed.cpu().view(torch.uint8).numpy()
    codes = np.empty((octets.shape[0], 2 * octets.shape[1]), dtype=np.int32)
    codes[:, 0::2], codes[:, 1::2] = octets % 16, octets // 16
    sign, exponent, mantissa = codes // 8, codes // 2 % 4, codes % 2
    size = np.where(exponent == 0, mantissa / 2, np.exp2(exponent - 1) * (1 + mantissa / 2))
    return np.where(sign == 1, -size, size).astype(np.float32)


def _whole_numbers(q: QuantTensor) -> F32:
    """Unsigned codes less their zero, the low half of a byte first, times the scale of the group, rounded to f32; or
    affine ones: codes times the scale, and the bias.
    """
    octets = q.values.cpu().numpy().astype(np.int32)
    codes, middle = octets, 128
    if q.scheme.per_byte == 2:
        codes, middle = np.empty((octets.shape[0], 2 * octets.shape[1]), dtype=np.int32), 8
        codes[:, 0::2], codes[:, 1::2] = octets % 16, octets // 16
    assert q.scales is not None
    if q.zeros is not None and q.zeros.is_floating_point():
        scaled = codes.astype(np.float32) * _over_blocks(_f32(q.scales), q)
        return np.asarray(scaled + _over_blocks(_f32(q.zeros), q), dtype=np.float32)
    zeros = middle if q.zeros is None else _over_blocks(_f32(q.zeros), q)
    return np.asarray((codes - zeros).astype(np.float32) * _over_blocks(_f32(q.scales), q), dtype=np.float32)


SIZES = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34), "iq4_nl": (32, 18),
    "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
    "iq4_xs": (256, 136),
}  # fmt: skip
"""(values, bytes) of each type of block."""
TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)


def ggml_values(name: str, rows: NDArray[np.uint8]) -> F32:
    """Blocks of ggml value by value, as `dequantize_row_*` of ggml-quants.c loops over them; (n, bytes) to (n, k)."""
    values, num_bytes = SIZES[name]
    blocks = rows.reshape(rows.shape[0], -1, num_bytes).astype(np.int32)
    of_block = _of_32 if values == 32 else _of_256
    return np.stack([of_block(name, blocks, i) for i in range(values)], axis=-1).reshape(rows.shape[0], -1)


def _of_32(name: str, b: NDArray[np.int32], i: int) -> F32:
    """Value i of each block of 32."""
    d, start = _f16(b, 0), SIZES[name][1] - 16
    if name == "q8_0":
        return np.asarray(d * _signed(b[..., 2 + i]))
    code: NDArray[np.int32] = (b[..., start + i % 16] >> 4 * (i // 16)) % 16
    if name == "iq4_nl":
        return np.asarray(d * TABLE[code])
    if name in ("q5_0", "q5_1"):
        code = code + (b[..., start - 4 + i // 8] >> i % 8) % 2 * 16
    if name in ("q4_1", "q5_1"):
        return d * code.astype(np.float32) + _f16(b, 2)
    return np.asarray(d * (code - (8 if name == "q4_0" else 16)).astype(np.float32))


def _of_256(name: str, b: NDArray[np.int32], i: int) -> F32:
    """Value i of each block of 256."""
    half, part, at = i // 128, i // 32 % 4, i % 32
    if name == "q6_k":
        low = b[..., 64 * half + 32 * (part % 2) + at] >> 4 * (part // 2)
        code = low % 16 + (b[..., 128 + 32 * half + at] >> 2 * part) % 4 * 16 - 32
        return _f16(b, 208) * _signed(b[..., 192 + i // 16]) * code.astype(np.float32)
    if name == "q2_k":
        code = (b[..., 16 + 32 * half + at] >> 2 * part) % 4
        scale, least = (b[..., i // 16] % 16).astype(np.float32), (b[..., i // 16] // 16).astype(np.float32)
        return _f16(b, 80) * scale * code.astype(np.float32) - _f16(b, 82) * least
    if name == "q3_k":
        code = (b[..., 32 + 32 * half + at] >> 2 * part) % 4 + (b[..., at] >> i // 32) % 2 * 4 - 4
        j = i // 16
        scale = (b[..., 96 + j % 8] >> 4 * (j // 8)) % 16 + (b[..., 104 + j % 4] >> 2 * (j // 4)) % 4 * 16 - 32
        return _f16(b, 108) * scale.astype(np.float32) * code.astype(np.float32)
    group, start = i // 32, 48 if name == "q5_k" else 16
    if name == "iq4_xs":
        scale = (b[..., 4 + group // 2] >> 4 * (group % 2)) % 16 + (b[..., 2 + group // 4] >> 2 * (group % 4)) % 4 * 16
        code = (b[..., 8 + 16 * group + i % 16] >> 4 * (i // 16 % 2)) % 16
        return np.asarray(_f16(b, 0) * (scale - 32).astype(np.float32) * TABLE[code])
    code = (b[..., start + 32 * (group // 2) + at] >> 4 * (group % 2)) % 16
    if name == "q5_k":
        code = code + (b[..., 16 + at] >> group) % 2 * 16
    first, second = _six_bit_pair(b, group)
    return np.asarray(_f16(b, 0) * first * code.astype(np.float32) - _f16(b, 2) * second)


def _f16(blocks: NDArray[np.int32], at: int) -> F32:
    bits = (blocks[..., at] + 256 * blocks[..., at + 1]).astype(np.uint16)
    return np.asarray(bits.view(np.float16).astype(np.float32))


def _signed(octets: NDArray[np.int32]) -> F32:
    return np.asarray(np.where(octets > 127, octets - 256, octets).astype(np.float32))


def _six_bit_pair(blocks: NDArray[np.int32], group: int) -> tuple[F32, F32]:
    """The scale and the minimum of a group of q4_k and q5_k, as `get_scale_min_k4` of ggml-quants.c."""
    at = 4 + group
    if group < 4:
        pair = blocks[..., at] % 64, blocks[..., at + 4] % 64
    else:
        pair = (
            blocks[..., at + 4] % 16 + blocks[..., at - 4] // 64 * 16,
            blocks[..., at + 4] // 16 + blocks[..., at] // 64 * 16,
        )
    return np.asarray(pair[0].astype(np.float32)), np.asarray(pair[1].astype(np.float32))


def _over_blocks(scales: F32, q: QuantTensor) -> F32:
    """Each scale repeated over its block, the last of which may be partial; a side of WHOLE spans the matrix."""
    assert q.scheme.block is not None
    out = scales
    for axis in (0, 1):
        length, side = q.shape[axis], q.scheme.block[axis]
        if side >= WHOLE:  # the matrix, or as many equal parts of it as there are scales
            side = -(-length // max(scales.shape[axis], 1))
        out = np.repeat(out, side, axis=axis)[:length] if axis == 0 else np.repeat(out, side, axis=axis)[:, :length]
    return out


Array = NDArray[np.float32]
Progress = Callable[[str, int, int], None]
"""("verify", experts done, experts in all)."""


@dataclass(frozen=True)
class DenseResult:
    """The expected output of the layer for some tokens."""

    y_TH: Tensor
    """f64, on the CPU."""
    biased_TE: Array
    """Scores used for the choice: with the bias, before groups are masked."""
    ids_TK: NDArray[np.int64]
    weights_TK: Array


def dense_layer(
    x_TH: Tensor,
    config: MoEConfig,
    weights: LayerWeights,
    ids_TK: NDArray[np.int64] | None = None,
    on_progress: Progress | None = None,
    token_ids_T: Tensor | None = None,
) -> DenseResult:
    """Compute the whole layer for (T, H) tokens on the CPU; weights must own every expert, unsliced.

    ids_TK: use this choice of experts instead of its own, weighed by its own scores.
    token_ids_T: integers, tokens of the vocabulary; a layer with a table of experts by token id needs them, and raises
    ShapeError where they are missing or not one a token, ConfigError where the table has no such token.
    Raises UnsupportedError for a router of another distribution.
    """
    if config.router.kind != "topk":
        way = "verify the layer with router.kind = topk, and the router with lab.testing.conformance.check_router"
        raise UnsupportedError(f"a reference for router.kind = {config.router.kind}", [way])
    assert weights.facts.owned == tuple(range(config.model.num_experts)) and weights.facts.tp_size == 1
    x = x_TH.to(device="cpu", dtype=torch.float64)
    router_TH, gate_EH = x_TH.cpu(), weights.gate_EH.cpu().double()
    if config.model.input_norm is not None and weights.input_norm is not None:
        norm_H, scale_H = (each.cpu().double() for each in weights.input_norm)
        x = x / torch.sqrt(x.pow(2).mean(1, keepdim=True) + config.model.input_norm)
        router_TH, x = x.to(x_TH.dtype), x * norm_H
        gate_EH = gate_EH * scale_H / config.model.hidden_size**0.5
    choice_TE, scores_TE = _scores(router_TH, gate_EH, weights.logit_bias_E, config.router)
    biased_TE = choice_TE if weights.bias_E is None else choice_TE + weights.bias_E.cpu().float().numpy()
    is_image_T, table_XK = np.zeros(len(scores_TE), dtype=bool), weights.table_XK
    if weights.image_bias_E is not None and token_ids_T is not None:
        is_image_T = token_ids_T.cpu().numpy() >= config.router.first_image_token
        own_TE = choice_TE + weights.image_bias_E.cpu().float().numpy()
        biased_TE = np.where(is_image_T[:, None], own_TE, biased_TE)
    if ids_TK is None and table_XK is not None and token_ids_T is not None and is_image_T.any():
        by_id_TK = _chosen(
            biased_TE, config.router, table_XK, torch.where(torch.from_numpy(is_image_T), 0, token_ids_T)
        )
        ids_TK = np.where(is_image_T[:, None], _chosen(biased_TE, config.router, None, None), by_id_TK)
    chosen_TK = _chosen(biased_TE, config.router, table_XK, token_ids_T) if ids_TK is None else ids_TK
    weights_TK = routing_weights(scores_TE, chosen_TK, config.router)
    if weights.expert_scale_E is not None:
        weights_TK = weights_TK * weights.expert_scale_E.cpu().float().numpy()[np.maximum(chosen_TK, 0)]
    own = x
    if config.router.weight_on_input:
        x, weights_TK = x * torch.from_numpy(weights_TK).double(), np.ones_like(weights_TK)
    x = x if weights.latent is None else x @ weights.latent[0].cpu().double().T
    y_TH = torch.zeros_like(x)
    with_weights = (chosen_TK >= 0) & (chosen_TK < config.model.num_experts)
    hit = np.unique(chosen_TK[with_weights]).tolist()
    for number, expert in enumerate(hit):
        share_T = torch.from_numpy(np.where(chosen_TK == expert, weights_TK, 0.0).sum(axis=1))
        rows = torch.nonzero(share_T).flatten()
        y_TH[rows] += share_T[rows, None] * _mlp(
            x[rows], weights.experts.slots[expert].changed(in_memory), config.model
        )
        if on_progress:
            on_progress("verify", number + 1, len(hit))
    if (eps := config.model.latent_norm) is not None and weights.latent is not None:
        y_TH = y_TH / torch.sqrt(y_TH.pow(2).mean(1, keepdim=True) + eps) * weights.latent[2].cpu().double()
    x, y_TH = own, y_TH if weights.latent is None else y_TH @ weights.latent[1].cpu().double().T
    if config.model.num_zero_experts and config.model.zero_expert_type == "identity":
        y_TH += x * torch.from_numpy(np.where(chosen_TK >= config.model.num_experts, weights_TK, 0.0)).sum(1, True)
    if weights.shared is not None:
        gate_H = weights.shared_gate_H
        factor_T1 = 1.0 if gate_H is None else 1 / (1 + torch.exp(-(x @ gate_H.cpu().double()[:, None])))
        shared = weights.shared.changed(in_memory)
        y_TH += config.model.shared_scale * factor_T1 * _mlp(x, shared, config.model.of_shared())
    return DenseResult(y_TH, biased_TE, chosen_TK, weights_TK)


def _chosen(
    biased_TE: Array, router: RouterConfig, table_XK: Tensor | None, token_ids_T: Tensor | None
) -> NDArray[np.int64]:
    """The experts of each token from the table if the layer has one, else those with the best scores."""
    if table_XK is None:
        return best(kept(biased_TE, router), router.top_k)
    if token_ids_T is None or tuple(token_ids_T.shape) != (len(biased_TE),):
        got = "none" if token_ids_T is None else list(token_ids_T.shape)
        raise ShapeError(
            f"a layer that chooses experts by token id is verified with token_ids_T, one id of each of its "
            f"{len(biased_TE)} tokens; got {got}"
        )
    table, ids = table_XK.cpu().numpy(), token_ids_T.cpu().numpy()
    beyond = [int(token) for token in ids if not 0 <= token < len(table)]
    if beyond:
        raise ConfigError(f"token_ids_T holds {beyond[:5]}, the table of experts has tokens [0, {len(table)})")
    return np.array([table[token] for token in ids], dtype=np.int64).reshape(len(ids), table.shape[1])


def _scores(x_TH: Tensor, gate_EH: Tensor, logit_bias_E: Tensor | None, router: RouterConfig) -> tuple[Array, Array]:
    """Return the scores that select, without a bias, and unbiased scores in f32.

    router_dtype "model" rounds logits and sigmoid to the dtype of the tokens.
    """
    logits = x_TH.double() @ gate_EH.T
    if logit_bias_E is not None:
        logits = logits + logit_bias_E.cpu().double()
    return scores_of(logits, router, x_TH.dtype if router.router_dtype == "model" else torch.float32)


def scores_of(logits_TE: Tensor, router: RouterConfig, coarse: torch.dtype) -> tuple[Array, Array]:
    """Return selecting scores without a bias, and unbiased scores in f32, of logits; both rounded to `coarse`."""
    logits = logits_TE.to(coarse).double()
    by_logit, kind = router.scoring_func.startswith(("logit_", "masked_")), router.scoring_func.removeprefix("logit_")
    if kind == "masked_softmax":
        scores = torch.stack([_masked_softmax(each) for each in logits]) if len(logits) else logits
    elif kind == "softmax":
        exps = torch.exp(logits - logits.amax(dim=1, keepdim=True))
        scores = exps / exps.sum(dim=1, keepdim=True)
    elif kind == "sqrtsoftplus":
        scores = torch.sqrt(torch.logaddexp(logits, torch.zeros_like(logits))).to(coarse)
    else:
        scores = 1.0 / (1.0 + torch.exp(-logits))
        scores = scores if by_logit else scores.to(coarse)
    exact = np.asarray(scores.float().numpy(), dtype=np.float32)
    return np.asarray(logits.float().numpy(), dtype=np.float32) if by_logit else exact, exact


def _masked_softmax(logits_E: Tensor) -> Tensor:
    """The experts of one token one after the other, best first, each weighed among those that are left and near it."""
    left, found = logits_E.clone(), torch.empty_like(logits_E)
    for _ in range(len(left)):
        expert = int(left.argmax())
        most = logits_E[expert]
        near = left[~((most - left) / logits_E.abs().clamp(min=float(most)) > 0.02)]
        found[expert], left[expert] = 1 / torch.exp(near - most).sum(), -torch.inf
    return found


def num_counted(router: RouterConfig, num_experts: int) -> int:
    """The number of scores in the score of a group: the best, or the two best with a bias or by `group_score`."""
    two = router.has_correction_bias or router.group_score == "two_best"
    return min(2 if two else 1, num_experts // router.num_expert_group)


def group_worth(biased_E: Array, router: RouterConfig) -> list[float]:
    """The score of each group of one token: the sum of its best scores."""
    size, counted = len(biased_E) // router.num_expert_group, num_counted(router, len(biased_E))
    groups = [biased_E[g * size : (g + 1) * size] for g in range(router.num_expert_group)]
    return [float(np.sort(group)[::-1][:counted].sum()) for group in groups]


def kept(biased_TE: Array, router: RouterConfig) -> Array:
    """Mask all but the best groups of each token."""
    if router.num_expert_group == 1:
        return biased_TE
    kept_TE, size = np.full_like(biased_TE, -np.inf), biased_TE.shape[1] // router.num_expert_group
    for t, biased_E in enumerate(biased_TE):
        worth = np.asarray(group_worth(biased_E, router))
        for g in np.argsort(-worth, kind="stable")[: router.topk_group]:
            kept_TE[t, g * size : (g + 1) * size] = biased_E[g * size : (g + 1) * size]
    return kept_TE


def best(choice_TE: Array, top_k: int) -> NDArray[np.int64]:
    """The experts with the greatest values of each token, of equal ones the lowest."""
    return np.argsort(-choice_TE, axis=1, kind="stable")[:, :top_k].astype(np.int64)


def routing_weights(scores_TE: Array, ids_TK: NDArray[np.int64], router: RouterConfig) -> Array:
    """The weights of chosen experts, without a factor of each expert; 0 for -1."""
    picked = np.where(ids_TK >= 0, np.take_along_axis(scores_TE, np.maximum(ids_TK, 0), axis=1), 0.0)
    if router.renormalize:
        picked = picked / (picked.sum(axis=1, keepdims=True) + 1e-20)
    return np.asarray(picked * router.routed_scaling_factor, dtype=np.float32)


def _mlp(x: Tensor, slot: SlotWeights, model: ModelConfig) -> Tensor:
    up = _affine(x, slot.up_IH, slot.bias("up"))
    if slot.gate_IH is None:
        hidden = ACTIVATIONS[model.activation](up)
    else:
        gate = _affine(x, slot.gate_IH, slot.bias("gate"))
        hidden = gated(gate, up, model)
    return _affine(hidden, slot.down_HI, slot.bias("down"))


def _affine(x: Tensor, weight: QuantTensor, bias: Tensor | None) -> Tensor:
    y = x @ decoded(weight).T
    return y if bias is None else y + bias.cpu().double()


def gated(gate: Tensor, up: Tensor, model: ModelConfig) -> Tensor:
    """act(gate) * up with the limits of the model."""
    if model.activation == "situ":
        soft = up if model.swiglu_limit is None else model.swiglu_limit * torch.tanh(up / model.swiglu_limit)
        return soft * model.swiglu_alpha * torch.tanh(gate / model.swiglu_alpha) / (1.0 + torch.exp(-gate))
    if model.swiglu_limit is None:
        return ACTIVATIONS[model.activation](gate) * up
    if model.activation == "silu_limit":
        gate = gate / (1.0 + torch.exp(-gate))
        return torch.clamp(gate, max=model.swiglu_limit) * torch.clamp(up, -model.swiglu_limit, model.swiglu_limit)
    gate, up = torch.clamp(gate, max=model.swiglu_limit), torch.clamp(up, -model.swiglu_limit, model.swiglu_limit)
    if model.activation == "swiglu_oai":
        return (up + 1.0) * gate / (1.0 + torch.exp(-model.swiglu_alpha * gate))
    return gate / (1.0 + torch.exp(-gate)) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda v: v / (1.0 + torch.exp(-v)),
    "gelu": lambda v: 0.5 * v * (1.0 + torch.erf(v / 2.0**0.5)),
    "gelu_tanh": lambda v: 0.5 * v * (1.0 + torch.tanh((2.0 / np.pi) ** 0.5 * (v + 0.044715 * v**3))),
    "relu2": lambda v: torch.clamp(v, min=0.0) ** 2,
}
