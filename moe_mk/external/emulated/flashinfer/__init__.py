"""`flashinfer`, as far as its MoE transports go. Names, defaults and limits as read in FlashInfer 0.6.18 and 0.7.2."""

from moe_mk.external.emulated.flashinfer import comm

__all__ = ["comm"]
