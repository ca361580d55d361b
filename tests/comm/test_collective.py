"""Votes of all ranks: a change is made by all of them or by none, whichever of them learn the result of the vote."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_mk.comm import LockstepWorld
from moe_mk.comm.collective import CallGroups
from moe_mk.comm.failure import Change
from moe_mk.flight import interleave

RANKS = 3
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


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.booleans(), st.dictionaries(st.integers(0, 2), st.sampled_from((WAIT, MAKE)))), max_size=5)
)
def test_a_change_is_made_by_all_ranks_or_by_none_whoever_is_interrupted(
    rounds: list[tuple[bool, dict[int, str]]],
) -> None:
    """Of each round: whether a rank objects, and which ranks are interrupted, where."""
    groups = [CallGroups(comm) for comm in LockstepWorld(RANKS).communicators()]
    served, wanted, made = [0] * RANKS, 0, 0
    for number, (objects, drawn) in enumerate(rounds, 1):
        interrupted = {rank: where for rank, where in drawn.items() if where == WAIT or not objects}
        flights = [
            each.decide(
                each.gather(int(objects and rank == 1), "vote"),
                change_of(served, rank, number, wanted, [interrupted.get(rank, "")]), accepted,
            )
            for rank, each in enumerate(groups)
        ]  # fmt: skip
        for flight in flights:
            next(flight)
        for rank in sorted(range(RANKS), key=lambda rank: interrupted.get(rank) == WAIT):  # ends the calls of others
            with pytest.raises(KeyboardInterrupt if rank in interrupted else StopIteration):
                flights[rank].throw(KeyboardInterrupt) if interrupted.get(rank) == WAIT else next(flights[rank])
            assert rank not in interrupted or served[rank] == wanted, "half a change serves until the recovery"
        interleave([each.recover() if interrupted else each.settle() for each in groups])
        if not objects and len(interrupted) < RANKS:
            wanted, made = number, made + 1
        assert served == [wanted] * RANKS
        assert [each.ep.changes.made for each in groups] == [made] * RANKS
        assert all(each.ep.changes.undecided is None for each in groups)
