"""Error limits between two correct results, derived from the number formats only."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from moe_mk.errors import MoEMKError
from moe_mk.lab.testing.laws import DETERMINISTIC, INPUTS, ON_FRESH, READ_ON_HOST, STAGE, Law, law_of
from moe_mk.oracle.expected_error import ALL_TOKENS, ONE_TOKEN

X = TypeVar("X")
Held = TypeVar("Held")
OF_ONE_CALL = (INPUTS, DETERMINISTIC, STAGE)
"""Laws that a single call can violate whatever the calls before it."""
HOST_READ = re.compile(r"tolist|numpy\(\)|[Cc]annot be converted to (a )?(Python|NumPy)")
"""Messages of torch about tensors without values, besides its two exceptions for operators."""


class NonConforming(MoEMKError, AssertionError):
    """A backend violates its contract; the message contains the case and the difference.

    law: the law behind wrong values, if it can be determined.
    """

    def __init__(self, message: str, law: Law | None = None) -> None:
        super().__init__(message)
        self.law = law


def require(holds: bool, what: str) -> None:
    """Raise NonConforming unless something holds."""
    if not holds:
        raise NonConforming(what)


def later_call(call: Callable[[], X], alone: Callable[[], object]) -> X:
    """A call after others on one instance. If it fails, but passes `alone` on a fresh one, the message states that."""
    try:
        return call()
    except Exception as problem:  # backends may fail in any way
        if isinstance(problem, NonConforming) and law_of(str(problem)) in OF_ONE_CALL:
            raise
        try:
            alone()
        except Exception:
            raise problem from None
        text = str(problem) if isinstance(problem, NonConforming) else f"{type(problem).__name__}: {problem}"
        raise NonConforming(f"{text}; it {ON_FRESH}") from problem


@contextmanager
def no_host_reads(what: str) -> Iterator[FakeTensorMode]:
    """Run torch operators on tensors without values. Raises NonConforming where a value is read on the host.

    Inputs must be passed through `fake`.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        try:
            yield mode
        except (DataDependentOutputException, DynamicOutputShapeException) as problem:
            raise NonConforming(f"{what}: {READ_ON_HOST} by {problem.func}") from problem
        except RuntimeError as problem:
            if not HOST_READ.search(str(problem)):
                raise
            raise NonConforming(f"{what}: {READ_ON_HOST}: {problem}") from problem


@contextmanager
def no_global_changes(what: str) -> Iterator[None]:
    """Raise NonConforming where the block changes a state of torch, Python or numpy that other code depends on."""
    before = _globals()
    yield
    changed = [name for name, value in _globals().items() if value != before[name]]
    require(not changed, f"{what}: {', '.join(changed)} of the process were changed")


def _globals() -> dict[str, Any]:
    of_numpy: Any = np.random.get_state()
    return {
        "random numbers of torch": torch.get_rng_state().numpy().tobytes(),
        "random numbers of Python": random.getstate(),
        "random numbers of numpy": (of_numpy[1].tobytes(), of_numpy[2:]),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the number of threads": torch.get_num_threads(),
        "the gradient mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "precision of products": torch.get_float32_matmul_precision(),
    }


def fake(mode: FakeTensorMode, value: Held) -> Held:
    """A tensor, or a dataclass with the tensors in it, without values."""
    made: Any = value
    if isinstance(value, Tensor):
        made = mode.from_tensor(value)
    elif is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: fake(mode, getattr(value, f.name)) for f in fields(value) if f.init}
        made = replace(value, **{name: one for name, one in changed.items() if one is not getattr(value, name)})
    return cast(Held, made)


def require_close(got_TH: Tensor, expected_TH: Tensor, error: float, what: str) -> None:
    """Relative L2 error: of all tokens within 1.5 errors, of each within 3. Tokens that should be zero must be zero."""
    require(got_TH.shape == expected_TH.shape, f"{what}: shape {tuple(got_TH.shape)}, not {tuple(expected_TH.shape)}")
    require(bool(got_TH.isfinite().all()), f"{what}: the output is not finite")
    distance_T = (got_TH.double() - expected_TH.double()).norm(dim=-1)
    size_T = expected_TH.double().norm(dim=-1)
    worst = distance_T / size_T.clamp_min(torch.finfo(torch.float32).tiny)
    beyond = torch.nonzero(distance_T > ONE_TOKEN * error * size_T).flatten().tolist()
    require(
        not beyond,
        f"{what}: tokens {beyond[:8]} are up to {float(worst.max()) if beyond else 0.0:.2e} away, "
        f"the limit is {ONE_TOKEN * error:.2e}",
    )
    total, limit = float(distance_T.norm()), ALL_TOKENS * error * float(size_T.norm())
    require(total <= limit, f"{what}: all tokens together are {total:.2e} away, limit {limit:.2e}")
