"""DeepEP V2, `ElasticBuffer`: one kernel family for few and many tokens, over NCCL's symmetric windows.

    deepep_v2           a row for each token and rank, in no particular order
    deepep_v2_grouped   a row for each assignment, grouped by expert: what a contiguous grouped GEMM reads as it lies

Whether the host waits for counts is said in each call: while a graph is captured it does not, and there is room for
rows of the worst routing.

Source: deep_ep.ElasticBuffer of deep_ep 2.1.0 (github.com/deepseek-ai/DeepEP); wants NCCL 2.30.4 or later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_mk.config.problem import Problem, Reason
from moe_mk.external.deepep_limits import (
    ELASTIC_EXPERTS,
    ELASTIC_EXPERTS_PER_RANK,
    ELASTIC_RANKS,
    ELASTIC_TOP_K,
    HIGH_THROUGHPUT_ROW_BYTES,
    elastic_bytes,
)
from moe_mk.external.device import capturing
from moe_mk.external.library import load
from moe_mk.flight import Flight, InFlight
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize, TransportContext, TransportTraits, Volume
from moe_mk.prepare_finalize.even_numbers import EvenNumbers
from moe_mk.prepare_finalize.library_calls import Call
from moe_mk.prepare_finalize.library_rows import (
    bf16_reasons,
    fp8_reasons,
    from_library,
    no_more_tokens,
    one_row_a_rank,
    padded_row,
    to_library,
)
from moe_mk.prepare_finalize.row_payloads import LibrarySession
from moe_mk.quant.fp8_block import Fp8Block
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import ExpertOutput, GroupedTokens, OutputStage, Routing, RowTokens, Tokens


@dataclass(frozen=True)
class WayHome:
    """The library's handle of one dispatch."""

    handle: object


class ElasticTransport(PrepareFinalize):
    """Dispatch and combine of an elastic buffer."""

    expand: ClassVar[bool] = False

    def __init__(self, context: TransportContext) -> None:
        """Make the library's buffer; every rank at once. Raises LibraryMissing, UnsupportedError or CommError."""
        super().__init__(context)
        self._numbers = EvenNumbers(context)
        self._hidden = padded_row(context.hidden_size, HIGH_THROUGHPUT_ROW_BYTES)
        library = load(self.traits.library, allow_emulated=context.allow_emulated)
        self._ids_dtype = library.topk_idx_t
        self._session = LibrarySession(context, self.traits.library)
        needed = {
            "group": context.comm.library_group(),
            "num_max_tokens_per_rank": context.max_num_tokens,
            "hidden": self._hidden,
            "num_topk": context.top_k,
            "use_fp8_dispatch": isinstance(context.wire, Fp8Block),
        }
        with self._session.call("set-up"):
            buffer = Call(library.ElasticBuffer, list(needed))(needed, {"explicitly_destroy": False})
        self._dispatch = Call(buffer.dispatch, ["do_expand", "do_cpu_sync", "async_with_compute_stream"])
        self._combine = Call(buffer.combine, ["handle", "async_with_compute_stream"])

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        """Send each token to the ranks of its experts."""
        c = self.context
        no_more_tokens(x_TH, c.max_num_tokens)
        needed = {
            "x": to_library(self.encode(x_TH), self._hidden),
            "topk_idx": self._numbers.of(routing.ids_TK).to(self._ids_dtype).contiguous(),
            "topk_weights": routing.weights_TK.to(torch.float32).contiguous(),
            "num_experts": self._numbers.total,
            "num_max_tokens_per_rank": c.max_num_tokens,
            "do_expand": self.expand,
            "do_cpu_sync": not capturing(c.device),
            "async_with_compute_stream": True,
        }
        with c.spans.span("dispatch"):
            with self._session.call("dispatch"):
                rows, slots, weights, handle, event = self._dispatch(needed, {"expert_alignment": 1})
            yield InFlight("dispatch")
            with self._session.call("dispatch"):
                event.current_stream_wait()
            return self._tokens(from_library(rows, c.wire, c.hidden_size), slots, weights, handle)

    def _tokens(self, x_RH: QuantTensor, slots_RK: Tensor, weights_RK: Tensor, handle: Any) -> Tokens:
        """Rows behind the last that came hold anything at all, and weights are those of all ranks' experts."""
        came = handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        number_R = torch.arange(len(slots_RK), dtype=torch.int32, device=slots_RK.device)
        mine_RK = (number_R < came)[:, None] & (slots_RK >= 0)
        slots_RK, weights_RK = torch.where(mine_RK, slots_RK, -1), torch.where(mine_RK, weights_RK, 0.0)
        return RowTokens(x_RH, slots_RK.to(torch.int32), weights_RK, self.context.num_slots, handle=WayHome(handle))

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        """Send rows home, where the library adds them up."""
        c, home = self.context, tokens.handle
        assert isinstance(home, WayHome)
        y_RH = pad(output.y, (0, self._hidden - c.hidden_size)).contiguous()
        with c.spans.span("combine"):
            with self._session.call("combine"):
                needed = {"x": y_RH, "handle": home.handle, "async_with_compute_stream": True}
                total_TH, _, event = self._combine(needed)
            yield InFlight("combine")
            with self._session.call("combine"):
                event.current_stream_wait()
            y_TH: Tensor = total_TH[:, : c.hidden_size].contiguous()
            return y_TH

    @classmethod
    def volume(cls, problem: Problem) -> Volume:
        """The same rows as V1, in one launch each way."""
        return one_row_a_rank(problem, collectives=2)

    @classmethod
    def max_rows(cls, problem: Problem) -> int:
        """All tokens of all ranks may want an expert of this one."""
        return problem.num_tokens * problem.ranks

    @classmethod
    def buffer_bytes(cls, problem: Problem) -> int:
        """The library's window: rows of every rank, whatever the experts."""
        hidden = padded_row(problem.config.model.hidden_size, HIGH_THROUGHPUT_ROW_BYTES)
        return elastic_bytes(
            problem.config.kernel.max_num_tokens, hidden, problem.config.router.top_k, problem.ranks, fp8=False,
            ranks_per_node=problem.ep_ranks_per_node,
        )  # fmt: skip

    @classmethod
    def reasons_against(cls, problem: Problem) -> list[Reason]:
        """Every limit: ranks, experts, top-k, number formats."""
        reasons = [*super().reasons_against(problem), *bf16_reasons(problem), *fp8_reasons(problem)]
        for code, what, have, most in (
            ("ranks", "ranks", problem.ranks, ELASTIC_RANKS),
            ("experts", "physical experts", problem.slots * problem.ranks, ELASTIC_EXPERTS),
            ("experts", "experts of a rank", problem.slots, ELASTIC_EXPERTS_PER_RANK),
            ("top_k", "experts a token", problem.config.router.top_k, ELASTIC_TOP_K),
        ):
            if have > most:
                reasons.append(Reason(code, f"takes {most} {what}, here are {have}"))
        return reasons


