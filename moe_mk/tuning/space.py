"""Tuning spaces: the parameters that a backend declares for tuning.

A backend that can be tuned has two further methods:

    @classmethod
    def tuning_space(cls, context, rows) -> Sequence[Mapping[str, int | bool | str]]     candidates, the built-in
                                                                                         parameters first
    def tuned_with(self, parameters) -> FusedExperts                                     the backend with one candidate

A CPU backend without these methods is tuned by torch's number of threads; the built-in choice is all cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from moe_mk.config.tuned import Candidate
from moe_mk.errors import UnsupportedError
from moe_mk.experts.base import ExpertsContext, FusedExperts


@dataclass(frozen=True)
class Space:
    """The candidates of one backend for one number of rows, and how to run it with one of them."""

    candidates: tuple[Candidate, ...]
    """The built-in choice first."""
    apply: Callable[[FusedExperts, Candidate], FusedExperts]
    threads_only: bool = False
    """Whether the parameters are torch's threads, which stay as they were outside of a measurement."""

    @property
    def built_in(self) -> Candidate:
        """The parameters in use if nothing was measured."""
        return self.candidates[0]


def space_of(backend: type[FusedExperts], context: ExpertsContext, rows: int, cores: int) -> Space:
    """The candidates of a backend. Raises UnsupportedError if it declares none and does not run on a CPU."""
    declared = getattr(backend, "tuning_space", None)
    if declared is not None:
        candidates: Sequence[Candidate] = declared(context, rows)
        return Space(tuple(dict(c) for c in candidates), lambda experts, c: experts.tuned_with(c))  # type: ignore[attr-defined]
    if context.device.type != "cpu" or "cpu" not in backend.traits.kinds:
        raise UnsupportedError(
            f"{backend.__name__} declares no tuning space",
            ["implement tuning_space() and tuned_with() (see moe_mk.tuning.space)"],
        )
    threads = sorted(thread_counts(cores), key=lambda count: (count != cores, count))
    return Space(tuple({"threads": n} for n in threads), lambda experts, c: experts, threads_only=True)


def thread_counts(cores: int) -> list[int]:
    """Powers of two up to the cores, and the cores themselves."""
    return sorted({2**power for power in range(cores.bit_length()) if 2**power <= cores} | {cores})


@contextmanager
def threads_of(candidate: Candidate, space: Space) -> Iterator[None]:
    """Set torch's number of threads to a candidate's, and restore it afterwards."""
    before = torch.get_num_threads()
    if space.threads_only:
        torch.set_num_threads(int(candidate["threads"]))
    try:
        yield
    finally:
        torch.set_num_threads(before)
