"""Layers with gradients: every router kind, several ranks against one, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk import ConfigError, MoEConfig, MoELayer, UnsupportedError
from moe_mk.comm.communicator import Communicator
from moe_mk.comm.threads import ThreadWorld
from moe_mk.lab.training import TrainingMoE
from moe_mk.lab.training.router import balance_loss, importance, route_with_capacity
from moe_mk.lab.verify.dense import gated

HIDDEN, EXPERTS, TOP_K, TOKENS = 8, 4, 2, 12


def config(**changes: Any) -> MoEConfig:
    model = {"hidden_size": HIDDEN, "moe_intermediate_size": 6, "num_experts": EXPERTS, "num_shared_experts": 1}
    return MoEConfig.parse({"model": model, "router": {"top_k": TOP_K}}, "a test").with_(**changes)


def layer(settings: MoEConfig) -> TrainingMoE:
    return TrainingMoE(settings, generator=torch.Generator().manual_seed(0))


def tokens() -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


def dense(made: TrainingMoE, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The same sum, expert by expert over all tokens."""
    assert made.shared_w13_IH is not None and made.shared_w2_HI is not None
    y_TH = made._mlp(x_TH, made.shared_w13_IH, made.shared_w2_HI)
    for expert in range(EXPERTS):
        weight_T = (weights_TK * (ids_TK == expert)).sum(1)
        y_TH = y_TH + weight_T[:, None] * made._mlp(x_TH, made.w13_LIH[expert], made.w2_LHI[expert])
    return y_TH


@pytest.mark.row("N23")
@pytest.mark.parametrize("kind", ["topk", "noisy_topk", "expert_capacity"])
def test_every_kind_equals_the_dense_sum_and_all_parameters_learn(kind: str) -> None:
    made = layer(config(kind=kind))
    out = made(tokens())
    torch.testing.assert_close(out.y_TH, dense(made, tokens(), out.ids_TK, out.weights_TK))
    loss = out.y_TH.square().mean() + balance_loss(importance(out.probabilities_TE), 0.01)
    loss.backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.row(15, 23, "N23")
@pytest.mark.parametrize("kind", ["topk", "noisy_topk", "expert_capacity"])
def test_the_loss_of_two_ranks_is_that_of_their_tokens_together(kind: str) -> None:
    settings, halves, world = config(kind=kind, noise_std=0.0), tokens().split([5, 7]), ThreadWorld(2)
    alone = TrainingMoE(settings, generator=torch.Generator().manual_seed(0), balance_weight=0.5)
    expected = alone(tokens())
    torch.testing.assert_close(expected.balance_loss, balance_loss(importance(expected.probabilities_TE), 0.5))
    expected.balance_loss.backward()

    def step(comm: Communicator) -> tuple[TrainingMoE, Tensor]:
        made = TrainingMoE(settings, comm, generator=torch.Generator().manual_seed(0), balance_weight=0.5)
        loss = made(halves[comm.rank]).balance_loss
        loss.backward()
        return made, loss

    made = world.together([lambda comm=comm: step(comm) for comm in world.communicators()])  # type: ignore[misc]
    for _, loss in made:
        torch.testing.assert_close(loss, expected.balance_loss)
    torch.testing.assert_close(sum(each.gate_EH.grad for each, _ in made), alone.gate_EH.grad)
    assert float(layer(settings)(tokens()).balance_loss) == 0.0, "no weight, no loss"


@pytest.mark.row(68, 122, "N23")
def test_the_bias_of_a_layer_that_trains_follows_the_load_of_all_ranks() -> None:
    settings, halves, world = config(has_correction_bias=True), tokens().chunk(2), ThreadWorld(2)
    load_E = torch.bincount(layer(settings)(tokens()).ids_TK.flatten(), minlength=EXPERTS).float()

    def step(comm: Communicator) -> Tensor:
        made = TrainingMoE(settings, comm, generator=torch.Generator().manual_seed(0))
        made.update_bias(made(halves[comm.rank]), 0.01)
        assert made.e_score_correction_bias is not None
        return made.e_score_correction_bias

    for bias_E in world.together([lambda comm=comm: step(comm) for comm in world.communicators()]):  # type: ignore[misc]
        torch.testing.assert_close(bias_E, 0.01 * (load_E.mean() - load_E).sign())
    # Choices that found no capacity are of no expert: what is left here is even, so that nothing moves.
    made = layer(settings)
    experts = settings.model.num_experts
    even_TK = torch.stack((torch.full((2 * experts,), -1), torch.arange(2 * experts) % experts), 1).to(torch.int32)
    made.update_bias(replace(made(tokens()), ids_TK=even_TK), 0.01)
    assert made.e_score_correction_bias is not None and not made.e_score_correction_bias.any()
    made = layer(config())
    out = made(tokens())
    with pytest.raises(ConfigError, match="has_correction_bias"):
        made.update_bias(out, 0.01)


