"""The vLLM plugin: inert unless it is named, what vLLM calls, and vLLM itself where it is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_mk import MoELayer
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.integrations import vllm as door
from tests.integrations.engines.cases import CLOSE, Tiny, call, error
from tests.integrations.engines.stand_ins import Activation, Vllm, moe_config, put_in
from tests.layer.native import NEEDS_COMPILER
from tests.support.layers import layer, tensors


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    host = Vllm(["moe_mk"], {"moe_mk": {"experts": "torch_cpu"}})
    put_in(monkeypatch, host.modules)
    assert door.register()
    return host


def layer_of(tiny: Tiny, **changes: Any) -> SimpleNamespace:
    """What vLLM calls RoutedExperts, as far as the method reads it."""
    facts = {"layer_name": "layers.1", "w13_weight": tiny.w13, "w2_weight": tiny.w2, "activation": Activation.SILU}
    return SimpleNamespace(**(facts | {"expert_map": None, "apply_router_weight_on_input": False} | changes))


@pytest.mark.parametrize("plugins", [None, [], ["another"]])
def test_it_is_inert_unless_it_is_named(monkeypatch: pytest.MonkeyPatch, plugins: list[str] | None) -> None:
    host = Vllm(plugins)
    put_in(monkeypatch, host.modules)
    assert not door.register()
    assert not host.registry


def test_it_may_be_loaded_twice_and_does_not_push_another_plugin_out(enabled: Vllm) -> None:
    assert not door.register()
    assert list(enabled.registry) == ["UnquantizedFusedMoEMethod"]
    enabled.registry["UnquantizedFusedMoEMethod"] = type("Hpu", (), {"__module__": "hpu"})
    with pytest.raises(ConfigError, match=r"replaced by hpu\.Hpu already; name one of the two"):
        door.enable()


def test_vllm_makes_our_method_and_gets_what_loops_compute(enabled: Vllm) -> None:
    tiny, tokens = Tiny.drawn(), call()
    method = enabled.method(moe_config())
    layer = layer_of(tiny)
    assert not method.is_monolithic and not method.supports_eplb
    assert method.maybe_roundup_sizes(32, 24, torch.float32, None) == (32, 24)
    method.process_weights_after_loading(layer)
    assert error(method.apply(layer, *tokens, None, None), tiny.loops(*tokens)) < CLOSE
    assert method.experts_here.backend == "torch_cpu", "as --additional-config states"
    tiny.w2.mul_(2.0)  # new weights, as reinforcement learning loads them
    method.process_weights_after_loading(layer)
    assert error(method.apply(layer, *tokens, None, None), tiny.loops(*tokens)) < CLOSE


@NEEDS_COMPILER
def test_weights_are_released_where_that_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Vllm(["moe_mk"], {"moe_mk": {"experts": "cpu_native", "release_weights": True}})
    put_in(monkeypatch, host.modules)
    assert door.register()
    tiny, (x_TH, weights_TK, ids_TK) = Tiny.drawn(), call()
    layer = layer_of(Tiny(tiny.w13.bfloat16(), tiny.w2.bfloat16()))
    method = host.method(moe_config())
    method.process_weights_after_loading(layer)
    assert layer.w13_weight.untyped_storage().nbytes() == layer.w2_weight.untyped_storage().nbytes() == 0
    got = method.apply(layer, x_TH.bfloat16(), weights_TK, ids_TK, None, None)
    assert error(got, tiny.loops(x_TH, weights_TK, ids_TK)) < 0.02


def test_a_rank_with_some_of_the_experts_adds_up_its_own(enabled: Vllm) -> None:
    # 10 experts over two ranks of 5: this one holds 5..9, so that global id 7 is its own 2.
    tiny, (x_TH, weights_TK, ids_TK) = Tiny.drawn(), call()
    expert_map = torch.cat((torch.full((5,), -1), torch.arange(5))).to(torch.int32)
    method = enabled.method(moe_config())
    layer = layer_of(tiny, expert_map=expert_map)
    method.process_weights_after_loading(layer)
    global_TK = ids_TK + 5
    global_TK[:, 1] -= 5  # of the other rank
    global_TK[0, 0] = -1  # padding of vLLM
    local_TK = ids_TK.clone()
    local_TK[:, 1], local_TK[0, 0] = -1, -1
    assert torch.equal(door.local_ids(global_TK, expert_map), local_TK)
    got = method.apply(layer, x_TH, weights_TK, global_TK, None, None)
    assert error(got, tiny.loops(x_TH, weights_TK, local_TK)) < CLOSE


def test_experts_without_a_gate(enabled: Vllm) -> None:
    tiny, tokens = Tiny.drawn(gated=False), call()
    method = enabled.method(moe_config(activation=Activation.RELU2_NO_MUL, is_act_and_mul=False))
    layer = layer_of(tiny, activation=Activation.RELU2_NO_MUL)
    method.process_weights_after_loading(layer)
    assert error(method.apply(layer, *tokens, None, None), tiny.loops(*tokens)) < CLOSE


def test_what_nothing_here_computes_is_refused_with_every_reason(enabled: Vllm) -> None:
    odd = moe_config(
        activation=Activation.SITU,
        has_bias=True,
        is_lora_enabled=True,
        swiglu_limit=7.0,
        moe_parallel_config=SimpleNamespace(dp_size=2),
    )
    with pytest.raises(UnsupportedError) as caught:
        enabled.method(odd)
    stated = "\n".join(caught.value.reasons)
    for word in ("'situ'", "biases", "LoRA", "swiglu_limit=7.0", "data parallel size 2", "VLLM_PLUGINS"):
        assert word in stated
    method = enabled.method(moe_config())
    with pytest.raises(UnsupportedError, match=r"layers.1\n.*applied to its input"):
        method.process_weights_after_loading(layer_of(Tiny.drawn(), apply_router_weight_on_input=True))


def test_a_model_of_vllm_loads_a_layer_as_it_loads_its_own_parameters() -> None:
    given, wanted = tensors(4), layer(4, 2)
    moe = MoELayer(wanted.config, dtype=torch.float32)
    loader = moe.loader()
    load = door.weight_loader(loader)
    for expert in range(4):
        for shard, projection in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
            tensor, name = given[f"experts.{expert}.{projection}_proj.weight"], f"mlp.experts.w{shard[1:]}_weight"
            assert load(None, tensor, name, shard_id=shard, expert_id=expert, return_success=True)
    loader.feed("gate.weight", given["gate.weight"])
    loader.finish()
    x_TH = torch.randn((3, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(moe(x_TH), wanted(x_TH))
    names = {"w13_weight": "weight", "w13_weight_scale_inv": "scale", "w2_weight_scale": "scale", "w13_bias": "bias"}
    names |= {"w13_weight_scale_2": "global_scale", "w2_input_scale": "input_scale"}
    assert {name: door.kind_of(f"mlp.experts.{name}") for name in names} == names


def test_settings_that_are_no_table_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Vllm(["moe_mk"], {"moe_mk": "torch_cpu"})
    put_in(monkeypatch, host.modules)
    assert door.register()
    with pytest.raises(ConfigError, match=r"additional_config\['moe_mk'\] is 'torch_cpu', expected a table"):
        host.method(moe_config())


def test_the_entry_point_leads_here() -> None:
    points = [p for p in entry_points(group="vllm.general_plugins") if p.name == "moe_mk"]
    if not points:
        pytest.skip("moe-mk was installed before it had this entry point: install it again")
    assert {point.value for point in points} == {"moe_mk.integrations.vllm:register"}
    assert points[0].load() is door.register


# vLLM itself, in a process of its own.


@pytest.mark.external
@pytest.mark.slow
def test_vllm_generates_the_same_tokens_with_and_without(tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here; `make engines` installs its build for CPUs and runs this")
    program = str(Path(__file__).parent / "vllm_host.py")
    done = subprocess.run(
        [sys.executable, program, str(tmp_path)], env=os.environ, capture_output=True, text=True, timeout=115
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    facts = dict(line.split(": ", 1) for line in done.stdout.splitlines() if line.startswith(("tokens", "calls")))
    assert facts["tokens by transformers"] == facts["tokens by vLLM"] == facts["tokens by vLLM with moe_mk"]
    assert facts["calls before"] == "0" and int(facts["calls"]) == 2 * 8, "two layers, one prefill and seven decodes"
