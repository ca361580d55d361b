"""The seams as they were read: stand-ins and adapters have them, and so have the engines where they are installed."""

import inspect
import json
import random
import re
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from moe_mk.errors import UnsupportedError
from moe_mk.integrations import sglang as sglang_door
from moe_mk.integrations import vllm as vllm_door
from moe_mk.integrations.sglang import RUNNER, UNQUANTISED
from moe_mk.integrations.vllm import MOE
from moe_mk.integrations.vllm_formats import FORMATS, LAYERS, format_of
from moe_mk.integrations.vllm_linear import CODES, DISPATCH, GATHERED, KEPT, LINEAR, READ, UTILS, linear_names
from tests.integrations.engines import stand_ins
from tests.integrations.engines.sources import SEAMS, UNPACKED, Sources


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_stand_ins_have_the_signatures_that_were_read() -> None:
    vllm = stand_ins.Vllm(None)
    core, experts = stand_ins.DispatchMoeRunnerCore, stand_ins.GroupedExperts
    override = stand_ins.torchtitan({})["torchtitan.config"]["override"]
    base, register = stand_ins.FusedMoEMethodBase, vllm.modules[LINEAR]["register_linear_kernel"]
    for name, wanted in vllm_door.PARAMETERS.items():
        owner, method = name.split(".")
        assert parameters(getattr({"FusedMoEMethodBase": base, "RoutedExperts": vllm.layer}[owner], method)) == [
            *wanted
        ]
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
    assert set(vllm_door.CONFIGS["FusedMoEConfig"]) <= vars(config).keys()
    assert set(vllm_door.CONFIGS["FusedMoEParallelConfig"]) == vars(config.moe_parallel_config).keys()


def names_of_engines() -> dict[str, Any]:
    """All names and values of engines that the adapters state, which sources of engines confirm where they are read."""
    formats = {name: [*vars(each).values()] for name, each in FORMATS.items()}
    formats = {name: [value for value in each if isinstance(value, str)] for name, each in formats.items()}
    of_vllm = [vllm_door.PLUGGABLE, vllm_door.PARAMETERS, vllm_door.CONFIGS, linear_names()]
    of_vllm += [CODES, [KEPT, GATHERED], sorted(READ)]
    settings = [sglang_door.REFUSED, sglang_door.READ, sglang_door.HARMLESS, sglang_door.ROUNDED]
    return {"formats": formats, "vllm": of_vllm, "sglang": [sglang_door.CALLED, RUNNER, UNQUANTISED, settings]}


def test_names_of_engines_are_those_that_were_read() -> None:
    assert json.loads(json.dumps(names_of_engines())) == SEAMS["names"]


def test_our_classes_take_what_vllm_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    host = stand_ins.Vllm(None)
    stand_ins.put_in(monkeypatch, host.modules)
    ours, layer = vllm_door.method_over("Fp8MoEMethod"), vllm_door.layer_over(host.layer)
    for name in ("apply", "process_weights_after_loading"):
        assert parameters(getattr(ours, name)) == [*vllm_door.PARAMETERS[f"FusedMoEMethodBase.{name}"]]
    wanted = vllm_door.PARAMETERS["RoutedExperts._get_quant_method"]
    assert parameters(layer._get_quant_method) == [*wanted]  # type: ignore[attr-defined]


def read_or_skip(project: str, version: str) -> Sources:
    sources = Sources(UNPACKED / f"{project}-{version}")
    if not sources.root.is_dir():
        pytest.skip(f"the sources of {project} {version} are not here; `make seams` downloads them and runs this")
    return sources


NEWEST = [*SEAMS["read"]["vllm"]][-1]
VLLM = pytest.mark.parametrize("version", SEAMS["read"]["vllm"])


