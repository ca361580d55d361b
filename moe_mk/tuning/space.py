"""What may be tuned: a backend declares its parameters and takes a choice of them.

A backend that can be tuned has two methods beside its contract:

    @classmethod
    def tuning_space(cls, context, rows) -> Sequence[Mapping[str, int | bool | str]]     what is worth trying; the first
                                                                                         one is what serves untuned
    def tuned_with(self, parameters) -> FusedExperts                                     itself with a choice of them

One that declares nothing and runs on a CPU has the number of threads: it is torch's, and every CPU backend follows it;
all cores serve untuned.
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
        """What serves where nothing was measured."""
        return self.candidates[0]


def space_of(backend: type[FusedExperts], context: ExpertsContext, rows: int, cores: int) -> Space:
    """What can be tried. Raises UnsupportedError for a backend that declares nothing and does not run on a CPU."""
    declared = getattr(backend, "tuning_space", None)
    if declared is not None:
        candidates: Sequence[Candidate] = declared(context, rows)
        return Space(tuple(dict(c) for c in candidates), lambda experts, c: experts.tuned_with(c))  # type: ignore[attr-defined]
    if context.device.type != "cpu" or "cpu" not in backend.traits.kinds:
        raise UnsupportedError(
            f"{backend.__name__} declares nothing to tune",
            ["add tuning_space() and tuned_with() as moe_mk.tuning.space says"],
        )
    threads = sorted(thread_counts(cores), key=lambda count: (count != cores, count))
    return Space(tuple({"threads": n} for n in threads), lambda experts, c: experts, threads_only=True)


def thread_counts(cores: int) -> list[int]:
    """Powers of two up to the cores, and the cores themselves."""
    return sorted({2**power for power in range(cores.bit_length()) if 2**power <= cores} | {cores})


@contextmanager
def threads_of(candidate: Candidate, space: Space) -> Iterator[None]:
    """torch's threads as a candidate says, and as they were afterwards."""
    before = torch.get_num_threads()
    if space.threads_only:
        torch.set_num_threads(int(candidate["threads"]))
    try:
        yield
    finally:
        torch.set_num_threads(before)
