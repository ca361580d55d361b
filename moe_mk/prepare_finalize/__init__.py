"""Communication backends: carry tokens to their experts and the output home. Importing this registers the built-ins."""

from moe_mk.prepare_finalize import (
    all_gather,
    all_to_all,
    baselines,
    deepep_ht,
    deepep_ll,
    deepep_v2,
    hierarchical,
    mori,
    nixl_ep,
    no_ep,
    nvlink_one_sided,
    nvlink_two_sided,
    one_sided,
    one_sided_device,
    one_sided_network,
    replicated,
    uccl_ep,
)
from moe_mk.prepare_finalize.base import (
    PREPARE_FINALIZE,
    PrepareFinalize,
    TransportContext,
    TransportPlan,
    TransportTraits,
    Volume,
)

__all__ = [
    "PREPARE_FINALIZE", "PrepareFinalize", "TransportContext", "TransportPlan", "TransportTraits", "Volume",
    "all_gather", "all_to_all", "baselines", "deepep_ht", "deepep_ll", "deepep_v2", "hierarchical", "mori", "nixl_ep",
    "no_ep", "nvlink_one_sided", "nvlink_two_sided", "one_sided", "one_sided_device", "one_sided_network",
    "replicated", "uccl_ep",
]  # fmt: skip
