"""Compute backends: w13 -> activation -> w2. The module of a built-in one is imported at its first use by name."""

from moe_mk.experts.base import EXPERTS, ExpertsContext, ExpertsTraits, FusedExperts

__all__ = ["EXPERTS", "ExpertsContext", "ExpertsTraits", "FusedExperts"]

EXPERTS.builtin(
    {
        f"{__name__}.cpu_native.experts": "cpu_native",
        f"{__name__}.deep_gemm": "deep_gemm",
        f"{__name__}.flashinfer.cutlass": "flashinfer_cutlass",
        f"{__name__}.flashinfer.trtllm": "flashinfer_trtllm",
        f"{__name__}.reference": "reference",
        f"{__name__}.torch_cpu": "torch_cpu",
        f"{__name__}.triton.experts": "triton",
    }
)
