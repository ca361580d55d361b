"""A MoE layer with gradients: gate, routing, exchange and experts as plain torch under autograd.

    layer = TrainingMoE(config, comm, balance_weight=0.01)    # config.router.kind: topk, noisy_topk or expert_capacity
    out = layer(x_TH)
    (task_loss(out.y_TH) + out.balance_loss).backward()
    layer.update_bias(out, gamma=1e-3)                        # where router.has_correction_bias

`MoELayer` serves quantised weights and has no gradients; it refuses the router kinds that exist for training only.
Experts are trained in one place each (`TrainingExchange`), with f32 or bf16 parameters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from moe_mk.comm.collective import CallGroups, collective
from moe_mk.comm.groups import Absent, Group, communicator
from moe_mk.config.moe import MoEConfig
from moe_mk.errors import ConfigError, UnsupportedError, expect_kind
from moe_mk.flight import wait
from moe_mk.kernels.reference.activation import activation
from moe_mk.kernels.reference.topk import expert_scores
from moe_mk.layer.settings import expert_map_of, router_of
from moe_mk.router.gate import gate_logits
from moe_mk.router.replay import ReplayedTokens
from moe_mk.router.training import (
    balance_loss,
    expert_capacity,
    importance,
    noisy_topk,
    route_with_capacity,
    updated_bias,
)
from moe_mk.runner.training_exchange import TrainingExchange
from moe_mk.shapes import expect
from moe_mk.tokens import Routing


@dataclass(frozen=True)
class TrainingOutput:
    """The result of one forward, and what auxiliary losses and bias updates are computed from."""

    y_TH: Tensor
    probabilities_TE: Tensor
    """f32 scores of all experts, differentiable: the argument of `router.training.importance`."""
    ids_TK: Tensor
    """int32: chosen experts; -1 for assignments that found no capacity."""
    weights_TK: Tensor
    """f32, differentiable: routing weights of the chosen experts."""
    balance_loss: Tensor
    """f32 scalar: balance_weight times the squared variation of importance over all ranks; 0 for a weight of 0."""


class TrainingMoE(nn.Module):
    """One MoE layer on one rank, trained. Every rank calls it, and backward, equally often, with zero tokens too."""

    def __init__(
        self,
        config: MoEConfig,
        comm: Group | Absent | None = Absent.ABSENT,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
        balance_weight: float = 0.0,
    ) -> None:
        """config: model, router and parallel.placement; the kernel section is not read.

        comm: the ranks that share out the experts; left out: one rank. generator: draws the noise of noisy_topk and the
        initial weights, which do not depend on the number of ranks. balance_weight: of the auxiliary loss; 0.0 omits it
        and its collective. Raises UnsupportedError with every setting that cannot be trained.
        """
        super().__init__()
        expect_kind("config", config, MoEConfig)
        self.config, self.comm, self.generator = config, communicator(comm), generator
        self.groups = CallGroups(self.comm)
        self.balance_weight = balance_weight
        if reasons := _reasons_against(config, self.comm.size):
            raise UnsupportedError(f"{config.model.name} cannot be trained as configured", reasons)
        model = config.model
        self.exchange = TrainingExchange(self.comm, expert_map_of(config.with_(ep=self.comm.size)))
        hidden, inner, experts = model.hidden_size, model.moe_intermediate_size, model.num_experts

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

        local = self.exchange.expert_map.num_slots(self.comm.rank)
        self.gate_EH = empty(experts, hidden)
        self.noise_EH = empty(experts, hidden) if config.router.kind == "noisy_topk" else None
        self.w13_LIH, self.w2_LHI = empty(local, 2 * inner, hidden), empty(local, hidden, inner)
        self.shared_w13_IH = empty(2 * model.shared_size, hidden) if model.shared_size else None
        self.shared_w2_HI = empty(hidden, model.shared_size) if model.shared_size else None
        self.e_score_correction_bias: Tensor | None
        bias_E = torch.zeros(experts, dtype=torch.float32, device=device) if config.router.has_correction_bias else None
        self.register_buffer("e_score_correction_bias", bias_E)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights from N(0, 1 / inputs); noise weights start at 0, as in Shazeer et al. 2017."""
        owned = {expert: slot for slot, expert in enumerate(self.exchange.expert_map.local_to_global(self.comm.rank))}
        self._draw(self.gate_EH)
        if self.noise_EH is not None:
            self.noise_EH.zero_()
        for expert in range(self.config.model.num_experts):
            for stack in (self.w13_LIH, self.w2_LHI):
                # Experts of other ranks are drawn too, so that equal seeds give equal layers at every EP size.
                self._draw(stack[owned[expert]] if expert in owned else torch.empty_like(stack[0]))
        for shared in (self.shared_w13_IH, self.shared_w2_HI):
            if shared is not None:
                self._draw(shared)

    def _draw(self, weight: Tensor) -> None:
        weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=self.generator)

    @collective(lambda moe, *_, **__: moe.groups)
    def forward(self, x_TH: Tensor, replay: Tensor | Routing | None = None) -> TrainingOutput:
        """Tokens (T, H) to outputs (T, H) with routing; raises ShapeError for other shapes and dtypes.

        replay: recorded experts of these tokens (rollout routing replay). Ids (T, K) are weighed by the live gate, with
        its gradient; a `Routing` brings its weights along, and the gate has a gradient through auxiliary losses alone.
        Only for router.kind = topk.
        """
        expect("x", x_TH, "T H", (self.gate_EH.dtype,), self.gate_EH.device, H=self.config.model.hidden_size)
        router = None if replay is None else self._replaying(x_TH, replay)
        probabilities_TE, weights_TK, ids_TK = self._route(x_TH, router)
        # A row of fp16 may overflow before it is weighted.
        wide_TH = x_TH.to(torch.float32) if x_TH.dtype is torch.float16 else x_TH
        y_TH = self.exchange(wide_TH, ids_TK, weights_TK.to(wide_TH.dtype), self._expert)
        if self.shared_w13_IH is not None and self.shared_w2_HI is not None:
            y_TH = y_TH + self._mlp(wide_TH, self.shared_w13_IH, self.shared_w2_HI)
        return TrainingOutput(
            y_TH.to(x_TH.dtype), probabilities_TE, ids_TK, weights_TK, self._balance_loss(probabilities_TE)
        )

    @collective(lambda moe, *_, **__: moe.groups)
    @torch.no_grad()
    def update_bias(self, out: TrainingOutput, gamma: float) -> None:
        """Move the correction bias of the router towards an even load, see `router.training.updated_bias`.

        Every rank calls it after the same step. Raises ConfigError for a router without a correction bias.
        """
        if self.e_score_correction_bias is None:
            raise ConfigError("update_bias needs router.has_correction_bias = true")
        load_E = torch.bincount(out.ids_TK[out.ids_TK >= 0], minlength=self.config.model.num_experts)
        load_E = wait(self.comm.all_reduce(load_E, "load"))
        self.e_score_correction_bias.copy_(updated_bias(self.e_score_correction_bias, load_E, gamma))

    def _balance_loss(self, probabilities_TE: Tensor) -> Tensor:
        if self.balance_weight == 0:
            return probabilities_TE.new_zeros(())
        summed_E = importance(probabilities_TE, lambda local_E: wait(self.comm.all_reduce(local_E, "importance")))
        return balance_loss(summed_E, self.balance_weight)

    def _replaying(self, x_TH: Tensor, replay: Tensor | Routing) -> ReplayedTokens:
        router, experts = self.config.router, self.config.model.num_experts
        if router.kind != "topk":
            raise UnsupportedError(f"replay with router.kind = {router.kind}", ["use router.kind = topk"])
        made = ReplayedTokens.of(router_of(self.config), replay, experts)
        expect("recorded ids", made.ids_TK, "T K", None, x_TH.device, T=len(x_TH), K=router.top_k)
        return made

    def _route(self, x_TH: Tensor, replayed: ReplayedTokens | None) -> tuple[Tensor, Tensor, Tensor]:
        router, experts = self.config.router, self.config.model.num_experts
        if router.kind == "noisy_topk":
            assert self.noise_EH is not None
            std = router.noise_std if self.training else 0.0
            return noisy_topk(x_TH, self.gate_EH, self.noise_EH, router.top_k, noise_std=std, generator=self.generator)
        logits_TE = gate_logits(x_TH, self.gate_EH)
        scores_TE = expert_scores(logits_TE, router.scoring_func, torch.float32)
        if router.kind == "expert_capacity":
            capacity = expert_capacity(len(x_TH), router.top_k, experts, router.capacity_factor)
            made = route_with_capacity(scores_TE, router.top_k, capacity, router.num_choices)
            return scores_TE, made.weights_TK, made.ids_TK
        routing = (replayed or router_of(self.config))(logits_TE, self.e_score_correction_bias)
        return scores_TE, routing.weights_TK, routing.ids_TK

    def _expert(self, slot: int, x_NH: Tensor) -> Tensor:
        return self._mlp(x_NH, self.w13_LIH[slot], self.w2_LHI[slot])

    def _mlp(self, x_NH: Tensor, w13_IH: Tensor, w2_HI: Tensor) -> Tensor:
        model = self.config.model
        w13_IH, w2_HI = w13_IH.to(x_NH.dtype), w2_HI.to(x_NH.dtype)
        gate, up = linear(x_NH, w13_IH).chunk(2, dim=-1)
        alpha, limit = model.swiglu_alpha, model.swiglu_limit
        return linear(activation(model.activation, gate, up, alpha=alpha, limit=limit), w2_HI)


