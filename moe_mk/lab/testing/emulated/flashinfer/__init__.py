"""`flashinfer`, as far as its MoE transports and experts go, as read in FlashInfer 0.6.18 and 0.7.2."""

from moe_mk.lab.testing.emulated.flashinfer import comm, fused_moe, tllm_enums

__all__ = ["comm", "fused_moe", "tllm_enums"]
