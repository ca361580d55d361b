"""Every tensor that a layer of any settings must have, drawn from a seed, in the names that all of them have."""

from dataclasses import replace

import torch
from torch import Tensor

from moe_mk.quant import BlockedScheme, QuantScheme, QuantTensor
from moe_mk.weights.layer_spec import LayerSpec, expected_tensors
from moe_mk.weights.names import CONVENTIONS, Part, Role

SCALED = CONVENTIONS["scaled"]


def tensors_of(spec: LayerSpec, seed: int) -> dict[str, Tensor]:
    """By local name. Rows of products have the size of their inputs; biases and tables are drawn too."""
    draw = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, expected in expected_tensors(spec, SCALED).items():
        part, shape = expected.part, expected.shape
        if part.role is Role.TABLE:
            made[name] = torch.rand((shape[0], spec.num_experts), generator=draw).argsort(1)[:, : shape[1]]
        elif part.extra == "bias" or part.role in (Role.BIAS, Role.LOGIT_BIAS, Role.IMAGE_BIAS):
            made[name] = torch.randn(shape, generator=draw) * 0.3
        elif part.role in (Role.INPUT_NORM, Role.EXPERT_SCALE):
            size = spec.hidden_size**0.5 if part.projection == "router" else 1.0
            made[name] = size * (1 + torch.randn(shape, generator=draw) * 0.3)
        elif part.role in (Role.ROUTER, Role.SHARED_GATE, Role.LATENT):
            made[name] = torch.randn(shape, generator=draw) * 2 * shape[-1] ** -0.5
        elif not part.extra:
            scheme = spec.scheme_of(part.role, part.projection)
            columns = shape[1] * scheme.per_byte
            matrix = torch.randn((shape[0], columns), generator=draw) * 1.3 * columns**-0.5
            made |= _stored(part, scheme.quantize(matrix), scheme)
    return made


def _stored(part: Part, q: QuantTensor, scheme: QuantScheme) -> dict[str, Tensor]:
    made = {SCALED.spell(part): q.values}
    if isinstance(scheme, BlockedScheme):
        assert q.scales is not None
        made[SCALED.spell(replace(part, extra="scale"))] = q.scales
        if q.global_scale is not None:
            made[SCALED.spell(replace(part, extra="global"))] = q.global_scale.reshape(())
    return made
