"""Shared code of the adapters of communication libraries: row formats, limits of number formats, calls, expert ids.

`Call` calls a function of a library of which several builds exist. Builds differ in the arguments they accept and in
their positions, and version strings do not identify them; the signature does.

`UniformExpertIds` numbers experts as libraries require: the same number of ids on each rank, so that a division yields
the rank. Ranks with fewer experts than others leave gaps. Three ranks with 2, 1 and 2 experts, two ids a rank:

    physical expert   0  1 | 2    | 3  4
    library id        0  1 | 2    | 4  5        id // 2 = rank, id % 2 = slot

`RowKernels` is the common part of DeepEP's high-throughput and elastic kernels. Rows are padded to the unit that the
kernels copy, a dispatch ends in an event, and combine takes the sums of a rank's experts with the handle of the
dispatch, through the same buffer.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_mk.config.problem import Problem, Reason
from moe_mk.errors import UnsupportedError
from moe_mk.external.deepep_limits import HIGH_THROUGHPUT_ROW_BYTES, SCALE_GROUP, up_to
from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.base import PrepareFinalize, TransportContext, TransportTraits
from moe_mk.prepare_finalize.deepep.buffers import LibrarySession, SlotHandle
from moe_mk.quant.fp8 import Fp8Block
from moe_mk.quant.plain import BF16, Plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.quant.wire import as_bytes, row_bytes
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens, Tokens


class UniformExpertIds:
    """Converts between physical ids, library ids and slots of this rank. multiple: divides the total number of ids."""

    def __init__(self, context: TransportContext, multiple: int = 1) -> None:
        ranks = context.comm.size
        per_rank = max(context.expert_map.num_slots(rank) for rank in range(ranks))
        while ranks * per_rank % multiple:
            per_rank += 1
        self.per_rank, self.total, self.first = per_rank, ranks * per_rank, context.comm.rank * per_rank
        self._context = context

    def of(self, physical_TK: Tensor, nowhere: int = -1) -> Tensor:
        """int32 library ids of physical ids; `nowhere` for -1."""
        tables, at_TK = self._context.tables, physical_TK.clamp_min(0).long()
        number_TK = tables.rank_of_P[at_TK] * self.per_rank + tables.slot_of_P[at_TK]
        return torch.where(physical_TK >= 0, number_TK, nowhere).to(torch.int32)

    def slots(self, number_RK: Tensor) -> Tensor:
        """int32 slots of this rank; -1 for every other id."""
        slot_RK = number_RK - self.first
        mine_RK = (slot_RK >= 0) & (slot_RK < self._context.num_slots)
        return torch.where(mine_RK, slot_RK, -1).to(torch.int32)


class Call:
    """A function of a library, called with the arguments that the installed build accepts."""

    def __init__(self, function: Callable[..., Any], needs: Sequence[str]) -> None:
        """needs: arguments without which the adapter cannot use it. Raises UnsupportedError with those it lacks."""
        parameters = inspect.signature(function).parameters
        self._function = function
        self._takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self._known = frozenset(parameters)
        if lacking := [name for name in needs if not self.knows(name)]:
            what = f"{getattr(function, '__qualname__', function)} of the installed build lacks arguments"
            raise UnsupportedError(what, [f"no {name!r}" for name in lacking])

    def knows(self, argument: str) -> bool:
        """Whether this build has an argument."""
        return self._takes_all or argument in self._known

    def __call__(self, needed: Mapping[str, object], options: Mapping[str, object] | None = None) -> Any:
        """Call by keyword; options that this build does not accept are omitted."""
        known = {name: value for name, value in (options or {}).items() if self.knows(name)}
        return self._function(**needed, **known)


SCALES_IN_WORD = 4
"""UE8M0 exponents in an element that libraries carry."""


def expect_wire(wire: QuantScheme, library: str) -> None:
    """Raise UnsupportedError for rows in a format that the kernels do not know."""
    if isinstance(wire, Plain) or (isinstance(wire, Fp8Block) and wire.block == (1, SCALE_GROUP)):
        return
    carried = f"it carries bf16, and FP8 with a scale for every {SCALE_GROUP} channels"
    raise UnsupportedError(f"{library} cannot carry {wire.name} rows", [f"{carried} [kernel.wire = plain]"])


def to_library(x_TH: QuantTensor, hidden: int) -> Tensor | tuple[Tensor, Tensor]:
    """Rows padded to `hidden`, and with their scales as elements of 4 bytes where they have any."""
    missing = hidden - x_TH.shape[-1]
    if x_TH.scales is None:
        return pad(x_TH.values, (0, missing)).contiguous()
    as_bytes = pad(x_TH.values.view(torch.uint8), (0, missing)).contiguous()
    scales = x_TH.scales
    if scales.element_size() == 1:
        scales = pad(scales.view(torch.uint8), (0, -scales.shape[1] % SCALES_IN_WORD)).contiguous().view(torch.int32)
    return as_bytes.view(x_TH.values.dtype), scales.contiguous()


def from_library(rows: Tensor | tuple[Tensor, Tensor], wire: QuantScheme, hidden_size: int) -> QuantTensor:
    """The way back: rows, or blocks of them, without their padding.

    Scales of blocks keep the column-major strides that grouped GEMMs want.
    """
    if isinstance(rows, Tensor):
        return QuantTensor(rows[..., :hidden_size], None, wire)
    values, scales = rows
    if scales.dtype == torch.int32:  # four UE8M0 exponents each
        scales = scales.contiguous().view(torch.uint8).view(torch.float8_e8m0fnu)
    scales = scales[..., : -(-hidden_size // SCALE_GROUP)]
    return QuantTensor(values[..., :hidden_size], scales.contiguous() if scales.dim() == 2 else scales, wire)


def padded_row(hidden_size: int, row_bytes: int) -> int:
    """Elements of a bf16 row that fills a multiple of some bytes."""
    return up_to(2 * hidden_size, row_bytes) // 2


def format_reasons(problem: Problem) -> list[Reason]:
    """Libraries send and sum bf16 rows; FP8 rows have a scale for every 128 channels, or do not travel."""
    reasons, asked = [], problem.activations
    if problem.sums != BF16 and problem.sums == problem.dtype:  # the base class has the reason against fp16
        text = f"carries bf16 rows, this layer computes in {problem.dtype.name}"
        reasons.append(Reason("dtype", text, "dtype = bf16"))
    if isinstance(asked, Fp8Block) and asked.block != (1, SCALE_GROUP) and problem.config.kernel.wire != "plain":
        text = f"carries FP8 in groups of 1x{SCALE_GROUP}, not {asked.name}"
        reasons.append(Reason("wire", text, "kernel.wire = plain"))
    return reasons


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
    graph_safe=True,
    deterministic=True,
    met="its Python, over emulated kernels",
)
"""Traits common to the transports of DeepEP and of libraries with its interface."""


@dataclass
class Surface:
    """The calls of one buffer."""

    dispatch: Call
    combine: Call
    layout: Call | None = None
    """Counts before a dispatch, where a dispatch does not count itself."""


DispatchHandle = tuple[Surface, Any]
"""The buffer that a dispatch went through, and the library's handle of it."""


