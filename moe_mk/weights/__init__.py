"""Weights: reading checkpoints strictly and without copies, and holding them."""

from moe_mk.weights.checkpoint import find_prefix, load_layer
from moe_mk.weights.expert_weights import (
    CANONICAL,
    MAPPED,
    ExpertWeights,
    MappedExpertWeights,
    SlotWeights,
    Weights,
    digest,
)
from moe_mk.weights.inspect import CheckpointFacts, LayerFacts, inspect_checkpoint
from moe_mk.weights.layer_spec import LayerSpec
from moe_mk.weights.layer_weights import LayerWeights, LoadFacts, as_mapped
from moe_mk.weights.loader import LayerLoader
from moe_mk.weights.names import CONVENTIONS, Convention
from moe_mk.weights.source import MappingSource, SafetensorsSource, TensorSource

__all__ = [
    "CANONICAL", "CONVENTIONS", "MAPPED", "CheckpointFacts", "Convention", "ExpertWeights",
    "LayerFacts", "LayerLoader", "LayerSpec", "LayerWeights", "LoadFacts", "MappedExpertWeights", "MappingSource",
    "SafetensorsSource", "SlotWeights", "TensorSource", "Weights", "as_mapped", "digest", "find_prefix",
    "inspect_checkpoint", "load_layer",
]  # fmt: skip
