"""DeepEP V2, `ElasticBuffer`: one kernel family for few and many tokens, over NCCL's symmetric windows.

    deepep_v2           a row for each token and rank, in no particular order
    deepep_v2_grouped   a row for each assignment, grouped by expert: the layout that a contiguous grouped GEMM reads

Whether the host waits for counts is an argument of each call: while a graph is captured it does not, and there is room
for rows of the worst routing.

Source: deep_ep.ElasticBuffer of deep_ep 2.1.0 (github.com/deepseek-ai/DeepEP); wants NCCL 2.30.4 or later.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from moe_mk.comm.destinations import expected_groups
from moe_mk.config.problem import Problem, Reason
from moe_mk.external.deepep_limits import HIGH_THROUGHPUT_ROW_BYTES
from moe_mk.external.device import capturing
from moe_mk.external.library import load
from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.base import Budget, TransportContext, TransportTraits
from moe_mk.prepare_finalize.deepep.common import (
    DEEPEP,
    Call,
    DispatchHandle,
    RowKernels,
    Surface,
    from_library,
    padded_row,
)
from moe_mk.quant.fp8 import Fp8Block
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import GroupedTokens, OutputStage, Routing, RowTokens, Tokens
from moe_mk_contrib.deepep_v2_limits import (
    ELASTIC_EXPERTS,
    ELASTIC_EXPERTS_PER_RANK,
    ELASTIC_RANKS,
    ELASTIC_TOP_K,
    elastic_bytes,
    elastic_sms,
)

EMULATION = "moe_mk_contrib.emulated.deep_ep"
"""Of `ElasticBuffer`."""


class ElasticTransport(RowKernels):
    """Dispatch and combine of an elastic buffer."""

    kernels: ClassVar[str] = "elastic"
    later: ClassVar[str] = "async_with_compute_stream"
    expand: ClassVar[bool] = False

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        library = load(self.traits.library, allow_emulated=context.allow_emulated, emulation=EMULATION)
        self._ids_dtype = library.topk_idx_t
        plain_rows = int(not isinstance(context.wire, Fp8Block))
        sizes = (context.max_num_tokens, self._hidden, context.top_k, plain_rows)
        self._session.open(sizes, lambda most: self._made(library, most))

    def _made(self, library: ModuleType, sizes: tuple[int, ...]) -> Surface:
        most, hidden, top_k, plain_rows = sizes
        needed = {
            "group": self.context.comm.library_group(),
            "num_max_tokens_per_rank": most,
            "hidden": hidden,
            "num_topk": top_k,
            "use_fp8_dispatch": not plain_rows,
        }
        buffer = Call(library.ElasticBuffer, list(needed))(needed, {"explicitly_destroy": False})
        by_budget = list(self._units(combine=False))
        dispatch = Call(buffer.dispatch, ["do_expand", "do_cpu_sync", self.later, *by_budget])
        return Surface(dispatch, Call(buffer.combine, ["handle", self.later, *by_budget]))

    def _units(self, *, combine: bool) -> dict[str, object]:
        del combine
        units = self.context.comm_units
        return {} if units is None else {"num_sms": units}

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        c = self.context
        needed = self._sent(x_TH, routing) | {
            "num_experts": self._numbers.total,
            "num_max_tokens_per_rank": c.max_num_tokens,
            "do_expand": self.expand,
            "do_cpu_sync": not capturing(c.device),
        }
        with c.spans.span("dispatch"):
            buffer = self._session.buffer
            with self._session.call("dispatch"):
                rows, slots, weights, handle, event = buffer.dispatch(needed, {"expert_alignment": 1})
            yield InFlight("dispatch")
            self._wait(event, "dispatch")
            x_RH = from_library(rows, c.wire, c.hidden_size)
            tokens = self._tokens(x_RH, slots, weights, (buffer, handle))
            if not isinstance(tokens, RowTokens):
                return tokens
            return replace(tokens, expected_N=self.expected_in_window(x_TH.shape[0]), most_K=self.most_K)

    def _tokens(self, x_RH: QuantTensor, slots_RK: Tensor, weights_RK: Tensor, handle: DispatchHandle) -> Tokens:
        """Rows behind the last that came hold anything at all, and weights are those of all ranks' experts."""
        came = handle[1].psum_num_recv_tokens_per_scaleup_rank[-1]
        number_R = torch.arange(len(slots_RK), dtype=torch.int32, device=slots_RK.device)
        mine_RK = (number_R < came)[:, None] & (slots_RK >= 0)
        slots_RK, weights_RK = torch.where(mine_RK, slots_RK, -1), torch.where(mine_RK, weights_RK, 0.0)
        return RowTokens(x_RH, slots_RK.to(torch.int32), weights_RK, self.context.num_slots, handle=handle)

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """The library's window: rows of every rank, whatever the experts."""
        hidden = padded_row(problem.config.model.hidden_size, HIGH_THROUGHPUT_ROW_BYTES)
        return elastic_bytes(
            problem.config.kernel.max_num_tokens, hidden, problem.config.router.top_k, problem.ranks, fp8=False,
            ranks_per_node=problem.ep_ranks_per_node,
        )  # fmt: skip

    @classmethod
    def own_budget(cls, problem: Problem) -> Budget:
        """The library's formula for the links in the profile; at run time the library queries the links."""
        near, far = problem.device.intra_node_gbs, problem.device.inter_node_gbs
        model, top_k = problem.config.model, problem.config.router.top_k
        # The formula knows of no routing that is limited to groups.
        ranks, nodes = (expected_groups(model.num_experts, top_k, each) for each in (problem.ranks, problem.nodes))
        count = elastic_sms(ranks, nodes, problem.ranks, problem.ep_ranks_per_node, near, far)
        links = f"{near:g} and {far:g} GB/s" if problem.nodes > 1 else f"{near:g} GB/s"
        return Budget(cls.traits.comm_unit, count, f"the library's formula for links of {links}")

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Every limit: ranks, experts, top-k, number formats."""
        reasons = super().reasons_against(problem)
        for code, what, have, most in (
            ("ranks", "ranks", problem.ranks, ELASTIC_RANKS),
            ("experts", "physical experts", problem.slots * problem.ranks, ELASTIC_EXPERTS),
            ("experts", "experts of a rank", problem.slots, ELASTIC_EXPERTS_PER_RANK),
            ("top_k", "experts a token", problem.config.router.top_k, ELASTIC_TOP_K),
        ):
            if have > most:
                reasons.append(Reason(code, f"takes {most} {what}, here are {have}"))
        return reasons


class DeepEPElastic(ElasticTransport):
    """DeepEP V2 with rows; for every phase."""

    traits: ClassVar[TransportTraits] = replace(
        DEEPEP,
        summary="DeepEP V2, one copy of a token per rank, small buffers; for prefill and decoding alike",
        deterministic=False,
        comm_unit="SMs",
    )


class DeepEPElasticGrouped(ElasticTransport):
    """DeepEP V2 with rows grouped by expert; for experts that multiply them as they lie."""

    expand: ClassVar[bool] = True
    traits: ClassVar[TransportTraits] = replace(
        DeepEPElastic.traits,
        summary="DeepEP V2, rows arrive grouped by expert, nothing is permuted; for prefill",
        produces=GroupedTokens,
        wants=OutputStage.WEIGHTED,
        graph_safe=False,  # rows without gaps need their number on the host
    )

    def _tokens(self, x_RH: QuantTensor, slots_RK: Tensor | None, weights_RK: Tensor, handle: DispatchHandle) -> Tokens:
        """Groups lie without gaps, as they are aligned to one row; each assignment has a row of its own."""
        del slots_RK
        upto_L = handle[1].psum_num_recv_tokens_per_expert[: self.context.num_slots].to(torch.int64)
        counts_L = upto_L.diff(prepend=torch.zeros_like(upto_L[:1]))
        rows = len(weights_RK)
        row_N = torch.arange(rows, dtype=torch.int64, device=weights_RK.device)
        return GroupedTokens(x_RH, counts_L, row_N, weights_RK, rows, handle=handle)

    @classmethod
    def max_rows(cls, problem: Problem) -> int:
        """A row for every local assignment of every token."""
        return super().max_rows(problem) * min(problem.config.router.top_k, problem.slots)
