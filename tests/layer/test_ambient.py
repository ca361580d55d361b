"""Settings of torch around a layer change neither what it computes nor what it loads."""

from functools import cache

import pytest
import torch
from torch import Tensor

from moe_mk import MoEConfig, MoELayer
from moe_mk.integrations.engine_experts import EngineExperts, EngineWeights
from moe_mk.layer.settings import layer_spec_of
from tests.layer.any_tensors import tensors_of
from tests.layer.native import NEEDS_COMPILER
from tests.support.ambient import AMBIENT
from tests.support.layers import HIDDEN, INNER, config, tensors
from tests.support.tiers import quick_where

QUICK = ("autocast_bf16", "dtype_fp16", "device_meta", "inference_mode")
BACKENDS = [
    pytest.param("torch_cpu", torch.float32),
    pytest.param("torch_cpu", torch.bfloat16),
    pytest.param("torch_cpu", torch.float16),
    pytest.param("reference", torch.float32),
    pytest.param("reference_monolithic", torch.float32),
    pytest.param("cpu_native", torch.bfloat16, marks=NEEDS_COMPILER),
]
"""Every second one for settings that are not QUICK."""


def load(experts: str, dtype: torch.dtype) -> MoELayer:
    quant = {"weights": {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]}
    settings = {"has_correction_bias": True, "num_shared_experts": 1, "quant": quant, "experts": experts}
    made = MoELayer(config(8, 2, **settings), dtype=dtype, device="cpu")
    return made.load_weights(given(dtype))


@cache
def given(dtype: torch.dtype) -> dict[str, Tensor]:
    return tensors(8, shared=1, bias=True, dtype=dtype)


@cache
def tokens(dtype: torch.dtype) -> Tensor:
    return torch.randn((12, HIDDEN), generator=torch.Generator().manual_seed(3)).to(dtype)


@cache
def stacks(dtype: torch.dtype) -> EngineWeights:
    named = given(dtype)
    w13 = [torch.cat([named[f"experts.{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(8)]
    down = [named[f"experts.{e}.down_proj.weight"] for e in range(8)]
    assert w13[0].shape == (2 * INNER, HIDDEN)
    return EngineWeights(torch.stack(w13), torch.stack(down))


def results(made: MoELayer, engine: EngineExperts | None, dtype: torch.dtype) -> list[Tensor]:
    """All that a layer and the experts of an engine compute of the same tokens, one call of each kind."""
    x_TH = tokens(dtype)
    routing = made.route(x_TH)
    found = [routing.ids_TK, routing.weights_TK, made(x_TH), made(x_TH[:1]), made(x_TH[None])[0]]
    if engine is not None:
        assert made.state.backends.shared is not None
        found += [engine(x_TH, routing.weights_TK, routing.ids_TK), made.state.backends.shared(x_TH)]
        found += [made.forward_routed(x_TH, routing.weights_TK, routing.ids_TK)]
    return found


@cache
def expected(experts: str, dtype: torch.dtype) -> tuple[MoELayer, EngineExperts | None, list[Tensor]]:
    made = load(experts, dtype)
    alone = "monolithic" not in experts
    engine = EngineExperts("e", stacks(dtype), top_k=2, settings={"experts": experts}) if alone else None
    return made, engine, results(made, engine, dtype)


@pytest.mark.parametrize(
    "experts,dtype,name",
    [
        pytest.param(*backend.values, name, marks=[*backend.marks, *[pytest.mark.thorough] * (name not in QUICK)])
        for at, name in enumerate(AMBIENT)
        for place, backend in enumerate(BACKENDS)
        if name in QUICK or (at + place) % 2
    ],
)
def test_settings_of_torch_change_no_bit(experts: str, dtype: torch.dtype, name: str) -> None:
    made, engine, wanted = expected(experts, dtype)
    with torch.no_grad(), AMBIENT[name]():
        called = results(made, engine, dtype)
        loaded = load(experts, dtype)
        if engine is not None:
            engine = EngineExperts("e", stacks(dtype), top_k=2, settings={"experts": experts})
        both = called, results(loaded, engine, dtype)
    for found in both:
        for got, want in zip(found, wanted, strict=True):
            assert got.dtype is want.dtype and torch.equal(got, want)
    assert torch.equal(loaded(tokens(dtype)), wanted[2]), "loaded under the setting, called without it"


# The projections are torch's products, whose f32 sums are split by the number of threads (docs/embedding.md).
@pytest.mark.parametrize("name", quick_where(lambda name: name in QUICK, [n for n in AMBIENT if n != "threads"]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projections_around_experts_and_the_gate_of_shared_experts(dtype: torch.dtype, name: str) -> None:
    model = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_shared_experts": 1}
    parts = {"latent_size": 48, "shared_gate": True, "quant": {"weights": "fp32"}}
    stated = {"model": {**model, **parts}, "router": {"top_k": 2}, "kernel": {"experts": "torch_cpu"}}

    def made() -> MoELayer:
        layer = MoELayer(MoEConfig.parse(stated, "a test"), dtype=dtype, device="cpu")
        return layer.load_weights(given_tensors)

    given_tensors = tensors_of(layer_spec_of(MoEConfig.parse(stated, "a test")), 1)
    x_TH = torch.randn((12, 64), generator=torch.Generator().manual_seed(3)).to(dtype)
    layer = made()
    wanted = layer(x_TH)
    with torch.no_grad(), AMBIENT[name]():
        assert torch.equal(layer(x_TH), wanted) and torch.equal(made()(x_TH), wanted)
