"""Experts of every format move: FP8 with scales, packed by a backend, mapped from a file; nothing stays stale."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_mk import MoEConfig, MoELayer, ParallelGroups
from moe_mk.comm import Communicator, LockstepWorld
from moe_mk.errors import UnsupportedError
from moe_mk.flight import interleave
from moe_mk.quant.fp8 import weight_scheme
from moe_mk.rebalance import RebalanceManager
from moe_mk.rebalance.transfer import flat_bytes
from tests.support.rebalance_world import PLACEMENT, RANKS, settings
from tests.support.tiers import slow

EXPERTS, HIDDEN, INNER, TOKENS = 8, 128, 128, 16


@pytest.fixture(params=["fp8_block", "bf16"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """Eight experts in a file; the gate sends most tokens to expert 6."""
    draw, made = torch.Generator().manual_seed(3), {}
    gate_EH = torch.randn(EXPERTS, HIDDEN, generator=draw) * 0.05
    gate_EH[6] += 0.2
    made["gate.weight"] = gate_EH.bfloat16()
    for e in range(EXPERTS):
        for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            weight = torch.randn(shape, generator=draw) * 0.1
            key = f"experts.{e}.{name}_proj.weight"
            if request.param == "bf16":
                made[key] = weight.bfloat16()
                continue
            q = weight_scheme((128, 128)).quantize(weight)
            assert q.scales is not None
            made[key], made[f"{key}_scale_inv"] = q.values, q.scales
    file = tmp_path / "model.safetensors"
    save_file({f"model.layers.0.mlp.{name}": tensor for name, tensor in made.items()}, file)
    return request.param, file


def layer(checkpoint: tuple[str, Path], comm: Communicator, experts: str) -> MoELayer:
    model = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS}
    data = {"model": {**model, "quant": {"weights": checkpoint[0]}}, "router": {"top_k": 2}}
    config = MoEConfig.parse(data, "a test").with_(placement=PLACEMENT, experts=experts)
    return MoELayer(config, groups=ParallelGroups(ep=comm))


def tokens(rank: int) -> Tensor:
    return (torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank)) + 0.5).bfloat16()


@pytest.mark.row(109, 120)
@pytest.mark.parametrize("experts", ["reference", *slow("torch_cpu"), "cpu_native"])
def test_after_moving_live_a_layer_is_one_that_was_loaded_so(checkpoint: tuple[str, Path], experts: str) -> None:
    try:
        layers = [layer(checkpoint, comm, experts) for comm in LockstepWorld(RANKS).communicators()]
    except UnsupportedError as problem:
        pytest.skip(f"{experts} cannot serve here: {problem}")
    for each in layers:
        each.load_from_safetensors(checkpoint[1], 0)
    managers = [RebalanceManager([each], settings(bytes_per_step=10_000)) for each in layers]
    for _ in range(60):
        interleave([each.steps(tokens(rank)) for rank, each in enumerate(layers)])
        interleave([manager.steps("prefill") for manager in managers])
    assert layers[0].epoch >= 1 and layers[0].expert_map.physical_to_global() != list(PLACEMENT)
    twins = [layer(checkpoint, comm, experts) for comm in LockstepWorld(RANKS).communicators()]
    for twin in twins:
        twin.live.set_placement(layers[0].expert_map)
        twin.load_from_safetensors(checkpoint[1], 0)
    for mine, theirs in zip(layers, twins, strict=True):
        for slot in range(len(mine.expert_map.local_to_global(mine.ep.rank))):
            pairs = zip(mine.live.export_slot(slot).tensors, theirs.live.export_slot(slot).tensors, strict=True)
            assert all(torch.equal(flat_bytes(a), flat_bytes(b)) for a, b in pairs)
    moved, loaded = (
        interleave([each.steps(tokens(rank)) for rank, each in enumerate(group)]) for group in (layers, twins)
    )
    assert all(torch.equal(a, b) for a, b in zip(moved, loaded, strict=True))
