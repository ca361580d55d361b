"""What all communicators share: sums in order, and the counting of bytes; and the one of a single rank."""

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from threading import Lock, RLock, Thread, Timer
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from moe_mk.comm import Communicator, LockstepWorld, SingleRank
from moe_mk.comm.communicator import sum_in_order, summing_dtype
from moe_mk.comm.failure import Exclusive, Failure, describe
from moe_mk.errors import CommError, UnsupportedError
from moe_mk.flight import InFlight, interleave, wait
from moe_mk.prepare_finalize.one_sided.transport import FusedOneSided
from tests.layer.interrupted_ranks import Interrupts


def test_parts_are_added_one_after_the_other_and_left_alone() -> None:
    # bf16 spacing above 256 is 2: in f32 256 + 1 + 1 + 1 = 259, rounded once to even, 260.
    parts = [torch.tensor([number], dtype=torch.bfloat16) for number in (256.0, 1.0, 1.0, 1.0)]
    assert sum_in_order(parts).tolist() == [260.0] and parts[0].tolist() == [256.0]
    for shape in ((1,), (3, 7), (16, 64)):  # no shape may change the order
        numbers = torch.tensor([1e8, 1.0, -1e8, 1.0])
        assert torch.equal(sum_in_order([number.expand(shape) for number in numbers]), torch.ones(shape))


def test_only_narrow_floats_are_widened() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64):
        assert summing_dtype(dtype) == (torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype)
        assert sum_in_order([torch.ones(1, dtype=dtype)]).dtype == dtype


@pytest.mark.parametrize("bad", [16, -2, 2**31 - 1])
def test_a_bad_id_in_any_piece_names_the_rank_that_sent_it(bad: int) -> None:
    comm, counts = LockstepWorld(3).communicators()[2], [2, 0, 1, 1, 2, 0]  # of two pieces, by rank
    senders = [0, 0, 2, 0, 1, 1]
    for row, sender in enumerate(senders):
        ids_RK = torch.zeros((len(senders), 2), dtype=torch.int32)
        ids_RK[row, 1] = bad
        with pytest.raises(CommError, match=rf"for expert {bad}, out of range") as failed:
            comm.check_ids(ids_RK, counts, 16, "expert", "relay")
        assert failed.value.peer == sender
        ids_RK[row, 1] = -1
        comm.check_ids(ids_RK, counts, 16, "expert", "relay")


def test_every_collective_of_a_single_rank_returns_what_it_got() -> None:
    comm = SingleRank()
    rows = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(wait(comm.all_to_all(rows, [3], [3], "a")), rows)
    assert torch.equal(wait(comm.all_gather(rows, [3], "b")), rows)
    assert torch.equal(wait(comm.all_reduce(rows, "c")), rows)
    assert torch.equal(wait(comm.reduce_scatter(rows, [3], "d")), rows)
    assert wait(comm.exchange_counts([5], "e")) == [5] and wait(comm.gather_count(7, "f")) == [7]
    assert (comm.rank, comm.size) == (0, 1) and not comm.traffic.bytes_by_phase


@pytest.mark.parametrize("comm", [SingleRank(), LockstepWorld(1).communicators()[0]])
def test_every_collective_is_one_hop_whatever_the_group(comm: Communicator) -> None:
    rows = torch.zeros(0, 2)
    for flight in (
        comm.all_to_all(rows, [0], [0], "a"),
        comm.all_reduce(rows, "a"),
        comm.reduce_scatter(rows, [0], "a"),
    ):
        assert list(flight) == [InFlight("a")]


def refused(text: str = "it is held") -> CommError:
    return CommError(text, rank=0, phase="a test")


def in_context(lock: Any) -> None:
    with Exclusive(lock, refused):
        describe(ValueError())


def in_native_call(lock: Any) -> None:
    """The first instructions of a native call, up to the buffers that it takes."""
    call: Any = FusedOneSided.__new__(FusedOneSided)
    call._comm, call._lock, call._status = Mock(another_thread=refused), lock, Mock(failure=None)
    call._pool = Mock(take=Mock(side_effect=refused("no buffers")))
    call(torch.empty(1), None)


@pytest.mark.parametrize("guarded", [in_context, in_native_call])
def test_a_lock_is_free_again_whatever_a_signal_handler_raises_at_any_step(guarded: Callable[[Any], None]) -> None:
    lock = RLock()

    def outer() -> None:  # what a handler raises at the first instruction of what this calls has held up nothing
        guarded(lock)

    for place in count(1):
        interrupts = Interrupts(place, outer.__code__)
        with suppress(KeyboardInterrupt, CommError), interrupts.traced():
            outer()
        assert not lock._is_owned(), interrupts.at  # type: ignore[attr-defined]
        if not interrupts.at:
            break
    assert place > 3


def test_a_lock_is_waited_for_until_a_limit() -> None:
    lock = Lock()
    with Exclusive(lock, refused, 0.01):
        with pytest.raises(CommError, match="it is held"), Exclusive(lock, refused, 0.01):
            raise AssertionError
        Timer(0.02, lock.release).start()
        with Exclusive(lock, refused, 60.0):
            assert lock.locked()
        lock.acquire()
    held = RLock()
    Thread(target=held.acquire).start()  # by a thread that does not free it
    with pytest.raises(CommError, match="dispatch"):
        in_native_call(held)


def test_what_a_failure_was_not_reported_to_hears_of_it_before_a_recovery_which_all_must_survive() -> None:
    comms, lacking, other = LockstepWorld(2).communicators(), Mock(), Mock()
    lacking.abort.side_effect = [MemoryError, None]
    lacking.reopen.side_effect = [UnsupportedError("no", []), None, None]
    for resource in (lacking, other):
        comms[0].keep(resource)
    comms[1].fail(CommError("no answer", rank=1, phase="dispatch", peer=0))
    failure = comms[0].status.failure
    assert failure == Failure("no answer", 0) and [lacking.abort.call_count, other.abort.call_count] == [1, 1]
    with pytest.raises(UnsupportedError):
        interleave([comm.recover() for comm in comms])
    assert comms[0].status.failure is failure and [lacking.abort.call_count, other.abort.call_count] == [2, 2]
