"""Communication backends: carry tokens to their experts and the output home. Importing this registers the built-ins."""

from moe_mk.prepare_finalize import all_gather, all_to_all, no_ep, one_sided, replicated
from moe_mk.prepare_finalize.base import (
    PREPARE_FINALIZE,
    PrepareFinalize,
    TransportContext,
    TransportTraits,
    Volume,
)

__all__ = [
    "PREPARE_FINALIZE", "PrepareFinalize", "TransportContext", "TransportTraits", "Volume",
    "all_gather", "all_to_all", "no_ep", "one_sided", "replicated",
]  # fmt: skip
