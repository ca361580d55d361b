"""The seams as they were read: stand-ins and adapters have them, and so have the engines where they are installed."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_mk.integrations import vllm as vllm_door
from tests.integrations.engines import stand_ins

SEAMS = json.loads((Path(__file__).parent / "seams.json").read_text(encoding="utf-8"))


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_stand_ins_have_the_signatures_that_were_read() -> None:
    method = stand_ins.Vllm(None).method
    core, experts = stand_ins.DispatchMoeRunnerCore, stand_ins.GroupedExperts
    override = stand_ins.torchtitan({})["torchtitan.config"]["override"]
    assert {name: parameters(getattr(method, name.split(".")[1])) for name in SEAMS["vllm"] if "Method." in name} == {
        name: wanted for name, wanted in SEAMS["vllm"].items() if "Method." in name
    }
    assert {
        "DispatchMoeRunnerCore.__init__": parameters(core.__init__),
        "DispatchMoeRunnerCore.run_from_dispatch": parameters(core.run_from_dispatch),
    } == SEAMS["sglang"]
    assert {
        "GroupedExperts.__init__": parameters(experts.__init__),
        "GroupedExperts.forward": parameters(experts.forward),
        "override": parameters(override),  # type: ignore[arg-type]
    } == SEAMS["torchtitan"]
    assert set(SEAMS["vllm"]["FusedMoEConfig"]) <= vars(stand_ins.moe_config()).keys()


def test_our_method_takes_what_vllm_passes() -> None:
    ours = vllm_door.method_over(stand_ins.Vllm(None).method)
    for name, wanted in SEAMS["vllm"].items():
        if "Method." in name and "register" not in name:
            assert parameters(getattr(ours, name.split(".")[1])) == wanted


@pytest.mark.external
def test_vllm_has_the_seam() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here; `make engines` installs its build for CPUs and runs this")
    moe = importlib.import_module("vllm.model_executor.layers.fused_moe")
    config = importlib.import_module("vllm.model_executor.layers.fused_moe.config").FusedMoEConfig
    names = {name for name in SEAMS["vllm"] if "Method." in name}
    found = {name: parameters(getattr(moe.UnquantizedFusedMoEMethod, name.split(".")[1])) for name in names}
    assert found == {name: SEAMS["vllm"][name] for name in names}
    assert set(SEAMS["vllm"]["FusedMoEConfig"]) <= {field.name for field in dataclasses.fields(config)}
    assert hasattr(importlib.import_module("vllm.envs"), "VLLM_PLUGINS")


@pytest.mark.external
def test_torchtitan_has_the_seam() -> None:
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed here; `make engines` installs it and runs this")
    experts = importlib.import_module("torchtitan.models.common.moe").GroupedExperts
    override = importlib.import_module("torchtitan.config").override
    assert parameters(experts.forward) == SEAMS["torchtitan"]["GroupedExperts.forward"]
    assert parameters(override) == SEAMS["torchtitan"]["override"]
