"""Plans of tiles, micro-batches as tiles, events that show what overlapped, and tiles that leave for the next stage."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.comm.threads import ThreadWorld
from moe_mk.errors import ConfigError
from moe_mk.flight import Flight, InFlight, interleave, wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.testing.cases import hostile_routings
from moe_mk.lab.testing.transports import NO_WEIGHTS
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.runner import MicroBatch, StageLink, TileRecord, TileWork, in_turns, plan_for, tile_sizes
from moe_mk.runner.tiles import Event, Step, TilePlan, deepest
from moe_mk.tokens import Routing
from moe_mk.weights.expert_weights import Weights
from tests.runner.tile_ranks import CPU, Meeting, Ranks, Rendezvous, both_ways, in_tiles, no_thread_is_left
from tests.support.formats import EXPERTS, FORMATS, HIDDEN, TOP_K, kernels_of


def words(plan: TilePlan) -> str:
    return " ".join(map(str, plan.order))


@pytest.mark.row(42)
@pytest.mark.parametrize(
    "plan,order",
    [
        # Tile 2 goes out and tile 0 returns while tile 1 is multiplied.
        (TilePlan(3), "D0i D0r / D1i M0 D1r / C0i D2i M1 C0r D2r / C1i M2 C1r / C2i C2r"),
        (TilePlan(1), "D0i D0r / M0 / C0i C0r"),
        # Two open: the next goes out meanwhile, nothing returns.
        (TilePlan(3, 2), "D0i D0r / D1i M0 D1r C0i C0r / D2i M1 D2r C1i C1r / M2 C2i C2r"),
        (TilePlan(2, 1), "D0i D0r M0 C0i C0r / D1i D1r M1 C1i C1r"),
        # S0 is under way while tile 1 returns; it is waited for before S1 leaves.
        (TilePlan(2, 3, True), "D0i D0r / D1i M0 D1r / C0i M1 C0r S0i / C1i C1r S0r S1i / S1r"),
    ],
)
def test_order_by_hand(plan: TilePlan, order: str) -> None:
    assert words(plan) == order.replace("/ ", "")


def test_needs_by_hand() -> None:
    # Of two tiles at a time the third may leave when the first has returned.
    plan = TilePlan(4, 2, True)
    needs = {str(step): " ".join(map(str, plan.needs(step))) for step in plan.order}
    assert [needs[f"D{tile}i"] for tile in range(4)] == ["", "", "C0r", "C1r"]
    last = {step: needs[step] for step in ("D3r", "M3", "C3i", "C3r", "S3i", "S3r")}
    assert last == {"D3r": "D3i", "M3": "D3r", "C3i": "M3", "C3r": "C3i", "S3i": "C3r", "S3r": "S3i"}


@pytest.mark.row(42)
@pytest.mark.parametrize("tiles,depth,onward", list(product([1, 2, 3, 4, 9], [1, 2, 3], [False, True])))
def test_the_order_meets_every_need_and_no_limit_is_passed(tiles: int, depth: int, onward: bool) -> None:
    plan = TilePlan(tiles, depth, onward)
    done, open_now, flying, most_open, most_flying = set(), 0, 0, 0, 0
    for step in plan.order:
        assert set(plan.needs(step)) <= done, f"{step} before {plan.needs(step)}"
        done.add(step)
        if step.kind in "DC":
            flying += {"i": 1, "r": -1}[step.half]
        open_now += {"Di": 1, "Cr": -1}.get(step.kind + step.half, 0)
        most_open, most_flying = max(most_open, open_now), max(most_flying, flying)
    assert (open_now, flying) == (0, 0)
    assert len(plan.order) == len(done) == tiles * (7 if onward else 5), "each step of each tile, once"
    assert most_open <= min(depth, tiles) and most_flying <= (2 if depth == 3 else 1)


@pytest.mark.row(42)
def test_lanes_hold_all_steps_in_their_order() -> None:
    plan = TilePlan(3, onward=True)
    carry, experts, onward = (" ".join(map(str, plan.workers[lane])) for lane in ("comm", "experts", "onward"))
    assert carry == "D0i D0r D1i D1r C0i D2i C0r D2r C1i C1r C2i C2r"
    assert experts == "M0 M1 M2" and onward == "S0i S0r S1i S1r S2i S2r"
    assert set(TilePlan(3).workers) == {"comm", "experts"}


@pytest.mark.parametrize(
    "open_calls,in_flight,depth",
    [(None, None, 3), (None, 2, 3), (None, 1, 2), (3, None, 3), (2, None, 2), (2, 2, 2), (1, None, 1), (8, 1, 2)],
)
def test_a_plan_is_as_deep_as_the_transport_allows(open_calls: int | None, in_flight: int | None, depth: int) -> None:
    assert deepest(open_calls, in_flight) == depth


@pytest.mark.parametrize("tiles,depth", [(0, 3), (-1, 1), (2, 0), (2, 4)])
def test_plans_that_cannot_be(tiles: int, depth: int) -> None:
    with pytest.raises(ConfigError, match=rf"{tiles} tiles, {depth} deep: at least one tile, and depth 1, 2 or 3"):
        TilePlan(tiles, depth)


def recorded(text: str) -> TileRecord:
    """A record from words such as D0i( for a beginning and D0i) for an end, a second apart."""
    record = TileRecord()
    for second, word in enumerate(text.split()):
        half = word[2:-1]
        step = Step(word[0], half, int(word[1]))  # type: ignore[arg-type]
        record.events.append(Event(step, "begins" if word[-1] == "(" else "ends", float(second)))
    return record


def test_a_journey_lasts_from_its_issue_until_it_is_received() -> None:
    # D0 from 0 to 3, M0 from 4 to 5.
    record = recorded("D0i( D0i) D0r( D0r) M0( M0)")
    assert [(i.name, i.first, i.last, i.start, i.end) for i in record.intervals()] == [
        ("D0", 0, 3, 0.0, 3.0),
        ("M0", 4, 5, 4.0, 5.0),
    ]
    assert record.overlaps() == [] and record.hidden_share() == 0.0


@pytest.mark.row(42)
def test_overlap_is_read_from_the_order_of_events() -> None:
    # D1 from 4 to 9, M0 from 6 to 7: one second of the 3 + 5 on the way was hidden.
    record = recorded("D0i( D0i) D0r( D0r) D1i( D1i) M0( M0) D1r( D1r)")
    assert record.overlaps() == [("D1", "M0")]
    assert record.hidden_share() == pytest.approx(1 / 8)
    assert [(s.stage, s.start, s.end) for s in record.spans()] == [
        ("dispatch", 0.0, 3.0),
        ("dispatch", 4.0, 9.0),
        ("experts", 6.0, 7.0),
    ]


def test_steps_of_one_tile_are_no_overlap_and_what_never_ended_is_no_interval() -> None:
    assert recorded("D0i( M0( D0r) M0)").overlaps() == []
    assert recorded("D0i( M1( M1)").overlaps() == []
    assert recorded("M0( M0)").hidden_share() is None


RANKS = 2
FORM = FORMATS[1]


def kernels(transport: str) -> list[tuple[FusedMoEKernel, Weights]]:
    return kernels_of(FORM, transport, ExpertMap.linear(EXPERTS, 1 if transport == "no_ep" else RANKS))


def batches(rank: int, counts: tuple[int, ...]) -> list[MicroBatch]:
    made = []
    for number, count in enumerate(counts):
        draw = torch.Generator().manual_seed(10 * number + rank)
        x_TH = torch.randn((count, HIDDEN), generator=draw).to(FORM.dtype.dtype)
        ids_TK = torch.rand((count, EXPERTS), generator=draw).argsort(dim=1)[:, :TOP_K].to(torch.int32)
        made.append(MicroBatch(x_TH, Routing(ids_TK, torch.rand(ids_TK.shape, generator=draw))))
    return made


def in_turn(
    kernel: FusedMoEKernel, weights: Weights, given: list[MicroBatch], record: TileRecord | None = None
) -> Flight[list[Tensor]]:
    transport = kernel.prepare_finalize
    work = TileWork(transport, lambda tokens: kernel.multiply(tokens, weights), given)
    return in_turns(work, plan_for(transport, len(given)), record or TileRecord())


@pytest.mark.row(48)
@pytest.mark.parametrize("transport", ["no_ep", "all_to_all", "one_sided"])
@pytest.mark.parametrize("counts", [(3,), (5, 2), (5, 0, 2), (1, 2, 3, 4, 0, 6)])
def test_micro_batches_of_any_sizes_take_turns_with_the_bits_of_one_after_the_other(
    transport: str, counts: tuple[int, ...]
) -> None:
    ranks = kernels(transport)
    records = [TileRecord() for _ in ranks]
    outputs = interleave([
        in_turn(kernel, weights, batches(rank, counts), records[rank])
        for rank, (kernel, weights) in enumerate(ranks)
    ])  # fmt: skip
    for record, (kernel, _) in zip(records, ranks, strict=True):
        began = [str(event.step) for event in record.events if event.what == "begins"]
        assert began == [str(step) for step in plan_for(kernel.prepare_finalize, len(counts)).order]
        in_flight = list(accumulate({"i": 1, "r": -1}.get(name[-1], 0) for name in began))
        assert max(in_flight) <= 2 and in_flight[-1] == 0, "two alternating buffers are enough"
    # The same kernels, one batch after the other.
    for number in range(len(counts)):
        alone = interleave([
            kernel.steps(*vars(batches(rank, counts)[number]).values(), weights)
            for rank, (kernel, weights) in enumerate(ranks)
        ])  # fmt: skip
        assert all(torch.equal(outputs[rank][number], alone[rank]) for rank in range(len(ranks)))


TILES = 4


def links() -> list[list[StageLink]]:
    """Of each EP rank: the ends at the earlier and the later stage."""
    return [[StageLink(comm) for comm in ThreadWorld(2).communicators()] for _ in range(2)]


def meeting_send(link: StageLink, meeting: Meeting, tile: int, y_XH: Tensor) -> Flight[None]:
    """Send; tile 0 is under way until somebody else comes to the meeting."""
    yield from link.send(tile, y_XH)
    if tile == 0:
        meeting.wait()


def later_stage(link: StageLink, kernel: Any, num_tokens: int, routing: Any) -> Tensor:
    """Receive tile by tile, then run the stage's own layer tile by tile."""
    sizes = tile_sizes(num_tokens, TILES)
    tiles = [wait(link.receive(size, HIDDEN, torch.bfloat16, CPU)) for size in sizes]
    assert [len(tile) for tile in tiles] == list(sizes)
    return wait(kernel.steps(torch.cat(tiles), routing, NO_WEIGHTS))