def _reasons_against(config: MoEConfig, ranks: int) -> list[str]:
    model, router, parallel = config.model, config.router, config.parallel
    if parallel.ep not in (1, ranks):
        raise ConfigError(f"parallel.ep={parallel.ep} but the group has {ranks} ranks; pass a group of that size")
    trained: dict[str, tuple[object, object]] = {
        "model.latent_size": (model.latent_size, None), "model.input_norm": (model.input_norm, None),
        "model.gated": (model.gated, True), "model.shared_gate": (model.shared_gate, False),
        "model.shared_activation": (model.shared_activation, None), "model.expert_bias": (model.expert_bias, False),
        "model.shared_scale": (model.shared_scale, 1.0), "model.num_zero_experts": (model.num_zero_experts, 0),
        "router.group_score": (router.group_score, "auto"),
        "router.has_expert_scale": (router.has_expert_scale, False),
        "router.weight_on_input": (router.weight_on_input, False), "parallel.tp": (parallel.tp, 1),
        "router.has_logit_bias": (router.has_logit_bias, False), "parallel.tokens": (parallel.tokens, "sharded"),
        "router.hash_vocabulary": (router.hash_vocabulary, None),
        "router.scoring_func": (router.scoring_func, re.sub("^(logit|masked)_", "", router.scoring_func)),
        "router.first_image_token": (router.first_image_token, None),
        "model.num_fused_shared_experts": (model.num_fused_shared_experts, 0),
    }  # fmt: skip
    reasons = [
        f"{name} = {value} is not trained; set it to {wanted}"
        for name, (value, wanted) in trained.items()
        if value != wanted
    ]
    if model.quant.weights not in ("bf16", "fp16", "fp32"):
        weights = f"model.quant.weights = {model.quant.weights}: quantised weights have no gradients"
        reasons.insert(0, f"{weights}; train in bf16 or fp32, then `moe-mk convert`")
    if not isinstance(parallel.placement, str):
        reasons.append("parallel.placement is a list: train in one place each, with linear or round_robin")
    return reasons
