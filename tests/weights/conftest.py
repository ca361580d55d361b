"""A tiny checkpoint of four experts, on disk and as a state dict, for all tests of this room."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from tests.weights.one_layer import PREFIX, StateDict


@pytest.fixture(scope="session")
def tiny() -> CheckpointShape:
    """Four experts of 32 x 64 in 16 x 16 blocks, one shared expert, layer 3."""
    return CheckpointShape(
        num_experts=4, hidden_size=64, intermediate_size=32, top_k=2, num_groups=2, top_k_groups=1, block=(16, 16)
    )


@pytest.fixture(scope="session")
def tiny_directory(tiny: CheckpointShape, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint in several shards. Never write into it."""
    directory = tmp_path_factory.mktemp("tiny")
    write_checkpoint(directory, tiny, seed=1, shard_bytes=16 << 10)
    return directory


@pytest.fixture(scope="module")
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small checkpoint of a type, of the SHAPE of the module, written once."""
    root = tmp_path_factory.mktemp("written")

    def of(quant: str) -> Path:
        folder = root / quant
        if not folder.exists():
            write_checkpoint(folder, replace(request.module.SHAPE, quant=quant), threads=1)
        return folder

    return of


@pytest.fixture
def tiny_state(tiny_directory: Path) -> StateDict:
    """All tensors of the tiny checkpoint by full name, as copies, read by the safetensors library alone."""
    state: StateDict = {}
    for file in sorted(tiny_directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            state |= {name: shard.get_tensor(name).clone() for name in list(shard.keys())}
    return state


@pytest.fixture
def renamed(tiny_state: StateDict) -> Callable[[str], StateDict]:
    """The tiny layer in another convention, renamed by rules written out here."""

    def rename(convention: str) -> StateDict:
        if convention == "official":
            return tiny_state
        if convention in ("fused", "stacked"):
            return _stacks(tiny_state, apart=convention == "stacked")
        words = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
        out: StateDict = {}
        for name, tensor in tiny_state.items():
            new = re.sub("gate_proj|down_proj|up_proj", lambda found: words[found[0]], name)
            if convention == "mixtral":
                new = new.replace(PREFIX, "model.layers.3.block_sparse_moe.")
                new = new.replace("gate.e_score_correction_bias", "e_score_correction_bias")
            else:
                new = new.replace(PREFIX, "layers.3.ffn.").replace("gate.e_score_correction_bias", "gate.bias")
                new = new.replace(".weight_scale_inv", ".scale")
            out[new] = tensor
        return out

    return rename


def _stacks(state: StateDict, *, apart: bool) -> StateDict:
    out = {name: tensor for name, tensor in state.items() if ".experts." not in name}
    for ending, new in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
        experts = [
            {p: state[f"{PREFIX}experts.{e}.{p}_proj.{ending}"] for p in ("gate", "up", "down")} for e in range(4)
        ]
        held = {f"{p}_proj": torch.stack([e[p] for e in experts]) for p in ("gate", "up", "down")}
        if not apart:
            held["gate_up_proj"] = torch.cat((held.pop("gate_proj"), held.pop("up_proj")), 1)
        out |= {f"{PREFIX}experts.{name}{new}": stack for name, stack in held.items()}
    return out
