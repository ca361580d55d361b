"""Autograd's switches belong to a thread: a job finds them as they are in the thread that asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
X = TypeVar("X")


def with_modes_of_here(job: Callable[P, X]) -> Callable[P, X]:
    """The same job, for another thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def as_here(*args: P.args, **kwargs: P.kwargs) -> X:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return job(*args, **kwargs)

    return as_here
