"""Experts on a CPU in native C++ kernels."""
