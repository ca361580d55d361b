"""In fp16, what passes 65504 before it is weighted, summed or cancelled does not reach the output."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk import MoEConfig, MoELayer
from moe_mk.integrations.engine_experts import EngineExperts, EngineWeights
from moe_mk.lab.testing.transports import run_together, virtual_groups
from moe_mk.lab.training import TrainingMoE
from tests.support.tiers import quick_where

EXPERTS, HIDDEN, INNER, SHARED = 4, 64, 32, -60000.0
LARGEST = torch.finfo(torch.float16).max


def rows_of_experts(seed: int, *, shared: bool = False) -> list[float]:
    """What each expert gives for every token: the first two have a sum that fp16 cannot hold, on one rank or on two.
    shared: the sum of all cannot be held either, before the shared expert is added."""
    draw = random.Random(seed)
    rows = [draw.uniform(2.8e5, 4e5), draw.uniform(2.8e5, 4e5), -draw.uniform(0.5e5, 1e5)]
    rows += [EXPERTS * (draw.uniform(7e4, 1e5) if shared else draw.uniform(3e4, 6e4)) - sum(rows)]
    assert min(rows[:2]) / EXPERTS > LARGEST
    return rows


def held(rows: list[float], *, bias: bool, shared: bool, half: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """An expert gives one number; the gate of the experts passes 65504 as well, and up brings it back."""
    made = {"gate.weight": torch.zeros(EXPERTS, HIDDEN, dtype=half)}
    names = [f"experts.{e}" for e in range(EXPERTS)] + ["shared_experts"] * shared
    for name, row in zip(names, [*rows, SHARED], strict=False):
        gate, up, down = torch.zeros(INNER, HIDDEN), torch.zeros(INNER, HIDDEN), torch.zeros(HIDDEN, INNER)
        by_bias = bias and name != "shared_experts"
        if not by_bias:
            gate[:, 0], up[:, 1], down[:] = 1000.0, 1e-2, row / INNER  # 100 * 1000 and 1e-3 * 1e-2: 1 together
        for projection, weight in (("gate", gate), ("up", up), ("down", down)):
            made[f"{name}.{projection}_proj.weight"] = weight.to(half)
            if bias and name != "shared_experts":
                made[f"{name}.{projection}_proj.bias"] = torch.full(
                    (len(weight),), row if projection == "down" else 0.0
                )
    return made


def tokens(count: int) -> Tensor:
    x_TH = torch.zeros((count, HIDDEN), dtype=torch.float16)
    x_TH[:, 0], x_TH[:, 1] = 100.0, 1e-3
    return x_TH


def config(experts: str, *, bias: bool = False, shared: bool = False, **settings: Any) -> MoEConfig:
    model: dict[str, Any] = {
        "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS,
        "num_shared_experts": int(shared), "quant": {"weights": "fp16"}, "expert_bias": bias,
    }  # fmt: skip
    if bias:
        model |= {"activation": "swiglu_oai", "swiglu_limit": 7.0}
    data = {"model": model, "router": {"top_k": EXPERTS}}
    return MoEConfig.parse(data, "fp16").with_(experts=experts, **settings)


def expect_total(y_TH: Tensor, rows: list[float], *, shared: bool = False) -> None:
    wanted = sum(rows) / EXPERTS + SHARED * shared
    torch.testing.assert_close(y_TH.double(), torch.full_like(y_TH, wanted, dtype=torch.float64), rtol=2e-2, atol=50.0)
    assert y_TH.dtype is torch.float16


@pytest.mark.parametrize("bias,shared", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize(
    "experts", quick_where(lambda name: name != "reference", ["torch_cpu", "reference", "reference_monolithic", "auto"])
)
def test_one_rank_sums_in_f32(experts: str, bias: bool, shared: bool) -> None:
    if bias and experts == "reference_monolithic":
        pytest.skip("the same experts as the reference")
    for seed in range(2):
        rows = rows_of_experts(seed, shared=shared)
        settings = {"bias": bias, "shared": shared}
        layer = MoELayer(config(experts, **settings), dtype=torch.float16)
        layer.load_weights(held(rows, **settings))
        for count in (1, 5):
            expect_total(layer(tokens(count)), rows, shared=shared)
            if experts != "reference_monolithic" and not shared:
                routing = layer.route(tokens(count))
                alone = layer.forward_routed(tokens(count), routing.weights_TK, routing.ids_TK)
                expect_total(alone, rows)


@pytest.mark.parametrize(
    "grid,transport,experts",
    quick_where(
        lambda grid, transport, experts: (transport, experts) in (("all_to_all", "torch_cpu"), ("auto", "torch_cpu")),
        [
            *[((2, 1), t, e) for t in ("all_to_all", "all_gather", "replicated") for e in ("torch_cpu", "reference")],
            ((2, 1), "auto", "reference_monolithic"),
            ((4, 1), "hierarchical", "torch_cpu"),
            ((1, 2), "auto", "torch_cpu"),
            ((1, 2), "auto", "reference"),
        ],
    ),
)
def test_ranks_send_sums_that_fp16_cannot_hold(grid: tuple[int, int], transport: str, experts: str) -> None:
    rows, (ep, tp) = rows_of_experts(7, shared=True), grid
    several = {"hierarchical": {"ranks_per_node": 2}, "replicated": {"tokens": "replicated"}}.get(transport, {})
    settings = {"prepare_finalize": transport, "shared": True, **several}
    layers = [MoELayer(config(experts, **settings), dtype=torch.float16, groups=g) for g in virtual_groups(ep, tp)]
    for layer in layers:
        layer.load_weights(held(rows, bias=False, shared=True))
    counts = [3] * len(layers) if tp > 1 or transport == "replicated" else [3, 0, 1, 2][: len(layers)]
    for y_TH in run_together(layers, [tokens(count) for count in counts]):
        expect_total(y_TH, rows, shared=True)


def test_experts_of_an_engine_and_a_layer_that_trains() -> None:
    rows = rows_of_experts(3)
    named = held(rows, bias=False, shared=True)
    w13_LIH = torch.stack(
        [torch.cat([named[f"experts.{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(EXPERTS)]
    )
    w2_LHI = torch.stack([named[f"experts.{e}.down_proj.weight"] for e in range(EXPERTS)])
    weights_TK, ids_TK = torch.full((3, EXPERTS), 0.25), torch.arange(EXPERTS).expand(3, EXPERTS).contiguous()
    for experts in ("torch_cpu", "reference"):
        engine = EngineExperts("e", EngineWeights(w13_LIH, w2_LHI), top_k=EXPERTS, settings={"experts": experts})
        expect_total(engine(tokens(3), weights_TK, ids_TK), rows)
    rows = rows_of_experts(3, shared=True)
    w2_LHI = torch.stack([held(rows, bias=False, shared=True)[f"experts.{e}.down_proj.weight"] for e in range(EXPERTS)])
    made = TrainingMoE(config("auto", shared=True), dtype=torch.float16)
    with torch.no_grad():
        shared = [named[f"shared_experts.{p}_proj.weight"] for p in ("gate", "up", "down")]
        assert made.shared_w13_IH is not None and made.shared_w2_HI is not None
        given = torch.zeros_like(made.gate_EH), w13_LIH, w2_LHI, torch.cat(shared[:2]), shared[2]
        own = made.gate_EH, made.w13_LIH, made.w2_LHI, made.shared_w13_IH, made.shared_w2_HI
        for parameter, values in zip(own, given, strict=True):
            parameter.copy_(values)
    y_TH = made(tokens(3)).y_TH
    expect_total(y_TH, rows, shared=True)
    (y_TH.float().mean() * 1e-4).backward()
    assert made.w2_LHI.grad is not None and made.w2_LHI.grad.isfinite().all() and made.w2_LHI.grad.any()
