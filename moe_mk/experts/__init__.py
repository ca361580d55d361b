"""Compute backends: w13 -> activation -> w2. Importing this registers the built-in ones."""

from moe_mk.experts import cpu_native, deep_gemm, flashinfer, reference, torch_cpu, triton
from moe_mk.experts.base import EXPERTS, ExpertsContext, ExpertsTraits, FusedExperts

__all__ = [
    "EXPERTS", "ExpertsContext", "ExpertsTraits", "FusedExperts", "cpu_native", "deep_gemm", "flashinfer", "reference",
    "torch_cpu", "triton",
]  # fmt: skip
