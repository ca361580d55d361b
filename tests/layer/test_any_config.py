"""Layers of any settings: the output of the independent reference within its own limit, or a refusal with reasons."""

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_mk import MoEConfig, MoELayer, ParallelGroups
from moe_mk.comm.threads import ThreadWorld
from moe_mk.config.moe import LIMITED
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.lab.testing.bits import equal_bits
from moe_mk.lab.verify import Answer, verify
from moe_mk.lab.verify.dense import dense_layer
from moe_mk.layer.settings import layer_spec_of
from moe_mk.router.topk import SCORING_FUNCS
from moe_mk.weights import MappingSource, load_layer
from tests.layer.any_tensors import tensors_of

WIDTHS = st.sampled_from([32, 48, 64, 100, 130, 160])
"""Multiples of blocks and not: the last block of 32, 64 or 128 is cut off in most of them."""


@st.composite
def any_settings(draw: st.DrawFn) -> dict[str, Any]:
    """One layer on one rank: shape, router, type of weights, backend and what else changes the way of a token."""
    flag = st.booleans()
    groups, per_group = draw(st.sampled_from([(1, 1), (1, 5), (2, 3), (4, 2), (3, 1)]))
    kept = draw(st.integers(1, groups))
    activation = draw(st.sampled_from(["silu", "gelu", "gelu_tanh", "relu2", *LIMITED]))
    hashed = draw(st.sampled_from([None, None, None, 5]))
    kinds = ["bf16", "fp32", "fp8_block", "fp8_channel", "int8", "int8_block", "mxfp8", "mxfp4", "nvfp4"]
    weights = draw(st.sampled_from(kinds))
    side = draw(st.sampled_from([32, 128]))
    model = {
        "hidden_size": draw(WIDTHS), "moe_intermediate_size": draw(WIDTHS), "num_experts": groups * per_group,
        "num_shared_experts": draw(st.integers(0, 2)), "activation": activation, "expert_bias": draw(flag),
        "swiglu_limit": 1.5 if activation in LIMITED else None,
        "latent_size": draw(st.sampled_from([None, None, 48, 64])), "swiglu_alpha": draw(st.sampled_from([0.7, 1.702])),
        "gated": activation in LIMITED or draw(flag),
        "quant": {"weights": weights, "block": (side, side)},
    }  # fmt: skip
    if model["num_shared_experts"]:
        model |= {"shared_gate": draw(flag), "shared_scale": draw(st.sampled_from([1.0, 0.5]))}
        if model["gated"] and draw(flag):
            own = draw(st.sampled_from(["silu", *LIMITED]))
            model |= {"shared_activation": own, "shared_swiglu_limit": 0.7 if own in LIMITED else None}
        model["quant"]["shared"] = draw(st.sampled_from(["same", "same", "bf16", "fp8_block"]))
    router = {
        "top_k": draw(st.integers(1, kept * per_group)), "num_expert_group": groups, "topk_group": kept,
        "scoring_func": draw(st.sampled_from(SCORING_FUNCS)), "renormalize": draw(flag),
        "group_score": draw(st.sampled_from(["auto", "two_best"])) if hashed is None else "auto",
        "has_correction_bias": draw(flag) and hashed is None, "has_logit_bias": draw(flag), "hash_vocabulary": hashed,
    }  # fmt: skip
    router["has_expert_scale"] = draw(flag)
    if not model["num_shared_experts"] and not model["latent_size"]:
        model["input_norm"] = draw(st.sampled_from([None, 1e-6]))
    router["weight_on_input"] = router["top_k"] == 1 and draw(flag)
    most = min(2, router["top_k"] - 1) if groups == 1 and not hashed else 0
    model["num_fused_shared_experts"] = draw(st.integers(0, most))
    changed = model["num_fused_shared_experts"] or router["has_expert_scale"]
    changed = changed or model["latent_size"] or model.get("input_norm")
    if groups == 1 and not (hashed or changed or router["weight_on_input"]):
        kind = draw(st.sampled_from(["identity", "drop"]))
        model |= {"num_zero_experts": draw(st.integers(0, 3)), "zero_expert_type": kind}
    if model["latent_size"]:
        model["latent_norm"] = draw(st.sampled_from([None, 1e-5]))
    kernel = {
        "experts": draw(st.sampled_from(["auto", "reference", "torch_cpu"])), "tiles": draw(st.sampled_from([1, 3])),
        "fused_router": draw(flag), "activations": draw(st.sampled_from(["auto", "plain"])),
    }  # fmt: skip
    return {"model": model, "router": router, "kernel": kernel}


@pytest.mark.slow
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(any_settings(), st.sampled_from([1, 2, 9]), st.integers(0, 99), st.sampled_from(["bfloat16", "float32"]))
def test_any_layer_gives_what_the_reference_gives(stated: dict[str, Any], count: int, seed: int, dtype: str) -> None:
    config = MoEConfig.parse(stated, "drawn")
    try:
        layer = MoELayer(config, dtype=getattr(torch, dtype))
    except UnsupportedError:
        return
    tensors = tensors_of(layer.spec, seed)
    layer.load_weights(tensors)
    draw = torch.Generator().manual_seed(seed + 1000)  # not that of the tensors, which starts with the gate
    x_TH = torch.randn((count, config.model.hidden_size), generator=draw).to(layer.dtype)
    vocabulary = config.router.hash_vocabulary
    ids_T = None if vocabulary is None else torch.randint(vocabulary, (count,), generator=draw)
    before = x_TH.clone()
    y_TH = layer(x_TH, ids_T)
    assert equal_bits(x_TH, before) and equal_bits(layer(x_TH, ids_T), y_TH)
    owned = range(config.model.num_experts)
    whole = load_layer(MappingSource(tensors), 0, layer.spec, owned=owned, prefix="")
    judged = verify(Answer(x_TH, y_TH, layer.route(x_TH, ids_T).ids_TK, ids_T), layer.decision, whole)
    # The limits hold for many numbers; a few of them are allowed twice as much.
    assert judged.routing_equal + judged.routing_ties == count, judged
    assert judged.error <= 2 * judged.limit and judged.worst_token_error <= 2 * judged.worst_token_limit, judged


