"""Every error and warning a user of the library can meet.

A message names what was asked, both numbers, and the next step. `assert` is for what the library promises itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from numbers import Integral
from types import TracebackType
from typing import Any, TypeVar

from moe_mk.text import shortened, terminal_width, wrapped


class MoEMKError(Exception):
    """The base of all errors raised on purpose by this library."""

    harmless_to_peers: bool = False
    """Whether no other rank waits for a call that ended in this: raised on all ranks, or before anything was sent."""

    def __str__(self) -> str:
        return shortened(super().__str__())


class ConfigError(MoEMKError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class ShapeError(MoEMKError, ValueError):
    """A tensor of the wrong shape, dtype, device or range of values."""


class WeightError(MoEMKError, ValueError):
    """A checkpoint that is missing, incomplete, foreign or damaged."""


class StoreError(WeightError):
    """A store of packed experts that is missing, damaged, foreign, or changed while it is in use."""


class UnsupportedError(MoEMKError, RuntimeError):
    """A request that is well formed but cannot be served here; carries every reason, not the first."""

    def __init__(self, what: str, reasons: Sequence[str] = ()) -> None:
        self.what = what
        self.reasons = tuple(reasons)
        super().__init__("\n  - ".join((what, *self.reasons)))

    def __str__(self) -> str:
        """Return what was requested and every reason, one per line, wrapped if standard error is a terminal."""
        width = terminal_width(sys.stderr)
        lines = (self.what, *(f"  - {reason}" for reason in self.reasons))
        return "\n".join(wrapped(shortened(line), width, hanging=4) for line in lines)

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...]]]:
        return type(self), (self.what, self.reasons)


class RegroupError(UnsupportedError):
    """Ranks could not go on as another group. Nothing was changed: the same call may be made again.

    Every rank raises it at the same step.
    """

    harmless_to_peers = True


class LibraryMissing(UnsupportedError, ImportError):
    """An optional library is not installed; the message carries the install line."""


class CommError(MoEMKError, RuntimeError):
    """A peer is dead, late or disagrees; names rank, phase and, where known, layer and peer.

    on_all_ranks: every rank of the group raises it at this step, so that none waits and calls may go on.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        phase: str,
        layer: str = "",
        peer: int | None = None,
        on_all_ranks: bool = False,
    ) -> None:
        self.harmless_to_peers = on_all_ranks
        self.rank, self.phase, self.layer, self.peer, self.detail = rank, phase, layer, peer, message
        where = f"rank {rank}, phase {phase!r}" + (f", layer {layer!r}" if layer else "")
        who = "" if peer is None else f", peer {peer}"
        super().__init__(f"{where}{who}: {message}")

    def __reduce__(self) -> tuple[object, ...]:
        named: dict[str, Any] = {"rank": self.rank, "phase": self.phase, "layer": self.layer, "peer": self.peer}
        return partial(CommError, on_all_ranks=self.harmless_to_peers, **named), (self.detail,)


class LostExpertError(MoEMKError, RuntimeError):
    """Experts have no live copy since their rank was lost, and the layer may not serve without them.

    Every rank raises it at the same step.
    """

    harmless_to_peers = True

    def __init__(self, message: str, *, layer: str, experts: Sequence[int]) -> None:
        self.layer, self.experts, self.detail = layer, tuple(experts), message
        super().__init__(f"layer {layer!r}: {message}")

    def __reduce__(self) -> tuple[object, ...]:
        return partial(LostExpertError, layer=self.layer, experts=self.experts), (self.detail,)


def expect_kind(name: str, value: object, *kinds: type, most: int | None = None) -> None:
    """Raise ConfigError unless a value is of one of these types, for doors that are called once. True is no number.

    most: the largest number.
    """
    allowed = tuple(Integral if kind is int else kind for kind in kinds)  # numpy's integers are no int
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ConfigError(f"{name} is {repr(value)[:80]} ({type(value).__name__}), expected {wanted}")
    if most is not None and isinstance(value, Integral) and int(value) > most:
        raise ConfigError(f"{name} is {value}, the limit is {most}")


E = TypeVar("E", bound=BaseException)

# Python calls signal handlers between two instructions of any code. What they raise is no error of that code.


def unless_signalled(*kinds: type[E]) -> tuple[type[E], ...]:
    """For an except clause: these kinds, or none of them where a signal handler has raised the exception."""
    return () if _is_of_handler(sys.exception()) else kinds


class Suppress:
    """A context that ends without exceptions of some kinds, unless a signal handler has raised them."""

    __slots__ = ("_kinds",)

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        return isinstance(error, self._kinds) and not _is_of_handler(error)


def _is_of_handler(error: BaseException | None) -> bool:
    """Whether a frame of the traceback was given the frame that called it, as handlers are: signum, frame."""
    at = None if error is None else error.__traceback__
    while at is not None and at.tb_next is not None:
        for value in at.tb_next.tb_frame.f_locals.values():
            if any(each is at.tb_frame for each in (value if isinstance(value, tuple) else (value,))):
                return True
        at = at.tb_next
    return False


class MoEMKWarning(UserWarning):
    """The base of all warnings, so that a host can turn them into errors."""


class FallbackWarning(MoEMKWarning):
    """Something slower or less accurate than requested is used; the message gives the reason."""


class CheckpointWarning(MoEMKWarning):
    """The configuration of a checkpoint contradicts its tensors; the message names both and what is used."""


class PluginWarning(MoEMKWarning):
    """A third-party plugin could not be loaded and was skipped."""
