"""Votes of all ranks: a change is made by all of them or by none, whichever of them learn the result of the vote."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_mk.comm import LockstepWorld
from moe_mk.comm.collective import CallGroups
from moe_mk.comm.failure import Change
from moe_mk.flight import Flight, interleave

WAIT, MAKE = "in the wait for the result", "in the change"


def accepted(objections: list[int]) -> bool:
    return not any(objections)


def change_of(served: list[int], rank: int, number: int, old: int, where: list[str]) -> Change:
    """A change of what a rank serves, which is interrupted once where that is asked for, half made."""

    def make() -> None:
        served[rank] = number
        if where == [MAKE]:
            where.clear()
            raise KeyboardInterrupt

    return Change(make, lambda: served.__setitem__(rank, old))


def ended(flight: Flight[object]) -> None:
    """Advance a flight until it ends, with StopIteration."""
    while True:
        next(flight)


@settings(max_examples=40)
@given(
    st.sampled_from([(3, 1), (1, 3), (2, 2)]),
    st.lists(st.tuples(st.booleans(), st.dictionaries(st.integers(0, 3), st.sampled_from((WAIT, MAKE)))), max_size=5),
)
@example((2, 2), [(False, {0: WAIT, 1: WAIT, 2: WAIT})])
def test_a_change_is_made_by_all_ranks_or_by_none_whoever_is_interrupted(
    grid: tuple[int, int], rounds: list[tuple[bool, dict[int, str]]]
) -> None:
    """Of each round: whether a rank objects, and which ranks are interrupted, where. The ranks of EP and TP go on by
    the calls of one layer or of another one.
    """
    ep, tp = grid
    columns, rows = ([LockstepWorld(n).communicators() for _ in range(of)] for n, of in ((ep, tp), (tp, ep)))
    of_rank, ranks = [(columns[t][e], rows[e][t]) for e in range(ep) for t in range(tp)], range(ep * tp)
    groups, others = ([CallGroups(*both) for both in of_rank] for _ in range(2))
    served, wanted, made = [0] * len(ranks), 0, 0
    for number, (objects, drawn) in enumerate(rounds, 1):
        interrupted = {rank: at for rank, at in drawn.items() if rank in ranks and (at == WAIT or not objects)}
        flights = [
            each.decide(
                each.gather(int(objects and rank == 1), "vote"),
                change_of(served, rank, number, wanted, [interrupted.get(rank, "")]), accepted,
            )
            for rank, each in enumerate(groups)
        ]  # fmt: skip
        for flight in flights * ((ep > 1) + (tp > 1)):
            next(flight)
        for rank in sorted(ranks, key=lambda rank: interrupted.get(rank) == WAIT):  # ends the calls of others
            with pytest.raises(KeyboardInterrupt if rank in interrupted else StopIteration):
                flights[rank].throw(KeyboardInterrupt) if interrupted.get(rank) == WAIT else ended(flights[rank])
            assert rank not in interrupted or served[rank] == wanted, "half a change serves until the recovery"
        layer = others if number % 2 else groups
        interleave([each.recover() if interrupted else each.settle() for each in layer])
        if not objects and len(interrupted) < len(ranks):
            wanted, made = number, made + 1
        assert served == [wanted] * len(ranks)
        assert all(each._changes.made == made and each._changes.undecided is None for each in groups)
