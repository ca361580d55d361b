"""Arguments of other types end in an error of this library at every public door, not in one of Python or torch."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

import moe_mk
from moe_mk import DeepseekV3MoE, DeviceProfile, ExpertMap, MoEConfig, MoELayer, ParallelGroups, Problem, ResidencyPool
from moe_mk.comm import SingleRank, communicator, rank_groups
from moe_mk.config import config_folder, device_profile
from moe_mk.lab.training import TrainingMoE
from moe_mk.layer import SequenceParallelMoE
from moe_mk.quant.plain import BF16
from moe_mk.router import Router
from tools import docs_api

MODEL = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 4, "quant": {"weights": "bf16"}}
PARTS = {"model": MODEL, "router": {"top_k": 2}}
CONFIG = MoEConfig.parse(PARTS, "a test").with_(experts="torch_cpu")
CPU = device_profile("cpu")
PROBLEM = Problem(CONFIG, CPU, BF16, 4)
BUILT = {"config": CONFIG, "device": "cpu", "dtype": torch.bfloat16, "groups": None, "name": "x", "pool": None}
LAYER = MoELayer(CONFIG)
X = torch.zeros((2, 64), dtype=torch.bfloat16)
IDS, WEIGHTS = torch.zeros((2, 2), dtype=torch.int32), torch.zeros((2, 2))
READ = {"path": "nowhere", "layer": 3, "device": None, "dtype": torch.bfloat16, "groups": None, "prefix": None}
DOORS: dict[str, tuple[Callable[..., object], Mapping[str, Any]]] = {
    "MoEConfig": (MoEConfig, PARTS),
    "MoEConfig.parse": (MoEConfig.parse, {"data": PARTS, "where": "a test"}),
    "MoEConfig.load": (MoEConfig.load, {"path": config_folder() / "models/tiny.yaml"}),
    "MoEConfig.from_hf": (MoEConfig.from_hf, {"path": "nowhere"}),
    "MoEConfig.with_": (CONFIG.with_, {"ep": 1, "experts": "auto", "trust": [], "quant": {}, "placement": "linear"}),
    "ParallelGroups": (ParallelGroups, {"ep": SingleRank(), "tp": SingleRank(), "dp": SingleRank()}),
    "ParallelGroups.from_mesh": (ParallelGroups.from_mesh, {"mesh": None}),
    "communicator": (communicator, {"group": SingleRank()}),
    "rank_groups": (rank_groups, {"num_ranks": 1, "pp": 1, "dp": 1, "pcp": 1, "tp": 1}),
    "MoELayer": (MoELayer, BUILT),
    "MoELayer.from_checkpoint": (MoELayer.from_checkpoint, READ),
    "MoELayer.load": (LAYER.load, {"source": {}, "layer": 0, "prefix": None}),
    "MoELayer.load_weights": (LAYER.load_weights, {"tensors": {}, "layer": 0}),
    "MoELayer.loader": (LAYER.loader, {"layer": 0, "prefix": ""}),
    "MoELayer.forward": (LAYER, {"hidden_states": X}),
    "MoELayer.forward_routed": (LAYER.forward_routed, {"hidden_states": X, "topk_weights": WEIGHTS, "topk_ids": IDS}),
    "MoELayer.route": (LAYER.route, {"hidden_states": X}),
    "MoELayer.warm_up": (LAYER.warm_up, {"token_counts": [1]}),
    "MoELayer.take": (LAYER.take, {"weights": None}),
    "DeepseekV3MoE": (DeepseekV3MoE, BUILT),
    "DeepseekV3MoE.from_config": (DeepseekV3MoE.from_config, {"config": CONFIG}),
    "TrainingMoE": (TrainingMoE, {"config": CONFIG, "comm": SingleRank()}),
    "SequenceParallelMoE": (SequenceParallelMoE, {"layer": LAYER, "group": SingleRank()}),
    "ExpertMap": (ExpertMap, {"experts_of_rank": ((0, 1), (2, 3)), "num_experts": 4}),
    "ExpertMap.linear": (ExpertMap.linear, {"num_experts": 4, "num_ranks": 2}),
    "ExpertMap.round_robin": (ExpertMap.round_robin, {"num_experts": 4, "num_ranks": 2}),
    "ExpertMap.from_physical": (
        ExpertMap.from_physical, {"logical_of_physical": [0, 1, 2, 3], "num_ranks": 2, "num_experts": 4}
    ),
    "DeviceProfile": (DeviceProfile, CPU.model_dump()),
    "DeviceProfile.load": (DeviceProfile.load, {"path": config_folder() / "devices/cpu.yaml"}),
    "ResidencyPool": (ResidencyPool, {"num_bytes": 1000}),
    "Problem": (Problem, {each.name: getattr(PROBLEM, each.name) for each in dataclasses.fields(PROBLEM)}),
    "oracle.select": (moe_mk.oracle.select, {"problem": PROBLEM}),
    "Router": (Router, {each.name: getattr(Router(2), each.name) for each in dataclasses.fields(Router)}),
}  # fmt: skip
RESULTS = {"MemoryReport", "Decision"}
"""Classes that are returned and not built."""
OBJECT = object()
WRONG = (None, -1, 2.5, "x", b"x", [1], {"a": 1}, OBJECT, int, True, torch.zeros(1), 10**30)


@pytest.mark.parametrize("door", DOORS)
def test_wrong_types_are_refused_in_errors_of_the_library(door: str) -> None:
    call, right = DOORS[door]
    for name in right:
        for wrong in WRONG:
            try:
                call(**{**right, name: wrong})
            except moe_mk.MoEMKError:
                continue
            except Exception as problem:
                what = f"{door}({name}={wrong!r}) raised {type(problem).__name__}: {problem}"
                raise AssertionError(what) from problem


def public() -> Iterator[str]:
    """Classes of `moe_mk`, and constructors that the reference lists."""
    for dotted, methods in docs_api.NAMES.items():
        name, made = dotted.rpartition(".")[2], docs_api.found(dotted)
        if not inspect.isclass(made):
            continue
        yield name
        yield from (f"{name}.{each}" for each in methods.split() if inspect.ismethod(getattr(made, each)))


def test_every_public_constructor_is_among_the_doors() -> None:
    classes = {name for name in moe_mk.__all__ if isinstance(getattr(moe_mk, name), type)}
    errors = {name for name in classes if issubclass(getattr(moe_mk, name), Exception)}
    assert {*classes, *public()} - errors - RESULTS <= DOORS.keys()
