"""Communication backends: dispatch tokens to experts and combine outputs.

The module of a built-in one is imported at its first use by name.
"""

from typing import TYPE_CHECKING

from moe_mk.imports import at_first_use
from moe_mk.prepare_finalize.base import (
    PREPARE_FINALIZE,
    PrepareFinalize,
    TransportContext,
    TransportPlan,
    TransportTraits,
    Volume,
)

if TYPE_CHECKING:
    from moe_mk.prepare_finalize.functional import (
        Dispatched,
        DistributeOptions,
        DistributePlan,
        distribute_combine,
        distribute_dispatch,
        plan_distribute,
    )
else:
    FUNCTIONAL = "Dispatched DistributeOptions DistributePlan distribute_combine distribute_dispatch plan_distribute"
    __getattr__ = at_first_use(__name__, {"functional": FUNCTIONAL})

__all__ = [
    "PREPARE_FINALIZE", "Dispatched", "DistributeOptions", "DistributePlan", "PrepareFinalize", "TransportContext",
    "TransportPlan", "TransportTraits", "Volume", "distribute_combine", "distribute_dispatch", "plan_distribute",
]  # fmt: skip

PREPARE_FINALIZE.builtin(
    {
        f"{__name__}.all_gather": "all_gather",
        f"{__name__}.all_to_all": "all_to_all all_to_all_p2p all_to_all_v",
        f"{__name__}.deepep.high_throughput": "deepep_ht",
        f"{__name__}.deepep.low_latency": "deepep_ll uccl_ep uccl_ep_ht",
        f"{__name__}.flashinfer.nvlink": "nvlink_one_sided nvlink_two_sided",
        f"{__name__}.hierarchical": "hierarchical",
        f"{__name__}.no_ep": "no_ep",
        f"{__name__}.one_sided.transport": "one_sided",
        f"{__name__}.one_sided.network": "one_sided_network",
        f"{__name__}.one_sided_gpu.transport": "one_sided_gpu",
        f"{__name__}.replicated": "replicated",
    }
)
