"""Buffers that one call at a time may use, and the pool in which the layers of a group share them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import ClassVar, Generic, Self, TypeVar

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.failure import GroupResource
from moe_mk.errors import CommError


class BufferSlot:
    """Memory for one call at a time, from its dispatch to its combine."""

    busy: bool = False
    """Whether a call uses it; set by `BufferPool.take`, cleared by the transport when the call is finalized."""

    def serve(self, comm: Communicator) -> None:
        """Begin the next call. comm: the view of the layer that makes it."""


S = TypeVar("S", bound=BufferSlot)


class BufferPool(GroupResource, Generic[S]):
    """As many slots as calls are in flight at once; every rank makes a slot at the same call.

    The communicator keeps pools (`Communicator.kept`): layers of one model that are given the same groups share a pool
    if their rows have the same geometry. Neither pools nor slots may refer to the communicator: the cycle of references
    would keep its process group alive.
    """

    MAX_OPEN_CALLS: ClassVar[int | None] = None
    """How many calls may be dispatched and not yet combined at once; None: any number."""

    def __init__(self, geometry: Hashable) -> None:
        """geometry: what layers must have in common to share the pool."""
        self.geometry = geometry
        self.slots: list[S] = []

    @classmethod
    def of(cls, comm: Communicator, geometry: Hashable) -> Self:
        """The pool of a group for rows of this geometry; a new one if there is none, or none that can be used."""
        pool = comm.kept.get((cls, geometry))
        if not isinstance(pool, cls) or not pool.is_usable:
            comm.kept[cls, geometry] = pool = cls(geometry)
        comm.keep(pool)
        return pool

    @property
    def is_usable(self) -> bool:
        """Whether new layers may share the pool."""
        return True

    def take(self, comm: Communicator, make: Callable[[], S] | None = None) -> S:
        """The first idle slot, or a new one, for the next call of the layer that `comm` belongs to.

        make: see `add`. Raises CommError if MAX_OPEN_CALLS are in flight.
        """
        for slot in self.slots:
            if not slot.busy:
                break
        else:
            slot = self.add(comm, "dispatch", make)
        slot.busy = True
        slot.serve(comm)
        return slot

    def add(self, comm: Communicator, phase: str, make: Callable[[], S] | None = None) -> S:
        """Make one more slot, together with every rank. Raises CommError if MAX_OPEN_CALLS exist.

        make: for pools whose slots a layer makes; the pool does not keep it.
        """
        if len(self.slots) == self.MAX_OPEN_CALLS:
            text = f"{self.MAX_OPEN_CALLS} calls were prepared and not finalized; finalize each before the next"
            raise CommError(text, rank=comm.rank, phase=phase, layer=comm.layer)
        slot = self._make(comm) if make is None else make()
        self.slots.append(slot)
        return slot

    def reopen(self) -> None:
        """Begin with new slots: the contents of those of failed calls are not defined."""
        self.slots.clear()

    def _make(self, comm: Communicator) -> S:
        """A new slot. Every rank calls it at the same call."""
        raise NotImplementedError
