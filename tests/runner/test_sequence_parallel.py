"""Sequence-parallel chunks: sizes by hand, each token computed once, and the output of the path without chunks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk import ConfigError, ParallelGroups, ShapeError
from moe_mk.comm import LockstepWorld, SingleRank
from moe_mk.flight import Flight, InFlight, interleave
from moe_mk.lab.testing.transports import virtual_groups
from moe_mk.layer import MoELayer, SequenceParallelMoE
from moe_mk.layer.sequence_parallel import chunk_sizes, sequence_parallel
from tests.support.layers import HIDDEN, config, layer, tensors

TOP_K = 2


@pytest.mark.row(72)
@pytest.mark.parametrize(
    "tokens,ranks,sizes",
    [
        (7, 4, [2, 2, 2, 1]),
        (8, 4, [2, 2, 2, 2]),
        (5, 4, [2, 2, 1, 0]),
        (1, 4, [1, 0, 0, 0]),
        (0, 4, [0, 0, 0, 0]),
        (7, 1, [7]),
    ],
)
def test_chunks_by_hand(tokens: int, ranks: int, sizes: list[int]) -> None:
    assert chunk_sizes(tokens, ranks) == sizes


@pytest.mark.row(72)
@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 13])
def test_each_token_is_computed_once_and_gathered_in_its_place(tokens: int) -> None:
    computed: list[float] = []

    def double(x_XH: Tensor) -> Flight[Tensor]:
        computed.extend(x_XH[:, 0].tolist())
        yield InFlight("dispatch")
        return 2 * x_XH

    x_TH = torch.arange(tokens * 3, dtype=torch.float32).view(tokens, 3)
    comms = LockstepWorld(4).communicators()
    for y_TH in interleave([sequence_parallel(x_TH, comm, double) for comm in comms]):
        assert torch.equal(y_TH, 2 * x_TH)
    assert sorted(computed) == x_TH[:, 0].tolist()
    assert [comm.traffic.calls_by_phase["sequence gather"] for comm in comms] == [1] * 4


def two_pairs(transport: str) -> tuple[list[MoELayer], list[SequenceParallelMoE]]:
    """Four EP ranks; attention is tensor-parallel over ranks 0 and 1, and over 2 and 3."""
    pairs = [comm for _ in range(2) for comm in LockstepWorld(2).communicators()]
    settings = {"prepare_finalize": transport, "experts": "reference", "num_shared_experts": 1}
    settings |= {"ranks_per_node": 2} if transport == "hierarchical" else {}
    layers = [layer(8, TOP_K, groups, **settings) for groups in virtual_groups(4)]
    return layers, [SequenceParallelMoE(one, pair) for one, pair in zip(layers, pairs, strict=True)]


@pytest.mark.row(71, 72)
@pytest.mark.parametrize("transport", ["all_to_all", "one_sided", "all_gather", "hierarchical"])
@pytest.mark.parametrize("counts", [(7, 4), (1, 0), (0, 0)])
def test_with_chunks_a_layer_gives_what_it_gives_without(transport: str, counts: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(0)
    batch = [torch.randn((count, HIDDEN), generator=draw) for count in counts]
    x = [batch[0], batch[0], batch[1], batch[1]]
    plain, _ = two_pairs(transport)
    whole = interleave([one.steps(own) for one, own in zip(plain, x, strict=True)])
    layers, chunked = two_pairs(transport)
    combined = interleave([one.steps(own) for one, own in zip(chunked, x, strict=True)])
    for got, want in zip(combined, whole, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    assert torch.equal(combined[0], combined[1]) and torch.equal(combined[2], combined[3]), (
        "ranks of a pair agree bit for bit"
    )
    chosen = sum(int(one.expert_load.sum()) for one in layers)
    assert chosen == TOP_K * sum(counts), "each token was computed once"
    assert sum(int(one.expert_load.sum()) for one in plain) == 2 * chosen, "and without chunks twice"


@pytest.mark.row(71)
def test_sliced_experts_are_added_up_before_the_chunks_are_gathered() -> None:
    # EP 2 x TP 2, and sequence-parallel over the EP ranks of each slice, which have the same tokens.
    draw = torch.Generator().manual_seed(1)
    x_TH = torch.randn((7, HIDDEN), generator=draw)
    groups = virtual_groups(2, 2)
    sequence = [LockstepWorld(2).communicators() for _ in range(2)]
    made = [
        SequenceParallelMoE(layer(8, TOP_K, g, experts="reference"), sequence[rank % 2][rank // 2])
        for rank, g in enumerate(groups)
    ]
    combined = interleave([one.steps(x_TH) for one in made])
    (alone,) = interleave([layer(8, TOP_K, ParallelGroups(), experts="reference").steps(x_TH)])
    for y_TH in combined:
        torch.testing.assert_close(y_TH, alone, atol=1e-6, rtol=1e-5)
    phases = [*made[0].layer.tp.traffic.calls_by_phase], [*made[0].comm.traffic.calls_by_phase]
    assert "late reduce" in phases[0] and phases[1] == ["sequence gather"]


def test_one_rank_has_one_chunk_and_bad_tokens_are_refused_before_anything_moves() -> None:
    one = SequenceParallelMoE(layer(8, TOP_K), SingleRank())
    x_TH = torch.randn(5, HIDDEN)
    assert torch.equal(one(x_TH), one.layer(x_TH))
    with pytest.raises(ShapeError, match="hidden_states"):
        one(torch.randn(5, HIDDEN + 1))


def by_token_id(
    ranks: int, vocabulary: int = 10, *, images: bool = False
) -> tuple[list[MoELayer], list[SequenceParallelMoE]]:
    """EP ranks with the same tokens, and layers whose hash table routes token v to experts v and v + 1.

    images: token ids from `vocabulary` on are image tokens, which are routed with a separate bias.
    """
    settings: dict[str, Any] = {"experts": "reference", "hash_vocabulary": vocabulary, "scoring_func": "sqrtsoftplus"}
    table_XK = torch.tensor([[v % 8, (v + 1) % 8] for v in range(vocabulary)])
    named = {**tensors(8), "gate.tid2eid": table_XK}
    if images:
        settings["first_image_token"] = vocabulary
        named["gate.e_score_correction_bias_vl"] = torch.arange(8) / 4
    groups = [ParallelGroups()] if ranks == 1 else virtual_groups(ranks)
    layers = [MoELayer(config(8, TOP_K, **settings), dtype=torch.float32, groups=g).load_weights(named) for g in groups]
    comms = LockstepWorld(ranks).communicators()
    return layers, [SequenceParallelMoE(one, comm) for one, comm in zip(layers, comms, strict=True)]


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 5, 8])
def test_chunks_take_their_token_ids_with_them(tokens: int, images: bool) -> None:
    draw = torch.Generator().manual_seed(2)
    x_TH, ids_T = torch.randn((tokens, HIDDEN), generator=draw), torch.randint(10, (tokens,), generator=draw)
    ids_T += 5 * images
    (alone,), _ = by_token_id(1, images=images)
    want = alone(x_TH, ids_T)
    layers, chunked = by_token_id(4, images=images)
    for got in interleave([one.steps(x_TH, ids_T) for one in chunked]):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    load_E = sum(one.expert_load for one in layers)
    assert torch.equal(load_E, alone.expert_load) and int(alone.expert_load.sum()) == 2 * tokens


@pytest.mark.parametrize(
    "ids,error,complaint",
    [
        (None, ShapeError, "chooses experts by token id; call it with token_ids_T"),
        (torch.arange(4), ShapeError, "token_ids_T"),
        (torch.tensor([0, 1, 2, 3, 10]), ConfigError, r"token ids from 0 to 10 lie outside the table's \[0, 10\)"),
    ],
)
def test_every_rank_refuses_ids_that_only_one_would_meet(
    ids: Tensor | None, error: type[Exception], complaint: str
) -> None:
    # Rank 3 has no token of five (2 2 1 0), rank 2 has the last: each of them must refuse before anything moves.
    _, chunked = by_token_id(4)
    for one in chunked:
        with pytest.raises(error, match=complaint):
            next(one.steps(torch.zeros(5, HIDDEN), ids))
        assert not one.comm.traffic.calls_by_phase and not one.layer.ep.traffic.calls_by_phase


def test_ids_are_without_effect_where_scores_choose() -> None:
    one = SequenceParallelMoE(layer(8, TOP_K), SingleRank())
    x_TH = torch.randn(5, HIDDEN)
    assert torch.equal(one(x_TH, torch.tensor(7)), one(x_TH))