class RowKernels(PrepareFinalize):
    """Dispatch of rows and combine of sums, for kernels that add the sums themselves."""

    relays: ClassVar[bool] = True
    kernels: ClassVar[str]
    """Which; layers of one group share a buffer of the same."""
    later: ClassVar[str]
    """The argument that makes a call return before its kernels finish."""
    _ids_dtype: torch.dtype

    def __init__(self, context: TransportContext) -> None:
        """Check what travels; no buffer is made yet. Raises UnsupportedError."""
        super().__init__(context)
        expect_wire(context.wire, self.traits.library)
        self._numbers = UniformExpertIds(context)
        self._hidden = padded_row(context.hidden_size, HIGH_THROUGHPUT_ROW_BYTES)
        self._session: LibrarySession[Surface] = LibrarySession(context, self.traits.library, self.kernels)

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Return sums to the source ranks, where the library adds them."""
        c, handle = self.context, tokens.handle
        assert isinstance(handle, tuple)
        buffer, library_handle = handle
        y_RH = pad(output.y, (0, self._hidden - c.hidden_size)).contiguous()
        with c.spans.span("combine"):
            with self._session.call("combine"):
                needed = {"x": y_RH, "handle": library_handle, self.later: True, **self._units(combine=True)}
                total_TH, _, event = buffer.combine(needed)
            yield InFlight("combine")
            self._wait(event, "combine")
            y_TH: Tensor = total_TH[:, : c.hidden_size].contiguous()
            return y_TH

    def _sent(self, x_TH: Tensor, routing: Routing) -> dict[str, Any]:
        """Return the arguments of a dispatch. Raises ShapeError for more tokens than the buffer holds."""
        self.expect_room(x_TH)
        return {
            "x": to_library(self.encode(x_TH), self._hidden),
            "topk_idx": self._numbers.of(routing.ids_TK).to(self._ids_dtype).contiguous(),
            "topk_weights": routing.weights_TK.to(torch.float32).contiguous(),
            self.later: True,
            **self._units(combine=False),
        }

    @abstractmethod
    def _units(self, *, combine: bool) -> dict[str, object]:
        """The argument that holds a call to kernel.comm_units; none where that is not set."""

    def _wait(self, event: Any, phase: str) -> None:
        with self._session.call(phase):
            if getattr(event, "event", None) is not None:
                event.current_stream_wait()

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        return [*super().reasons_against(problem), *format_reasons(problem)]


class SlotTransport(PrepareFinalize):
    """Calls that each have a buffer slot of their own, from dispatch to combine."""

    _session: LibrarySession[Any]

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Return sums to the ranks of their tokens, and add up those of this rank's tokens."""
        c, handle = self.context, tokens.handle
        assert isinstance(handle, SlotHandle)
        self._session.expect_open(handle.buffer_slot, handle.call)
        with c.spans.span("combine"):
            with self._session.call("combine"):
                y_TX = self._combine(output.y, handle)
            yield InFlight("combine")
            self._complete(handle)
            handle.buffer_slot.busy = False
            return y_TX[:, : c.hidden_size].contiguous()

    @abstractmethod
    def _combine(self, y: Tensor, handle: Any) -> Tensor:
        """Begin to send outputs back; returns what they add up to, (T, H or more), in memory of its own."""

    def _complete(self, handle: SlotHandle) -> None:
        """The second half of a combine, for libraries that have one."""


