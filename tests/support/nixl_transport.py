"""`one_sided_network` with its link pinned to NIXL, as a transport of its own, for the conformance kit."""

from dataclasses import replace

from moe_mk.prepare_finalize import PREPARE_FINALIZE, TransportContext
from moe_mk.prepare_finalize.one_sided.network import OneSidedNetwork

NAME = "one_sided_network_over_nixl"


@PREPARE_FINALIZE.register(NAME)
class OneSidedNetworkOverNixl(OneSidedNetwork):
    def __init__(self, context: TransportContext) -> None:
        super().__init__(replace(context, network_link="nixl"))
