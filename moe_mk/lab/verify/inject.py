"""Fault injection, to show that verification detects known mistakes of weight loading and routing."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeVar, get_args

import torch

from moe_mk.errors import ConfigError
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.registry import did_you_mean
from moe_mk.router.hashed import HashRouter
from moe_mk.router.router import Router
from moe_mk.weights.expert_weights import MappedExpertWeights, SlotBiases, SlotWeights
from moe_mk.weights.layer_weights import LayerWeights

R = TypeVar("R", Router, HashRouter)
Fault = Literal["swap-halves", "drop-scale", "double-scale"]


def check_fault(fault: str, scheme: QuantScheme) -> None:
    """Raise ConfigError for an unknown fault, and for dropping scales that experts of this scheme do not have."""
    if fault not in get_args(Fault):
        raise ConfigError(f"no fault is called {fault!r}{did_you_mean(fault, get_args(Fault))}")
    if fault == "drop-scale" and scheme.block is None:
        raise ConfigError(f"the fault drop-scale needs experts with scales, these are {scheme.name}")


def faulty_weights(weights: LayerWeights, fault: str) -> LayerWeights:
    """Return weights with gate and up exchanged, or with all scales at 1; double-scale does not change weights.

    Raises ConfigError for a fault that cannot be injected into them.
    """
    check_fault(fault, weights.experts.scheme)
    if fault == "double-scale":
        return weights
    change = _swap if fault == "swap-halves" else _drop
    slots = tuple(map(change, map(weights.experts.slot, range(weights.experts.num_slots))))
    return replace(weights, experts=MappedExpertWeights(slots, weights.experts.scheme))


def faulty_router(router: R, fault: str) -> R:
    """Return the router; with double-scale, one whose weights are scaled twice (by 2 where the factor is 1)."""
    if fault != "double-scale" or not hasattr(router, "routed_scaling_factor"):  # of another distribution: not verified
        return router
    factor = router.routed_scaling_factor
    return replace(router, routed_scaling_factor=factor * (factor if factor != 1.0 else 2.0))


def _swap(slot: SlotWeights) -> SlotWeights:
    if slot.gate_IH is None:
        raise ConfigError("the fault swap-halves needs experts with a gate, these have none")
    own = slot.biases
    swapped = None if own is None or own.gate_I is None else SlotBiases(own.up_I, own.gate_I, own.down_H)
    return SlotWeights(slot.up_IH, slot.gate_IH, slot.down_HI, swapped)


def _drop(slot: SlotWeights) -> SlotWeights:
    gate = None if slot.gate_IH is None else _without_scales(slot.gate_IH)
    return replace(slot, gate_IH=gate, up_IH=_without_scales(slot.up_IH), down_HI=_without_scales(slot.down_HI))


def _without_scales(q: QuantTensor) -> QuantTensor:
    return q if q.scales is None else replace(q, scales=torch.ones_like(q.scales, dtype=torch.float32))