ROW_ALIGNMENT = 16
"""Bytes that libraries copy at a time."""


def payloads_of(x_TH: QuantTensor, *, filled: bool = False) -> list[Tensor]:
    """Values, then scales where the scheme has any: (T, X) each. Elements of one byte go as uint8, which all carry.

    filled: all as bytes, each row filled up to 16.
    """
    parts = [part for part in (x_TH.values, x_TH.scales) if part is not None]
    if filled:
        return [pad(part, (0, -part.shape[1] % ROW_ALIGNMENT)).contiguous() for part in map(as_bytes, parts)]
    return [(part.view(torch.uint8) if part.element_size() == 1 else part).contiguous() for part in parts]


def rows_of(parts: Sequence[Tensor], like: QuantTensor) -> QuantTensor:
    """The rows that have arrived as `payloads_of(like)` left, in the dtypes of `like`, without what filled them up."""

    def restored(part_RB: Tensor, like: Tensor) -> Tensor:
        return part_RB.view(torch.uint8)[..., : like.shape[1] * like.element_size()].contiguous().view(like.dtype)

    scales = None if like.scales is None else restored(parts[1], like.scales)
    return replace(like, values=restored(parts[0], like.values), scales=scales)


def wire_bytes(wire: QuantScheme, hidden_size: int) -> int:
    """Bytes of values and scales of one row, each filled up to 16."""
    values = row_bytes(wire, hidden_size) if isinstance(wire, Plain) else hidden_size // wire.per_byte
    scales = row_bytes(wire, hidden_size) - values
    return up_to(values, ROW_ALIGNMENT) + up_to(scales, ROW_ALIGNMENT)
