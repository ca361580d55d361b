"""`flashinfer.fused_moe`, as far as its CUTLASS experts go."""

from moe_mk.external.emulated.flashinfer.fused_moe import core

__all__ = ["core"]
