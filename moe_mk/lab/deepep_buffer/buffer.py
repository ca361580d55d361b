"""`Buffer`: DeepEP's calls in both modes, over the transport `one_sided_network`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.groups import communicator
from moe_mk.errors import ConfigError, ShapeError, UnsupportedError
from moe_mk.flight import Flight, wait
from moe_mk.lab.deepep_buffer.calls import (
    CPU,
    FP8_COLUMNS,
    Blocks,
    BufferSettings,
    Config,
    DispatchHandle,
    EventOverlap,
    Hook,
    LowLatencyHandle,
    Received,
)
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.base import TransportContext
from moe_mk.prepare_finalize.one_sided.network import OneSidedNetwork
from moe_mk.quant.fp8 import activation_scheme
from moe_mk.quant.plain import BF16
from moe_mk.quant.tensor import QuantScheme
from moe_mk.shapes import expect
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens


class Buffer:
    """Dispatch and combine with DeepEP's signatures, between CPU processes.

    Every rank of the group makes the same calls in the same order, with any number of tokens, none included.
    """

    num_sms: ClassVar[int] = 20

    def __init__(
        self, group: ProcessGroup | None, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0,
        low_latency_mode: bool = False, num_qps_per_rank: int = 24, allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False, explicitly_destroy: bool = False, enable_shrink: bool = False, comm: object = None,
        *, settings: BufferSettings | None = None,
    ) -> None:  # fmt: skip
        """group: processes with CPU tensors. settings: of the network engine, an addition to DeepEP's arguments.

        Sizes, queue pairs and NVLink options are accepted and have no effect.
        Raises UnsupportedError for enable_shrink and comm, ConfigError without a group.
        """
        del num_nvl_bytes, num_rdma_bytes, num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl
        _refuse("Buffer", enable_shrink="the engine has no rank mask" if enable_shrink else "",
                comm="give a process group" if comm is not None else "")  # fmt: skip
        if group is None:
            raise ConfigError("Buffer: group is None; give the process group of the ranks")
        self.settings = settings or BufferSettings()
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self._comm: Communicator | None = communicator(group, timeout_s=self.settings.timeout_s, layer="deepep_buffer")
        self.rank, self.group_size = self._comm.rank, self._comm.size
        self._transports: dict[Hashable, OneSidedNetwork] = {}

    def destroy(self) -> None:
        """Give up the windows. Raises ConfigError unless made with explicitly_destroy=True."""
        if not self.explicitly_destroy:
            raise ConfigError("destroy: the buffer was made with explicitly_destroy=False")
        self._transports.clear()
        self._comm = None

    @staticmethod
    def is_sm90_compiled() -> bool:
        """False: there are no GPU kernels."""
        return False

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Store an even number, which has no effect. Raises ConfigError for an odd one."""
        if new_num_sms % 2:
            raise ConfigError(f"set_num_sms: {new_num_sms} must be even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event that is done."""
        return EventOverlap()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        del num_ranks
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Buffer.get_dispatch_config(num_ranks)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes for `num_rdma_bytes`: 0, since the first call opens windows of the size it needs."""
        del num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
        return 0

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, previous_event: EventOverlap | None = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:  # fmt: skip
        """Count the tokens of each rank and expert.

        topk_idx: (T, K) int64, -1 for none. Returns tokens per rank, int32 (W,); None, for all ranks are in one
        domain; tokens per expert, int32 (E,); whether a token goes to a rank, bool (T, W); an event.
        Raises ShapeError or ConfigError for ids or numbers of experts that cannot be.
        """
        _check_event("get_dispatch_layout", previous_event, async_finish, allocate_on_comm_stream)
        self._check_ids("get_dispatch_layout", topk_idx, num_experts)
        in_rank_TW = self._ranks_of(topk_idx, num_experts)
        per_expert_E = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).to(torch.int32)
        return in_rank_TW.sum(0, dtype=torch.int32), None, per_expert_E, in_rank_TW, EventOverlap()

    def dispatch(
        self, x: Tensor | tuple[Tensor, Tensor], handle: DispatchHandle | None = None,
        num_tokens_per_rank: Tensor | None = None, num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None, num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None, topk_weights: Tensor | None = None, expert_alignment: int = 1,
        num_worst_tokens: int = 0, config: Config | None = None, previous_event: EventOverlap | None = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> Received:  # fmt: skip
        """Send each token once to every rank that holds one of its experts.

        x: (T, H) bf16. topk_idx: (T, K) int64; topk_weights: (T, K) f32; the counts: of `get_dispatch_layout`.
        Returns rows (R, H), by source rank and then by token; ids local to this rank, int64 (R, K), -1 for experts of
        other ranks; their weights, f32 (R, K); tokens of each local expert, rounded up to expert_alignment; a handle;
        an event. With `handle`, rows of another x go the same way, and all but the rows and the event are None.
        Raises UnsupportedError for a pair (fp8, scales) and num_worst_tokens, ShapeError and ConfigError for arguments
        that do not fit, CommError for a peer that is lost.
        """
        del num_tokens_per_rdma_rank, config
        where = "dispatch"
        _check_event(where, previous_event, async_finish, allocate_on_comm_stream)
        _refuse(where, num_worst_tokens="the host knows the counts" if num_worst_tokens else "",
                x="rows of a pair (fp8, scales) cannot be sent; give bf16" if isinstance(x, tuple) else "")  # fmt: skip
        assert isinstance(x, Tensor)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise ConfigError("dispatch: with a handle, topk_idx and topk_weights must be None")
            hidden = handle.transport.context.hidden_size
            expect("x", x, "T H", torch.bfloat16, CPU, T=handle.routing.num_tokens, H=hidden)
            return self._send(x, handle).x_RH.values.clone(), None, None, None, None, EventOverlap()
        needed = {
            "num_tokens_per_rank": num_tokens_per_rank, "is_token_in_rank": is_token_in_rank,
            "num_tokens_per_expert": num_tokens_per_expert, "topk_idx": topk_idx, "topk_weights": topk_weights,
        }  # fmt: skip
        if missing := [name for name, given in needed.items() if given is None]:
            raise ConfigError(f"dispatch: without a handle, {', '.join(missing)} must be given")
        assert num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None
        assert topk_idx is not None and topk_weights is not None
        num_experts = num_tokens_per_expert.shape[0]
        self._check_ids(where, topk_idx, num_experts)
        expect("x", x, "T H", torch.bfloat16, CPU, T=topk_idx.shape[0])
        expect("topk_weights", topk_weights, "T K", torch.float32, CPU, T=topk_idx.shape[0], K=topk_idx.shape[1])
        if expert_alignment < 1:
            raise ConfigError(f"dispatch: expert_alignment={expert_alignment} must be 1 or more")
        if x.shape[0] > self.settings.max_num_tokens:
            raise ShapeError(
                f"x has T={x.shape[0]} tokens, the buffer takes {self.settings.max_num_tokens} of each rank "
                "[BufferSettings.max_num_tokens]; raise the limit on all ranks"
            )
        if not torch.equal(is_token_in_rank, self._ranks_of(topk_idx, num_experts)):
            raise ConfigError(
                "dispatch: is_token_in_rank is not that of topk_idx; take both of one get_dispatch_layout"
            )
        transport = self._transport(num_experts, x.shape[1], topk_idx.shape[1], self.settings.max_num_tokens, BF16)
        made = DispatchHandle(transport, Routing(topk_idx.to(torch.int32), topk_weights.clone()))
        tokens = self._send(x, made)
        counts_L = torch.bincount(tokens.ids_RK[tokens.ids_RK >= 0].long(), minlength=tokens.num_slots).tolist()
        aligned = [-(-count // expert_alignment) * expert_alignment for count in counts_L]
        weights_RK = torch.where(tokens.ids_RK >= 0, tokens.weights_RK, 0.0)
        return tokens.x_RH.values.clone(), tokens.ids_RK.long(), weights_RK, aligned, made, EventOverlap()

    def combine(
        self, x: Tensor, handle: DispatchHandle, topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None, config: Config | None = None,
        previous_event: EventOverlap | None = None, async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, EventOverlap]:  # fmt: skip
        """Add up, for each token, the rows of all ranks that received it, in f32 and in rank order.

        x: (R, H) bf16, a row for each received row, weighted already. bias: (T, H), added to the sums; or two.
        Returns (T, H) bf16, None, and an event. Raises UnsupportedError for topk_weights, ConfigError for a handle
        whose dispatches were all combined, ShapeError, CommError.
        """
        del config
        _check_event("combine", previous_event, async_finish, allocate_on_comm_stream)
        text = "weights are not reduced; multiply rows by them before combine"
        _refuse("combine", topk_weights=text if topk_weights is not None else "")
        hidden = handle.transport.context.hidden_size
        biases = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        for each in biases:
            expect("bias", each, "T H", torch.bfloat16, CPU, T=handle.routing.num_tokens, H=hidden)
        if handle.tokens:
            expect("x", x, "R H", torch.bfloat16, CPU, R=handle.tokens[-1].ids_RK.shape[0], H=hidden)
        tokens = handle.take()
        y_TH = wait(handle.transport.finalize(ExpertOutput(x, OutputStage.REDUCED), tokens))
        for each in biases:
            y_TH = y_TH + each
        return y_TH, None, EventOverlap()

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Do nothing: windows of the two modes are separate, and flags are never reset."""

    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None, dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True, round_scale: bool = False, use_ue8m0: bool = False, async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, LowLatencyHandle, EventOverlap, Hook | None]:  # fmt: skip
        """Send each token to a slot of each of its experts.

        x: (T, H) bf16, T <= M = num_max_dispatch_tokens_per_rank; topk_idx: (T, K) int64, -1 for none.
        Returns blocks (L, W * M, H) bf16, or e4m3 values with f32 scales (L, W * M, H / 128); received tokens of each
        local expert, int32 (L,); a handle; an event; and, if asked for, a hook that receives: before it has run, blocks
        and counts are not filled. cumulative_local_expert_recv_stats: int32 (L,), the counts are added to it.
        round_scale: scales are powers of two. Every received assignment is a row of its own, as in DeepEP.
        Raises UnsupportedError for use_ue8m0 and dispatch_wait_recv_cost_stats, ConfigError, ShapeError, CommError.
        """
        where, most = "low_latency_dispatch", num_max_dispatch_tokens_per_rank
        _refuse(where, use_ue8m0="scales are f32; round_scale makes them powers of two" if use_ue8m0 else "",
                dispatch_wait_recv_cost_stats="waits are not measured" if dispatch_wait_recv_cost_stats is not None
                else "")  # fmt: skip
        self._check_low_latency(where, async_finish, return_recv_hook)
        self._check_ids(where, topk_idx, num_experts)
        expect("x", x, "T H", torch.bfloat16, CPU, T=topk_idx.shape[0])
        (count, top_k), hidden = topk_idx.shape, x.shape[1]
        if count > most:
            raise ShapeError(f"x has T={count} tokens, num_max_dispatch_tokens_per_rank={most}; raise it on all ranks")
        if use_fp8 and hidden % FP8_COLUMNS:
            raise ShapeError(f"x has H={hidden}, which use_fp8 needs to be a multiple of {FP8_COLUMNS}")
        ordered_TK = topk_idx.sort(dim=1).values
        if ((ordered_TK[:, 1:] == ordered_TK[:, :-1]) & (ordered_TK[:, 1:] >= 0)).any():
            raise ConfigError(f"{where}: topk_idx names an expert twice for one token; blocks have no slot for that")
        local = num_experts // self.group_size
        stats_L = cumulative_local_expert_recv_stats
        if stats_L is not None:
            expect("cumulative_local_expert_recv_stats", stats_L, "L", torch.int32, CPU, L=local)
        wire = activation_scheme(FP8_COLUMNS, ue8m0=round_scale) if use_fp8 else BF16
        # A row an assignment, so that every expert output returns by itself and is weighted at its source.
        transport = self._transport(num_experts, hidden, 1, max(most * top_k, 1), wire)
        blocks = Blocks.empty(local, self.group_size * most, hidden, wire)
        handle = LowLatencyHandle(transport, topk_idx.clone(), most)
        ids_X1 = topk_idx.reshape(-1, 1).to(torch.int32)
        routing = Routing(ids_X1, torch.where(ids_X1 >= 0, 1.0, 0.0))
        flight = transport.prepare(x.repeat_interleave(top_k, dim=0), routing)
        next(flight)  # all rows are sent

        def receive() -> None:
            tokens = wait(flight)
            assert isinstance(tokens, RowTokens)
            handle.tokens, handle.place_R = tokens, blocks.fill(tokens)
            if stats_L is not None:
                stats_L.add_(blocks.counts_L)

        return blocks.received, blocks.counts_L, handle, EventOverlap(), _now_or(return_recv_hook, receive)

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: LowLatencyHandle, use_logfmt: bool = False,
        zero_copy: bool = False, async_finish: bool = False, return_recv_hook: bool = False, out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:  # fmt: skip
        """Return the outputs of all experts to their tokens, and add them up by weight, in f32.

        x: (L, W * M, H) bf16; rows behind the counts are not read. topk_idx: as dispatched; topk_weights: (T, K) f32.
        Returns (T, H) bf16, `out` if given; an event; and, if asked for, a hook that receives.
        Raises UnsupportedError for use_logfmt, zero_copy and combine_wait_recv_cost_stats, ConfigError for a handle
        whose hook has not run or that was combined, ShapeError, CommError.
        """
        where = "low_latency_combine"
        _refuse(where, use_logfmt="outputs are sent in bf16" if use_logfmt else "",
                zero_copy="outputs are copied to the window" if zero_copy else "",
                combine_wait_recv_cost_stats="waits are not measured" if combine_wait_recv_cost_stats is not None
                else "")  # fmt: skip
        self._check_low_latency(where, async_finish, return_recv_hook)
        tokens, place_R, hidden = handle.tokens, handle.place_R, handle.transport.context.hidden_size
        if tokens is None or place_R is None:
            raise ConfigError(f"{where}: run the hook of the dispatch first, and combine each handle once")
        (count, top_k), slots = handle.ids_TK.shape, self.group_size * handle.max_tokens
        expect("x", x, "L S H", torch.bfloat16, CPU, L=tokens.num_slots, S=slots, H=hidden)
        expect("topk_weights", topk_weights, "T K", torch.float32, CPU, T=count, K=top_k)
        if not torch.equal(topk_idx, handle.ids_TK):
            raise ConfigError(f"{where}: topk_idx is not that of the dispatch")
        y_TH = torch.empty((count, hidden), dtype=torch.bfloat16, device=CPU) if out is None else out
        expect("out", y_TH, "T H", torch.bfloat16, CPU, T=count, H=hidden)
        handle.tokens = handle.place_R = None
        weights_TK = torch.where(topk_idx >= 0, topk_weights, 0.0)
        y_RH = x.reshape(-1, hidden)[place_R]
        flight = handle.transport.finalize(ExpertOutput(y_RH, OutputStage.REDUCED), tokens)
        next(flight)  # all rows are sent

        def receive() -> None:
            y_TKH = wait(flight).view(count, top_k, hidden)
            y_TH.copy_((y_TKH.float() * weights_TK[:, :, None]).sum(dim=1))

        return y_TH, EventOverlap(), _now_or(return_recv_hook, receive)

    def get_next_low_latency_combine_buffer(self, handle: object) -> Tensor:
        """Raises UnsupportedError: combine has no zero-copy input."""
        raise _unsupported("get_next_low_latency_combine_buffer", ["there is no zero-copy input of combine"])

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Raises UnsupportedError: the engine has no rank mask."""
        raise _unsupported("low_latency_update_mask_buffer", ["the engine has no rank mask; form a smaller group"])

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Raises UnsupportedError: the engine has no rank mask."""
        raise _unsupported("low_latency_query_mask_buffer", ["the engine has no rank mask"])

    def low_latency_clean_mask_buffer(self) -> None:
        """Raises UnsupportedError: the engine has no rank mask."""
        raise _unsupported("low_latency_clean_mask_buffer", ["the engine has no rank mask"])

    def _send(self, x_TH: Tensor, handle: DispatchHandle) -> RowTokens:
        flight: Flight[object] = handle.transport.prepare(x_TH, handle.routing)
        tokens = wait(flight)
        assert isinstance(tokens, RowTokens)
        handle.tokens.append(tokens)
        return tokens

    def _transport(
        self, num_experts: int, hidden: int, top_k: int, max_tokens: int, wire: QuantScheme
    ) -> OneSidedNetwork:
        """The transport of calls of one shape; made at the first of them, on every rank."""
        if self._comm is None:
            raise ConfigError("the buffer was destroyed")
        key = (num_experts, hidden, top_k, max_tokens, wire.name)
        if key not in self._transports:
            experts = ExpertMap.linear(num_experts, self.group_size)
            context = TransportContext(self._comm, experts, experts.tables(CPU), wire, BF16, hidden, top_k, CPU)
            given = self.settings
            context = replace(
                context, max_num_tokens=max_tokens, ranks_per_node=given.ranks_per_node or 1, network=given.network
            )
            self._transports[key] = OneSidedNetwork(context)
        return self._transports[key]

    def _ranks_of(self, ids_TK: Tensor, num_experts: int) -> Tensor:
        """(T, W): whether a token has an expert on a rank."""
        rank_TK = torch.where(ids_TK >= 0, ids_TK // (num_experts // self.group_size), -1)
        ranks_W = torch.arange(self.group_size, dtype=ids_TK.dtype, device=CPU)
        return (rank_TK[:, :, None] == ranks_W).any(dim=1)

    def _check_ids(self, where: str, ids_TK: Tensor, num_experts: int) -> None:
        if num_experts < 1 or num_experts % self.group_size:
            raise ConfigError(f"{where}: {num_experts} experts do not divide over {self.group_size} ranks")
        expect("topk_idx", ids_TK, "T K", torch.int64, CPU)
        if ((ids_TK < -1) | (ids_TK >= num_experts)).any():
            raise ConfigError(f"{where}: topk_idx must be -1, or 0 <= id < {num_experts}")

    def _check_low_latency(self, where: str, async_finish: bool, return_recv_hook: bool) -> None:
        if not self.low_latency_mode:
            raise ConfigError(f"{where}: make the buffer with low_latency_mode=True")
        if async_finish and return_recv_hook:
            raise ConfigError(f"{where}: async_finish and return_recv_hook exclude each other")


def _now_or(later: bool, receive: Hook) -> Hook | None:
    """The hook if it is asked for; else it runs here. Raises ConfigError where a hook is run again."""
    if not later:
        receive()
        return None
    pending = [receive]

    def hook() -> None:
        if not pending:
            raise ConfigError("this receive hook was run before; each call returns a hook of its own")
        pending.pop()()

    return hook


def _check_event(
    where: str, previous_event: EventOverlap | None, async_finish: bool, allocate_on_comm_stream: bool
) -> None:
    if allocate_on_comm_stream and not (async_finish and previous_event is not None):
        raise ConfigError(f"{where}: allocate_on_comm_stream needs previous_event and async_finish")


def _refuse(where: str, **reasons: str) -> None:
    """Raise UnsupportedError with the reason of every argument that has one."""
    found = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    if found:
        raise _unsupported(where, found)


def _unsupported(where: str, reasons: list[str]) -> UnsupportedError:
    return UnsupportedError(f"{where} is not supported with these arguments over CPU processes", reasons)
