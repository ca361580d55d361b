"""The layer that the tiny checkpoint holds, and how tests load and compare it."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.quant import QuantTensor
from moe_mk.weights import LayerSpec, LayerWeights, MappingSource, load_layer

PREFIX = "model.layers.3.mlp."
ALL = range(4)
StateDict = dict[str, Tensor]


def same(one: QuantTensor | None, values: Tensor, scales: Tensor | None) -> bool:
    """Whether values and scales are the given ones, bit for bit."""
    assert one is not None
    bits = torch.equal(one.values.contiguous().view(torch.uint8), values.contiguous().view(torch.uint8))
    return bits and (
        one.scales is None if scales is None else one.scales is not None and torch.equal(one.scales, scales)
    )


def load(state: StateDict, spec: LayerSpec, **options) -> LayerWeights:
    return load_layer(MappingSource(state), 3, spec, **{"owned": ALL, **options})
