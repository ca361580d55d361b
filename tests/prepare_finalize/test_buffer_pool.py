"""Slots of calls in flight: who shares a pool, which slot is next, and how many there may be."""

from typing import ClassVar

import pytest

from moe_mk import CommError
from moe_mk.comm import Communicator, LockstepWorld
from moe_mk.comm.failure import Failure
from moe_mk.prepare_finalize.buffer_pool import BufferPool, BufferSlot


class Pool(BufferPool[BufferSlot]):
    MAX_OPEN_CALLS: ClassVar[int | None] = 2
    usable = True

    @property
    def is_usable(self) -> bool:
        return self.usable

    def abort(self, failure: Failure) -> None:
        """Nothing waits."""

    def _make(self, comm: Communicator) -> BufferSlot:
        return BufferSlot()


class Endless(Pool):
    MAX_OPEN_CALLS: ClassVar[int | None] = None


def test_as_many_calls_as_are_allowed_are_open_and_not_one_more() -> None:
    comm = LockstepWorld(1).communicators()[0]
    pool = Pool.of(comm, "rows")
    first, second = pool.take(comm), pool.take(comm)
    assert first is not second and first.busy and second.busy
    with pytest.raises(CommError, match="2 calls were prepared and not finalized"):
        pool.take(comm)
    first.busy = False
    assert pool.take(comm) is first and len(pool.slots) == 2
    pool.reopen()
    assert pool.take(comm) not in (first, second)
    endless = Endless.of(comm, "rows")
    assert len({id(endless.take(comm)) for _ in range(9)}) == 9


def test_a_pool_is_shared_by_layers_of_one_geometry_as_long_as_it_can_be_used() -> None:
    comm, other = LockstepWorld(2).communicators()
    pool = Pool.of(comm, "rows")
    assert Pool.of(comm, "rows") is pool
    for different in (Pool.of(comm, "wider rows"), Endless.of(comm, "rows"), Pool.of(other, "rows")):
        assert different is not pool
    pool.usable = False
    fresh = Pool.of(comm, "rows")
    assert fresh is not pool and Pool.of(comm, "rows") is fresh
