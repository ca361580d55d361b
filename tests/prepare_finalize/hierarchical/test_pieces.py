"""A relay piece by piece: no bit depends on the size of a piece, and both levels work at once."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_mk.comm import LockstepWorld
from moe_mk.comm.communicator import Communicator
from moe_mk.flight import Flight, interleave
from moe_mk.lab.testing.cases import hostile_routings
from moe_mk.lab.testing.transports import yield_points_of
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import TransportContext
from moe_mk.prepare_finalize.hierarchical import Hierarchical
from moe_mk.quant import BF16, FP8_1x128
from moe_mk.tokens import Routing
from tests.support.one_sided_ranks import there_and_back
from tests.support.problems import problem
from tests.support.tiers import slow

CPU, HIDDEN, EXPERTS, TOP_K, MOST = torch.device("cpu"), 256, 16, 3, 8
CROSSING_US, RELAYING_US = 38.3, 8.0
"""Of a whole batch of 16 tokens: the worked example of CANN's operators, 8 nodes of 8 of which a token visits 4."""


def transports(
    comms: Sequence[Communicator], per_node: int, pieces: int | None, most: int = MOST
) -> list[Hierarchical]:
    place = ExpertMap.linear(EXPERTS, len(comms))
    made = [
        TransportContext(
            comm, place, place.tables(CPU), FP8_1x128, BF16, HIDDEN, TOP_K, CPU, max_num_tokens=most,
            ranks_per_node=per_node, relay_tokens=pieces,
        )
        for comm in comms
    ]  # fmt: skip
    return [Hierarchical(context) for context in made]


def rows(count: int, seed: int) -> Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.row(46, 145)
@pytest.mark.parametrize("ranks,per_node", [(4, 2), *slow((8, 4)), (4, 1)])
def test_output_and_rows_sent_do_not_depend_on_the_size_of_a_piece(ranks: int, per_node: int) -> None:
    for case in hostile_routings(ranks, num_experts=EXPERTS, top_k=TOP_K):
        if len(case.expert_map.experts_of_rank[0]) * ranks != EXPERTS or case.expert_map.num_physical != EXPERTS:
            continue  # placements are not what is tried here
        x = [rows(count, rank) for rank, count in enumerate(case.num_tokens)]
        combined, sent = {}, {}
        sizes = (1, 3, 100) if ranks == 8 else (1, 3, MOST, 100)
        for pieces in (None, *sizes):
            comms = LockstepWorld(ranks).communicators()
            made = transports(comms, per_node, pieces)
            given = zip(made, x, case.routings, strict=True)
            combined[pieces] = interleave([there_and_back(*each) for each in given])
            phases = ("dispatch", "relay", "gather", "combine")
            sent[pieces] = [[dict(comm.traffic.bytes_by_peer[phase]) for phase in phases] for comm in comms]
        for pieces in sizes:
            assert all(torch.equal(a, b) for a, b in zip(combined[pieces], combined[None], strict=True)), (
                case.name,
                pieces,
            )
            assert sent[pieces] == sent[None], (case.name, pieces)


def test_there_are_as_many_hops_for_no_tokens_as_for_all() -> None:
    logs = []
    for count in (0, 5, MOST):
        comms, hops = LockstepWorld(4).communicators(), [[] for _ in range(4)]
        routing = Routing(torch.zeros(count, TOP_K, dtype=torch.int32), torch.ones(count, TOP_K))
        flights = [there_and_back(each, rows(count, 0), routing) for each in transports(comms, 2, 3)]
        interleave([yield_points_of(flight, log) for flight, log in zip(flights, hops, strict=True)])
        logs += hops
    assert all(log == logs[0] for log in logs)
    assert logs[0].count("relay") == 3, "8 tokens in pieces of 3"


