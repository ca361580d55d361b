"""The SGLang runner core: entered once, built for a layer, one call by loops, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_mk.errors import UnsupportedError
from moe_mk.integrations import sglang as door
from moe_mk.quant.kinds import scheme_of_kind
from tests.integrations.engines.cases import CLOSE, EXPERTS, Tiny, call, error
from tests.integrations.engines.stand_ins import DispatchMoeRunnerCore, Sglang, StandardCombineInput, put_in
from tests.layer.native import NEEDS_COMPILER


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Sglang:
    made = Sglang()
    put_in(monkeypatch, made.modules)
    return made


def runner_config(**changes: Any) -> SimpleNamespace:
    facts = {"activation": "silu", "is_gated": True, "apply_router_weight_on_input": False, "no_combine": False}
    facts |= {"routed_scaling_factor": None, "gemm1_alpha": None, "gemm1_clamp_limit": None, "swiglu_limit": None}
    return SimpleNamespace(**(facts | changes))


def dispatched(x: Any, weights: Any, ids: Any) -> SimpleNamespace:
    return SimpleNamespace(hidden_states=x, topk_output=SimpleNamespace(topk_weights=weights, topk_ids=ids))


def quant_info(tiny: Tiny, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**({"w13_weight": tiny.w13, "w2_weight": tiny.w2, "b13": None, "b2": None} | changes))


def test_it_enters_one_name_and_leaves_the_others_alone(host: Sglang) -> None:
    assert door.register() and list(host.factories) == ["moe_mk"]
    assert not door.register(), "SGLang's entry point may come after a program's own call"


def test_one_call_computes_what_loops_do(host: Sglang) -> None:
    door.register(experts="torch_cpu")
    tiny, (x_TH, weights_TK, ids_TK) = Tiny.drawn(), call()
    ids_TK[0, 1] = -1  # of another rank
    config = runner_config()
    core = host.factories["moe_mk"](config)
    assert isinstance(core, DispatchMoeRunnerCore) and core.runner_backend == "moe_mk"
    out = core.run_from_dispatch(dispatched(x_TH, weights_TK, ids_TK), quant_info(tiny), config)
    assert isinstance(out, StandardCombineInput)
    assert error(out.hidden_states, tiny.loops(x_TH, weights_TK, ids_TK)) < CLOSE


def test_a_scaling_factor_that_the_router_left_is_applied_once(host: Sglang) -> None:
    door.register()
    tiny, tokens = Tiny.drawn(), call()
    config = runner_config(routed_scaling_factor=2.5)
    out = host.factories["moe_mk"](config).run_from_dispatch(dispatched(*tokens), quant_info(tiny), config)
    assert error(out.hidden_states, 2.5 * tiny.loops(*tokens)) < CLOSE


def test_experts_without_a_gate(host: Sglang) -> None:
    door.register()
    tiny, tokens = Tiny.drawn(gated=False), call()
    config = runner_config(is_gated=False, activation="relu2")
    out = host.factories["moe_mk"](config).run_from_dispatch(dispatched(*tokens), quant_info(tiny), config)
    assert error(out.hidden_states, tiny.loops(*tokens)) < CLOSE


@pytest.mark.parametrize(
    ("quant", "flags"),
    [
        ("fp8_block", {"use_fp8_w8a8": True, "block_shape": [8, 16]}),
        ("fp8_channel", {"use_fp8_w8a8": True, "per_channel_quant": True}),
        ("fp8_tensor", {"use_fp8_w8a8": True}),
        ("int8", {"use_int8_w8a8": True}),
    ],
)
def test_fp8_and_int8_weights_with_their_scales(host: Sglang, quant: str, flags: dict[str, Any]) -> None:
    door.register(experts="reference", activations="plain")
    scheme, tokens, config = scheme_of_kind(quant, (8, 16)), call(), runner_config()
    tiny = Tiny.drawn()
    w13, w2 = scheme.quantize(tiny.w13), scheme.quantize(tiny.w2)
    decoded = Tiny(w13.dequantize(torch.float32), w2.dequantize(torch.float32))
    given = quant_info(Tiny(w13.values, w2.values), w13_scale=w13.scales, w2_scale=w2.scales, **flags)
    out = host.factories["moe_mk"](config).run_from_dispatch(dispatched(*tokens), given, config)
    assert error(out.hidden_states, decoded.loops(*tokens)) < CLOSE


def test_biases_are_added(host: Sglang) -> None:
    door.register()
    tiny, (x_TH, weights_TK, ids_TK), config = Tiny.drawn(), call(), runner_config()
    given = quant_info(tiny, b13=torch.zeros(EXPERTS, 48), b2=torch.ones(EXPERTS, 32))
    out = host.factories["moe_mk"](config).run_from_dispatch(dispatched(x_TH, weights_TK, ids_TK), given, config)
    wanted = tiny.loops(x_TH, weights_TK, ids_TK) + weights_TK.double().sum(dim=1, keepdim=True)
    assert error(out.hidden_states, wanted) < CLOSE


@NEEDS_COMPILER
def test_released_weights_are_freed_once_they_are_converted(host: Sglang) -> None:
    door.register(release_weights=True, experts="cpu_native")
    config, layers = runner_config(), [Tiny.drawn(seed=seed) for seed in (0, 1)]
    core, (x_TH, weights_TK, ids_TK) = host.factories["moe_mk"](config), call()
    given = [quant_info(Tiny(tiny.w13.bfloat16(), tiny.w2.bfloat16())) for tiny in layers]
    tokens = dispatched(x_TH.bfloat16(), weights_TK, ids_TK)
    first = [core.run_from_dispatch(tokens, each, config).hidden_states for each in given]
    assert [
        each.w13_weight.untyped_storage().nbytes() + each.w2_weight.untyped_storage().nbytes() for each in given
    ] == [0, 0]
    assert all(
        error(y_TH, tiny.loops(x_TH, weights_TK, ids_TK)) < 0.02 for y_TH, tiny in zip(first, layers, strict=True)
    )
    again = [core.run_from_dispatch(tokens, each, config).hidden_states for each in given]
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def test_what_nothing_here_computes_is_refused_with_every_reason(host: Sglang) -> None:
    door.register()
    make = host.factories["moe_mk"]
    with pytest.raises(UnsupportedError, match=r"no_combine=True(.|\n)*swiglu_limit=7.0"):
        make(runner_config(no_combine=True, swiglu_limit=7.0))
    with pytest.raises(UnsupportedError, match="without a gate and activation 'gelu'"):
        make(runner_config(is_gated=False, activation="gelu"))
    config, tokens = runner_config(), dispatched(*call())
    core = make(config)
    odd = quant_info(Tiny.drawn(), use_int4_w4a16=True, a13_scale=torch.ones(EXPERTS))
    with pytest.raises(UnsupportedError, match=r"use_int4_w4a16(.|\n)*a13_scale"):
        core.run_from_dispatch(tokens, odd, config)
    with pytest.raises(UnsupportedError, match="LoRA"):
        core.run_from_dispatch(tokens, quant_info(Tiny.drawn()), config, hooks=object())
