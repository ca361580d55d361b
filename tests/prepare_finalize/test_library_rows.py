"""One dispatch by hand through the transport of every library, over its emulation: rows, sums, padding, failures."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk.errors import CommError, ShapeError
from moe_mk.flight import wait
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.quant import BF16, FP32, MXFP8, NVFP4_TOKENS
from moe_mk.quant.fp8 import FP8_1x128, FP8_1x128_UE8M0
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import BatchedTokens, Routing
from tests.support.library_ranks import ROUTINGS, Ranks, X, combine_all, live_rows, rows_of_expert

OF_ROWS = {"deepep_ht": False, "uccl_ep_ht": False, "nvlink_one_sided": False, "nvlink_two_sided": True}
"""Whether rows are consecutive, and nothing is behind them."""
OF_EXPERTS = ("deepep_ll", "uccl_ep")
ONE_SIDED = ("nvlink_one_sided",)
LATE = [
    ("nvlink_one_sided", 0, "dispatch"),
    ("deepep_ll", 0, "low-latency dispatch"),
    ("deepep_ht", 1, "high-throughput dispatch"),
    ("nvlink_two_sided", 1, "prepare"),
]
"""The rank that calls, and the phase in which it misses the other one."""
FP8 = (FP8_1x128, FP8_1x128_UE8M0)
BLOCKS = ("deepep_ht", "deepep_ll")
ROUNDED = [
    *((name, scheme, 256) for name in BLOCKS for scheme in FP8),
    *((name, FP8_1x128, hidden) for name in ("nvlink_one_sided", "nvlink_two_sided") for hidden in (256, 200)),
    *((name, s, 224) for name in (*ONE_SIDED, "nvlink_two_sided") for s in (MXFP8, NVFP4_TOKENS)),
]


def is_counted(name: str) -> bool:
    """Whether the library returns as many rows as have come; others return room for the tokens of every rank."""
    return PREPARE_FINALIZE[name].traits.library in ("deep_ep", "uccl")


def ranks_of(name: str, wire: QuantScheme | None = None, hidden: int = 2) -> tuple[Ranks, list[Tensor]]:
    """Two ranks and their tokens; libraries that carry no f32 get the same numbers in bf16."""
    batched = PREPARE_FINALIZE[name].traits.produces is BatchedTokens
    dtype: Plain = BF16 if wire or batched or is_counted(name) else FP32
    return Ranks(name, hidden=hidden, wire=wire or dtype, dtype=dtype), [x.to(dtype.dtype) for x in X]


@pytest.mark.row(74)
@pytest.mark.row(76)
@pytest.mark.row(77)
@pytest.mark.row(160)
@pytest.mark.parametrize("name,consecutive", OF_ROWS.items())
def test_each_rank_gets_each_token_once_and_sums_return(name: str, consecutive: bool) -> None:
    ranks, x = ranks_of(name)
    first, second = tokens = ranks.dispatched(x)
    assert live_rows(first) == [((1.0, 2.0), (0, -1), (0.5, 0.0)), ((5.0, 6.0), (0, 1), (0.75, 0.125))]  # a c
    own, moved_up = ((-1, 1), (0.0, 0.25)), ((1, -1), (0.25, 0.0))  # a library may close gaps
    assert live_rows(second) in [[((1.0, 2.0), *a), ((3.0, 4.0), (0, -1), (1.0, 0.0))] for a in (own, moved_up)]  # a b
    assert len(first.x_RH.values) == (2 if is_counted(name) else 2 * 4), "counted rows, or 4 tokens of each rank"
    assert all(bool((t.weights_RK[t.ids_RK < 0] == 0).all()) for t in tokens), "padding weighs nothing"
    assert all(bool(t.x_RH.values.isnan().any()) for t in tokens if not is_counted(name)), "what no token fills is NaN"
    if consecutive:
        assert first.x_RH.values[:2].tolist() == [[1.0, 2.0], [5.0, 6.0]] and bool(first.x_RH.values[2:].isnan().all())
        assert bool((first.ids_RK[2:] == -1).all())
    ranks.expect_sums(tokens)


@pytest.mark.row(47)
@pytest.mark.row(75)
@pytest.mark.row(160)
@pytest.mark.parametrize("name", OF_EXPERTS)
def test_each_expert_gets_its_tokens_and_padding_is_never_read(name: str) -> None:
    ranks, x = ranks_of(name)
    first, second = ranks.dispatched(x)
    assert first.counts_L.tolist() == [2, 1] and second.counts_L.tolist() == [1, 1]
    assert rows_of_expert(first, 0) == [[1.0, 2.0], [5.0, 6.0]] and rows_of_expert(first, 1) == [[5.0, 6.0]]  # a c, c
    assert rows_of_expert(second, 0) == [[3.0, 4.0]] and rows_of_expert(second, 1) == [[1.0, 2.0]]  # b, a
    assert first.x_LSH.shape == (2, 2 * 4, 2) and bool(first.x_LSH.values[0, 2:].isnan().all()), "never written"
    # a: (0.5 x 1 + 0.25 x 8) a; b: 1 x 4 b; d goes nowhere; c: (0.75 x 1 + 0.125 x 2) c
    assert combine_all(ranks, [first, second]) == [[[2.5, 5.0], [12.0, 16.0], [0.0, 0.0]], [[5.0, 6.0]]]


@pytest.mark.row(74)
@pytest.mark.row(77)
@pytest.mark.parametrize("name,scheme,hidden", ROUNDED)
def test_rounded_rows_arrive_bit_for_bit(name: str, scheme: QuantScheme, hidden: int) -> None:
    x = [torch.randn(count, hidden).to(torch.bfloat16) for count in (3, 1)]
    first, second = ranks_of(name, scheme, hidden)[0].dispatched(x)
    (a, b, _), (c,) = (scheme.quantize(part).dequantize(torch.float32).tolist() for part in x)
    if isinstance(first, BatchedTokens):
        assert rows_of_expert(first, 1) == [c] and rows_of_expert(second, 0) == [b]
        return
    for tokens, rows in ((first, [a, c]), (second, [a, b])):
        assert tokens.x_RH.scheme == scheme and [list(row[0]) for row in live_rows(tokens)] == sorted(rows)


@pytest.mark.parametrize("name", ["nvlink_two_sided"])
def test_nothing_is_sent_for_tokens_that_go_nowhere(name: str) -> None:
    nowhere = Routing(torch.full((3, 2), -1, dtype=torch.int32), torch.zeros(3, 2))
    first, second = ranks_of(name)[0].dispatched(routings=[nowhere, ROUTINGS[1]])
    assert live_rows(first) == [((5.0, 6.0), (0, 1), (0.75, 0.125))] and live_rows(second) == []
    assert first.x_RH.values[:, 0].nan_to_num(nan=0.0).tolist() == [5.0] + [0.0] * 7
    assert bool(second.x_RH.values.isnan().all())


@pytest.mark.parametrize("name", ["deepep_ll"])
def test_combine_is_given_the_ids_that_this_rank_dispatched(name: str) -> None:
    (ranks, x), seen = ranks_of(name), []
    for transport in ranks.transports:
        slots = transport._session.pool.slots
        library = slots[0].buffer if slots else transport._session.buffer
        call = library.combine

        def logged(needed: Any, *more: Any, call: Any = call) -> Any:
            seen.append((more[-1] if more else needed["topk_idx"]).tolist())
            return call(needed, *more)

        library.combine = logged
    tokens = ranks.dispatched(x)
    combine_all(ranks, tokens) if isinstance(tokens[0], BatchedTokens) else ranks.expect_sums(tokens)
    assert sorted(seen) == [[[0, 1]], [[0, 3], [2, -1], [-1, -1]]]


@pytest.mark.row(77)
@pytest.mark.parametrize("name", ONE_SIDED)
def test_calls_in_flight_have_workspaces_of_their_own_and_layers_share_them(name: str) -> None:
    ranks, x = ranks_of(name)

    def workspaces(transport: object) -> list[int]:
        twin = type(transport)(transport.context)  # type: ignore[attr-defined, call-arg]
        tokens = [wait(each.prepare(x[0], ROUTINGS[0])) for each in (transport, twin, transport)]  # type: ignore[attr-defined]
        slots = [t.handle.buffer_slot for t in tokens]
        assert slots == transport._session.pool.slots == twin._session.pool.slots  # type: ignore[attr-defined]
        return [id(getattr(slot.buffer, "alltoall", slot.buffer).workspace) for slot in slots]

    assert [len(set(own)) for own in ranks.each(workspaces, ranks.transports)] == [3, 3]


@pytest.mark.parametrize("name", ONE_SIDED)
@pytest.mark.parametrize("top_k,filled", [(3, 4), (8, 8), (9, 10), (19, 22)])
def test_top_k_is_filled_up_to_one_that_the_kernels_know(name: str, top_k: int, filled: int) -> None:
    ranks = Ranks(name, ExpertMap.linear(24, 2), top_k=top_k)
    assert [t._top_k for t in ranks.transports] == [filled] * 2
    routings = [Routing(torch.randperm(24)[None, :top_k].to(torch.int32), torch.ones(1, top_k))] * 2
    tokens = ranks.dispatched([part[:1] for part in X], routings)
    assert all(t.ids_RK.shape[1] == top_k for t in tokens)
    assert sum(int((t.ids_RK >= 0).sum()) for t in tokens) == 2 * top_k


@pytest.mark.parametrize("name", [*OF_ROWS, *OF_EXPERTS])
def test_more_tokens_than_planned_are_refused_before_any_work(name: str) -> None:
    ranks, x = ranks_of(name)
    with pytest.raises(ShapeError, match=r"T=5 tokens, .* 4 .*\[kernel\.max_num_tokens\]"):
        next(ranks.transports[0].prepare(torch.zeros(5, 2, dtype=x[0].dtype), ROUTINGS[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name,rank,phase", LATE)
def test_a_peer_that_never_calls_ends_in_commerror_and_so_does_every_later_call(
    name: str, rank: int, phase: str
) -> None:
    ranks, x = ranks_of(name)
    ranks.world.timeout_s = 0.2
    for text in (rf"phase '{phase}', peer {1 - rank}: is later than 0\.2 s", ".* an earlier call failed"):
        with pytest.raises(CommError, match=f"rank {rank}, {text}"):
            wait(ranks.transports[rank].prepare(x[rank], ROUTINGS[rank]))
