"""One-sided dispatch and combine between CPU processes: over shared memory, and over TCP between hosts."""

from moe_mk.prepare_finalize.one_sided.network import OneSidedNetwork
from moe_mk.prepare_finalize.one_sided.transport import OneSided

__all__ = ["OneSided", "OneSidedNetwork"]