class Watched(Communicator):
    """A communicator that notes when each exchange is posted and when it has landed."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.events: list[tuple[str, str, int]] = []

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], phase: str) -> Flight[Tensor]:
        number = sum(event[:2] == ("post", phase) for event in self.events)
        self.events.append(("post", phase, number))
        got = yield from self.comm.all_to_all(rows, send, receive, phase)
        self.events.append(("land", phase, number))
        return got

    def all_gather(self, rows: Tensor, counts: Sequence[int], phase: str) -> Flight[Tensor]:
        raise AssertionError("nothing is gathered")

    def all_reduce(self, x: Tensor, phase: str) -> Flight[Tensor]:
        raise AssertionError("nothing is reduced")


def events_of(tokens: int, pieces: int | None) -> tuple[list[tuple[str, str, int]], list[tuple[str, str, int]]]:
    """What rank 0 did on the way out, and on the way back."""
    watched = [Watched(comm) for comm in LockstepWorld(4).communicators()]
    ids_TK = torch.arange(TOP_K, dtype=torch.int32).mul(5).expand(tokens, TOP_K)  # both nodes
    routing = Routing(ids_TK, torch.ones(tokens, TOP_K))
    interleave([there_and_back(t, rows(tokens, 0), routing) for t in transports(watched, 2, pieces, most=tokens)])
    events = watched[0].events
    split = events.index(("post", "gather", 0))
    return events[:split], events[split:]


@pytest.mark.row(145)
def test_a_piece_crosses_while_the_one_before_it_is_relayed() -> None:
    out, combined = events_of(4, 1)
    for piece in range(3):
        crossing = out.index(("post", "dispatch", piece + 1)), out.index(("land", "dispatch", piece + 1))
        relaying = out.index(("post", "relay", piece)), out.index(("land", "relay", piece))
        assert crossing[0] < relaying[0] < relaying[1] < crossing[1], "in the air together"
        crossing = combined.index(("post", "combine", piece)), combined.index(("land", "combine", piece))
        gathering = combined.index(("post", "gather", piece + 1)), combined.index(("land", "gather", piece + 1))
        assert crossing[0] < gathering[0] < gathering[1] < crossing[1]


def time_of(events: list[tuple[str, str, int]], pieces: int) -> float:
    """Microseconds of these calls if each kind of link carries one piece after the other, and both kinds at once."""
    lasting = {"dispatch": CROSSING_US, "combine": CROSSING_US, "relay": RELAYING_US, "gather": RELAYING_US}
    clock, free, done = 0.0, dict.fromkeys(lasting, 0.0), {}
    for what, phase, number in events:
        if phase in lasting:
            if what == "post":
                free[phase] = done[phase, number] = max(clock, free[phase]) + lasting[phase] / pieces
            else:
                clock = max(clock, done[phase, number])
    return clock


@pytest.mark.row(145)
def test_a_pipeline_of_tokens_takes_little_more_than_the_longer_level() -> None:
    whole, alone = events_of(16, 1), events_of(16, None)
    for way in (0, 1):
        # One level after the other is 46.3 us. In a pipeline what is left over is one token of the shorter level.
        assert time_of(alone[way], 1) == pytest.approx(46.3)
        assert time_of(whole[way], 16) == pytest.approx(CROSSING_US + RELAYING_US / 16)
        assert CROSSING_US < time_of(whole[way], 16) < 41.7


def test_the_plan_knows_a_pipeline() -> None:
    asked = problem("deepseek_v3", "h200", 128, ep=32, max_num_tokens=128)
    whole = Hierarchical.volume(asked)
    pieces = Hierarchical.volume(replace(asked, config=asked.config.with_(relay_tokens=32)))
    assert (whole.collectives, whole.pipelined) == (6, False)
    alone = Hierarchical.volume(replace(asked, config=asked.config.with_(ranks_per_node=1)))
    assert alone.collectives == 3, "nodes of one rank relay nothing: counts, rows out, sums back"
    assert (pieces.collectives, pieces.pipelined) == (1 + 4 * 5, True) and pieces.far_rows == whole.far_rows
