"""Experts on NVIDIA GPUs in Triton kernels."""

from moe_mk.experts.triton.experts import TritonExperts

__all__ = ["TritonExperts"]
