"""Low-latency dispatch and combine in the manner of DeepEP, over blocking exchanges; shared by all of its dialects.

What a kernel leaves undefined is poisoned, orders are drawn from a seeded generator, results become visible when the
hook is called or the event waited for, and a third operation in flight is refused where kernels would lose rows.

What low-latency kernels put on the wire and where they place it: casts, and an unspecified order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.external.deepep_limits import LOW_LATENCY_IN_FLIGHT, SCALE_GROUP, low_latency_bytes
from moe_mk.lab.testing.emulated.events import Arrival, EventHandle, host_assert
from moe_mk.lab.testing.emulated.exchange import Exchange
from moe_mk.lab.testing.emulated.live import swap_among
from moe_mk.lab.testing.emulated.pending import poison

FP8_MAX = 448.0
AMAX_FLOOR = 1e-4


def cast_rows(x_TH: Tensor, *, round_scale: bool, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """FP8 e4m3 values as bytes, and the scale of every 128 channels: f32, or four UE8M0 exponents in an int32."""
    rows, hidden = x_TH.shape
    pieces = x_TH.float().view(rows, hidden // SCALE_GROUP, SCALE_GROUP)
    amax = pieces.abs().amax(dim=2).clamp_min(AMAX_FLOOR)
    if round_scale:
        mantissa, exponent = torch.frexp(amax / FP8_MAX)
        exponent = exponent - (mantissa == 0.5).to(exponent.dtype)  # frexp has mantissas in [0.5, 1)
        scales = torch.exp2(exponent.float())
    else:
        scales = amax / FP8_MAX
    values = (pieces / scales[..., None]).to(torch.float8_e4m3fn).view(rows, hidden).view(torch.uint8)
    if not use_ue8m0:
        return values, scales
    return values, (exponent + 127).to(torch.uint8).contiguous().view(torch.int32)


class Places:
    """Where received rows go: expert by expert, the sources of each in an unspecified order."""

    def __init__(self, expert_R: Tensor, source_R: Tensor, sizes: tuple[int, int], draw: torch.Generator) -> None:
        """sizes: local experts and ranks. Rows of one source must already be shuffled."""
        num_experts, ranks = sizes
        turn_LW = torch.rand((num_experts, ranks), generator=draw, dtype=torch.float32, device="cpu").argsort(dim=1)
        source_of_turn_LW, turn_of_source_LW = turn_LW, turn_LW.argsort(dim=1)
        expert_R, source_R = expert_R.long().cpu(), source_R.cpu()
        turn_R = expert_R * ranks + turn_of_source_LW[expert_R, source_R]
        order_R = turn_R.argsort(stable=True)
        counts_LW = torch.bincount(turn_R, minlength=num_experts * ranks).view(num_experts, ranks)
        begin_LW = counts_LW.cumsum(dim=1) - counts_LW
        first_R = (counts_LW.flatten().cumsum(dim=0) - counts_LW.flatten())[turn_R[order_R]]
        within_R = torch.arange(len(order_R), dtype=torch.int64, device="cpu") - first_R
        self.order_R, self.expert_R = order_R, expert_R[order_R]
        self.place_R = begin_LW.flatten()[turn_R[order_R]] + within_R
        self.counts_L = counts_LW.sum(dim=1).to(torch.int32)
        self.range_LW = torch.empty((num_experts, ranks), dtype=torch.int64, device="cpu")
        self.range_LW.scatter_(1, source_of_turn_LW, (begin_LW << 32) | counts_LW)


def rows_of_source(range_LW: Tensor, source: int) -> tuple[Tensor, Tensor]:
    """Local expert and place of every row that came from one rank."""
    begin_L, counts_L = range_LW[:, source] >> 32, range_LW[:, source] & 0xFFFFFFFF
    expert_X = torch.repeat_interleave(counts_L)
    first_X = (counts_L.cumsum(dim=0) - counts_L)[expert_X]
    within_X = torch.arange(len(expert_X), dtype=torch.int64, device=range_LW.device) - first_X
    return expert_X, begin_L[expert_X] + within_X


Hook = Callable[[], None]


@dataclass(frozen=True)
class Build:
    """Limits for which one library's kernels are compiled."""

    hidden: tuple[int, ...]
    max_top_k: int
    ids_dtype: torch.dtype


