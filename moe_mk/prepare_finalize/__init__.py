"""Communication backends: dispatch tokens to experts and combine outputs. Importing it registers the built-ins."""

from moe_mk.prepare_finalize import (
    all_gather,
    all_to_all,
    deepep,
    flashinfer,
    functional,
    hierarchical,
    mori,
    nccl_ep,
    no_ep,
    one_sided,
    one_sided_gpu,
    replicated,
)
from moe_mk.prepare_finalize.base import (
    PREPARE_FINALIZE,
    PrepareFinalize,
    TransportContext,
    TransportPlan,
    TransportTraits,
    Volume,
)
from moe_mk.prepare_finalize.functional import (
    Dispatched,
    DistributeOptions,
    DistributePlan,
    distribute_combine,
    distribute_dispatch,
    plan_distribute,
)

__all__ = [
    "PREPARE_FINALIZE", "Dispatched", "DistributeOptions", "DistributePlan", "PrepareFinalize", "TransportContext",
    "TransportPlan", "TransportTraits", "Volume", "all_gather", "all_to_all", "deepep", "distribute_combine",
    "distribute_dispatch", "flashinfer", "functional", "hierarchical", "mori", "nccl_ep", "no_ep", "one_sided",
    "one_sided_gpu", "plan_distribute", "replicated",
]  # fmt: skip
