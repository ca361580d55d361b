"""`mori`, as far as its expert-parallel dispatch and combine go. Names, defaults and limits as read in August 2026."""

from moe_mk_contrib.emulated.mori import ops, shmem

__all__ = ["ops", "shmem"]
