"""The number of assignments that a rank expects: from shapes, whatever part of a window is filled."""

from dataclasses import replace

import pytest
import torch

from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.flight import interleave
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.tokens import Routing, RowTokens
from tests.support.one_sided_ranks import context

RANKS, EXPERTS, TOP_K, TOKENS = 4, 16, 4, 96


def routing(seed: int) -> Routing:
    draw = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand((TOKENS, EXPERTS), generator=draw).argsort(dim=1)[:, :TOP_K].to(torch.int32)
    return Routing(ids_TK, torch.ones(ids_TK.shape))


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "replicated"])
def test_a_transport_expects_as_many_assignments_as_uniform_routing_brings(name: str) -> None:
    comms = LockstepWorld(RANKS).communicators()
    ranks = [PREPARE_FINALIZE[name](context(c, experts=EXPERTS, hidden=8, top_k=TOP_K)) for c in comms]
    batches = [(torch.zeros((TOKENS, 8)), routing(0 if name == "replicated" else r)) for r in range(RANKS)]
    arrived = interleave([each.prepare(*batch) for each, batch in zip(ranks, batches, strict=True)])
    kept = sum(int((tokens.ids_RK >= 0).sum()) for tokens in arrived if isinstance(tokens, RowTokens)) / RANKS
    ids = arrived[0].ids_RK.numel()
    for tokens in arrived:
        assert tokens.expected_N == pytest.approx(kept, rel=0.1)
    assert kept < 0.6 * ids, "the number of ids is no estimate"


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "replicated", "hierarchical"])
@pytest.mark.parametrize("experts,most", [(RANKS, 1), (2 * RANKS, 2), (EXPERTS, TOP_K)])
def test_a_row_has_at_most_as_many_assignments_as_a_rank_has_experts(name: str, experts: int, most: int) -> None:
    comms = LockstepWorld(RANKS).communicators()
    ranks = [PREPARE_FINALIZE[name](context(c, experts=experts, hidden=8, top_k=TOP_K)) for c in comms]
    ids_TK = torch.rand((TOKENS, experts)).argsort(dim=1)[:, :TOP_K].to(torch.int32)
    given = Routing(ids_TK, torch.ones(ids_TK.shape))
    for tokens in interleave([each.prepare(torch.zeros((TOKENS, 8)), given) for each in ranks]):
        assert isinstance(tokens, RowTokens) and tokens.most_K == most
        assert int((tokens.ids_RK >= 0).sum(1).max()) <= most


def test_rows_that_reach_a_rank_have_at_least_one_expert_there() -> None:
    (one,) = LockstepWorld(1).communicators()
    alone = PREPARE_FINALIZE["no_ep"](context(one, experts=EXPERTS, top_k=TOP_K))
    assert alone.expected_of_rows(10) == alone.expected_of_tokens(10) == 40.0
    comms = LockstepWorld(8).communicators()
    eighth = PREPARE_FINALIZE["all_to_all"](replace(context(comms[0], experts=256, top_k=8), max_num_tokens=1))
    assert eighth.context.share == 0.125
    assert eighth.expected_of_rows(672) / 32 == pytest.approx(32.0, rel=0.01), "EP = 8, 128 tokens a rank"
    assert eighth.expected_of_rows(0) == 0.0
