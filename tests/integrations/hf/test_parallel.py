"""Expert parallelism of transformers, its communication half carried by our transports: two processes over gloo."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

pytest.importorskip("transformers.distributed.expert_parallel", reason="this transformers has no EP registry")

from transformers.distributed.expert_parallel import apply_expert_parallelism

from moe_mk.integrations.transformers import register
from moe_mk.lab.checkpoints.tiny_models import tiny_model
from moe_mk.lab.testing.on_ranks import RankError, RankWorld
from tests.support.worlds import world_of

pytestmark = pytest.mark.slow
CLOSE = 1e-5
"""Relative, in f32: two ranks add up in another order than one."""


world = world_of(2)


LAYERS = (1, 2)


@cache
def meshes(shared: bool) -> tuple[DeviceMesh, DeviceMesh]:
    """The expert and the tensor mesh: one and the same where ranks share a batch, else one rank each."""
    sizes = (1, 2) if shared else (2, 1)
    grid = init_device_mesh("cpu", sizes, mesh_dim_names=("fsdp", "tp"))
    return (grid["tp"], grid["tp"]) if shared else (grid["fsdp"], grid["tp"])


def plan_of(model: Any) -> dict[str, str]:
    """The expert-parallel plan of the model's configuration, layer by layer; parameters first."""
    plan: dict[str, str] = model.config.base_model_ep_plan
    return {f"model.{name}".replace("*", str(layer)): style for name, style in plan.items() for layer in LAYERS}


@torch.no_grad()
def forward(rank: int, ids: Any, shared: bool, implementation: str, settings: dict[str, Any]) -> Any:
    """Logits of this rank's prompt, and how many experts its first module holds."""
    register(**settings)
    model = tiny_model()
    model.set_experts_implementation("moe_mk")
    apply_expert_parallelism(model, *meshes(shared), plan_of(model), ep_implementation=implementation)
    module = model.model.layers[LAYERS[0]].mlp.experts
    logits = model(ids[rank] if isinstance(ids, list) else ids).logits
    return {"logits": logits.clone(), "num_experts": module.num_experts}


def prompts() -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(1, 90, (2, 7), generator=draw), torch.randint(1, 90, (1, 3), generator=draw)]


@torch.no_grad()
def error(got: Tensor, ids: Tensor) -> float:
    model = tiny_model()
    model.set_experts_implementation("eager")
    want = model(ids).logits
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("transport", ["auto", "all_gather"])
def test_ranks_with_their_own_batches(world: RankWorld, transport: str) -> None:
    ids = prompts()
    answers = world.call(forward, ids, False, "moe_mk", {"prepare_finalize": transport})
    for answer, mine in zip(answers, ids, strict=True):
        assert answer["num_experts"] == 4
        assert error(answer["logits"], mine) < CLOSE


def test_ranks_that_share_a_batch(world: RankWorld) -> None:
    ids = prompts()[0]
    for answer in world.call(forward, ids, True, "moe_mk", {}):
        assert error(answer["logits"], ids) < CLOSE


@pytest.mark.parametrize(("theirs", "shared"), [("all_reduce", True), ("all_to_all", True), ("all_to_all", False)])
def test_our_experts_behind_their_communication(world: RankWorld, theirs: str, shared: bool) -> None:
    ids = prompts()
    given = ids[0] if shared else ids
    for rank, answer in enumerate(world.call(forward, given, shared, theirs, {})):
        assert answer["num_experts"] == 4
        assert error(answer["logits"], ids[0] if shared else ids[rank]) < CLOSE


def test_a_transport_that_cannot_serve_is_refused_on_every_rank(world: RankWorld) -> None:
    with pytest.raises(RankError, match=r"2 of 2 ranks failed(.|\n)*serves 1 rank, the group has 2"):
        world.call(forward, prompts(), False, "moe_mk", {"prepare_finalize": "no_ep"})
