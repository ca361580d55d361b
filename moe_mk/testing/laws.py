"""What a backend owes, law by law, and which law a failed check speaks of."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Law:
    """One promise of the contract."""

    name: str
    text: str


LOADS = Law("loads", "a plugin can be imported")
SIGNATURE = Law("signature", "methods take the parameters of the contract, and traits are declared")
INPUTS = Law("inputs", "what a backend is given stays as it was")
SHAPE = Law("shape", "outputs have the shape, the dtype and the device that the contract names")
STAGE = Law("stage", "an output has come as far as the traits say")
WEIGHTING = Law("weighting", "every assignment counts once, times its routing weight")
ORDER = Law("order", "tokens come home in the order in which they left")
LOST = Law("lost", "no token is lost on its way")
NOWHERE = Law("nowhere", "an id of -1 goes nowhere and adds nothing")
PADDING = Law("padding", "padding is never read")
DETERMINISTIC = Law("deterministic", "equal inputs give equal bits, where the traits say so")
HOPS = Law("hops", "every rank makes the same hops per call, with zero tokens too")
INVARIANT = Law("invariant", "a row gets the same bits in any company, where the traits say so")
SLOTS = Law("slots", "every assignment reaches the slot of its expert")
CALLS = Law("calls", "a call depends on what it is given, not on the calls before it")
KEPT = Law("kept", "what is handed over stays as it is through later calls, and is no input")
NOTHING_LEFT = Law("nothing left", "a call leaves no tensors behind")
PROCESSES = Law("processes", "processes give the bits that ranks of one process give")
VALUES = Law("values", "outputs are as near to the reference as the number formats allow")
FAULTS = Law("faults", "a fault on one rank ends in a typed error in time on the others, never in a wrong output")
RUNS = Law("runs", "every case runs to its end")

LAWS = (
    LOADS, SIGNATURE, INPUTS, SHAPE, STAGE, WEIGHTING, ORDER, LOST, NOWHERE, PADDING, DETERMINISTIC, INVARIANT,
    SLOTS, CALLS, KEPT, NOTHING_LEFT, HOPS, PROCESSES, VALUES, FAULTS, RUNS,
)  # fmt: skip

WITH_NOWHERE = re.compile(r"(all to one rank|all to one expert|all -1|some -1)\b")
"""Cases in which some ids are -1; every case before them in the kit has none."""

SAID = (
    (re.compile(r"outcomes after faults"), FAULTS),
    (re.compile(r"breaks the contract|registered twice"), SIGNATURE),
    (re.compile(r"could not be loaded"), LOADS),
    (re.compile(r"input changed|(weights|tokens) were changed"), INPUTS),
    (re.compile(r"tensors behind"), NOTHING_LEFT),
    (re.compile(r"changed in a later call|shares memory with an input"), KEPT),
    (re.compile(r"after a smaller call|of two weights in turn"), CALLS),
    (re.compile(r"with a factor of its own"), SLOTS),
    (re.compile(r"than in company"), INVARIANT),
    (re.compile(r"hops|other ranks (wait|call)|disagree"), HOPS),
    (re.compile(r"different bits|changes? bits"), DETERMINISTIC),
    (re.compile(r"traits say"), STAGE),
    (re.compile(r"output is torch|lies on|got \(|shape \(|got torch"), SHAPE),
    (re.compile(r"not finite"), PADDING),
)


def law_of(message: str) -> Law:
    """The law that a message of the kit speaks of."""
    for pattern, law in SAID:
        if pattern.search(message):
            return law
    return NOWHERE if WITH_NOWHERE.search(message) else VALUES
