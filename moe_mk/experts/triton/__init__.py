"""Experts on NVIDIA GPUs in Triton kernels."""
