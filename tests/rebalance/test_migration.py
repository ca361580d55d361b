"""Four ranks in lockstep: data that is damaged, refused or late keeps the old map, is reported, and is sent again."""

import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TypeVar

import pytest
from torch import Tensor

from moe_mk.comm import LockstepWorld
from moe_mk.comm.failure import Change
from moe_mk.errors import WeightError
from moe_mk.rebalance import RebalanceWarning, measure_balance
from moe_mk.rebalance.migration import Migration
from moe_mk.rebalance.transfer import HEADER, PHASE
from moe_mk.weights import SlotWeights
from tests.support.layers import live_method
from tests.support.rebalance_world import (
    PLACEMENT,
    RANKS,
    Rank,
    check_that_all_is_well,
    damage_first,
    holds_right_weights,
    lose,
    matrices_equal,
    serve,
    tensors,
    touch_chunks,
)
from tests.support.tiers import slow

R = TypeVar("R")

# A rank that only hears of another's trouble warns too; what a test expects it asks for by its words.
pytestmark = pytest.mark.filterwarnings("ignore::moe_mk.rebalance.RebalanceWarning")


def world(**changes: object) -> list[Rank]:
    return [Rank(comm, **changes) for comm in LockstepWorld(RANKS).communicators()]


def serve_until_it_backs_off(ranks: list[Rank]) -> None:
    while ranks[0].manager.state != "backing off":
        serve(ranks, 1)
        assert len(ranks[0].epochs) < 40


@pytest.mark.row(120)
@pytest.mark.parametrize(
    ("at", "states"),
    [
        (HEADER + 5, "256 bytes were damaged on their way"),
        (0, r"sent chunk 0 of link \d, plan 65"),
        (-1, "were damaged"),
    ],
)
def test_a_damaged_chunk_leaves_the_old_map_and_is_sent_again(at: int, states: str) -> None:
    ranks = world()
    victim = 1
    touch_chunks(ranks[victim], damage_first(at))
    with pytest.warns(RebalanceWarning, match=states):
        serve_until_it_backs_off(ranks)
    assert 0 in ranks[0].manager.status().epochs
    reported = [rank.manager.status().incidents for rank in ranks]
    assert all(len(each) == 1 and "retry 1 at step" in each[0].then for each in reported)
    assert re.search(states, reported[victim][0].what) and f"ranks [{victim}] refuse" in reported[0][0].what
    serve(ranks, 30)
    check_that_all_is_well(ranks)
    assert ranks[0].manager.status().epochs == (1, 1) and ranks[0].manager.state == "watching"


def test_a_wire_that_always_damages_ends_in_a_dropped_plan_with_growing_pauses() -> None:
    ranks = world(max_retries=2)

    def damage(chunk: int, arrived: Tensor) -> Tensor:
        arrived[HEADER] ^= 1
        return arrived

    touch_chunks(ranks[2], damage)
    with pytest.warns(RebalanceWarning, match="plan 1 is dropped after 2 retries"):
        serve(ranks, 40)
    check_that_all_is_well(ranks)
    status = ranks[2].manager.status()
    assert len(status.incidents) == 3 and status.state == "watching"
    first, second, _ = (incident.step for incident in status.incidents)
    # The pauses are 3 and 6 steps.
    assert [incident.then.split("; ")[-1] for incident in status.incidents[:2]] == [
        f"retry 1 at step {first + 3}",
        f"retry 2 at step {second + 6}",
    ]
    # Shares may be solved anew, but the layer whose weights never came keeps its slots.
    assert ranks[2].layers[1].expert_map.physical_to_global() == list(PLACEMENT)


