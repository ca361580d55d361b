"""Kernels of DeepEP that move rows: what its high-throughput and its elastic ones have in common.

Rows are padded to what the kernels copy at once, a dispatch ends in an event, and combine takes the sums of a rank's
experts, with the handle of the dispatch, through the buffer that it went through.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import pad

from moe_mk.config.problem import Problem, Reason
from moe_mk.external.deepep_limits import HIGH_THROUGHPUT_ROW_BYTES
from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.base import PrepareFinalize, TransportContext, TransportTraits
from moe_mk.prepare_finalize.deepep.buffers import LibrarySession
from moe_mk.prepare_finalize.deepep.common import bf16_reasons, expect_wire, fp8_reasons, padded_row
from moe_mk.prepare_finalize.even_numbers import EvenNumbers
from moe_mk.prepare_finalize.library_calls import Call
from moe_mk.tokens import ExpertOutput, OutputStage, RowTokens, Tokens

DEEPEP = TransportTraits(
    summary="",
    kinds=frozenset({"cuda"}),
    min_arch=(9, 0),
    library="deep_ep",
    extra="pip install sgl-deep-ep, or build DeepEP",
    produces=RowTokens,
    wants=OutputStage.REDUCED,
    wire=frozenset({"plain", "fp8"}),
    min_ranks=2,
    blocking=True,
)
"""What transports of this library, and of those that speak its language, have in common."""


@dataclass
class Surface:
    """The calls of one buffer."""

    dispatch: Call
    combine: Call
    layout: Call | None = None
    """Counts before a dispatch, where a dispatch does not count itself."""


@dataclass(frozen=True)
class WayHome:
    """The library's handle of one dispatch, and the buffer that it went through."""

    buffer: Surface
    handle: Any


class RowKernels(PrepareFinalize):
    """Rows to experts and sums home."""

    kernels: ClassVar[str]
    """Which; layers of one group share a buffer of the same."""
    later: ClassVar[str]
    """The argument by which a call is told not to wait for its kernels."""

    def __init__(self, context: TransportContext) -> None:
        """Check what travels; no buffer is made yet. Raises UnsupportedError."""
        super().__init__(context)
        expect_wire(context.wire, self.traits.library)
        self._numbers = EvenNumbers(context)
        self._hidden = padded_row(context.hidden_size, HIGH_THROUGHPUT_ROW_BYTES)
        self._session: LibrarySession[Surface] = LibrarySession(context, self.traits.library, self.kernels)

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Send sums home, where the library adds them up."""
        c, home = self.context, tokens.handle
        assert isinstance(home, WayHome)
        y_RH = pad(output.y, (0, self._hidden - c.hidden_size)).contiguous()
        with c.spans.span("combine"):
            with self._session.call("combine"):
                needed = {"x": y_RH, "handle": home.handle, self.later: True, **self._units(combine=True)}
                total_TH, _, event = home.buffer.combine(needed)
            yield InFlight("combine")
            self._wait(event, "combine")
            y_TH: Tensor = total_TH[:, : c.hidden_size].contiguous()
            return y_TH

    @abstractmethod
    def _units(self, *, combine: bool) -> dict[str, object]:
        """The argument that holds a call to kernel.comm_units; none where that is not set."""

    def _wait(self, event: Any, phase: str) -> None:
        with self._session.call(phase):
            if getattr(event, "event", None) is not None:
                event.current_stream_wait()

    @classmethod
    def max_rows(cls, problem: Problem) -> int:
        """All tokens of all ranks may want an expert of this one."""
        return problem.num_tokens * problem.ranks

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Limits of number formats."""
        return [*super().reasons_against(problem), *bf16_reasons(problem), *fp8_reasons(problem)]
