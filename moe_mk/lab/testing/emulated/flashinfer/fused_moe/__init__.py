"""`flashinfer.fused_moe`, as far as its experts go: CUTLASS, and TRT-LLM for tokens that are routed already."""

from moe_mk.lab.testing.emulated.flashinfer.fused_moe import core

__all__ = ["core"]
