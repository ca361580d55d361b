"""Rows of any wire scheme as the payloads of a library that moves rows, and a session with it that a failure ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from moe_mk.errors import CommError, MoEMKError, ShapeError, UnsupportedError
from moe_mk.prepare_finalize.base import TransportContext
from moe_mk.quant.tensor import QuantTensor


def payloads_of(x_TH: QuantTensor) -> list[Tensor]:
    """Values, then scales where the scheme has any: (T, X) each. Elements of one byte go as uint8, which all carry."""
    parts = [part for part in (x_TH.values, x_TH.scales) if part is not None]
    return [(part.view(torch.uint8) if part.element_size() == 1 else part).contiguous() for part in parts]


def rows_of(parts: Sequence[Tensor], like: QuantTensor) -> QuantTensor:
    """The rows that have arrived as `payloads_of(like)` left, in the dtypes of `like`."""
    scales = None if like.scales is None else parts[1].view(like.scales.dtype)
    return replace(like, values=parts[0].view(like.values.dtype), scales=scales)


def expect_room(x_TH: Tensor, context: TransportContext) -> None:
    """Raise ShapeError where a call brings more tokens than the windows of the library hold."""
    if x_TH.shape[0] > context.max_num_tokens:
        raise ShapeError(
            f"x has T={x_TH.shape[0]} tokens, a window holds {context.max_num_tokens} of each rank "
            "[kernel.max_num_tokens]; raise the limit or bring fewer tokens a call"
        )


class LibrarySession:
    """Calls into a library over one group: what fails there ends every later call too, because ranks disagree then."""

    def __init__(self, context: TransportContext, library: str) -> None:
        self._rank, self._library, self._failure = context.comm.rank, library, ""

    @contextmanager
    def call(self, phase: str) -> Iterator[None]:
        """Make one call. Raises CommError for a peer that is dead, late or disagrees, and for calls after that;
        UnsupportedError for what the library refuses.
        """
        if self._failure:
            text = f"an earlier call failed, so ranks no longer agree on a call: build the layer anew ({self._failure})"
            raise CommError(text, rank=self._rank, phase=phase)
        try:
            yield
        except MoEMKError as problem:
            self._failure = str(problem)
            raise
        except AssertionError as problem:
            self._failure = _first_line(problem)
            raise UnsupportedError(f"{self._library} refuses {phase}", [self._failure]) from problem
        except (RuntimeError, OSError) as problem:
            self._failure = f"{self._library} failed, as it does when a peer is dead or late: {_first_line(problem)}"
            raise CommError(self._failure, rank=self._rank, phase=phase) from problem


def _first_line(problem: Exception) -> str:
    return str(problem).splitlines()[0] if str(problem) else type(problem).__name__
