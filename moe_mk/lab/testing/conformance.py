"""The checks of every backend by name, to run on a backend of your own.

    check_transport("my_transport", num_ranks=4)
    check_experts("my_experts", FP8_128x128, dtype=BF16, compute=FP8_1x128)

Each raises NonConforming with the case and the figures, and returns how many cases it ran.
"""

from moe_mk.lab.testing.cases import RoutingCase, hostile_routings
from moe_mk.lab.testing.experts import check_experts
from moe_mk.lab.testing.identity import IdentityExperts
from moe_mk.lab.testing.limits import NonConforming
from moe_mk.lab.testing.transports import check_transport

__all__ = ["IdentityExperts", "NonConforming", "RoutingCase", "check_experts", "check_transport", "hostile_routings"]
