"""One-sided dispatch and combine between GPUs, over peer pointers."""

from moe_mk.prepare_finalize.one_sided_gpu.transport import OneSidedGpu

__all__ = ["OneSidedGpu"]
