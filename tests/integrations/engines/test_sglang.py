"""The SGLang runner core: one call by loops, what it refuses, and layers of the wheel where it is installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_mk.errors import UnsupportedError
from moe_mk.integrations import sglang as door
from moe_mk.quant.kinds import scheme_of_kind
from tests.integrations.engines.cases import CLOSE, EXPERTS, Tiny, call, error
from tests.integrations.engines.stand_ins import SGLANG, DispatchMoeRunnerCore, StandardCombineInput, put_in
from tests.layer.native import NEEDS_COMPILER

INSTALLED = importlib.util.find_spec("sglang") is not None
HOST = Path(__file__).parent / "sglang_host.py"


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, SGLANG)


def runner_config(**changes: Any) -> SimpleNamespace:
    facts = {"activation": "silu", "is_gated": True, "apply_router_weight_on_input": False, "no_combine": False}
    facts |= dict.fromkeys(("routed_scaling_factor", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit"))
    return SimpleNamespace(**(facts | changes))


def dispatched(x: Any, weights: Any, ids: Any) -> SimpleNamespace:
    return SimpleNamespace(hidden_states=x, topk_output=SimpleNamespace(topk_weights=weights, topk_ids=ids))


def quant_info(tiny: Tiny, **changes: Any) -> SimpleNamespace:
    facts: dict[str, Any] = {"w13_weight": tiny.w13, "w2_weight": tiny.w2, "b13": None, "b2": None}
    facts |= {"fuse_swiglu_interleaved": False, "use_int4_w4a16": False, "use_int8_w8a16": False}
    return SimpleNamespace(**(facts | changes))


def test_one_call_computes_what_loops_do() -> None:
    tiny, (x_TH, weights_TK, ids_TK) = Tiny.drawn(), call()
    ids_TK[0, 1] = -1  # of another rank
    config = runner_config()
    core = door.core(config, {"experts": "torch_cpu"})
    assert isinstance(core, DispatchMoeRunnerCore)
    out = core.run_from_dispatch(dispatched(x_TH, weights_TK, ids_TK), quant_info(tiny), config)
    assert isinstance(out, StandardCombineInput)
    assert error(out.hidden_states, tiny.loops(x_TH, weights_TK, ids_TK)) < CLOSE


def test_a_scaling_factor_that_the_router_left_is_applied_once() -> None:
    tiny, tokens = Tiny.drawn(), call()
    config = runner_config(routed_scaling_factor=2.5)
    out = door.core(config, {}).run_from_dispatch(dispatched(*tokens), quant_info(tiny), config)
    assert error(out.hidden_states, 2.5 * tiny.loops(*tokens)) < CLOSE


def test_experts_without_a_gate() -> None:
    tiny, tokens = Tiny.drawn(gated=False), call()
    config = runner_config(is_gated=False, activation="relu2")
    out = door.core(config, {}).run_from_dispatch(dispatched(*tokens), quant_info(tiny), config)
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
def test_fp8_and_int8_weights_with_their_scales(quant: str, flags: dict[str, Any]) -> None:
    scheme, tokens, config = scheme_of_kind(quant, (8, 16)), call(), runner_config()
    tiny = Tiny.drawn()
    w13, w2 = scheme.quantize(tiny.w13), scheme.quantize(tiny.w2)
    decoded = Tiny(w13.dequantize(torch.float32), w2.dequantize(torch.float32))
    given = quant_info(Tiny(w13.values, w2.values), w13_scale=w13.scales, w2_scale=w2.scales, **flags)
    out = door.core(config, {"experts": "reference", "activations": "plain"}).run_from_dispatch(
        dispatched(*tokens), given, config
    )
    assert error(out.hidden_states, decoded.loops(*tokens)) < CLOSE


class Noting(SimpleNamespace):
    """A quant info that notes which of its tensors are read."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if isinstance(value, torch.Tensor):
            super().__getattribute__("read").append(name)
        return value


@pytest.mark.parametrize("flag", ["", "use_fp8_w8a8", "use_int8_w8a8", "use_int4_w4a16", "use_int8_w8a16"])
def test_converted_weights_are_kept_by_every_tensor_that_was_read(flag: str) -> None:
    names = [side + part for side in ("w13", "w2") for part in ("_weight", "_scale", "_zp")] + ["b13", "b2"]
    held = {name: torch.full((1, 2, 3), number, dtype=torch.uint8) for number, name in enumerate(names)}
    flags = {**dict.fromkeys(("use_int4_w4a16", "use_int8_w8a16"), False), **({flag: True} if flag else {})}
    info = Noting(**held, **flags, block_shape=[0, 32], fuse_swiglu_interleaved=False, read=[])
    door.weights_of(info, runner_config(), torch.bfloat16)
    read, kept = {*info.read}, {names[int(tensor[0, 0, 0])] for tensor in door.stated(info)}
    assert {"w13_weight", "w2_weight", "b13", "b2"} <= read <= kept


