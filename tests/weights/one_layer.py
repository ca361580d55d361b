"""The layer that the tiny checkpoint holds, and how tests load and compare it."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moe_mk.quant import QuantTensor
from moe_mk.weights import LayerSpec, LayerWeights, MappingSource, SlotWeights, inspect_checkpoint, load_layer
from moe_mk.weights.gguf_source import open_source

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


def load_written(folder: Path, owned: Sequence[int] = ALL, **tp: int) -> LayerWeights:
    """Layer 1 of what the fixture `written` writes. tp: tp_rank, tp_size."""
    spec = inspect_checkpoint(folder).layers[0].layer_spec()
    return load_layer(open_source(folder), 1, spec, owned=owned, **tp)


def wide(slot: SlotWeights) -> list[Tensor]:
    return [q.dequantize(torch.float32) for q in (slot.gate_IH, slot.up_IH, slot.down_HI) if q is not None]
