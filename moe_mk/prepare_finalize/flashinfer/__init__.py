"""Transports of FlashInfer over NVLink, one-sided and two-sided."""

from moe_mk.prepare_finalize.flashinfer.one_sided import NvlinkOneSided
from moe_mk.prepare_finalize.flashinfer.two_sided import NvlinkTwoSided

__all__ = ["NvlinkOneSided", "NvlinkTwoSided"]
