"""The laws of the contract of backends, and the law that a failed check violates."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Law:
    """One promise of the contract."""

    name: str
    text: str


LOADS = Law("loads", "a plugin can be imported")
SIGNATURE = Law("signature", "methods take the parameters of the contract, and traits are declared")
INPUTS = Law("inputs", "a backend does not modify its inputs")
SHAPE = Law("shape", "outputs have the shape, the dtype and the device that the contract names")
STAGE = Law("stage", "an output has the stage that the traits declare")
WEIGHTING = Law("weighting", "every assignment counts once, times its routing weight")
ORDER = Law("order", "combined tokens have the order of the dispatched tokens")
LOST = Law("lost", "no token is lost")
NOWHERE = Law("nowhere", "an id of -1 contributes nothing")
PADDING = Law("padding", "padding is never read")
DETERMINISTIC = Law("deterministic", "equal inputs give equal bits, if the traits declare it")
YIELD_POINTS = Law("yield points", "every rank yields at the same points of a call, with zero tokens too")
INVARIANT = Law("invariant", "a row gets the same bits in any batch, if the traits declare it")
SLOTS = Law("slots", "every assignment reaches the slot of its expert")
CALLS = Law("calls", "a call does not depend on earlier or concurrent calls")
KEPT = Law("kept", "outputs are not changed by later calls and share no memory with inputs")
NOTHING_LEFT = Law("nothing left", "a call does not leak tensors")
ALONE = Law("alone", "NaN in one token reaches no other token")
GLOBALS = Law("globals", "a call leaves random states, default dtype, threads and modes of the process as they were")
GRAPHS = Law("graphs", "a call reads no values on the host, if the traits declare graph_safe")
PROCESSES = Law("processes", "processes and ranks of one process give the same bits")
VALUES = Law("values", "outputs are within the error limit of the number formats")
FAULTS = Law(
    "faults", "after a fault on one rank the others raise a typed error in time, and never return a wrong output"
)
RUNS = Law("runs", "every case runs without an unexpected exception")

LAWS = (
    LOADS, SIGNATURE, INPUTS, SHAPE, STAGE, WEIGHTING, ORDER, LOST, NOWHERE, PADDING, DETERMINISTIC, INVARIANT,
    SLOTS, CALLS, KEPT, NOTHING_LEFT, ALONE, GLOBALS, YIELD_POINTS, GRAPHS, PROCESSES, VALUES, FAULTS, RUNS,
)  # fmt: skip

WITH_NOWHERE = re.compile(r"(all to one rank|all to one expert|all -1|some -1)\b(?!, (grouped|batched))")
"""Cases in which some ids are -1; every case before them in the kit has none. Sorted rows contain no ids."""
ON_FRESH = "passes on a fresh instance"
AT_ONCE = "two micro-batches at once"
READ_ON_HOST = "a value is read on the host"

STATED = (
    (re.compile(r"outcomes after faults"), FAULTS),
    (re.compile(r"with a token of NaN"), ALONE),
    (re.compile(r"of the process (was|were) changed"), GLOBALS),
    (re.compile(f"{ON_FRESH}$|{AT_ONCE}|, called again: tokens"), CALLS),
    (re.compile(READ_ON_HOST), GRAPHS),
    (re.compile(r"breaks the contract|registered twice|reads neither"), SIGNATURE),
    (re.compile(r"could not be loaded"), LOADS),
    (re.compile(r"input changed|(weights|tokens) were changed"), INPUTS),
    (re.compile(r"calls leak \d+ tensors"), NOTHING_LEFT),
    (re.compile(r"changed in a later call|shares memory with an input"), KEPT),
    (re.compile(r"after a smaller call|of two weights in turn"), CALLS),
    (re.compile(r"with its own factor"), SLOTS),
    (re.compile(r"in a batch of its own"), INVARIANT),
    (re.compile(r"yield points|other ranks (wait|call)|disagree"), YIELD_POINTS),
    (re.compile(r"different bits|changes? bits"), DETERMINISTIC),
    (re.compile(r"the traits declare"), STAGE),
    (re.compile(r"dispatched tokens|output is torch|is on device|got \(|shape \(|got torch"), SHAPE),
    (re.compile(r"zeros, large and small tokens"), VALUES),
    (re.compile(r"not finite"), PADDING),
)


def law_of(message: str) -> Law:
    """The law that a message of the kit refers to."""
    for pattern, law in STATED:
        if pattern.search(message):
            return law
    return NOWHERE if WITH_NOWHERE.search(message) else VALUES


SAME = 0.02
"""Relative, above the rounding of bf16: distinguishes mistakes; rounding is checked elsewhere."""


def explained(got: list[Tensor], tokens: list[Tensor], weights: list[Tensor]) -> Law | None:
    """The law that explains a wrong result of identity experts, or None.

    got, tokens: (T, H) of each rank. weights: (T,) of each rank, what each token should be multiplied by.
    """
    rows = torch.cat(got).double()
    sent, scale = torch.cat(tokens).double(), torch.cat(weights).double()
    wanted = sent * scale[:, None]
    if rows.shape != wanted.shape:
        return None
    wrong = (rows - wanted).norm(dim=1) > SAME * wanted.norm(dim=1)
    if bool(wrong.any()) and not bool(rows[wrong].any()):
        return LOST
    elsewhere = torch.cdist(rows[wrong], wanted).min(dim=1).values <= SAME * wanted.norm(dim=1).max()
    if bool(wrong.any()) and bool(elsewhere.all()):
        return ORDER
    cosine = torch.nn.functional.cosine_similarity(rows[wrong], sent[wrong], dim=1)
    scaled = (cosine > 1.0 - SAME) | ~rows[wrong].any(dim=1)
    return WEIGHTING if bool(wrong.any()) and bool(scaled.all()) else None
