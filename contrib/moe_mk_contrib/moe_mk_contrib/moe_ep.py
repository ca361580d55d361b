"""`flashinfer.moe_ep`: NVLink communication through the interface that FlashInfer maintains since 0.7.1.

    moe_ep_one_sided   rows written into the workspaces of peers, by the kernels of MoeAlltoAll
    moe_ep_cake        the same protocol, by generated kernels for sm_100 and sm_103
    moe_ep_two_sided   rows pushed through FIFOs

One communication object serves one call at a time, so that each call in flight has its own. It takes rows, scales, ids
and weights, and returns room for M rows of every rank with the ids and weights of each row; combine sums the outputs of
ranks. Rows and scales travel as bytes filled up to 16, so that every payload is aligned whatever comes before it.

The ids of a dispatch are both its route and a payload. One-sided kernels find the rank of an id by division, which -1
does not survive: an assignment to no expert repeats the highest id of its token, and a token without any goes to this
rank's own first expert. Their weight is minus infinity, which marks them on arrival. Two-sided kernels take the number
of experts as an id of no rank.

`MoeAlltoAll` and `MnnvlMoe`, which the classes build on, are deprecated for direct use; `nvlink_one_sided` and
`nvlink_two_sided` serve builds before 0.7.1. The Fleet backends of `flashinfer.moe_ep` wrap libraries that have
transports of their own here: `nccl_ep`, `nixl_ep`.
Source: flashinfer-python 0.7.2.post1, moe_ep/core/comm/communication.py and moe_ep/backends/split/comm/.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_mk.config.problem import Problem, Reason
from moe_mk.external.deepep_limits import up_to
from moe_mk.external.library import load
from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.base import TransportContext, TransportTraits
from moe_mk.prepare_finalize.deepep.buffers import MAX_OPEN_CALLS, LibrarySession, SlotHandle
from moe_mk.prepare_finalize.deepep.common import (
    ROW_ALIGNMENT,
    SlotTransport,
    UniformExpertIds,
    payloads_of,
    rows_of,
    wire_bytes,
)
from moe_mk.prepare_finalize.flashinfer.nvlink import (
    LIBRARY,
    LINE_BYTES,
    MULTIPLE,
    NvlinkOneSided,
    NvlinkTwoSided,
    filled_top_k,
    leave_out_once,
    rank_mask,
    routes_of,
    workspace_bytes,
)
from moe_mk.quant.plain import Plain
from moe_mk.tokens import Routing, Tokens

EMULATION = "moe_mk_contrib.emulated.flashinfer_moe_ep"
"""Of `flashinfer.moe_ep`."""
CAKE_ARCHS = ((10, 0), (10, 3))
NOWHERE = -torch.inf
"""The weight of an assignment to no expert."""


class MoeEpTransport(SlotTransport):
    """Dispatch and combine of a communication object."""

    pads_rows: ClassVar[bool] = True
    multiple: ClassVar[int] = 1
    """Divides the number of experts."""

    def __init__(self, context: TransportContext) -> None:
        """Make the first communication object, together with all ranks. Raises LibraryMissing, UnsupportedError."""
        super().__init__(context)
        c = context
        self._moe_ep = load("flashinfer.moe_ep", allow_emulated=c.allow_emulated, emulation=EMULATION)
        self._numbers = UniformExpertIds(c, self.multiple)
        self._hidden = filled_hidden(c.dtype, c.hidden_size)
        config = self._config(0)
        geometry = (config.backend_name, self._hidden, c.max_num_tokens, self._top_k, self._numbers.total)
        self._session: LibrarySession[Any] = LibrarySession(c, LIBRARY, (*geometry, self._longer_wire))
        self._session.open_first_slot(self._communication)

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        c = self.context
        self.expect_room(x_TH)
        x_wire = self.encode(x_TH)
        with c.spans.span("dispatch"):
            buffer_slot = self._session.take("dispatch", self._communication)
            ids_TK, weights_TK = self._routes(routing)
            values, scale = (*payloads_of(x_wire, filled=True), None)[:2]
            with self._session.call("dispatch"):
                got = buffer_slot.buffer.dispatch(
                    values, ids_TK, weights_TK, hidden_states_scale=scale, max_tokens_per_rank=c.max_num_tokens,
                    **self._mask,
                )  # fmt: skip
            yield InFlight("dispatch")
            weights_RK = got.topk_weights[:, : c.top_k]
            slots_RK = self._numbers.slots(got.topk_ids[:, : c.top_k])
            # Behind the rows of a source lie no ids, and any weights.
            slots_RK = torch.where(weights_RK == NOWHERE, -1, slots_RK)
            x_RH = rows_of([got.hidden_states, got.hidden_states_scale], x_wire)
            handle = SlotHandle(buffer_slot, buffer_slot.call)
            return self.window_rows(x_RH, slots_RK, weights_RK, handle, x_TH.shape[0])

    def _combine(self, y: Tensor, handle: SlotHandle) -> Tensor:
        y_RX = pad(y, (0, self._hidden - self.context.hidden_size)).contiguous()
        y_TX: Tensor = handle.buffer_slot.buffer.combine(y_RX, **self._mask)
        return y_TX

    @property
    def _top_k(self) -> int:
        return self.context.top_k

    @property
    def _longer_wire(self) -> int:
        """Bytes by which a row on the wire exceeds one in the dtype of the layer, where that counts."""
        return 0

    @property
    def _mask(self) -> dict[str, Tensor]:
        """The argument for calls that mask ranks; none where the backend has no mask."""
        return {}

    @abstractmethod
    def _config(self, number: int) -> Any:
        """The library's config of the communication object of a number."""

    @abstractmethod
    def _routes(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Ids, int32, and weights, f32, as the library wants them."""

    def _communication(self, number: int) -> Any:
        c, library = self.context, self._moe_ep
        bootstrap = library.BootstrapConfig(
            c.comm.size, c.comm.rank, device=c.device.index, process_group=c.comm.library_group()
        )
        params = library.MoEEpCommParams(
            num_experts=self._numbers.total, top_k=self._top_k, max_tokens_per_rank=c.max_num_tokens,
            hidden_size=self._hidden, dtype=c.dtype.dtype, invalid_expert_id=-1,
        )  # fmt: skip
        return library.create_communication(bootstrap, params, self._config(number))


class MoeEpOneSided(MoeEpTransport):
    """FlashInfer's NVLinkOneSidedAlltoAll."""

    config: ClassVar[str] = "NVLinkOneSidedConfig"
    traits: ClassVar[TransportTraits] = replace(
        NvlinkOneSided.traits,
        summary="FlashInfer moe_ep, rows written straight into peers' memory; inside one NVLink domain",
        met="its Python, over emulated kernels",
    )

    @property
    def _top_k(self) -> int:
        return filled_top_k(self.context.top_k)

    @property
    def _longer_wire(self) -> int:
        c = self.context
        return max(wire_bytes(c.wire, c.hidden_size) - self._hidden * c.dtype.dtype.itemsize, 0)

    @property
    def _mask(self) -> dict[str, Tensor]:
        return {"active_rank_mask": rank_mask(self._session.pool.left_out, self.context.comm.size)}

    def leave_out(self, active_W: Tensor) -> None:
        leave_out_once(self._session, self.active_ranks(active_W))

    def _config(self, number: int) -> Any:
        # A line more for each: the process has one workspace for all objects of one size.
        extra = self._longer_wire + LINE_BYTES * number
        return getattr(self._moe_ep, self.config)(extra_payload_bytes_per_token=extra, enable_rank_mask=True)

    def _routes(self, routing: Routing) -> tuple[Tensor, Tensor]:
        more = self._top_k - self.context.top_k
        ids_TK = pad(self._numbers.of(routing.ids_TK), (0, more), value=-1)
        weights_TK = pad(routing.weights_TK.to(torch.float32), (0, more))
        return routes_of(ids_TK, self._numbers.first), torch.where(ids_TK >= 0, weights_TK, NOWHERE).contiguous()

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        hidden, top_k = problem.config.model.hidden_size, problem.config.router.top_k
        combined = filled_hidden(problem.dtype, hidden) * problem.dtype.dtype.itemsize
        wires = [problem.dtype, *([] if problem.activations is None else [problem.activations])]
        dispatched = max(combined, *(wire_bytes(wire, hidden) for wire in wires))
        filled = filled_top_k(top_k)
        return workspace_bytes(problem.ranks, problem.config.kernel.max_num_tokens, dispatched + 8 * filled, combined)


class MoeEpCake(MoeEpOneSided):
    """FlashInfer's CakeAlltoAll."""

    config: ClassVar[str] = "CakeAlltoAllConfig"
    traits: ClassVar[TransportTraits] = replace(
        MoeEpOneSided.traits,
        summary="FlashInfer moe_ep with generated kernels for sm_100 and sm_103; inside one NVLink domain",
        min_arch=CAKE_ARCHS[0],
    )

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        reasons, arch = super().reasons_against(problem), problem.device.arch
        if problem.device.kind == "cuda" and arch is not None and cls.traits.min_arch <= arch not in CAKE_ARCHS:
            have = "".join(map(str, arch))
            reasons.append(Reason("arch", f"has kernels for sm_100 and sm_103, this device is sm_{have}"))
        return reasons


class MoeEpTwoSided(MoeEpTransport):
    """FlashInfer's NVLinkTwoSidedAlltoAll."""

    multiple: ClassVar[int] = MULTIPLE
    traits: ClassVar[TransportTraits] = replace(
        NvlinkTwoSided.traits,
        summary="FlashInfer moe_ep, rows pushed through FIFOs whose size knows no tokens; inside one NVLink domain",
        open_calls=MAX_OPEN_CALLS,
        met="its Python, over emulated kernels",
    )
    collectives: ClassVar[int] = NvlinkTwoSided.collectives

    def _config(self, number: int) -> Any:
        del number
        return self._moe_ep.NVLinkTwoSidedConfig()

    def _routes(self, routing: Routing) -> tuple[Tensor, Tensor]:
        ids_TK = self._numbers.of(routing.ids_TK, nowhere=self._numbers.total)
        return ids_TK.contiguous(), routing.weights_TK.to(torch.float32).contiguous()

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        return NvlinkTwoSided.buffer_bytes(problem)


def filled_hidden(dtype: Plain, hidden_size: int) -> int:
    """Values of a row that fills a multiple of 16 bytes."""
    return up_to(hidden_size * dtype.dtype.itemsize, ROW_ALIGNMENT) // dtype.dtype.itemsize
