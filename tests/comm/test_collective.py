"""Calls of two groups: errors of earlier calls; votes after which a change is made by all ranks or by none."""

from contextlib import suppress
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_mk.comm import LockstepWorld, SingleRank
from moe_mk.comm.collective import CallGroups, collective
from moe_mk.comm.failure import Change
from moe_mk.comm.lockstep import LockstepCommunicator
from moe_mk.errors import CommError, ConfigError
from moe_mk.flight import Flight, InFlight, interleave

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
    groups, others = (
        [CallGroups(*(comm if comm.size > 1 else SingleRank() for comm in both)) for both in of_rank] for _ in range(2)
    )  # as layers have them
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


@pytest.mark.parametrize("recovered", [(), (0,), (1,), (0, 1)])
def test_an_error_ends_the_calls_of_its_epoch_and_names_this_rank_in_each_group(recovered: tuple[int, ...]) -> None:
    views = [LockstepWorld(3).communicators(), LockstepWorld(2).communicators()]
    groups = CallGroups(*(own := (views[0][2], views[1][1])))
    begun_in, late = groups.epochs, CommError("no answer", rank=2, phase="dispatch", peer=1)
    for number in recovered:
        views[number][0].fail(RuntimeError("of an earlier call"))
        interleave([comm.recover() for comm in views[number]])
    groups.fail(late, begun_in)
    assert [comm.status.failure is None for comm in own] == [number in recovered for number in (0, 1)]
    groups.fail(late, groups.epochs)
    with patch.object(LockstepCommunicator, "fail_recovery", autospec=True) as reported:
        groups.fail_recovery(late, begun_in)
    assert [each.args[0] for each in reported.call_args_list] == [own[n] for n in (0, 1) if n not in recovered]
    for comm in own:
        failure = comm.status.failure
        assert failure is not None and failure.culprit == comm.rank and "no answer" in failure.text


@pytest.mark.parametrize("ends", ["is refused", "is refused in it", "raises", "is dropped"])
@pytest.mark.parametrize("recovered", [False, True])
def test_a_call_that_ends_is_reported_unless_it_had_not_begun_or_its_ranks_have_recovered(
    ends: str, recovered: bool
) -> None:
    @collective(lambda groups: groups)
    def verb(groups: CallGroups) -> Flight[None]:
        if ends == "is refused":
            raise ConfigError("before anything was sent")
        yield InFlight("dispatch")
        raise ConfigError("on this rank alone") if ends == "is refused in it" else ArithmeticError

    first, second = LockstepWorld(2).communicators()
    flight = verb(CallGroups(first))
    if ends != "is refused":
        next(flight)
    if recovered:
        second.fail(RuntimeError("of an earlier call"))
        interleave([comm.recover() for comm in (first, second)])
    with suppress(ConfigError, ArithmeticError):
        flight.close() if ends == "is dropped" else next(flight)
    is_reported = ends in ("is refused in it", "raises") or (ends == "is dropped" and not recovered)
    assert (first.status.failure is not None) == is_reported