@pytest.mark.row(28, 42)
@pytest.mark.parametrize("case", [0, 2, 4], ids=["even", "an idle rank", "uneven"])
def test_a_tile_goes_to_the_next_stage_while_the_next_one_returns(case: int) -> None:
    """S0 and C1 end only together, and the later stage gets what one stage after the other would give it."""
    given = hostile_routings(2)[case]
    early, late = (Ranks("all_to_all", given, threads=True) for _ in range(2))
    first = early.forward(early.kernels)
    once_more = zip(late.kernels, first, given.routings, strict=True)
    serial = late.fly([kernel.steps(x_TH, routing, NO_WEIGHTS) for kernel, x_TH, routing in once_more])
    jobs, records = [], [TileRecord(), TileRecord()]
    for rank, (here, there) in enumerate(links()):
        meeting = Meeting(2)
        transport = Rendezvous(early.kernels[rank].prepare_finalize, {"C1": meeting})
        settings = {"executor": "thread", "record": records[rank], "prepare_finalize": transport}
        leave = partial(meeting_send, here, meeting)
        stage = in_tiles(early.kernels[rank], TILES, onward=leave, **settings)
        routing, own = given.routings[rank], in_tiles(late.kernels[rank], TILES, executor="thread")
        jobs.append(partial(wait, stage.steps(early.tokens()[rank], routing, NO_WEIGHTS)))
        jobs.append(partial(later_stage, there, own, given.num_tokens[rank], routing))
    with ThreadPoolExecutor(4) as ranks:
        done = [each.result() for each in [ranks.submit(job) for job in jobs]]
    for rank in range(2):
        assert torch.equal(done[2 * rank], first[rank]) and torch.equal(done[2 * rank + 1], serial[rank])
        assert ("S0", "C1") in both_ways(records[rank])
    assert no_thread_is_left()


@pytest.mark.row(42)
def test_in_one_thread_a_tile_is_under_way_to_the_next_stage_too() -> None:
    made = Ranks("all_to_all", hostile_routings(2)[4], threads=False)
    sent: list[list[Tensor]] = [[], []]

    def leave(rank: int, tile: int, y_XH: Tensor) -> Flight[None]:
        assert tile == len(sent[rank])
        sent[rank].append(y_XH)
        yield InFlight("next stage")

    kernels = [in_tiles(kernel, TILES, onward=partial(leave, rank)) for rank, kernel in enumerate(made.kernels)]
    for y_TH, tiles, kernel in zip(made.forward(kernels), sent, kernels, strict=True):
        assert torch.equal(torch.cat(tiles), y_TH)
        assert {("C1", "S0"), ("C2", "S1")} <= both_ways(kernel.record) and ("S0", "S1") not in both_ways(kernel.record)


def test_a_link_has_two_ends() -> None:
    with pytest.raises(ConfigError, match=r"is a group of 2 ranks, this one has 3; .*rank_groups"):
        StageLink(LockstepWorld(3).communicators()[0])