@pytest.mark.parametrize(("first", "second"), [(2, 2), *slow((0, 1), (1, 2), (2, 0))])
def test_every_layer_of_a_plan_has_its_retries_and_pauses(first: int, second: int) -> None:
    ranks, faults = world(max_retries=2, bytes_per_step=1 << 20), (first, second)

    def damage(rank: Rank, arrived: Tensor) -> Tensor:
        migration = rank.manager._migration
        assert migration is not None
        arrived[HEADER] ^= migration.retries < faults[migration.batches[0][0]]
        return arrived

    for rank in ranks:
        touch_chunks(rank, lambda _, arrived, rank=rank: damage(rank, arrived))  # type: ignore[misc]
    serve(ranks, 45)
    check_that_all_is_well(ranks)
    status = ranks[0].manager.status()
    assert status.state == "watching" and status.epochs == (1, 1), status
    stated = [re.search(r"retry (\d) at step (\d+)", incident.then) for incident in status.incidents]
    one, other = (list(range(1, count + 1)) for count in (first, second))
    assert [found and int(found[1]) for found in stated] in (one + other, other + one), status
    for incident, found in zip(status.incidents, stated, strict=True):
        assert found and int(found[2]) - incident.step == 3 * 2 ** (int(found[1]) - 1)


def test_a_flip_that_was_made_is_undone_and_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a recovery after an interrupt right behind it: `Change` states that both may follow any part of either."""
    change_of, undone = Migration._change, Counter[int]()

    def checked(migration: Migration) -> Change:
        change, layers, ledger = change_of(migration), migration.layers, migration.ledger

        def seen() -> tuple[object, ...]:
            rows = ledger.phy2log.tolist(), ledger.share.tolist()
            return [id(layer.state) for layer in layers], rows, migration.batches, migration.staged, migration.flips

        def make() -> None:
            before = seen()
            change.make()
            flipped = seen()[1:]
            assert flipped != before[1:]
            for _ in range(2):
                change.undo()
                assert seen() == before
            change.make()
            assert seen()[1:] == flipped
            undone[migration.peers.ep.rank] += 1

        return Change(make, change.undo)

    monkeypatch.setattr(Migration, "_change", checked)
    ranks = world()
    serve(ranks, 40)
    check_that_all_is_well(ranks)
    assert ranks[0].manager.status().epochs == (1, 1) and undone == dict.fromkeys(range(RANKS), 2)


def test_a_rank_that_cannot_send_states_why() -> None:
    ranks = world()
    failing = ranks[3].layers[0]
    export, times = failing.live.export_slot, []

    def once(slot: int) -> object:
        times.append(slot)
        if len(times) == 4:  # sizes are asked first
            raise WeightError("the file behind it is gone")
        return export(slot)

    with pytest.warns(RebalanceWarning), live_method(failing, "export_slot", once):
        serve(ranks, 40)
    check_that_all_is_well(ranks)
    reported = [str(incident) for rank in ranks for incident in rank.manager.status().incidents]
    assert any("the file behind it is gone" in each for each in reported)
    assert ranks[0].manager.status().epochs == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("steps", range(4))
def test_weights_that_are_loaded_during_a_move_serve_afterwards(steps: int) -> None:
    ranks = world(bytes_per_step=100)
    while ranks[0].manager.state != "moving":
        serve(ranks, 1)
    serve(ranks, steps)
    stale = [rank.layers[0].live.stage(rank.layers[0].expert_map) for rank in ranks]
    fresh = [tensors(number + 7) for number in range(2)]
    for rank, state in zip(ranks, stale, strict=True):
        for layer, weights in zip(rank.layers, fresh, strict=True):
            layer.load_weights(weights)
        with pytest.raises(WeightError, match="has loaded weights since this state was staged; stage it again"):
            rank.layers[0].live.flip(state)
    serve(ranks, 80)
    assert ranks[0].manager.status().epochs == (1, 1)
    for number, rank in enumerate(ranks):
        for layer, weights in zip(rank.layers, fresh, strict=True):
            for slot, expert in enumerate(layer.expert_map.local_to_global(number)):
                assert matrices_equal(layer.live.export_slot(slot), weights, expert)


def test_no_step_sends_more_than_the_budget() -> None:
    ranks = world(bytes_per_step=100)
    most = 0
    for _ in range(80):
        before = [rank.manager.comm.traffic.bytes_by_phase[PHASE] for rank in ranks]
        serve(ranks, 1)
        after = [rank.manager.comm.traffic.bytes_by_phase[PHASE] for rank in ranks]
        most = max(most, *(b - a for a, b in zip(before, after, strict=True)))
    assert most == 100 + HEADER
    check_that_all_is_well(ranks)
    assert ranks[0].manager.status().epochs == (1, 1)


@pytest.mark.row(120)
def test_moved_bytes_are_those_predicted() -> None:
    ranks, seen = world(), []
    chunks = [touch_chunks(rank, lambda number, arrived: None) for rank in ranks]
    for _ in range(40):
        serve(ranks, 1)
        seen.append((sum(rank.manager.status().received_bytes for rank in ranks), ranks[0].manager.state))
    assert seen == sorted(seen, key=lambda at: at[0]) and any(size and state == "moving" for size, state in seen)
    predicted = {rank.manager.status().predicted_bytes for rank in ranks}
    received = sum(rank.manager.status().received_bytes for rank in ranks)
    headers = sum(map(len, chunks)) * HEADER
    sent = sum(rank.manager.comm.traffic.bytes_by_phase[PHASE] for rank in ranks)
    assert len(predicted) == 1 and received == predicted.pop() > 0
    assert sent == received + headers


@pytest.fixture
def replaced() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(("patience", "given_up"), [(1000, False), (3, True)])
def test_a_slow_read_is_waited_for_and_a_hopeless_one_is_given_up(
    patience: int, given_up: bool, replaced: ExitStack
) -> None:
    ranks = world(patience=patience, backoff=4)
    serve(ranks, 2)
    release = threading.Event()
    for layer in (layer for rank in ranks for layer in rank.layers):
        replaced.enter_context(live_method(layer, "read_expert", reading_after(release, layer.live.read_expert)))
    left = ranks[:3]
    staged: Counter[tuple[int, int]] = Counter()
    for rank in left:
        for x, layer in enumerate(rank.layers):
            count = counting(layer.live.stage, staged, (rank.original_rank, x))
            replaced.enter_context(live_method(layer, "stage", count))
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        lose(ranks, 3)
        serve(left, 20)
        assert all(rank.manager.status().read_bytes == 0 for rank in left)
        assert left[0].manager.state in ("moving", "backing off")
        release.set()
        for _ in range(200):
            threading.Event().wait(0.005)
            serve(left, 1)
            if left[0].manager.state == "watching":
                break
    assert given_up or max(staged.values()) <= 2, "a rank that is ready builds its state once and waits"
    assert sum(rank.manager.status().read_bytes for rank in left) > 0
    assert any("still reading after 4 steps" in str(each.message) for each in reported) == given_up
    assert all(rank.manager.status().lost_experts == {} for rank in left)
    assert all(holds_right_weights(layer, x) for rank in left for x, layer in enumerate(rank.layers))


def counting(call: Callable[..., R], calls: Counter[tuple[int, int]], key: tuple[int, int]) -> Callable[..., R]:
    def counted(*arguments: object, **settings: object) -> R:
        calls[key] += 1
        return call(*arguments, **settings)

    return counted


def reading_after(release: threading.Event, read: Callable[[int], SlotWeights]) -> Callable[[int], SlotWeights]:
    """A checkpoint on a slow disk."""

    def slowly(expert: int) -> SlotWeights:
        assert release.wait(60)
        return read(expert)

    return slowly


def test_bytes_are_counted_while_layers_are_still_under_way() -> None:
    ranks, received, read = world(bytes_per_step=768), [0], [0]
    while ranks[0].manager.status().epochs != (1, 1):
        serve(ranks, 1)
        received.append(sum(rank.manager.status().received_bytes for rank in ranks))
    first = ranks[0].manager
    assert first.balance is not None
    assert first.balance.as_dict() == measure_balance(first.history.load("all"), first.ledger).as_dict()
    left = lose(ranks, 3)
    while any(layer.expert_map.lost for layer in left[0].layers):
        serve(left, 1)
        read.append(sum(rank.manager.status().read_bytes for rank in left))
    for seen in (received, read):
        assert seen == sorted(seen) and len(set(seen)) > 2, "a layer at a time"