@PREPARE_FINALIZE.register("deepep_v2")
class DeepEPElastic(ElasticTransport):
    """DeepEP V2 with rows; for every phase."""

    traits: ClassVar[TransportTraits] = TransportTraits(
        summary="DeepEP V2, one copy of a token per rank, small buffers; for prefill and decoding alike",
        kinds=frozenset({"cuda"}),
        min_arch=(9, 0),
        library="deep_ep",
        extra="pip install sgl-deep-ep, or build DeepEP",
        produces=RowTokens,
        wants=OutputStage.REDUCED,
        wire=frozenset({"plain", "fp8"}),
        min_ranks=2,
        blocking=True,
        deterministic=False,
    )


@PREPARE_FINALIZE.register("deepep_v2_grouped")
class DeepEPElasticGrouped(ElasticTransport):
    """DeepEP V2 with rows grouped by expert; for experts that multiply them as they lie."""

    expand: ClassVar[bool] = True
    traits: ClassVar[TransportTraits] = TransportTraits(
        summary="DeepEP V2, rows arrive grouped by expert, nothing is permuted; for prefill",
        kinds=frozenset({"cuda"}),
        min_arch=(9, 0),
        library="deep_ep",
        extra="pip install sgl-deep-ep, or build DeepEP",
        produces=GroupedTokens,
        wants=OutputStage.WEIGHTED,
        wire=frozenset({"plain", "fp8"}),
        min_ranks=2,
        blocking=True,
        deterministic=False,
        graph_safe=False,  # rows without gaps need their number on the host
    )

    def _tokens(self, x_RH: QuantTensor, slots_RK: Tensor | None, weights_RK: Tensor, handle: Any) -> Tokens:
        """Groups lie without gaps, as they are aligned to one row; each assignment has a row of its own."""
        del slots_RK
        upto_L = handle.psum_num_recv_tokens_per_expert[: self.context.num_slots].to(torch.int64)
        counts_L = upto_L.diff(prepend=torch.zeros_like(upto_L[:1]))
        rows = len(weights_RK)
        row_N = torch.arange(rows, dtype=torch.int64, device=weights_RK.device)
        return GroupedTokens(x_RH, counts_L, row_N, weights_RK, rows, handle=WayHome(handle))

    @classmethod
    def max_rows(cls, problem: Problem) -> int:
        """A row for every local assignment of every token."""
        return super().max_rows(problem) * min(problem.config.router.top_k, problem.slots)
