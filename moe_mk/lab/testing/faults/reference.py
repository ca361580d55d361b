"""The independent reference of the fault harness: random checkpoints, tokens and expected outputs in plain torch f64.

It shares no code with the layer under test: weights are dequantised here, routing and experts are computed here, token
by token chosen so that no rounding of router scores can change which experts they get.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.config.moe import MoEConfig
from moe_mk.errors import ConfigError

BLOCK = 128
"""Rows and columns of an FP8 weight that share a scale."""
MARGIN = 1e-4
"""Tokens whose choice of experts is closer than this are not drawn; f32 scores are exact to about 1e-6."""
E4M3_MAX = 448.0


def check_supported(config: MoEConfig) -> None:
    """Raise ConfigError, listing every reason, for a layer that this reference does not compute."""
    model, router = config.model, config.router
    reasons = []
    if model.activation != "silu":
        reasons.append(f"model.activation={model.activation!r}, the reference computes silu")
    if model.expert_bias:
        reasons.append("model.expert_bias=true, the reference has no biases of experts")
    if router.has_logit_bias:
        reasons.append("router.has_logit_bias=true, the reference has no bias of logits")
    if model.input_norm is not None or router.has_expert_scale:
        reasons.append("model.input_norm or router.has_expert_scale is set, the reference computes neither")
    if model.num_zero_experts or model.shared_scale != 1:
        reasons.append("model.num_zero_experts > 0 or model.shared_scale != 1, the reference computes neither")
    if router.hash_vocabulary is not None:
        reasons.append("router.hash_vocabulary is set, the reference routes by scores")
    if router.scoring_func not in ("softmax", "sigmoid"):
        reasons.append(f"router.scoring_func={router.scoring_func!r}, the reference computes softmax and sigmoid")
    if reasons:
        raise ConfigError(
            f"the fault harness cannot verify this layer: {'; '.join(reasons)}; use another configuration"
        )


@dataclass(frozen=True)
class Choice:
    """The experts of some tokens."""

    ids_TK: Tensor
    weights_TK: Tensor
    margin_T: Tensor
    """How far the closest score that was not chosen is from one that was."""


class ReferenceLayer:
    """One layer with random weights: the tensors of its checkpoint, tokens to call it with, and the right outputs."""

    def __init__(self, config: MoEConfig, seed: int) -> None:
        self.config = config
        self._draw = torch.Generator("cpu").manual_seed(seed)
        model = config.model
        self.tensors: dict[str, Tensor] = {"gate.weight": self._normal(model.num_experts, model.hidden_size).bfloat16()}
        """Named as an official checkpoint names them below the prefix of its layer."""
        if config.router.has_correction_bias:
            bias_E = self._normal(model.num_experts, 1)[:, 0] * 0.1 - 0.8
            self.tensors["gate.e_score_correction_bias"] = bias_E.float()
        self._dense: dict[str, Tensor] = {}
        blocks = [(f"experts.{expert}", model.moe_intermediate_size) for expert in range(model.num_experts)]
        blocks += [("shared_experts", model.shared_size)] if model.shared_size else []
        for name, inner in blocks:
            self._add(f"{name}.gate_proj.weight", inner, model.hidden_size, 1.7)
            self._add(f"{name}.up_proj.weight", inner, model.hidden_size, 1.7)
            self._add(f"{name}.down_proj.weight", model.hidden_size, inner, 0.9)

    def tokens(self, count: int, seed: int) -> Tensor:
        """(count, H) random rows in bf16 whose choice of experts is clear."""
        draw = torch.Generator("cpu").manual_seed(seed)
        shape = (2 * count + 8, self.config.model.hidden_size)
        x_TH = torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu").bfloat16()
        clear_TH = x_TH[self.choice(x_TH).margin_T > MARGIN]
        assert len(clear_TH) >= count, "fewer than half of the tokens are clear"
        return clear_TH[:count].contiguous()

    def choice(self, x_TH: Tensor) -> Choice:
        """Which experts tokens get, with which weights; f64 throughout."""
        router = self.config.router
        logits_TE = x_TH.double() @ self.tensors["gate.weight"].double().T
        scores_TE = logits_TE.softmax(dim=1) if router.scoring_func == "softmax" else logits_TE.sigmoid()
        biased_TE = scores_TE
        if router.has_correction_bias:
            biased_TE = scores_TE + self.tensors["gate.e_score_correction_bias"].double()
        margins = []
        groups = router.num_expert_group
        if groups > 1:
            grouped_TGX = biased_TE.view(len(x_TH), groups, biased_TE.shape[1] // groups)
            counted = min(2 if router.has_correction_bias else 1, grouped_TGX.shape[2])
            worth_TG = grouped_TGX.topk(counted, dim=2).values.sum(dim=2)
            kept_TG, margin_T = _best(worth_TG, router.topk_group)
            margins.append(margin_T)
            allowed_TG = torch.zeros_like(worth_TG, dtype=torch.bool).scatter_(1, kept_TG, value=True)
            biased_TE = grouped_TGX.masked_fill(~allowed_TG[:, :, None], -torch.inf).flatten(1)
        ids_TK, margin_T = _best(biased_TE, router.top_k)
        margins.append(margin_T)
        weights_TK = scores_TE.gather(1, ids_TK)
        if router.renormalize:
            weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True)
        return Choice(ids_TK, weights_TK * router.routed_scaling_factor, torch.stack(margins).amin(dim=0))

    def expected(self, x_TH: Tensor) -> Tensor:
        """Return the expected output of the layer, in f64."""
        choice, x = self.choice(x_TH), x_TH.double()
        y_TH = torch.zeros_like(x)
        for expert in range(self.config.model.num_experts):
            weight_T = (choice.weights_TK * (choice.ids_TK == expert)).sum(dim=1)
            rows_X = weight_T.nonzero()[:, 0]
            y_TH[rows_X] += weight_T[rows_X, None] * self._mlp(f"experts.{expert}", x[rows_X])
        if self.config.model.shared_size:
            y_TH += self._mlp("shared_experts", x)
        return y_TH

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up, down = (self._dense[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        g = x @ gate.T
        y: Tensor = ((g * g.sigmoid()) * (x @ up.T)) @ down.T
        return y

    def _add(self, name: str, rows: int, columns: int, gain: float) -> None:
        weight = self._normal(rows, columns) * gain
        if self.config.model.quant.weights != "fp8_block":
            self.tensors[name] = weight.bfloat16()
            self._dense[name] = self.tensors[name].double()
            return
        scales = torch.empty((-(-rows // BLOCK), -(-columns // BLOCK)), dtype=torch.float32, device="cpu")
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = weight[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
                scales[i, j] = block.abs().max() / E4M3_MAX
        spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        values = (weight / spread).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        self.tensors[name], self.tensors[f"{name}_scale_inv"] = values, scales
        self._dense[name] = values.float().double() * spread.double()

    def _normal(self, rows: int, columns: int) -> Tensor:
        """Rows of length 1 on average."""
        drawn = torch.randn((rows, columns), generator=self._draw, dtype=torch.float32, device="cpu")
        return drawn / math.sqrt(columns)


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The columns with the largest scores of each row, and how far the next score is below them."""
    if count == scores.shape[1]:
        best = scores.topk(count, dim=1)
        return best.indices, torch.full_like(best.values[:, 0], torch.inf)
    best = scores.topk(count + 1, dim=1)
    return best.indices[:, :count], best.values[:, count - 1] - best.values[:, count]
