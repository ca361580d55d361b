"""Experts of FlashInfer: its CUTLASS kernels and its TensorRT-LLM kernels."""