@dataclass(frozen=True)
class Shape:
    """Arguments that must be equal on every rank in each call."""

    max_tokens: int
    hidden: int
    num_experts: int


@dataclass(frozen=True)
class Finish:
    """How a caller wants to learn that an operation is done."""

    async_finish: bool
    return_recv_hook: bool


class LowLatency:
    """The low-latency kernels of one rank."""

    def __init__(self, exchange: Exchange, num_bytes: int, build: Build, *, seed: int = 0) -> None:
        self.exchange, self.num_bytes, self.build = exchange, num_bytes, build
        self.masked: set[int] = set()
        self._draw = torch.Generator("cpu").manual_seed(seed + exchange.rank)
        self._in_flight = 0
        self._staged: Tensor | None = None
        self._device = torch.device("cpu")

    def dispatch(
        self, x: Tensor, topk_idx: Tensor, stats: Tensor | None, waits: Tensor | None, shape: Shape,
        casts: tuple[bool, bool, bool], finish: Finish,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, EventHandle | None, Hook | None]:  # fmt: skip
        """casts: use_fp8, round_scale, use_ue8m0. Returns rows, scales, counts, source tokens, ranges, event, hook."""
        self._check_dispatch(x, topk_idx, waits, shape, casts, finish)
        use_fp8, round_scale, use_ue8m0 = casts
        num_local, self._device = shape.num_experts // self.exchange.size, x.device
        wire = cast_rows(x, round_scale=round_scale, use_ue8m0=use_ue8m0) if use_fp8 else (x,)
        mail = self._swap(self._outgoing(wire, topk_idx, num_local), "low-latency dispatch")
        source_R = torch.repeat_interleave(torch.tensor([len(m[-1]) for m in mail], dtype=torch.int64, device="cpu"))
        *parts, expert_R, token_R = (torch.cat(column) for column in zip(*mail, strict=True))
        places = Places(expert_R, source_R, (num_local, self.exchange.size), self._draw)
        arrival, slots = Arrival(), shape.max_tokens * self.exchange.size
        rows_LSH = self._promise(arrival, parts[0], places, (num_local, slots, parts[0].shape[1]))
        if use_fp8:
            rows_LSH = rows_LSH.view(torch.float8_e4m3fn)
        scales = self._promise_scales(arrival, parts[1], places, (num_local, slots)) if use_fp8 else None
        token_LS = self._promise(arrival, token_R[:, None], places, (num_local, slots, 1))[..., 0]
        counts_L, range_LW = places.counts_L.to(x.device), places.range_LW.to(x.device)
        held_L, held_LW = poison(torch.empty_like(counts_L)), poison(torch.empty_like(range_LW))
        arrival.then(lambda: (held_L.copy_(counts_L), held_LW.copy_(range_LW)))
        if stats is not None:
            arrival.then(lambda: stats.add_(counts_L))
        return (rows_LSH, scales, held_L, token_LS, held_LW, *self._finish(arrival, finish))

    def combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, origin: tuple[Tensor, Tensor], shape: Shape,
        copies: tuple[bool, bool], finish: Finish, out: Tensor | None,
    ) -> tuple[Tensor, EventHandle | None, Hook | None]:  # fmt: skip
        """origin: source tokens and ranges of the dispatch. copies: use_logfmt, zero_copy."""
        use_logfmt, zero_copy = copies
        self._check_combine(x, topk_idx, topk_weights, shape, finish, out)
        host_assert(not (use_logfmt and zero_copy), "not (zero_copy and use_logfmt)")
        host_assert(not use_logfmt, "LogFMT is not emulated")
        if zero_copy:
            host_assert(self._staged is not None, "get_next_low_latency_combine_buffer comes before zero_copy")
            x, self._staged = self._staged, None  # type: ignore[assignment]
        num_local, (token_LS, range_LW) = shape.num_experts // self.exchange.size, origin
        parts = []
        for peer in range(self.exchange.size):
            expert_X, place_X = rows_of_source(range_LW * (peer not in self.masked), peer)
            expert_of_all_X = expert_X + self.exchange.rank * num_local
            parts.append([x[expert_X, place_X], expert_of_all_X * shape.max_tokens + token_LS[expert_X, place_X]])
        mail = self._swap(parts, "low-latency combine")
        rows_XH, key_X = (torch.cat(column) for column in zip(*mail, strict=True))
        total_TH = self._weighted_sum(rows_XH, key_X, topk_idx, topk_weights, shape)
        held_TH = poison(torch.empty_like(total_TH) if out is None else out)
        arrival = Arrival()
        arrival.then(lambda: held_TH.copy_(total_TH))
        return (held_TH, *self._finish(arrival, finish))

    def combine_buffer(self, shape: Shape) -> Tensor:
        """The registered memory of the next combine; rows lie apart, as each has room for its scales before it."""
        num_local, meta = shape.num_experts // self.exchange.size, 2 * (shape.hidden // SCALE_GROUP)
        size = (num_local, self.exchange.size * shape.max_tokens, meta + shape.hidden)
        self._staged = poison(torch.empty(size, dtype=torch.bfloat16, device=self._device))[..., meta:]
        return self._staged

    def clean(self, shape: Shape) -> None:
        """Zero the flags of all ranks together."""
        self._check_shape(shape)
        self.exchange.swap([[]] * self.exchange.size, "low-latency clean")

    def _swap(self, parts: list[list[Tensor]], phase: str) -> list[list[Tensor]]:
        """Kernels wait for no rank that is masked, whose process may be gone."""
        live = [rank for rank in range(self.exchange.size) if rank not in self.masked]
        return swap_among(self.exchange, parts, live, phase)

    def _outgoing(self, wire: tuple[Tensor, ...], topk_idx: Tensor, num_local: int) -> list[list[Tensor]]:
        token_X, k_X = torch.nonzero(topk_idx >= 0, as_tuple=True)
        shuffled_X = torch.randperm(len(token_X), generator=self._draw, dtype=torch.int64, device="cpu").to(
            topk_idx.device
        )
        token_X, expert_X = token_X[shuffled_X], topk_idx[token_X, k_X].long()[shuffled_X]
        outgoing = []
        for peer in range(self.exchange.size):
            to_peer_X = (expert_X // num_local == peer) & (peer not in self.masked)
            token_there_X, expert_there_X = token_X[to_peer_X], expert_X[to_peer_X] % num_local
            rows = [part[token_there_X] for part in wire]
            outgoing.append([*rows, expert_there_X.to(torch.int32), token_there_X.to(torch.int32)])
        return outgoing

    def _promise(self, arrival: Arrival, rows: Tensor, places: Places, size: tuple[int, ...]) -> Tensor:
        held = poison(torch.empty(size, dtype=rows.dtype, device=rows.device))
        order_R, expert_R, place_R = (i.to(rows.device) for i in (places.order_R, places.expert_R, places.place_R))
        arrival.then(lambda: held.index_put_((expert_R, place_R), rows[order_R]))
        return held

    def _promise_scales(self, arrival: Arrival, scales: Tensor, places: Places, size: tuple[int, int]) -> Tensor:
        """Column-major in the last two dimensions, as tensor memory accelerators read them."""
        order_R, expert_R, place_R = (i.to(scales.device) for i in (places.order_R, places.expert_R, places.place_R))
        shape = (size[0], scales.shape[1], size[1])
        held = poison(torch.empty(shape, dtype=scales.dtype, device=scales.device)).transpose(1, 2)
        arrival.then(lambda: held.index_put_((expert_R, place_R), scales[order_R]))
        return held

    def _weighted_sum(
        self, rows_XH: Tensor, key_X: Tensor, topk_idx: Tensor, topk_weights: Tensor, shape: Shape
    ) -> Tensor:
        """One slot per expert and token; an unwritten slot holds poison, unless its rank is masked."""
        row_of_key_X = torch.full((shape.num_experts * shape.max_tokens,), -1, dtype=torch.int64, device=rows_XH.device)
        row_of_key_X[key_X.long()] = torch.arange(len(key_X), dtype=torch.int64, device=rows_XH.device)
        token_T = torch.arange(len(topk_idx), dtype=torch.int64, device=rows_XH.device)
        total_TH = torch.zeros((len(topk_idx), shape.hidden), dtype=torch.float32, device=rows_XH.device)
        for ids_T, weights_T in zip(topk_idx.long().unbind(1), topk_weights.unbind(1), strict=True):
            row_T = torch.where(ids_T >= 0, row_of_key_X[ids_T.clamp_min(0) * shape.max_tokens + token_T], -1)
            found_T = row_T >= 0
            total_TH[found_T] += weights_T[found_T, None] * rows_XH[row_T[found_T]].float()
            rank_T = ids_T.clamp_min(0) // (shape.num_experts // self.exchange.size)
            masked_T = sum(((rank_T == rank) for rank in self.masked), start=torch.zeros_like(found_T))
            total_TH[(ids_T >= 0) & ~found_T & ~masked_T.bool()] = torch.nan
        return total_TH.to(torch.bfloat16)

    def _finish(self, arrival: Arrival, finish: Finish) -> tuple[EventHandle | None, Hook | None]:
        self._in_flight += 1
        arrival.then(self._received)
        if finish.return_recv_hook:
            return None, arrival
        if finish.async_finish:
            return EventHandle(arrival), None
        arrival()
        return None, None

    def _received(self) -> None:
        self._in_flight -= 1

    def _check_dispatch(
        self, x: Tensor, topk_idx: Tensor, waits: Tensor | None, shape: Shape, casts: tuple[bool, bool, bool],
        finish: Finish,
    ) -> None:  # fmt: skip
        use_fp8, round_scale, use_ue8m0 = casts
        host_assert(x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16, "x is contiguous bf16 [T, H]")
        self._check_shape(shape)
        self._check_ids(topk_idx, x.shape[0], shape)
        host_assert(x.shape[0] <= shape.max_tokens, "x.size(0) <= num_max_dispatch_tokens_per_rank")
        host_assert(not use_ue8m0 or round_scale, "round_scale for use_ue8m0")
        host_assert(not use_fp8 or shape.hidden % 512 == 0, "hidden % 512 == 0")
        if waits is not None:
            right = waits.dim() == 1 and waits.dtype == torch.int64 and len(waits) == self.exchange.size
            host_assert(right, "dispatch_wait_recv_cost_stats is int64 [ranks]")
        self._check_finish(finish)

    def _check_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, shape: Shape, finish: Finish, out: Tensor | None
    ) -> None:
        self._check_shape(shape)
        slots = shape.max_tokens * self.exchange.size
        size = (shape.num_experts // self.exchange.size, slots, shape.hidden)
        host_assert(tuple(x.shape) == size and x.dtype == torch.bfloat16, f"x is bf16 {list(size)}")
        host_assert(x.is_contiguous(), "x.is_contiguous()")
        self._check_ids(topk_idx, topk_idx.shape[0], shape)
        right = topk_weights.shape == topk_idx.shape and topk_weights.dtype == torch.float32
        host_assert(right and topk_weights.is_contiguous(), "topk_weights is contiguous f32 [T, K]")
        if out is not None:
            right = out.dtype == torch.bfloat16 and out.shape == (len(topk_idx), shape.hidden) and out.is_contiguous()
            host_assert(right, "out is contiguous bf16 [T, H]")
        self._check_finish(finish)

    def _check_ids(self, topk_idx: Tensor, tokens: int, shape: Shape) -> None:
        host_assert(topk_idx.dim() == 2 and topk_idx.is_contiguous(), "topk_idx is contiguous [T, K]")
        host_assert(topk_idx.shape[0] == tokens, "x.size(0) == topk_idx.size(0)")
        host_assert(topk_idx.dtype == self.build.ids_dtype, f"topk_idx is {self.build.ids_dtype}")
        host_assert(topk_idx.shape[1] <= self.build.max_top_k, f"num_topk <= {self.build.max_top_k}")
        host_assert(bool((topk_idx < shape.num_experts).all()), "topk_idx < num_experts")

    def _check_shape(self, shape: Shape) -> None:
        host_assert(shape.hidden in self.build.hidden, f"Unsupported hidden {shape.hidden}")
        host_assert(shape.num_experts % self.exchange.size == 0, "num_experts % num_ranks == 0")
        host_assert(self.exchange.size * shape.max_tokens % 4 == 0, "(num_ranks * max_tokens) % 4 == 0")
        need = low_latency_bytes(shape.max_tokens, shape.hidden, shape.num_experts)
        host_assert(need <= self.num_bytes, f"layout.total_bytes ({need}) <= num_rdma_bytes ({self.num_bytes})")

    def _check_finish(self, finish: Finish) -> None:
        host_assert(not (finish.async_finish and finish.return_recv_hook), "not (async_finish and return_recv_hook)")
        host_assert(self._in_flight < LOW_LATENCY_IN_FLIGHT, "at most two low-latency operations in flight")
