"""Experts of FlashInfer: its CUTLASS kernels and its TensorRT-LLM kernels."""

from moe_mk.experts.flashinfer.cutlass import FlashInferCutlassExperts
from moe_mk.experts.flashinfer.trtllm import FlashInferTrtllmExperts

__all__ = ["FlashInferCutlassExperts", "FlashInferTrtllmExperts"]
