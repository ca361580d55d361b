"""Layers of any settings: the output of the independent reference within its own limit, or a refusal with reasons."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_mk import MoEConfig, MoELayer
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.lab.testing.bits import equal_bits
from moe_mk.lab.verify import Answer, verify
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
    activation = draw(st.sampled_from(["silu", "gelu", "gelu_tanh", "relu2", "swiglu_limit", "swiglu_oai"]))
    hashed = draw(st.sampled_from([None, None, None, 5]))
    kinds = ["bf16", "fp32", "fp8_block", "fp8_channel", "int8", "int8_block", "mxfp8", "mxfp4", "nvfp4"]
    weights = draw(st.sampled_from(kinds))
    side = draw(st.sampled_from([32, 128]))
    model = {
        "hidden_size": draw(WIDTHS), "moe_intermediate_size": draw(WIDTHS), "num_experts": groups * per_group,
        "num_shared_experts": draw(st.integers(0, 2)), "activation": activation, "expert_bias": draw(flag),
        "swiglu_limit": 1.5 if activation.startswith("swiglu") else None,
        "latent_size": draw(st.sampled_from([None, None, 48, 64])),
        "gated": activation.startswith("swiglu") or draw(flag),
        "quant": {"weights": weights, "block": (side, side)},
    }  # fmt: skip
    if model["num_shared_experts"]:
        model["shared_gate"] = draw(flag)
        model["quant"]["shared"] = draw(st.sampled_from(["same", "same", "bf16", "fp8_block"]))
    router = {
        "top_k": draw(st.integers(1, kept * per_group)), "num_expert_group": groups, "topk_group": kept,
        "scoring_func": draw(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"])), "renormalize": draw(flag),
        "has_correction_bias": draw(flag) and hashed is None, "has_logit_bias": draw(flag), "hash_vocabulary": hashed,
    }  # fmt: skip
    kernel = {
        "experts": draw(st.sampled_from(["auto", "reference", "torch_cpu"])), "tiles": draw(st.sampled_from([1, 3])),
        "fused_router": draw(flag), "activations": draw(st.sampled_from(["auto", "plain"])),
    }  # fmt: skip
    return {"model": model, "router": router, "kernel": kernel}


@pytest.mark.thorough
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
    draw = torch.Generator().manual_seed(seed)
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


@pytest.mark.thorough
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


def test_what_is_drawn_reaches_every_type_of_weights() -> None:
    """The property would hold of refusals alone."""
    model = {"hidden_size": 100, "moe_intermediate_size": 160, "num_experts": 3}
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
