"""The one rule of failure for every call that all ranks of some groups make together.

    @collective(lambda layer, *_, **__: layer.state.experts.grid)
    def swap_backends(layer, x_TH, ...): ...

Whatever ends such a call on one rank, at whichever instruction, ends it on every rank: it is reported to the peers.
Their calls raise CommError with that rank and the cause at once, not at their timeout, until all ranks `recover`.
Not reported are refusals, which are errors of this library before anything was sent, and errors that all ranks raise.

A change that ranks vote on last is made by all of them or by none (`CallGroups.decide`): a rank on which the vote
ends in an exception cannot know whether the others have counted it, and learns that when they recover.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import wraps
from inspect import isgeneratorfunction
from operator import not_
from typing import Any, TypeVar

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.failure import FRAMES, Change, Changes
from moe_mk.comm.single import SingleRank
from moe_mk.errors import CommError, MoEMKError, MoEMKWarning
from moe_mk.flight import Flight, cancel

F = TypeVar("F", bound=Callable[..., Any])
X = TypeVar("X")


class CallGroups:
    """The groups of ranks that make a call together: EP ranks hold different experts, TP ranks slices of the same."""

    name = ""
    """Of the layer, for errors."""

    def __init__(self, ep: Communicator, tp: Communicator | None = None) -> None:
        self.ep, self.tp = ep, tp or SingleRank()

    @property
    def epochs(self) -> tuple[int, int]:
        """The epochs of both groups, `GroupStatus.epoch`."""
        return self.ep.status.epoch, self.tp.status.epoch

    def fail(self, error: BaseException, epochs: Iterable[int | None] = (None, None)) -> None:
        """Report an exception of this rank to the ranks of both groups. Never raises.

        An error that one group has raised and knows of names a rank of that group; to the other, this rank is to blame.
        epochs: those in which the call began, see `Communicator.fail`.
        """
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + FRAMES)
        try:
            for comm, epoch in zip((self.ep, self.tp), epochs, strict=True):
                own = error
                if isinstance(error, CommError) and not error.harmless_to_peers:
                    own = CommError(str(error), rank=comm.rank, phase=error.phase, layer=self.name, peer=comm.rank)
                comm.fail(own, epoch)
        finally:
            sys.setrecursionlimit(limit)

    def fail_recovery(self, error: BaseException, epochs: tuple[int, int]) -> None:
        """Report an exception that ended `recover` on this rank: peers wait in theirs, or in a call. Never raises.

        epochs: those in which it began; a group in another one has recovered.
        """
        for comm, epoch in zip((self.ep, self.tp), epochs, strict=True):
            comm.fail(error)
            if comm.status.epoch == epoch:
                comm.fail_recovery(error)

    def recover(self) -> Flight[None]:
        """Go on after a failed call, see `Communicator.recover`. All ranks of both groups do.

        A change that was undecided on this rank is made if any rank has made it, and undone if none has.
        """
        made = yield from self.ep.recover(self._changes.made)
        self._settle((yield from self.tp.recover(made)))

    def settle(self) -> Flight[None]:
        """Make or undo a change that was undecided on this rank, as the other ranks did."""
        self._settle(max((yield from self.gather(self._changes.made, "recovery"))))

    def _settle(self, made: int) -> None:
        changes = self._changes
        if changes.undecided is not None:
            number, change = changes.undecided
            (change.make if number <= made else change.undo)()
        changes.made, changes.undecided = made, None

    def decide(self, vote: Flight[X], change: Change, accepts: Callable[[X], bool] = not_) -> Flight[X]:
        """Hold a vote, and make a change on all ranks if its result is accepted; returns the result.

        accepts: given the result, which is the same on all ranks. If the vote fails the change is undone here, and the
        next `recover` makes it or not, as the other ranks did. Both may be called repeatedly, after any part of either.
        """
        changes = self._changes
        number = changes.made + 1
        changes.undecided = number, change
        try:
            result = yield from vote
            if accepts(result):
                change.make()
                changes.made = number
            changes.undecided = None
        except BaseException:
            change.undo()
            raise
        return result

    def gather(self, number: int, phase: str) -> Flight[list[int]]:
        """All-gather a number; returns, equal on all ranks, the largest among the slices of each EP rank."""
        if self.tp.size > 1:
            number = max((yield from self.tp.gather_count(number, phase)))
        return (yield from self.ep.gather_count(number, phase))

    @property
    def _changes(self) -> Changes:
        return (self.ep if self.ep.size > 1 else self.tp).changes


def collective(groups_of: Callable[..., CallGroups], *, recovers: bool = False) -> Callable[[F], F]:
    """Decorate a call that every rank of some groups makes, a function or a flight: see the rule above.

    groups_of: given the arguments of the call. Of a function, errors and warnings of this library are not reported: the
    flight that it waits for does so, where they arise. recovers: whether the call is `recover`.
    """

    def decorated(verb: F) -> F:
        @wraps(verb)
        def flight(*given: Any, **named: Any) -> Flight[Any]:
            groups, epochs, has_begun, steps = None, (0, 0), False, None
            try:
                groups = groups_of(*given, **named)
                epochs, steps = groups.epochs, verb(*given, **named)
                while True:
                    try:
                        point = next(steps)
                    except StopIteration as end:
                        return end.value
                    has_begun = True
                    yield point
            except BaseException as error:
                if has_begun or not isinstance(error, MoEMKError):
                    groups = groups_of(*given, **named) if groups is None else groups  # interrupted there
                    # One that is dropped may have ended with a recovery; one that raises goes on.
                    groups.fail(error, epochs if isinstance(error, GeneratorExit) else groups.epochs)
                if steps is not None:
                    cancel((steps,))  # now, and not when nothing refers to them: peers may wait for what they do then
                raise

        @wraps(verb)
        def call(*given: Any, **named: Any) -> Any:
            groups, epochs = None, None
            try:
                groups = groups_of(*given, **named)
                epochs = groups.epochs
                return verb(*given, **named)
            except BaseException as error:
                if not isinstance(error, MoEMKError | MoEMKWarning):
                    limit = sys.getrecursionlimit()
                    sys.setrecursionlimit(limit + FRAMES)  # here: `fail` itself may have no frame
                    groups = groups or groups_of(*given, **named)  # interrupted there
                    if recovers:
                        groups.fail_recovery(error, epochs or groups.epochs)
                    else:
                        groups.fail(error)
                    sys.setrecursionlimit(limit)
                raise

        return flight if isgeneratorfunction(verb) else call  # type: ignore[return-value]

    return decorated