def test_biases_are_added() -> None:
    tiny, (x_TH, weights_TK, ids_TK), config = Tiny.drawn(), call(), runner_config()
    given = quant_info(tiny, b13=torch.zeros(EXPERTS, 48), b2=torch.ones(EXPERTS, 32))
    out = door.core(config, {}).run_from_dispatch(dispatched(x_TH, weights_TK, ids_TK), given, config)
    wanted = tiny.loops(x_TH, weights_TK, ids_TK) + weights_TK.double().sum(dim=1, keepdim=True)
    assert error(out.hidden_states, wanted) < CLOSE


@NEEDS_COMPILER
def test_released_weights_are_freed_once_they_are_converted() -> None:
    config, layers = runner_config(), [Tiny.drawn(seed=seed) for seed in (0, 1)]
    core, (x_TH, weights_TK, ids_TK) = door.core(config, {"experts": "cpu_native"}, release_weights=True), call()
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


def test_rows_of_gate_and_up_that_alternate() -> None:
    tiny, tokens, config = Tiny.drawn(), call(), runner_config()
    alternating = torch.stack(tiny.w13.chunk(2, dim=1), dim=2).flatten(1, 2)
    given = quant_info(Tiny(alternating, tiny.w2), fuse_swiglu_interleaved=True)
    out = door.core(config, {}).run_from_dispatch(dispatched(*tokens), given, config)
    assert error(out.hidden_states, tiny.loops(*tokens)) < CLOSE


def test_what_nothing_here_computes_is_refused_with_every_reason() -> None:
    with pytest.raises(UnsupportedError, match=r"no_combine=True(.|\n)*swiglu_limit=7.0"):
        door.core(runner_config(no_combine=True, swiglu_limit=7.0), {})
    with pytest.raises(UnsupportedError, match="without a gate and activation 'gelu'"):
        door.core(runner_config(is_gated=False, activation="gelu"), {})
    with pytest.raises(UnsupportedError, match="a_new_law=3, which is not known"):
        door.core(runner_config(a_new_law=3), {})
    config, tokens = runner_config(), dispatched(*call())
    core = door.core(config, {})
    with pytest.raises(UnsupportedError, match="use_mxfp8"):
        core.run_from_dispatch(tokens, quant_info(Tiny.drawn(), use_mxfp8=True), config)
    odd = quant_info(Tiny.drawn(), use_int4_w4a16=True, block_shape=[0, 48], w13_zp=None, w2_zp=None)
    with pytest.raises(UnsupportedError, match="groups of 48 columns"):
        core.run_from_dispatch(tokens, odd, config)
    rounded = SimpleNamespace(**vars(tokens), hidden_states_scale=torch.ones(1))
    with pytest.raises(UnsupportedError, match="quantised before dispatch .hidden_states_scale."):
        core.run_from_dispatch(rounded, quant_info(Tiny.drawn()), config)
    with pytest.raises(UnsupportedError, match="LoRA"):
        core.run_from_dispatch(tokens, quant_info(Tiny.drawn()), config, hooks=object())


def run_host(plugins: str) -> subprocess.CompletedProcess[str]:
    if not INSTALLED:
        pytest.skip("SGLang is not installed here; `make engines` installs its wheel and runs this")
    environment = os.environ | {"SGLANG_PLUGINS": plugins}
    return subprocess.run([sys.executable, str(HOST)], env=environment, capture_output=True, text=True, timeout=115)


@pytest.mark.external
@pytest.mark.stress
def test_layers_of_the_wheel_compute_what_loops_do() -> None:
    done = run_host("moe_mk")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert len(facts["errors"]) == 11 and max(facts["errors"].values()) < 0.02
    assert set(facts["settings"]) == {*door.READ, *door.HARMLESS, *door.REFUSED}
    assert "swiglu_limit=7.0" in facts["refused"] and facts["recorded"]


@pytest.mark.external
@pytest.mark.stress
def test_the_wheel_keeps_its_own_runner_where_the_plugin_is_not_named() -> None:
    done = run_host("another")
    assert done.returncode != 0 and "MoeMkRunnerCore" in done.stderr, done.stderr[-2000:]