@VLLM
@pytest.mark.external
def test_vllm_has_the_seam(version: str) -> None:
    vllm = read_or_skip("vllm", version)
    for name, wanted in vllm_door.PARAMETERS.items():
        assert [each for each in vllm.parameters(MOE, name) if each != "cls"] == [*wanted], name
    for name, wanted in vllm_door.CONFIGS.items():
        assert {*wanted} <= vllm.fields(f"{MOE}.config", name), name
    assert vllm.parameters(LINEAR, "register_linear_kernel") == SEAMS["vllm"]["register_linear_kernel"]
    assert vllm.parameters(MOE, "RoutedExperts.weight_loader") == SEAMS["vllm"]["RoutedExperts.weight_loader"]
    for module, name in linear_names():
        assert re.search(rf"\b{name}\b", vllm.text(module)), name
    for kind in ("FP8_BLOCK_", "FP8_", "INT8_", ""):
        (table,) = re.findall(rf"^_POSSIBLE_{kind}KERNELS\b.*?^}}", vllm.text(LINEAR), re.MULTILINE | re.DOTALL)
        assert "PlatformEnum.CPU" in table
    assert vllm.parameters(UTILS, DISPATCH) == ["layer", "remove_weight"]
    for module in ("linear", "vocab_parallel_embedding"):  # they look the function up at each use
        assert f"            from {UTILS} import {DISPATCH}" in vllm.text(f"{LAYERS}.{module}")
    for module, name in vllm_door.PLUGGABLE:
        assert vllm.find(module, name)
    known = {*SEAMS["refused"]["layers"], *(name for _, name in vllm_door.PLUGGABLE)}
    assert vllm.classes_below("vllm", "RoutedExperts") <= known, "read a new layer; replace it, or let vLLM compute it"


@VLLM
@pytest.mark.external
@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if each.module])
def test_methods_of_vllm_create_the_parameters_that_were_read(name: str, version: str) -> None:
    vllm, found = read_or_skip("vllm", version), FORMATS[name]
    if name not in vllm.classes_below("vllm", "FusedMoEMethodBase"):
        assert version != NEWEST, f"{name} is not in the newest version that was read"
        pytest.skip(f"vLLM {version} has no {name}")
    renames = name == "CompressedTensorsW4A8Mxfp4MoEMethod"
    values = found.values.removesuffix("_packed" * renames)  # which it appends to the names of its base
    of = "Mxfp4MoEMethod" if renames else name
    created, made = (vllm.code(found.module, f"{of}.{each}") for each in ("create_weights", "__init__"))
    for side in ("w13_", "w2_"):
        for stem in (values, found.above, found.zeros, "" if name == "Fp8MoEMethod" else found.scale):
            assert not stem or f'"{side}{stem}"' in created, f"{name} creates no {side}{stem}"
    assert f"{found.selects}(" in made, f"{name} selects no kernel by {found.selects}"


@VLLM
@pytest.mark.external
def test_every_class_of_vllm_that_holds_weights_is_read_or_refused_by_name(version: str) -> None:
    vllm = read_or_skip("vllm", version)
    experts, refused = vllm.classes_below("vllm", "FusedMoEMethodBase"), SEAMS["refused"]["experts"]
    assert experts <= {*FORMATS, *refused}, "read a new class, then add it to FORMATS or to those that are refused"
    linear = vllm.classes_below("vllm", "LinearMethodBase", "CompressedTensorsScheme", "QuarkScheme", "INCLinearScheme")
    assert linear <= {*READ, *SEAMS["refused"]["linear"]}, "the same with READ"
    if version == NEWEST:
        assert experts == {*FORMATS, *refused} and linear == {*READ, *SEAMS["refused"]["linear"]}
    for name in refused:
        with pytest.raises(UnsupportedError, match=name):
            format_of(type(name, (), {})())


def broken(host: stand_ins.Vllm, rng: random.Random) -> str:
    """Remove something that the plugin uses from an imitated vLLM, or give it other parameters; what that was."""
    module, names = rng.choice(
        [
            *((MOE, name.split(".")) for name in vllm_door.PARAMETERS),
            *((f"{MOE}.config", [name, field]) for name, fields in vllm_door.CONFIGS.items() for field in fields),
            *((module, [name]) for module, name in (*linear_names(), *vllm_door.PLUGGABLE)),
        ]
    )
    *owner, last = names
    held = host.modules[module] if not owner else vars(host.modules[module][owner[0]])
    if owner and isinstance(host.modules[module][owner[0]], type):
        copy = type(owner[0], (), dict(held))
        host.modules[module] = host.modules[module] | {owner[0]: copy}
        if rng.random() < 0.5:
            setattr(copy, last, lambda self, *others: None)
        else:
            delattr(copy, last)
    else:
        del held[last]
    return last


