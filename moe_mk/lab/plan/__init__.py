"""Planning models: lower bounds on time and bytes of a layer, computed without building it."""

from moe_mk.lab.plan.affinity import AffinityPlacement, nodes_per_token, place_by_affinity
from moe_mk.lab.plan.exchange import Exchange, Volumes, break_even_ranks, distinct_groups
from moe_mk.lab.plan.links import LinkProfile, link_profile, shipped_links
from moe_mk.lab.plan.paths import HostBound, dispatch_us
from moe_mk.lab.plan.pipeline import bubble
from moe_mk.lab.plan.predict import Line, Prediction
from moe_mk.lab.plan.two_level import Relay

__all__ = [
    "AffinityPlacement", "Exchange", "HostBound", "Line", "LinkProfile", "Prediction", "Relay",
    "Volumes", "break_even_ranks", "bubble", "dispatch_us", "distinct_groups", "link_profile",
    "nodes_per_token", "place_by_affinity", "shipped_links",
]  # fmt: skip
