"""The interface of placement policies, and their registry: built-in policies and those of entry points."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, get_args

import numpy as np

from moe_mk.errors import ConfigError, MoEMKError, UnsupportedError, unless_signalled
from moe_mk.placement.balance.request import PlacementRequest, Split, split_shares
from moe_mk.placement.balance.shares import copies_of
from moe_mk.placement.balance.topology import Doubles, Ints
from moe_mk.registry import Registry, did_you_mean

Policy = str
"""The name of a policy in EPLB_POLICIES; "auto", "compat", "flat" and "hybrid" are built in."""


@dataclass
class SlotPlacement:
    """Expert and share of every living slot [X, P], the method of each layer, and the exported part of the load [X]."""

    experts: Ints
    shares: Doubles
    method: list[str]
    exported: Doubles

    @classmethod
    def of(cls, experts: Ints, request: PlacementRequest, method: str) -> SlotPlacement:
        """A placement whose shares are solved for its slots, according to `request.split`."""
        return cls(experts, split_shares(experts, request), [method] * len(experts), np.zeros(len(experts)))

    def keep_better(self, other: SlotPlacement, request: PlacementRequest, layers: Ints | None = None) -> None:
        """Adopt the layers in which another placement is faster. layers: those that the other one and request have."""
        layers = np.arange(len(self.experts)) if layers is None else layers
        mine = request.times(self.experts[layers], self.shares[layers]).max(1)
        rows = np.flatnonzero(request.times(other.experts, other.shares).max(1) < mine)
        self.replace(layers[rows], other, rows)

    def replace(self, layers: Ints, other: SlotPlacement, rows: Ints) -> None:
        """Take some layers from these rows of another placement."""
        self.experts[layers], self.shares[layers] = other.experts[rows], other.shares[rows]
        self.exported[layers] = other.exported[rows]
        for layer, row in zip(layers, rows, strict=True):
            self.method[layer] = other.method[row]


class EplbPolicy(ABC):
    """An algorithm that places experts. Instantiated without arguments for every plan; it keeps no state.

    A policy does not consider the previous placement: `plan` requests a fresh placement and adopts the changes whose
    gain exceeds their cost.
    """

    summary: ClassVar[str] = ""
    whole_nodes: ClassVar[bool] = True
    """Whether it considers nodes: a fresh placement is then aligned with the previous one node by node."""
    mends_near: ClassVar[bool] = False
    """Whether small changes are first tried inside nodes."""

    @abstractmethod
    def reasons_against(self, request: PlacementRequest) -> list[str]:
        """Every reason for which it cannot place this request; empty if it can."""

    @abstractmethod
    def place(self, request: PlacementRequest) -> SlotPlacement:
        """Experts and shares of all slots of `request.sites`, [X, P]; every slot is filled, every expert somewhere."""

    def stands_for(self, request: PlacementRequest) -> tuple[str, str]:
        """The policy to run instead, and why; an empty name for this policy itself."""
        return "", ""


EPLB_POLICIES: Registry[type[EplbPolicy]] = Registry("EPLB policy", EplbPolicy, group="moe_mk.eplb_policies")


def resolve(name: Policy, request: PlacementRequest) -> tuple[Policy, EplbPolicy, str]:
    """The policy that runs, by name and as an object, and why.

    Raises ConfigError for an unknown one, UnsupportedError with every reason where it cannot serve.
    """
    if request.split not in get_args(Split):
        raise ConfigError(f"split={request.split!r} is not known{did_you_mean(str(request.split), get_args(Split))}")
    policy, why = EPLB_POLICIES[name](), f"policy {name} as asked"
    with _foreign(name):
        other, because = policy.stands_for(request)
    if other:
        name, policy, why = other, EPLB_POLICIES[other](), because
    with _foreign(name):
        against = policy.reasons_against(request)
    if against:
        raise UnsupportedError(f"policy {name!r} cannot serve this topology; use 'flat' or 'auto'", against)
    return name, policy, why


def fresh(name: Policy, policy: EplbPolicy, request: PlacementRequest) -> SlotPlacement:
    """Place every layer anew. Raises UnsupportedError, with every reason, for an answer that cannot serve."""
    with _foreign(name):
        placed = policy.place(request)
    if wrong := _problems(placed, request):
        raise UnsupportedError(
            f"policy {name!r} of {EPLB_POLICIES.origin(name)} gave no placement that can serve", wrong
        )
    return placed


def _problems(placed: SlotPlacement, request: PlacementRequest) -> list[str]:
    """List the errors of a placement that a policy returned."""
    expected, experts = (len(request.load), request.sites.num_slots), request.load.shape[1]
    found = {"experts": np.shape(placed.experts), "shares": np.shape(placed.shares)}
    wrong = [f"{name} have shape {shape}, needed {expected}" for name, shape in found.items() if shape != expected]
    if len(placed.method) != expected[0] or np.shape(placed.exported) != expected[:1]:
        wrong.append(f"method and exported need an entry for each of {expected[0]} layers")
    if wrong:
        return wrong
    if placed.experts.size and not 0 <= placed.experts.min() <= placed.experts.max() < experts:
        return [f"experts from {placed.experts.min()} to {placed.experts.max()}, there are {experts}"]
    absent = np.argwhere(copies_of(placed.experts, experts) == 0)
    if len(absent):
        wrong.append(f"{len(absent)} experts are nowhere, for example (layer, expert) {absent[:4].tolist()}")
    total = np.zeros(request.load.shape)
    np.add.at(total, (np.arange(expected[0])[:, None], placed.experts), placed.shares)
    uneven = np.argwhere((np.abs(total - 1.0) > 1e-3) & (copies_of(placed.experts, experts) > 0))
    if not np.isfinite(placed.shares).all() or placed.shares.min(initial=0.0) < 0:
        wrong.append(f"shares from {placed.shares.min()} to {placed.shares.max()}")
    elif len(uneven):
        wrong.append(f"shares do not sum to 1 for (layer, expert) {uneven[:4].tolist()}")
    return wrong


@contextmanager
def _foreign(name: str) -> Iterator[None]:
    """Turns whatever a policy of another wheel raises into UnsupportedError with its name."""
    try:
        yield
    except MoEMKError:
        raise
    except unless_signalled(Exception) as error:
        what = f"policy {name!r} of {EPLB_POLICIES.origin(name)} failed"
        raise UnsupportedError(what, [f"{type(error).__name__}: {error}"]) from error