@pytest.mark.parametrize("seed", range(40))
def test_another_version_without_what_is_used_runs_its_own_experts(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    host = stand_ins.Vllm(["moe_mk"], version="0.47.1")
    missing = [broken(host, rng := random.Random(seed))]
    with suppress(KeyError, AttributeError):  # what is missing already
        missing.append(broken(host, rng))
    stand_ins.put_in(monkeypatch, host.modules)
    kernels = {kind: list(each) for kind, each in host.kernels.items()}
    assert not vllm_door.register()
    (line,) = host.logged
    assert all(each in line for each in ("vLLM 0.47.1 is none of the versions", "its own experts run", *missing))
    assert not host.registry and host.kernels == kernels, "nothing of vLLM is replaced"


def test_another_version_that_has_all_of_it_is_used_after_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    host = stand_ins.Vllm(["moe_mk"], {"moe_mk": {"experts": "torch_cpu"}}, version="0.47.1")
    found = FORMATS["Fp8MoEMethod"]
    del host.modules[found.module][found.selects]
    stand_ins.put_in(monkeypatch, host.modules)
    assert vllm_door.register() and "not read" in host.logged[0]
    fp8 = type("Fp8MoEMethod", (stand_ins.FusedMoEMethodBase,), {"block_quant": True})
    with pytest.raises(UnsupportedError, match=f"has no {found.selects}, by which Fp8MoEMethod selects its kernel"):
        host.layer(fp8, stand_ins.moe_config())
    host.layer(stand_ins.UnquantizedFusedMoEMethod, stand_ins.moe_config())
    assert not vllm_door.register(), "done already"


def test_the_versions_that_the_plugin_states_are_those_that_are_read_here() -> None:
    assert [version.rsplit(".", 1)[0] for version in SEAMS["read"]["vllm"]] == [*vllm_door.READ]


@pytest.mark.parametrize("missing", [("", ""), *sglang_door.CALLED, tuple(RUNNER.rsplit(".", 1))])
def test_another_sglang_runs_its_own_experts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: tuple[str, str]
) -> None:
    plugins = SimpleNamespace(SGLANG_PLUGINS=SimpleNamespace(get=lambda: "another, moe_mk"))
    modules: dict[str, dict[str, Any]] = {"sglang.srt.environ": {"envs": plugins}}
    hooked = [tuple(path.rsplit(".", 2)) for path in (RUNNER, UNQUANTISED)]
    for module, *names in (*((module, *name.split(".")) for module, name in sglang_door.CALLED), *hooked):
        if (module, ".".join(names)) != missing and (f"{module}.{names[0]}", names[-1]) != missing:
            held = modules.setdefault(module, {}).setdefault(names[0], SimpleNamespace())
            vars(held).update(dict.fromkeys(names[1:], True))
    stand_ins.put_in(monkeypatch, modules)
    monkeypatch.setattr(sglang_door, "register", lambda: missing)
    assert sglang_door.plugin() == (missing if missing == ("", "") else False)
    assert ("SGLang's own experts run" in caplog.text) == (missing != ("", "")) and missing[1] in caplog.text


@pytest.mark.external
@pytest.mark.parametrize("version", SEAMS["read"]["sglang"])
def test_sglang_has_the_seam(version: str) -> None:
    sglang = read_or_skip("sglang", version)
    for name, wanted in SEAMS["sglang"].items():
        assert sglang.parameters("sglang.srt.layers.moe.moe_runner.base", name) == wanted
    for hooked in (RUNNER, UNQUANTISED):
        module, owner, method = hooked.rsplit(".", 2)
        assert sglang.parameters(module, f"{owner}.{method}")
    for module, name in sglang_door.CALLED:
        assert sglang.find(module, name.partition(".")[0])
    config = sglang.fields("sglang.srt.layers.moe.moe_runner.base", "MoeRunnerConfig", properties=False)
    assert config == {*sglang_door.READ, *sglang_door.HARMLESS, *sglang_door.REFUSED}, "read a new setting"


@pytest.mark.external
@pytest.mark.parametrize("version", SEAMS["read"]["torchtitan"])
def test_torchtitan_has_the_seam(version: str) -> None:
    titan = read_or_skip("torchtitan", version)
    for name, wanted in SEAMS["torchtitan"].items():
        assert titan.parameters("torchtitan.models.common.moe" if "." in name else "torchtitan.config", name) == wanted
