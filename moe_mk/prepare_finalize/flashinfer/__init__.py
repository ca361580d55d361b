"""Transports of FlashInfer over NVLink, one-sided and two-sided, and those of its moe_ep."""

from moe_mk.prepare_finalize.flashinfer.moe_ep import MoeEpCake, MoeEpOneSided, MoeEpTwoSided
from moe_mk.prepare_finalize.flashinfer.nvlink import NvlinkOneSided, NvlinkTwoSided

__all__ = ["MoeEpCake", "MoeEpOneSided", "MoeEpTwoSided", "NvlinkOneSided", "NvlinkTwoSided"]