@pytest.mark.slow
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    any_settings(),
    st.sampled_from(["model", "router", "kernel"]),
    st.data(),
    st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2)),
)
def test_any_change_of_a_setting_is_a_setting_or_a_refusal(
    stated: dict[str, Any], group: str, data: st.DataObject, value: object
) -> None:
    key = data.draw(st.sampled_from(sorted(stated[group])))
    with suppress(ConfigError):
        MoEConfig.parse({**stated, group: {**stated[group], key: value}}, "drawn")


EQUATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clamps": ({"activation": "silu_limit", "swiglu_limit": 0.3, "num_shared_experts": 1, "swiglu_alpha": 0.7,
                "shared_activation": "situ", "shared_swiglu_limit": 0.5}, {}),
    "latent norm": ({"activation": "situ", "swiglu_alpha": 0.7, "latent_size": 32, "latent_norm": 1e-5,
                     "num_shared_experts": 1}, {}),
    "weight on the input": ({"num_shared_experts": 1}, {"top_k": 1, "weight_on_input": True, "renormalize": False}),
    "norm and scale": ({"input_norm": 1e-6}, {"has_expert_scale": True}),
    "scale on the input": ({}, {"top_k": 1, "weight_on_input": True, "has_expert_scale": True, "renormalize": False}),
    "experts without weights": ({"num_zero_experts": 6, "num_shared_experts": 1}, {"renormalize": False}),
    "shared in the normalisation": ({"num_fused_shared_experts": 2}, {"scoring_func": "sigmoid"}),
    "mean with shared experts": ({"num_shared_experts": 2, "shared_scale": 0.5}, {"routed_scaling_factor": 0.5}),
    "groups by two": ({}, {"num_expert_group": 4, "topk_group": 2, "group_score": "two_best"}),
}  # fmt: skip
GRIDS: dict[str, dict[str, Any]] = {
    "ep": {"ep": 2, "prepare_finalize": "all_to_all"}, "tp": {"tp": 2},
    "ep replicated": {"ep": 2, "tokens": "replicated", "prepare_finalize": "replicated"},
}  # fmt: skip


@pytest.mark.parametrize("name", EQUATIONS)
def test_an_equation_holds_over_two_ranks(name: str) -> None:
    model, router = EQUATIONS[name]
    model = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "quant": {"weights": "fp32"}} | model
    config = MoEConfig.parse({"model": model, "router": {"top_k": 3} | router}, "a test")
    tensors = tensors_of(layer_spec_of(config), 1)
    # Not the seed of the tensors: a token would equal a row of the gate, and have one expert of weight 1.
    x_TH = torch.randn((12, 64), generator=torch.Generator().manual_seed(2))
    whole = load_layer(MappingSource(tensors), 0, layer_spec_of(config), owned=range(8), prefix="")
    expected = dense_layer(x_TH, config, whole).y_TH
    for grid, sizes in GRIDS.items():
        world = ThreadWorld(2)
        names = ["tp" if grid == "tp" else "ep"] * 2
        groups = [ParallelGroups(**{n: comm}) for n, comm in zip(names, world.communicators(), strict=True)]
        layers = [MoELayer(config.with_(**sizes), dtype=torch.float32, groups=each) for each in groups]
        tokens = [x_TH[:5], x_TH[5:]] if grid == "ep" else [x_TH, x_TH]
        jobs = [partial(each.load_weights(tensors), mine) for each, mine in zip(layers, tokens, strict=True)]
        found = world.together(jobs)
        for y_TH in [torch.cat(found)] if grid == "ep" else found:
            torch.testing.assert_close(y_TH.double(), expected, rtol=1e-4, atol=1e-4, msg=f"{name}, {grid}")


def test_what_is_drawn_reaches_every_type_of_weights() -> None:
    """The property would hold of refusals alone."""
    shared = {"num_shared_experts": 1, "shared_gate": True}
    model = {"hidden_size": 100, "moe_intermediate_size": 160, "num_experts": 3, **shared}
    for weights in ("bf16", "fp8_block", "fp8_channel", "int8", "int8_block", "mxfp8", "mxfp4", "nvfp4"):
        data = {"model": {**model, "quant": {"weights": weights, "block": (32, 32)}}, "router": {"top_k": 2}}
        layer = MoELayer(MoEConfig.parse({**data, "kernel": {"experts": "reference"}}, "a test"))
        tensors = tensors_of(layer.spec, 1)
        x_TH = torch.randn((16, 100), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        y_TH = layer.load_weights(tensors)(x_TH)
        whole = load_layer(MappingSource(tensors), 0, layer.spec, owned=range(3), prefix="")
        judged = verify(Answer(x_TH, y_TH, layer.route(x_TH).ids_TK), layer.decision, whole)
        assert judged.passed, (weights, judged)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_token_of_nan_stays_with_itself(rows: int) -> None:
    data = {"model": {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4}, "router": {"top_k": 2}}
    layer = MoELayer(MoEConfig.parse(data, "a test"))
    layer.load_weights(tensors_of(layer.spec, 2))
    x_TH = torch.randn((rows + 1, 64), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    x_TH[0] = float("nan")
    assert bool(layer(x_TH)[1:].isfinite().all())
