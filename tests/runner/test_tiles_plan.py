"""The plan alone: its order by hand, what each step needs, and how much is ever open."""

from itertools import product

import pytest

from moe_mk.errors import ConfigError
from moe_mk.runner.tiles import TilePlan, deepest


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
