"""The ring and mbarrier protocol of the Gluon GEMMs in every order: no wrong data, no overwrite, no deadlock."""

from collections import Counter
from dataclasses import replace

import pytest

from contrib.moe_mk_contrib.tests.kernels.ring_model import Action, Broken, Traces, check, traces

pytestmark = pytest.mark.sm90
KINDS = {"decode w13": (8, False), "decode w2": (8, True), "middle w13": (64, False), "middle w2": (64, True)}
KINDS |= {"prefill w13": (128, False), "prefill w2": (128, True)}
SIZES = [(2, 1, 1), (2, 3, 1), (2, 1, 3), pytest.param(3, 2, 2, marks=pytest.mark.stress)]
"""Stages, steps of a unit, units of this program: fewer and more steps than stages, and rounds across units."""


@pytest.mark.parametrize("stages,steps,tiles", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_order_of_events_is_right(kind: str, stages: int, steps: int, tiles: int) -> None:
    rows, second = KINDS[kind]
    given = traces(rows, second=second, stages=stages, steps=steps, tiles=tiles)
    uses = [action[2] for trace in given.partitions for action in trace if action[0] == "use"]
    assert len(uses) == tiles * steps * (1 if rows == 8 else 2), "once a step and warpgroup"
    assert Counter(operand for operands in uses for operand in operands) == {
        operand: count * tiles * steps for operand, count in operands_of(rows).items()
    }
    assert check(given, rows) > 2 * len(given.partitions) * tiles * steps


def operands_of(rows: int) -> dict[str, int]:
    """How often a step of all warpgroups multiplies each operand."""
    if rows == 64:  # both warpgroups multiply all rows, each by two of the four boxes of weights
        return {"rows": 2, **{f"{name}, box {box}": 1 for name in ("one", "two") for box in (0, 1)}}
    return {"rows": 2, "one": 1, "two": 1} if rows == 8 else {"rows": 4, "one": 2, "two": 2}


@pytest.mark.parametrize("filled,multiplied", [((64,), 1), ((65,), 2), ((1, 128), 1.5), ((128, 64), 1.5)])
@pytest.mark.parametrize("second", [False, True])
def test_a_warpgroup_without_rows_empties_its_stages(second: bool, filled: tuple[int, ...], multiplied: float) -> None:
    given = traces(128, second=second, stages=2, steps=2, tiles=2, filled=filled)
    uses = sum(action[0] == "use" for trace in given.partitions for action in trace)
    assert uses == 2 * 2 * multiplied, "once a step and warpgroup with rows"
    check(given, 128)


def test_a_program_without_work_ends() -> None:
    for rows, second in KINDS.values():
        assert not any(traces(rows, second=second, stages=2, steps=3, tiles=0, program=1).partitions)


def without(given: Traces, dropped: str) -> Traces:
    """The same with one kind of action left out."""

    def kept(action: Action) -> bool:
        return f"{action[0]} {action[1][0] if isinstance(action[1], tuple) else ''}".strip() != dropped

    return replace(given, partitions=tuple(tuple(filter(kept, trace)) for trace in given.partitions))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dropped,reason",
    [("wait empty", "written while|more arrivals"), ("wait full", "uses"), ("free empty", "nothing can go on")],
)
def test_a_protocol_without_one_of_its_steps_is_found_out(kind: str, dropped: str, reason: str) -> None:
    rows, second = KINDS[kind]
    with pytest.raises(Broken, match=reason):
        check(without(traces(rows, second=second, stages=2, steps=3, tiles=1), dropped), rows)


@pytest.mark.parametrize("barrier", ["full", "empty"])
def test_a_barrier_with_one_arrival_too_many_never_completes(barrier: str) -> None:
    given = traces(128, second=False, stages=2, steps=3, tiles=1)
    counts = {bar: count + (bar[0] == barrier) for bar, count in given.counts.items()}
    with pytest.raises(Broken, match="nothing can go on"):
        check(replace(given, counts=counts), 128)


def test_a_parity_that_does_not_turn_is_found_out() -> None:
    given = traces(8, second=True, stages=2, steps=3, tiles=1)
    stuck = tuple(tuple(("wait", action[1], 0) if action[0] == "wait" else action for action in trace)
                  for trace in given.partitions)  # fmt: skip
    with pytest.raises(Broken):
        check(replace(given, partitions=stuck), 8)


def exchanging(units: int) -> Traces:
    """The first product of 64 rows: its warpgroups synchronise once per unit."""
    return traces(64, second=False, stages=2, steps=1, tiles=units)


def test_warpgroups_that_exchange_values_read_those_of_their_unit() -> None:
    given = exchanging(3)
    assert [sum(action[0] == "get" for action in trace) for trace in given.partitions] == [3, 3, 0, 0]
    check(given, 64)
    with pytest.raises(Broken, match="reads the amax of"):
        check(without(given, "wait written"), 64)


def test_one_place_for_all_units_is_overwritten_before_it_is_read() -> None:
    given = exchanging(2)
    one_place = tuple(
        tuple((action[0], action[1] % 2) if action[0] in ("put", "get") else action for action in trace)
        for trace in given.partitions
    )
    with pytest.raises(Broken, match="reads the amax of"):
        check(replace(given, partitions=one_place), 64)
