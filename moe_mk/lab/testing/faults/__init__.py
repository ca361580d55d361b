"""Faults in worlds of real processes: kills, stops, delays, exceptions, calls that do not match, cut connections.

    from moe_mk.lab.testing.faults import Campaign, run_worlds

    report = run_worlds(Campaign(("all_to_all",), seed=0), range(60))
    report.passed, report.table()

Each world is 2 to 4 processes that build small layers over one transport and serve a seeded sequence of calls. One
fault at most is injected, from outside the library. Every output is compared with an independent f64 reference, and
every rank's outcome is one of OUTCOMES.
"""

from moe_mk.lab.testing.faults.plans import BUILT_IN, KINDS, Call, Campaign, Fault, World, transports_of
from moe_mk.lab.testing.faults.report import ACCEPTED, OUTCOMES, Report, Row, WorldResult
from moe_mk.lab.testing.faults.supervisor import run_plans, run_worlds

__all__ = [
    "ACCEPTED", "BUILT_IN", "KINDS", "OUTCOMES", "Call", "Campaign", "Fault", "Report", "Row", "World", "WorldResult",
    "run_plans", "run_worlds", "transports_of",
]  # fmt: skip
