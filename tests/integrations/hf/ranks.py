"""What one rank of an expert-parallel transformers model does; called by import path."""

from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.distributed.expert_parallel import apply_expert_parallelism

from moe_mk.integrations.transformers import register
from moe_mk.lab.checkpoints.tiny_models import tiny_model

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
