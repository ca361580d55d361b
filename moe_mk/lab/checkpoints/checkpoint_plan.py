"""The tensors of a synthetic checkpoint, their shards, and the recipe that identifies the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch

from moe_mk.errors import ConfigError
from moe_mk.lab.checkpoints.checkpoint_shape import CheckpointShape
from moe_mk.lab.checkpoints.safetensors_writer import Planned
from moe_mk.weights.layer_spec import expected_tensors
from moe_mk.weights.names import Role

RECIPE = "moe_mk_recipe"
"""Metadata key of index and shards: shape and seed of a checkpoint written here."""
VERSION = 1
_BESIDE_VALUES = (
    "_scale_inv", ".weight_scale", ".weight_scale_2", ".weight_zero_point", ".weight_shape", ".scales", ".qzeros",
    ".g_idx", ".input_scale",
)  # fmt: skip


def recipe_of(shape: CheckpointShape, seed: int) -> str:
    """Shape, seed and version of the generator as one line of JSON."""
    stated = {key: value for key, value in asdict(shape).items() if value is not None}
    return json.dumps({"version": VERSION, "seed": seed, **stated}, sort_keys=True)


def planned_tensors(shape: CheckpointShape) -> list[Planned]:
    """Every tensor of the checkpoint, in the order of the model."""
    expected = expected_tensors(shape.layer_spec(), shape.convention)
    prefix = shape.convention.prefix
    halves = shape.convention.packing in ("gptq", "awq")  # whose scales are f16
    router_dtype = {Role.ROUTER: torch.bfloat16, Role.BIAS: torch.float32}
    return [
        Planned(
            prefix.replace("{N}", str(layer)) + name,
            torch.float16 if halves and e.part.extra == "scale" else router_dtype.get(e.part.role, e.dtypes[0]),
            e.shape,
        )
        for layer in shape.layers
        for name, e in expected.items()
        if not e.optional or e.part.extra in ("shape", "order") or (shape.quant, e.part.extra) == ("nvfp4", "input")
        if (shape.convention.packing, e.part.extra) != ("compressed_tensors", "order")
    ]


def plan_shards(shape: CheckpointShape, shard_bytes: int) -> list[list[Planned]]:
    """Fill shards in order up to a size; a matrix and its scales stay together."""
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes={shard_bytes} must be at least 1")
    shards: list[list[Planned]] = [[]]
    for group in matrices(planned_tensors(shape)):
        size = sum(t.num_bytes for t in group)
        if shards[-1] and sum(t.num_bytes for t in shards[-1]) + size > shard_bytes:
            shards.append([])
        shards[-1] += group
    return shards


def matrices(tensors: Sequence[Planned]) -> Iterator[list[Planned]]:
    """Each tensor of values together with its scales, global scale and input scale, if any."""
    group: list[Planned] = []
    for tensor in tensors:
        if group and not tensor.name.endswith(_BESIDE_VALUES):
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group
