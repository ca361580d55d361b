"""Dispatch and combine as two functions: all state is in what dispatch returns, no transport object is needed.

    plan      sizes of everything, from numbers alone; raises UnsupportedError for unsupported options
    dispatch  a row for each assignment, grouped by expert, with everything that combine needs
    combine   rows back, times their weights, summed over the experts of each token in order, in f32

For callers that manage experts, streams and memory themselves. The interface, outputs and options are those of CANN's
MoeDistributeDispatch and MoeDistributeCombine (version 2); the functions run over any communicator:

    options = DistributeOptions(num_experts=8)
    rows = wait(distribute_dispatch(x_TH, ids_TK, weights_TK, comm, options))
    y_NH = my_experts(rows.expand_x, rows.expert_token_nums)
    y_TH = wait(distribute_combine(y_NH, ids_TK, weights_TK, rows.expand_idx, rows.ep_recv_counts, comm, options))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.comm.collective import CallGroups, collective
from moe_mk.comm.communicator import Communicator
from moe_mk.errors import ShapeError, UnsupportedError
from moe_mk.flight import Flight
from moe_mk.quant.int8 import INT8_TOKEN
from moe_mk.quant.plain import plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.quant.wire import as_bytes, decode_rows, encode_rows, from_bytes, row_bytes

NO_QUANT, DYNAMIC_INT8 = 0, 2
PREFIX_SUMS, COUNTS = 0, 1
WEIGHT_BYTES, INDEX_BYTES = 4, 8


@dataclass(frozen=True)
class DistributeOptions:
    """Options of both calls, equal on every rank."""

    num_experts: int
    """Routed experts; the same number on each rank, rank 0 holding the first."""
    quant_mode: int = NO_QUANT
    """0 sends rows as they are, 2 rounds each to INT8 with an f32 scale of its own."""
    global_batch: int = 0
    """Maximum number of tokens of all ranks, as ranks times the maximum of one; 0: no limit."""
    token_nums_type: int = COUNTS
    """Whether `expert_token_nums` are counts (1) or running sums (0)."""
    expert_shard_type: int = 0
    shared_expert_num: int = 0
    shared_expert_ranks: int = 0
    comm_quant_mode: int = 0
    tp_size: int = 1
    group_list: Tensor | None = None

    def reasons_against(self, ranks: int) -> list[str]:
        """Every option that is not supported over this number of ranks, with the remedy."""
        asked = {
            "num_experts": (self.num_experts % ranks == 0, f"must divide over {ranks} ranks"),
            "quant_mode": (self.quant_mode in (NO_QUANT, DYNAMIC_INT8), "use 0 (as they are) or 2 (INT8 by token)"),
            "global_batch": (self.global_batch % ranks == 0, f"must be 0 or {ranks} times the most tokens of a rank"),
            "token_nums_type": (self.token_nums_type in (PREFIX_SUMS, COUNTS), "use 0 (running sums) or 1 (counts)"),
            "expert_shard_type": (self.expert_shard_type == 0, "only 0 is served"),
            "shared_expert_num": (self.shared_expert_num == 0, "compute shared experts where their tokens are"),
            "shared_expert_ranks": (self.shared_expert_ranks == 0, "compute shared experts where their tokens are"),
            "comm_quant_mode": (self.comm_quant_mode == 0, "sums are returned unquantised; use 0"),
            "tp_size": (self.tp_size == 1, "gather over TP outside"),
            "group_list": (self.group_list is None, "groups are those of dispatch; leave it out"),
        }
        return [f"{name} = {getattr(self, name)}: {remedy}" for name, (fits, remedy) in asked.items() if not fits]


@dataclass(frozen=True)
class DistributePlan:
    """Maximum sizes of a call, with the worst routing."""

    rows: int
    """Rows that one rank may get."""
    num_bytes: int
    """Bytes of one rank during either call, outputs included, inputs not."""


@dataclass(frozen=True)
class Dispatched:
    """Result of dispatch, by the names of the operator's outputs. N rows lie expert by expert, by source inside."""

    expand_x: Tensor
    """(N, H), in the dtype of x or int8."""
    dynamic_scales: Tensor | None
    """f32 (N), where rows are INT8."""
    expand_idx: Tensor
    """int32 (T K). The place of each assignment among those of this rank to the same expert; -1 goes nowhere."""
    expert_token_nums: Tensor
    """int64 (L). Rows of each local expert, or their running sums."""
    ep_recv_counts: Tensor
    """int32 (L W). Running sums of the rows of each local expert from each rank."""
    tp_recv_counts: Tensor
    """int32 (1). Rows of this rank's TP group, which is one rank."""
    expand_scales: Tensor
    """f32 (N). The routing weight of each row."""


