"""Sessions of layers with a communication library over one group: shared buffers, and the failure that ends all calls.

The first layer makes the library's buffer, on every rank at once. The communicator keeps it (`Communicator.kept`), and
layers that are given the same groups share it. It is freed with the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.failure import Failure
from moe_mk.errors import CommError, MoEMKError, UnsupportedError, unless_signalled
from moe_mk.prepare_finalize.base import TransportContext
from moe_mk.prepare_finalize.buffer_pool import BufferPool, BufferSlot

B = TypeVar("B")
MAX_OPEN_CALLS = 8


class LibraryBufferSlot(BufferSlot, Generic[B]):
    """A buffer of a library for one call at a time, with the number of the call that uses it."""

    def __init__(self, buffer: B) -> None:
        self.buffer, self.call = buffer, 0

    def serve(self, comm: Communicator) -> None:
        del comm
        self.call += 1


@dataclass(frozen=True)
class SlotHandle:
    """The buffer slot of a dispatch, and its call there."""

    buffer_slot: LibraryBufferSlot[Any]
    call: int


class LibraryBufferPool(BufferPool[LibraryBufferSlot[B]], Generic[B]):
    """Open buffers of a library over one group, for rows of one geometry."""

    MAX_OPEN_CALLS = MAX_OPEN_CALLS

    def __init__(self, geometry: Hashable) -> None:
        super().__init__(geometry)
        self.buffer: B | None = None
        self.size: tuple[int, ...] = ()
        """What the buffer was asked to hold, in the units of the library's own arguments."""
        self.in_flight = 0
        """Operations that were issued and have not arrived, of all layers."""
        self.failure = ""
        self.left_out: frozenset[int] = frozenset()
        """Ranks that take no part, see `PrepareFinalize.leave_out`."""

    @property
    def is_usable(self) -> bool:
        return not self.failure

    def abort(self, failure: Failure) -> None:
        """Refuse further calls; peers hear of it from the group, or from the library's own timeout inside of a call."""
        self.failure = self.failure or failure.report

    def reopen(self) -> None:
        """Raise UnsupportedError: what a library's buffers hold after a failed call is not known."""
        if self.failure:
            raise UnsupportedError(
                "a library's buffers cannot start over after a failed call",
                [f"{self.failure}; build the layer over a new group"],
            )


class LibrarySession(Generic[B]):
    """One layer's view of what is kept. What fails in a call ends every later one, because ranks disagree then."""

    def __init__(self, context: TransportContext, library: str, geometry: Hashable = ()) -> None:
        """geometry: whatever layers must have in common to share a buffer."""
        self._comm, self._rank, self._layer = context.comm, context.comm.rank, context.comm.layer
        self._library = library
        self.pool: LibraryBufferPool[B] = LibraryBufferPool.of(context.comm, (library, geometry))

    @property
    def buffer(self) -> B:
        """The buffer as it is now; a layer that needed more may have replaced it."""
        assert self.pool.buffer is not None
        return self.pool.buffer

    def open(self, size: tuple[int, ...], make: Callable[[tuple[int, ...]], B]) -> None:
        """See that there is a buffer of `size` or more in every respect; one that is too small is replaced.

        A call under way goes on in the buffer it began in, which ends after it.
        """
        pool = self.pool
        if pool.buffer is None or any(asked > held for asked, held in zip(size, pool.size, strict=True)):
            most = tuple(map(max, zip(size, pool.size or size, strict=True)))
            self._expect_all_ranks("a larger buffer")
            with self.call("set-up"):
                pool.buffer = make(most)
            pool.size = most

    def open_first_slot(self, make: Callable[[int], B]) -> None:
        """Open the first buffer slot if there is none, so that errors are raised before any call."""
        if not self.pool.slots:
            self.pool.add(self._comm, "open", lambda: self._slot("open", make))

    def take(self, phase: str, make: Callable[[int], B]) -> LibraryBufferSlot[B]:
        """An idle buffer slot for one call; if all are busy a new one, which every rank makes at the same call.

        make: given the number of slots. Raises CommError with too many calls open.
        """
        return self.pool.take(self._comm, lambda: self._slot(phase, make))

    def _slot(self, phase: str, make: Callable[[int], B]) -> LibraryBufferSlot[B]:
        self._expect_all_ranks("one more workspace")
        with self.call(phase):
            return LibraryBufferSlot(make(len(self.pool.slots)))

    def _expect_all_ranks(self, what: str) -> None:
        if gone := sorted(self.pool.left_out):
            way_out = "form a group of the other ranks and call RebalanceManager.rank_lost()"
            refusal = UnsupportedError(
                f"{what} of {self._library} needs every rank; ranks {gone} are left out", [way_out]
            )
            refusal.harmless_to_peers = True
            raise refusal

    def expect_between_calls(self, verb: str, ranks: Collection[int]) -> None:
        """Raise UnsupportedError while a call of any layer is under way."""
        flying = self.pool.in_flight + sum(buffer_slot.busy for buffer_slot in self.pool.slots)
        if flying:
            reason = f"{flying} operations are in flight; finish the step first"
            raise UnsupportedError(f"rank {self._rank} cannot {verb} {sorted(ranks)} inside a step", [reason])

    def expect_open(self, buffer_slot: LibraryBufferSlot[B], call: int) -> None:
        """Raise CommError for tokens that were finalized before, whoever uses the buffer slot now."""
        if not buffer_slot.busy or buffer_slot.call != call:
            text = "these tokens were finalized before"
            raise CommError(text, rank=self._rank, phase="combine", layer=self._layer)

    @contextmanager
    def call(self, phase: str) -> Iterator[None]:
        """Make one call. Raises CommError for a peer that is dead, late or disagrees, and for calls after that;
        UnsupportedError for what the library refuses.
        """
        if cause := self.pool.failure:
            text = f"an earlier call failed, so ranks no longer agree on a call: build the layer anew ({cause})"
            raise CommError(text, rank=self._rank, phase=phase, layer=self._layer)
        try:
            yield
        except MoEMKError as problem:
            self.pool.failure = str(problem)
            raise
        except AssertionError as problem:
            self.pool.failure = _first_line(problem)
            raise UnsupportedError(f"{self._library} refuses {phase}", [self.pool.failure]) from problem
        except unless_signalled(RuntimeError, OSError) as problem:
            cause = f"{self._library} failed, as it does when a peer is dead or late: {_first_line(problem)}"
            self.pool.failure = cause
            raise CommError(cause, rank=self._rank, phase=phase, layer=self._layer) from problem
        except unless_signalled(Exception) as problem:  # a library has errors of its own for arguments that it refuses
            self.pool.failure = f"{type(problem).__name__}: {_first_line(problem)}"
            raise UnsupportedError(f"{self._library} refuses {phase}", [self.pool.failure]) from problem


def _first_line(problem: Exception) -> str:
    return str(problem).splitlines()[0] if str(problem) else type(problem).__name__