@pytest.mark.row(23)
@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_two_ranks_give_the_gradients_of_one(placement: str) -> None:
    alone, halves = layer(config()), tokens().chunk(2)
    expected = alone(tokens())
    expected.y_TH.square().sum().backward()
    world = ThreadWorld(2)

    def step(comm: Communicator) -> tuple[TrainingMoE, Tensor]:
        generator = torch.Generator().manual_seed(0)
        made = TrainingMoE(config(placement=placement), comm, generator=generator)
        y_TH = made(halves[comm.rank]).y_TH
        y_TH.square().sum().backward()
        return made, y_TH

    made = world.together([lambda comm=comm: step(comm) for comm in world.communicators()])  # type: ignore[misc]
    torch.testing.assert_close(torch.cat([y_TH for _, y_TH in made]), expected.y_TH)
    assert alone.w2_LHI.grad is not None and alone.gate_EH.grad is not None
    for rank, (each, _) in enumerate(made):
        owned = list(each.exchange.expert_map.local_to_global(rank))
        torch.testing.assert_close(each.w2_LHI.grad, alone.w2_LHI.grad[owned])
    torch.testing.assert_close(sum(each.gate_EH.grad for each, _ in made), alone.gate_EH.grad)


@pytest.mark.row(16, 18)
def test_capacity_leaves_out_what_does_not_fit() -> None:
    # capacity = ceil(0.5 * 12 * 2 / 4) = 3 tokens an expert: 12 of 24 assignments find a place.
    made = layer(config(kind="expert_capacity", capacity_factor=0.5, num_shared_experts=0))
    out = made(tokens())
    ids_TK, nowhere_T = out.ids_TK, (out.ids_TK < 0).all(1)
    assert bool(nowhere_T.any()) and not bool(out.y_TH[nowhere_T].any()), "tokens without a place add nothing"
    assert bool(out.y_TH[~nowhere_T].any(1).all())
    assert torch.bincount(ids_TK[ids_TK >= 0], minlength=EXPERTS).tolist() == [3] * EXPERTS
    assert int((ids_TK < 0).sum()) == 12
    for choices in (2, 3, None):
        out = layer(config(kind="expert_capacity", capacity_factor=0.5, num_choices=choices))(tokens())
        assert torch.equal(out.ids_TK, route_with_capacity(out.probabilities_TE, TOP_K, 3, choices).ids_TK)


def test_weights_are_drawn_for_outputs_of_the_size_of_their_inputs() -> None:
    made = TrainingMoE(config(hidden_size=256, moe_intermediate_size=64), generator=torch.Generator().manual_seed(0))
    for weight in (made.gate_EH, made.w13_LIH, made.w2_LHI, made.shared_w13_IH, made.shared_w2_HI):
        assert weight is not None
        drawn = weight.detach() * weight.shape[-1] ** 0.5
        assert float(drawn.std()) == pytest.approx(1.0, rel=0.1) and abs(float(drawn.mean())) < 0.1


def test_noise_is_drawn_only_while_training() -> None:
    made = layer(config(kind="noisy_topk", noise_std=10.0))
    noisy = [made(tokens()).probabilities_TE for _ in range(2)]
    made.eval()
    clean = [made(tokens()).probabilities_TE for _ in range(2)]
    assert not torch.equal(*noisy) and torch.equal(*clean)


def test_settings_of_other_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kind='noisy_topk' does not support router.num_expert_group, .*_bias"):
        config(kind="noisy_topk", num_expert_group=2, has_correction_bias=True)
    for out in (1, 5):
        with pytest.raises(ConfigError, match=rf"num_choices={out} is not in \[router.top_k=2, model.num_experts=4\]"):
            config(kind="expert_capacity", num_choices=out)
    assert [config(kind="expert_capacity", num_choices=n).router.num_choices for n in (2, 4, None)] == [2, 4, None]
    with pytest.raises(ConfigError, match="pass a group of that size"):
        layer(config(ep=2))


SERVED_ALONE = {
    "latent_size": 4, "input_norm": 1e-6, "shared_gate": True, "shared_activation": "gelu", "expert_bias": True,
    "shared_scale": 2.0, "num_zero_experts": 1, "group_score": "two_best", "has_expert_scale": True, "tp": 2,
    "has_logit_bias": True, "tokens": "replicated", "scoring_func": "logit_sigmoid", "quant": {"weights": "fp8_block"},
    "placement": [1, 0, 3, 2], "router_dtype": "model",
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED_ALONE)
def test_what_only_a_layer_that_serves_has_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        layer(config(**{"num_shared_experts": int("shared" in name), name: SERVED_ALONE[name]}))
    (reason,) = refused.value.reasons
    assert f".{name}" in reason.split()[0]


@pytest.mark.parametrize("activation", ["swiglu_oai", "swiglu_limit"])
def test_limits_of_the_activation_are_those_of_the_model(activation: str) -> None:
    made = layer(config(activation=activation, swiglu_limit=0.1, swiglu_alpha=1.3, num_shared_experts=0))
    gate, up = torch.randn(2, 5, 6).unbind()
    w13_IH, w2_HI, x_NH = torch.eye(12), torch.eye(6), torch.cat((gate, up), -1)
    expected = gated(gate.double(), up.double(), made.config.model)
    torch.testing.assert_close(made._mlp(x_NH, w13_IH, w2_HI).double(), expected, rtol=1e-5, atol=1e-7)


def test_the_layer_that_serves_names_the_layer_that_trains() -> None:
    with pytest.raises(UnsupportedError, match=r"(?s)router.kind = noisy_topk is for training.*TrainingMoE"):
        MoELayer(config(kind="noisy_topk"))
