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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from moe_mk.comm.collective import CallGroups, collective
from moe_mk.comm.communicator import Communicator
from moe_mk.comm.groups import Absent, Group, communicator
from moe_mk.config.moe import MoEConfig
from moe_mk.config.router import TRAINING_KINDS
from moe_mk.errors import ConfigError, UnsupportedError, expect_kind
from moe_mk.flight import wait
from moe_mk.kernels.reference.activation import activation
from moe_mk.kernels.reference.topk import expert_scores
from moe_mk.lab.training.router import (
    balance_loss,
    expert_capacity,
    importance,
    noisy_topk,
    route_with_capacity,
    updated_bias,
)
from moe_mk.layer.settings import expert_map_of, router_of
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.router.gate import gate_logits
from moe_mk.router.replay import ReplayedTokens
from moe_mk.shapes import expect
from moe_mk.tokens import Routing


@dataclass(frozen=True)
class TrainingOutput:
    """The result of one forward, and what auxiliary losses and bias updates are computed from."""

    y_TH: Tensor
    probabilities_TE: Tensor
    """f32 scores of all experts, differentiable: the argument of `moe_mk.lab.training.importance`."""
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
        """Move the correction bias of the router towards an even load, see `moe_mk.lab.training.updated_bias`.

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
        "router.kind": (router.kind, router.kind if router.kind in ("topk", *TRAINING_KINDS) else "topk"),
        "router.group_score": (router.group_score, "auto"), "router.router_dtype": (router.router_dtype, "float32"),
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


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Expert = Callable[[int, Tensor], Tensor]
"""The expert in a slot of this rank, of rows (N, H): (N, H)."""


class _AllToAll(torch.autograd.Function):
    """An all-to-all whose gradient is the all-to-all in the opposite direction."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, comm: Communicator, send: Sequence[int], receive: Sequence[int], phase: str
    ) -> Tensor:
        ctx.comm, ctx.send, ctx.receive, ctx.phase = comm, send, receive, phase
        return wait(comm.all_to_all(rows.contiguous(), send, receive, phase))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        phase = f"{ctx.phase} backward"
        return wait(ctx.comm.all_to_all(grads[0].contiguous(), ctx.receive, ctx.send, phase)), None, None, None, None


@dataclass(frozen=True)
class TrainingExchange:
    """An exchange that autograd runs backwards. Every rank calls it, and backward, equally often, with zero tokens too.

        forward     dispatch   rows and their weights go to the ranks of their experts
                    combine    sums are returned
        backward    combine    gradients of sums are sent
                    dispatch   gradients of rows and weights are returned

    Four all-to-alls a step and layer; ids go ahead of the rows and have no gradient.

    comm must wait inside a call: a process group, or ranks as threads; ranks in lockstep cannot go backwards.
    """

    comm: Communicator
    expert_map: ExpertMap

    def __post_init__(self) -> None:
        if self.expert_map.has_replicas or self.expert_map.num_ranks != self.comm.size:
            raise ConfigError(
                f"experts are trained in one place each, on all {self.comm.size} ranks of the group; this placement "
                f"has {self.expert_map.num_physical} of {self.expert_map.num_experts} on {self.expert_map.num_ranks}"
            )

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, expert: Expert) -> Tensor:
        """Sum of weight times expert over the choices of each token: (T, H), differentiable in x, weights and experts.

        ids_TK: logical experts, -1 goes nowhere. Rows travel in the wider dtype of x and weights.
        Raises ShapeError for tensors that do not fit each other, CommError for peers that are dead or late.
        """
        expect("x", x_TH, "T H", FLOATS)
        expect("ids", ids_TK, "T K", (torch.int32, torch.int64), x_TH.device, T=x_TH.shape[0])
        expect("weights", weights_TK, "T K", FLOATS, x_TH.device, T=x_TH.shape[0], K=ids_TK.shape[1])
        rank_TK, slot_TK = self._ranks_and_slots(ids_TK)
        ranks_W = torch.arange(self.comm.size, dtype=torch.int64, device=x_TH.device)
        peer_X, token_X = torch.nonzero((rank_TK[None] == ranks_W[:, None, None]).any(2), as_tuple=True)
        sent = torch.bincount(peer_X, minlength=self.comm.size).tolist()
        received = wait(self.comm.exchange_counts(sent, "dispatch counts"))
        slots_XK = torch.where(rank_TK[token_X] == peer_X[:, None], slot_TK[token_X], -1)
        slots_RK = wait(self.comm.all_to_all(slots_XK, sent, received, "dispatch ids"))
        wide = torch.promote_types(x_TH.dtype, weights_TK.dtype)
        rows_XB = torch.cat((x_TH[token_X].to(wide), weights_TK[token_X].to(wide)), dim=1)
        arrived_RB = _all_to_all(rows_XB, self.comm, sent, received, "dispatch")
        hidden, num_slots = x_TH.shape[1], self.expert_map.num_slots(self.comm.rank)
        y_RH = _at_experts(arrived_RB[:, :hidden], slots_RK, arrived_RB[:, hidden:], expert, num_slots)
        summed_XH = _all_to_all(y_RH, self.comm, received, sent, "combine")
        return torch.zeros_like(x_TH, dtype=wide).index_add(0, token_X, summed_XH).to(x_TH.dtype)

    def _ranks_and_slots(self, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Rank and slot of every choice, -1 for nowhere."""
        tables = self.expert_map.tables(ids_TK.device)
        physical_E = torch.tensor(self.expert_map.global_to_physical(), dtype=torch.int64, device=ids_TK.device)
        physical_TK, nowhere_TK = physical_E[ids_TK.clamp_min(0).long()], ids_TK < 0
        places = (tables.rank_of_P[physical_TK], tables.slot_of_P[physical_TK])
        rank_TK, slot_TK = (place.long().masked_fill(nowhere_TK, -1) for place in places)
        return rank_TK, slot_TK


def _all_to_all(rows: Tensor, comm: Communicator, send: Sequence[int], receive: Sequence[int], phase: str) -> Tensor:
    out: Tensor = _AllToAll.apply(rows, comm, send, receive, phase)  # type: ignore[no-untyped-call]
    return out


def _at_experts(x_RH: Tensor, slots_RK: Tensor, weights_RK: Tensor, expert: Expert, num_slots: int) -> Tensor:
    y_RH = torch.zeros_like(x_RH)
    for slot in range(num_slots):
        row_N, k_N = torch.nonzero(slots_RK == slot, as_tuple=True)
        y_RH = y_RH.index_add(0, row_N, expert(slot, x_RH[row_N]) * weights_RK[row_N, k_N][:, None])
    return y_RH
