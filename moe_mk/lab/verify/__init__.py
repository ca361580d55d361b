"""Verification of layers: an independent reference, error limits derived from number formats, and fault injection."""

from moe_mk.lab.verify.compare import Answer, Verification, could_choose, tie_tolerance, verify
from moe_mk.lab.verify.dense import DenseResult, dense_layer
from moe_mk.lab.verify.inject import Fault, check_fault, faulty_router, faulty_weights
from moe_mk.lab.verify.own_block import OwnBlock, own_block

__all__ = [
    "Answer",
    "DenseResult",
    "Fault",
    "OwnBlock",
    "Verification",
    "check_fault",
    "could_choose",
    "dense_layer",
    "faulty_router",
    "faulty_weights",
    "own_block",
    "tie_tolerance",
    "verify",
]
