"""Layers with outputs that need no router to compute: one expert, all experts, only shared experts."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_mk import DeepseekV3MoE, MoELayer
from moe_mk.kernels.reference.activation import activation
from moe_mk.weights.expert_weights import SlotWeights
from tests.layer.native import NEEDS_COMPILER
from tests.support import layers as build
from tests.support.layers import HIDDEN, config, layer, mlp, tensors

EXPERTS = ["reference", "torch_cpu"]


@pytest.fixture
def x_TH() -> Tensor:
    return torch.randn(6, HIDDEN)


@pytest.mark.row(1)
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
def test_one_expert_always_chosen_is_a_dense_block_bit_for_bit(x_TH: Tensor, experts: str, scoring_func: str) -> None:
    got = layer(1, 1, experts=experts, scoring_func=scoring_func, renormalize=True)(x_TH)
    assert torch.equal(got, mlp(x_TH, tensors(1), "experts.0"))


@pytest.mark.row(2)
@pytest.mark.parametrize("experts", EXPERTS)
def test_all_experts_chosen_is_the_mixture_weighted_by_probability_bit_for_bit(x_TH: Tensor, experts: str) -> None:
    weights = tensors(5)
    logits_TE = (x_TH @ weights["gate.weight"].T).double()
    probability_TE = torch.softmax(logits_TE, dim=-1).float()
    expected = torch.zeros_like(x_TH)
    for e in range(5):
        expected += probability_TE[:, e, None] * mlp(x_TH, weights, f"experts.{e}")
    assert torch.equal(layer(5, 5, experts=experts)(x_TH), expected)


@pytest.mark.row(3)
@pytest.mark.parametrize("experts", EXPERTS)
def test_only_the_weights_of_chosen_experts_are_read(x_TH: Tensor, experts: str) -> None:
    sparse = layer(8, 2, experts=experts)
    chosen = set(sparse.route(x_TH).ids_TK.flatten().tolist())
    assert 2 <= len(chosen) < 8
    expected = sparse(x_TH)
    for expert, slot in enumerate(sparse.weights.experts.slots):
        if expert not in chosen:
            poison(slot)
    assert torch.equal(sparse(x_TH), expected)
    poison(sparse.weights.experts.slots[min(chosen)])  # the poison works
    assert sparse(x_TH).isnan().any()


def poison(slot: SlotWeights) -> None:
    for q in (slot.gate_IH, slot.up_IH, slot.down_HI):
        assert q is not None
        q.values.fill_(math.nan)


@pytest.mark.row(6)
@pytest.mark.parametrize("num_shared", [1, 2])
@pytest.mark.parametrize("experts", EXPERTS)
def test_routed_and_shared_experts_add_up(x_TH: Tensor, experts: str, num_shared: int) -> None:
    both = layer(4, 2, experts=experts, num_shared_experts=num_shared)
    routing = both.route(x_TH)
    routed = both.forward_routed(x_TH, routing.weights_TK, routing.ids_TK)
    shared = mlp(x_TH, tensors(4, shared=num_shared), "shared_experts")
    assert torch.equal(both(x_TH), routed + shared)
    assert float(shared.std()) > 0.1 < float(routed.std())


def test_a_configuration_and_a_file_of_it_build_the_same_layer(tmp_path: Path) -> None:
    config = build.config(4, 2, routed_scaling_factor=2.5)
    file = tmp_path / "layer.json"
    file.write_text(config.model_dump_json(), encoding="utf-8")
    for given in (config, file, str(file)):
        layer = DeepseekV3MoE.from_config(given, name="mlp 3")
        assert type(layer) is DeepseekV3MoE and layer.name == "mlp 3" and layer.config.model == config.model
        assert layer.config.router == config.router


ACTS = (("silu", None), ("swiglu_limit", 0.4), ("swiglu_limit", 2.0), ("gelu", None))


@pytest.mark.parametrize("experts", [*EXPERTS, pytest.param("cpu_native", marks=NEEDS_COMPILER)])
@pytest.mark.parametrize("shared", [None, *ACTS], ids=str)
@pytest.mark.parametrize("routed", ACTS, ids=str)
def test_shared_experts_have_an_activation_and_a_limit_of_their_own(
    routed: tuple[str, float | None], shared: tuple[str, float | None] | None, experts: str
) -> None:
    stated: dict[str, object] = {"activation": routed[0], "swiglu_limit": routed[1]}
    if shared is not None:
        stated |= {"shared_activation": shared[0], "shared_swiglu_limit": shared[1]}
    # Nothing but the shared experts has an output.
    keeps = {"shared_experts.down_proj.weight"}
    weights = {
        name: tensor.bfloat16() * ("down_proj" not in name or name in keeps)
        for name, tensor in tensors(4, shared=1).items()
    }
    made = MoELayer(config(4, 2, experts=experts, num_shared_experts=1, **stated).with_(quant={"weights": "bf16"}))
    made.load_weights(weights)
    x_TH = (torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    gate, up, down = (weights[f"shared_experts.{p}_proj.weight"].double() for p in ("gate", "up", "down"))
    name, limit = shared or routed
    wanted = activation(name, x_TH.double() @ gate.T, x_TH.double() @ up.T, limit=limit) @ down.T
    assert float((made(x_TH).double() - wanted).norm() / wanted.norm()) < 0.01
