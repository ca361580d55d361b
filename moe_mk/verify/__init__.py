"""Verification of layers: an independent reference, error limits derived from number formats, and fault injection."""

from moe_mk.verify.compare import Answer, Verification, could_choose, error_of, tie_tolerance, verify
from moe_mk.verify.dense import DenseResult, dense_layer
from moe_mk.verify.inject import Fault, check_fault, faulty_router, faulty_weights

__all__ = [
    "Answer",
    "DenseResult",
    "Fault",
    "Verification",
    "check_fault",
    "could_choose",
    "dense_layer",
    "error_of",
    "faulty_router",
    "faulty_weights",
    "tie_tolerance",
    "verify",
]
