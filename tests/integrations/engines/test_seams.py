"""The seams as they were read: stand-ins and adapters have them, and so have the engines where they are installed."""

import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_mk.errors import UnsupportedError
from moe_mk.integrations import vllm as vllm_door
from moe_mk.integrations.vllm_formats import FORMATS, format_of
from moe_mk.integrations.vllm_linear import DISPATCH, LINEAR, READ, UTILS
from tests.integrations.engines import stand_ins

SEAMS = json.loads((Path(__file__).parent / "seams.json").read_text(encoding="utf-8"))


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_stand_ins_have_the_signatures_that_were_read() -> None:
    vllm = stand_ins.Vllm(None)
    core, experts = stand_ins.DispatchMoeRunnerCore, stand_ins.GroupedExperts
    override = stand_ins.torchtitan({})["torchtitan.config"]["override"]
    base, register = stand_ins.FusedMoEMethodBase, vllm.modules[LINEAR]["register_linear_kernel"]
    for name in ("__init__", "apply", "process_weights_after_loading"):
        assert parameters(getattr(base, name)) == SEAMS["vllm"][f"FusedMoEMethodBase.{name}"]
    for name in ("_get_quant_method", "register_oot"):
        assert parameters(getattr(vllm.layer, name)) == SEAMS["vllm"][f"RoutedExperts.{name}"]
    assert parameters(register) == SEAMS["vllm"]["register_linear_kernel"]  # type: ignore[arg-type]
    assert {
        "DispatchMoeRunnerCore.__init__": parameters(core.__init__),
        "DispatchMoeRunnerCore.run_from_dispatch": parameters(core.run_from_dispatch),
    } == SEAMS["sglang"]
    assert {
        "GroupedExperts.__init__": parameters(experts.__init__),
        "GroupedExperts.forward": parameters(experts.forward),
        "override": parameters(override),  # type: ignore[arg-type]
    } == SEAMS["torchtitan"]
    config = stand_ins.moe_config()
    assert set(SEAMS["vllm"]["FusedMoEConfig"]) <= vars(config).keys()
    assert set(SEAMS["vllm"]["FusedMoEParallelConfig"]) == vars(config.moe_parallel_config).keys()


def test_our_classes_take_what_vllm_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    host = stand_ins.Vllm(None)
    stand_ins.put_in(monkeypatch, host.modules)
    ours, layer = vllm_door.method_over("Fp8MoEMethod"), vllm_door.layer_over(host.layer)
    for name in ("apply", "process_weights_after_loading"):
        assert parameters(getattr(ours, name)) == SEAMS["vllm"][f"FusedMoEMethodBase.{name}"]
    assert parameters(layer._get_quant_method) == SEAMS["vllm"]["RoutedExperts._get_quant_method"]  # type: ignore[attr-defined]


@pytest.mark.external
def test_vllm_has_the_seam() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here; `make engines` installs its build for CPUs and runs this")
    moe = importlib.import_module("vllm.model_executor.layers.fused_moe")
    configs = importlib.import_module("vllm.model_executor.layers.fused_moe.config")
    linear = importlib.import_module(LINEAR)
    for name, wanted in SEAMS["vllm"].items():
        owner, _, attribute = name.partition(".")
        if dataclasses.is_dataclass(of_config := getattr(configs, owner, None)):
            fields = {field.name for field in dataclasses.fields(of_config)}
            assert set(wanted) <= fields | set(dir(of_config)), name
        else:
            found = getattr(getattr(moe, owner), attribute) if attribute else getattr(linear, owner)
            assert parameters(found) == wanted, name
    for kind in ("FP8_BLOCK_", "FP8_", "INT8_", ""):
        assert "cpu" in {platform.name.lower() for platform in getattr(linear, f"_POSSIBLE_{kind}KERNELS")}
    assert parameters(getattr(importlib.import_module(UTILS), DISPATCH)) == ["layer", "remove_weight"]
    for module in ("linear", "vocab_parallel_embedding"):  # they look the function up at each use
        source = inspect.getsource(importlib.import_module(f"vllm.model_executor.layers.{module}"))
        assert f"            from {UTILS} import {DISPATCH}" in source
    for module, name in vllm_door.PLUGGABLE:
        assert issubclass(getattr(importlib.import_module(module), name), moe.RoutedExperts)


@pytest.mark.external
@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if each.module])
def test_methods_of_vllm_create_the_parameters_that_were_read(name: str) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here; `make engines` installs its build for CPUs and runs this")
    found = FORMATS[name]
    renames = name == "CompressedTensorsW4A8Mxfp4MoEMethod"
    values = found.values.removesuffix("_packed" * renames)  # which it appends to the names of its base
    method = getattr(importlib.import_module(found.module), "Mxfp4MoEMethod" if renames else name)
    created, made = inspect.getsource(method.create_weights), inspect.getsource(method.__init__)
    for side in ("w13_", "w2_"):
        for stem in (values, found.above, found.zeros, "" if name == "Fp8MoEMethod" else found.scale):
            assert not stem or f'"{side}{stem}"' in created, f"{name} creates no {side}{stem}"
    assert f"{found.selects}(" in made, f"{name} selects no kernel by {found.selects}"


@pytest.mark.external
def test_every_class_of_vllm_that_holds_weights_is_read_or_refused_by_name() -> None:
    if (found := importlib.util.find_spec("vllm")) is None or found.origin is None:
        pytest.skip("vLLM is not installed here; `make engines` installs its build for CPUs and runs this")
    bases: dict[str, set[str]] = {}
    for path in Path(found.origin).parent.rglob("*.py"):
        for name, stated in re.findall(r"^class (\w+)\(([^)]*)\)", path.read_text(encoding="utf-8"), re.MULTILINE):
            bases.setdefault(name, set()).update(re.findall(r"\w+", stated))

    def below(*roots: str) -> set[str]:
        names = set(roots)
        while more := {name for name, of in bases.items() if of & names} - names:
            names |= more
        return names

    experts, refused = below("FusedMoEMethodBase"), SEAMS["refused"]["experts"]
    assert experts == {*FORMATS, *refused}, "read a new class, then add it to FORMATS or to those that are refused"
    linear = below("LinearMethodBase", "CompressedTensorsScheme", "QuarkScheme", "INCLinearScheme")
    assert linear == {*READ, *SEAMS["refused"]["linear"]}, "the same with READ"
    for name in refused:
        with pytest.raises(UnsupportedError, match=name):
            format_of(type(name, (), {})())


@pytest.mark.external
def test_torchtitan_has_the_seam() -> None:
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed here; `make engines` installs it and runs this")
    experts = importlib.import_module("torchtitan.models.common.moe").GroupedExperts
    override = importlib.import_module("torchtitan.config").override
    assert parameters(experts.forward) == SEAMS["torchtitan"]["GroupedExperts.forward"]
    assert parameters(override) == SEAMS["torchtitan"]["override"]