def plan_distribute(
    options: DistributeOptions, *, ranks: int, num_tokens: int, hidden_size: int, top_k: int, dtype: torch.dtype
) -> DistributePlan:
    """Sizes of both calls, before any memory is there. num_tokens: the most that a rank brings.

    Raises UnsupportedError with every option that is not supported.
    """
    _expect_served(options, ranks)
    most = max(num_tokens, options.global_batch // ranks)
    sent, rows = most * top_k, ranks * most * min(top_k, options.num_experts // ranks)
    wire, summed = row_bytes(_wire(options, dtype), hidden_size) + WEIGHT_BYTES, row_bytes(plain(dtype), hidden_size)
    # Dispatch: rows are picked, packed and staged, then arrive, are put in order and taken apart; combine likewise.
    out = 4 * sent * wire + 4 * rows * wire
    back = 3 * rows * summed + 3 * sent * summed + most * 4 * hidden_size * 4
    indices = 12 * INDEX_BYTES * (sent + rows + most) + 16 * INDEX_BYTES * options.num_experts * ranks
    return DistributePlan(rows, max(out, back) + indices)


def _groups_of(*given: object, **named: object) -> CallGroups:
    return CallGroups(next(each for each in (*given, *named.values()) if isinstance(each, Communicator)))


@collective(_groups_of)
def distribute_dispatch(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    comm: Communicator,
    options: DistributeOptions,
    active_T: Tensor | None = None,
) -> Flight[Dispatched]:
    """Send a row for each assignment. active_T: bool; tokens that are not active go nowhere.

    Raises UnsupportedError for options that are not served, ShapeError for more tokens than were planned.
    """
    _expect_served(options, comm.size)
    if options.global_batch and len(x_TH) > options.global_batch // comm.size:
        most = options.global_batch // comm.size
        raise ShapeError(f"{len(x_TH)} tokens exceed {most} of a rank [global_batch = {options.global_batch}]")
    picked_TK = _active(ids_TK, active_T)
    order_X, counts_E = _by_expert(picked_TK, options)
    wire = _wire(options, x_TH.dtype)
    token_X = torch.div(order_X, ids_TK.shape[1], rounding_mode="floor")
    rows_XB = encode_rows(wire.quantize(x_TH))[token_X]
    weights_X = weights_TK.to(torch.float32).flatten()[order_X]
    counts_WL, ones = counts_E.view(comm.size, -1), [1] * comm.size
    received_WL = yield from comm.all_to_all(counts_WL, ones, ones, "dispatch counts")
    sent = counts_WL.sum(dim=1).tolist()
    packed_XB = torch.cat((rows_XB, as_bytes(weights_X[:, None])), dim=1)
    arrived_NB = yield from comm.all_to_all(packed_XB, sent, received_WL.sum(dim=1).tolist(), "dispatch")
    arrived_NB = arrived_NB[_expert_major(received_WL)]
    x_NH = decode_rows(arrived_NB[:, :-WEIGHT_BYTES], wire, x_TH.shape[1])
    nums_L = received_WL.sum(dim=0)
    return Dispatched(
        x_NH.values,
        None if x_NH.scales is None else x_NH.scales.flatten(),
        _places(picked_TK),
        nums_L.cumsum(dim=0) if options.token_nums_type == PREFIX_SUMS else nums_L,
        received_WL.T.flatten().cumsum(dim=0).to(torch.int32),
        received_WL.sum().to(torch.int32)[None],
        from_bytes(arrived_NB[:, -WEIGHT_BYTES:], torch.float32).flatten(),
    )


@collective(_groups_of)
def distribute_combine(
    y_NH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    expand_idx: Tensor,
    ep_recv_counts: Tensor,
    comm: Communicator,
    options: DistributeOptions,
    active_T: Tensor | None = None,
) -> Flight[Tensor]:
    """(T, H): the rows of each token's assignments times their weights, summed in the order of its picks, in f32.

    ids_TK, weights_TK, active_T: as dispatch had them. expand_idx, ep_recv_counts: as it returned them.
    """
    _expect_served(options, comm.size)
    counts_LW = ep_recv_counts.diff(prepend=torch.zeros_like(ep_recv_counts[:1])).view(-1, comm.size).long()
    counts_E = _by_expert(_active(ids_TK, active_T), options)[1]
    by_source_N = _expert_major(counts_LW.T).argsort()
    receive = counts_E.view(comm.size, -1).sum(dim=1).tolist()
    back_XH = yield from comm.all_to_all(y_NH[by_source_N], counts_LW.sum(dim=0).tolist(), receive, "combine")
    first_E = counts_E.cumsum(dim=0) - counts_E
    total_TH = torch.zeros((len(ids_TK), y_NH.shape[1]), dtype=torch.float32, device=y_NH.device)
    for ids_T, weights_T, place_T in zip(
        ids_TK.long().unbind(1), weights_TK.float().unbind(1), expand_idx.view(ids_TK.shape).unbind(1), strict=True
    ):
        token_X = torch.nonzero(place_T >= 0).flatten()
        row_X = first_E[ids_T[token_X]] + place_T[token_X]
        total_TH[token_X] += weights_T[token_X, None] * back_XH[row_X].float()
    return total_TH.to(y_NH.dtype)


def _expect_served(options: DistributeOptions, ranks: int) -> None:
    if reasons := options.reasons_against(ranks):
        raise UnsupportedError("these options of dispatch and combine are not served", reasons)


def _wire(options: DistributeOptions, dtype: torch.dtype) -> QuantScheme:
    return INT8_TOKEN if options.quant_mode == DYNAMIC_INT8 else plain(dtype)


def _active(ids_TK: Tensor, active_T: Tensor | None) -> Tensor:
    return ids_TK if active_T is None else torch.where(active_T[:, None], ids_TK, -1)


def _by_expert(ids_TK: Tensor, options: DistributeOptions) -> tuple[Tensor, Tensor]:
    """Assignments in the order of their experts, those of one expert by token; and how many each expert has."""
    ids_X = ids_TK.flatten().long()
    order_X = ids_X.argsort(stable=True)[int((ids_X < 0).sum()) :]
    return order_X, torch.bincount(ids_X[order_X], minlength=options.num_experts)


def _places(ids_TK: Tensor) -> Tensor:
    """The number of earlier assignments to the same expert; -1 for those that go nowhere."""
    ids_X = ids_TK.flatten().long()
    order_X = ids_X.argsort(stable=True)
    sorted_X = ids_X[order_X]
    number_X = torch.arange(len(ids_X), dtype=torch.int64, device=ids_X.device)
    first_X = torch.searchsorted(sorted_X, sorted_X)
    places_X = torch.empty_like(number_X).index_put_((order_X,), number_X - first_X)
    return torch.where(ids_X >= 0, places_X, -1).to(torch.int32)


def _expert_major(counts_WL: Tensor) -> Tensor:
    """For rows that lie by source and then by expert: their order by expert and then by source."""
    ranks, experts = counts_WL.shape
    expert_WL = torch.arange(experts, dtype=torch.int64, device=counts_WL.device).expand(ranks, experts)
    return torch.repeat_interleave(expert_WL.flatten(), counts_WL.flatten()).argsort(stable=True)
