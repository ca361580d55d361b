"""Experts on a CPU in native C++ kernels."""

from moe_mk.experts.cpu_native.experts import CpuNativeExperts

__all__ = ["CpuNativeExperts"]
