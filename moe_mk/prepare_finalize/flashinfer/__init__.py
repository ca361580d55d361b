"""Transports of FlashInfer over NVLink, one-sided and two-sided, and those of its moe_ep."""

from moe_mk.prepare_finalize.flashinfer.moe_ep import MoeEpCake, MoeEpOneSided, MoeEpTwoSided
from moe_mk.prepare_finalize.flashinfer.one_sided import NvlinkOneSided
from moe_mk.prepare_finalize.flashinfer.two_sided import NvlinkTwoSided

__all__ = ["MoeEpCake", "MoeEpOneSided", "MoeEpTwoSided", "NvlinkOneSided", "NvlinkTwoSided"]
