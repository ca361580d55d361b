"""Small layers from tensors that a test writes out."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from moe_mk import MoEConfig, MoELayer, ParallelGroups
from moe_mk.lab.checkpoints.like import write_like
from moe_mk.layer.live import LivePlacement

HIDDEN, INNER = 16, 8


def tensors(
    num_experts: int, *, shared: int = 0, bias: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Official names below the layer's prefix; values that give outputs of size 1."""
    draw = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=draw, dtype=torch.float32) * 1.5 * shape[-1] ** -0.5).to(dtype)

    made = {"gate.weight": normal(num_experts, HIDDEN)}
    if bias:
        made["gate.e_score_correction_bias"] = normal(num_experts).float() - 0.8
    blocks = [(f"experts.{e}", INNER) for e in range(num_experts)]
    if shared:
        blocks.append(("shared_experts", shared * INNER))
    for name, inner in blocks:
        made[f"{name}.gate_proj.weight"] = normal(inner, HIDDEN)
        made[f"{name}.up_proj.weight"] = normal(inner, HIDDEN)
        made[f"{name}.down_proj.weight"] = normal(HIDDEN, inner)
    return made


def config(num_experts: int, top_k: int, **settings: object) -> MoEConfig:
    """A plain f32 layer; settings by their bare key."""
    model = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": num_experts}
    data = {"model": {**model, "quant": {"weights": "fp32"}}, "router": {"top_k": top_k, "renormalize": False}}
    return MoEConfig.parse(data, "a test").with_(**settings)


def layer(
    num_experts: int,
    top_k: int,
    groups: ParallelGroups | None = None,
    dtype: torch.dtype = torch.float32,
    **settings: object,
) -> MoELayer:
    made = MoELayer(config(num_experts, top_k, **settings), dtype=dtype, groups=groups)
    shared, bias = made.config.model.num_shared_experts, made.config.router.has_correction_bias
    return made.load_weights(tensors(num_experts, shared=shared, bias=bias))


def mlp(x_TH: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    """One dense SwiGLU block, written down once more."""
    gate, up, down = (weights[f"{name}.{p}_proj.weight"] for p in ("gate", "up", "down"))
    h = torch.nn.functional.silu(x_TH @ gate.T) * (x_TH @ up.T)
    return h @ down.T


def small_checkpoint(folder: Path, hf: Mapping[str, object]) -> Path:
    """A small checkpoint of a config.json in the names of its model, by `make-checkpoint --like`."""
    (folder / "like").mkdir(parents=True)
    (folder / "like" / "config.json").write_text(json.dumps(hf))
    assert write_like(folder / "small", folder / "like" / "config.json") == 0
    return folder / "small"


@contextmanager
def live_method(layer: MoELayer, name: str, function: Callable[..., object]) -> Iterator[None]:
    """Replace a method of `layer.live` of this layer, which is made anew by each access. function: without self."""
    before = getattr(LivePlacement, name)

    def method(self: LivePlacement, *given: object, **settings: object) -> object:
        return function(*given, **settings) if self.layer is layer else before(self, *given, **settings)

    with mock.patch.object(LivePlacement, name, method):
        yield
