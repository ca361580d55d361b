"""Headers of messages, and whom a long wait may blame."""

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm import DistributedCommunicator
from moe_mk.comm.connections import MOST_RECEIVES, Connections
from moe_mk.comm.header import (
    ANY,
    CALLS,
    EAGER_BYTES,
    EPOCHS,
    HEADER_BYTES,
    HEADER_TAGS,
    LAYOUT,
    TEXT_BYTES,
    Envelope,
    Header,
    Kind,
    Recovery,
    RowHeaders,
    host_number,
    row_tag,
)  # fmt: skip
from moe_mk.comm.messages import GroupMessages
from moe_mk.errors import CommError
from moe_mk.flight import wait
from moe_mk.lab.testing.on_ranks import RankError, RankWorld
from moe_mk.process import Process, WatchedProcess
from tests.support.worlds import world_of

world = world_of(2)


def test_a_header_comes_back_as_it_was_packed_and_bytes_of_another_program_are_none() -> None:
    header = Header(Kind.ROWS, 3, 7, "dispatch", 2, -5, 1 << 40, 9, 1, Process(12, "345", 67), host_number())
    packed = header.packed()
    assert len(packed) == HEADER_BYTES and Header.unpacked(packed) == header
    long = Header.unpacked(replace(header, text="x" * 1000).packed())
    assert long.text == "x" * TEXT_BYTES
    with pytest.raises(ValueError, match="no header of this version"):
        Header.unpacked(bytes(HEADER_BYTES))
    unknown = Header(Kind.ROWS, 0, 1, "").packed()
    unknown[8] = 9
    with pytest.raises(ValueError, match="no header"):
        Header.unpacked(unknown)


def test_tags_of_rows_are_of_one_epoch_call_and_size_and_of_nothing_else() -> None:
    sizes = [torch.empty(EAGER_BYTES + more, dtype=torch.uint8) for more in (1, 2)]
    tags = [row_tag(epoch, call, x) for epoch in (0, 1, EPOCHS - 1) for call in range(1, 1 + CALLS) for x in sizes]
    assert len(set(tags)) == len(tags) and HEADER_TAGS + EPOCHS <= 1 << 16 <= min(tags) and max(tags) < 1 << 31


def test_a_recovery_sends_and_awaits_again_only_where_other_ranks_are_left_out() -> None:
    group, recovery = Mock(), Recovery(3)
    for peers, left_out in (([1, 2], 0), ([1, 2], 0), ([1], 1 << 2)):
        recovery.call(group, peers, left_out, 7, Process.this())
    sent = [(peer, Header.unpacked(x[0].numpy().tobytes()).count) for (x, peer, _), _ in group.send.call_args_list]
    assert sent == [(1, 0), (2, 0), (1, 1 << 2)] and [each.args[1] for each in group.recv.call_args_list] == [1, 2]


def waits_for_a_slow_peer(rank: int, elsewhere: bool) -> str:
    """Rank 1 has the number of a process that is not on this host, and is slow."""
    comm = DistributedCommunicator(dist.new_group(), timeout_s=20.0)
    connections = GroupMessages.of(comm.group).connections
    if rank == 1:
        connections.process = Process(2**22 + 1, "1", connections.process.namespace)
        connections.host += elsewhere
    wait(comm.gather_count(1, "counts"))
    if rank == 1:
        time.sleep(1.5)
    try:
        wait(comm.gather_count(1, "counts"))
    except CommError as error:
        return str(error)
    return "landed"


@pytest.mark.slow
def test_a_process_of_another_host_is_not_looked_for_on_this_one(world: RankWorld) -> None:
    assert world.call(waits_for_a_slow_peer, True) == ["landed", "landed"]
    assert "peer 1" in world.call(waits_for_a_slow_peer, False)[0], "on this host it counts as ended"


def pattern(rank: int, count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int64).remainder(251 - rank).to(torch.uint8).view(-1, 1)


def sizes_around_the_limit(rank: int) -> list[bool]:
    """Rows that come with their header and rows that come after it: from both ranks, and from rank 0 alone.

    Of two calls from both the headers of the first one arrive while the second is awaited, and are kept.
    """
    comm, found = DistributedCommunicator(dist.new_group(), timeout_s=20.0), []
    for count in (0, 1, EAGER_BYTES - 1, EAGER_BYTES, EAGER_BYTES + 1, 3 * EAGER_BYTES):
        flights = [comm.all_gather(pattern(rank + 2 * call, count), [count] * 2, "gather") for call in range(2)]
        next(flights[0]), next(flights[1])
        for call in (1, 0):
            wanted = torch.cat([pattern(r + 2 * call, count) for r in range(2)])
            found.append(torch.equal(wait(flights[call]), wanted))
        mine, splits = (pattern(0, count), ([0, count], [0, 0])) if rank == 0 else (pattern(0, 0), ([0, 0], [count, 0]))
        rows = wait(comm.all_to_all(mine, *splits, "one way"))
        found.append(torch.equal(rows, pattern(0, count if rank else 0)))
    for dtype in (torch.bfloat16, torch.float64, torch.bool):
        rows = wait(comm.all_gather(torch.full((3, 2), rank, dtype=dtype), [3, 3], "dtypes"))
        found.append(rows.dtype is dtype and int(rows.float().sum()) == 6)
    return found


def test_rows_arrive_whole_on_both_sides_of_the_limit_of_eager_ones(world: RankWorld) -> None:
    assert all(map(all, world.call(sizes_around_the_limit)))


def many_recoveries(rank: int) -> list[str]:
    """Abandon a call on rank 0, or on both ranks, before each recovery; then recover in the last epoch."""
    comm, rows = DistributedCommunicator(dist.new_group(), timeout_s=20.0), pattern(rank, 2 * EAGER_BYTES)
    wrong, expected = [], torch.cat([pattern(r, 2 * EAGER_BYTES) for r in range(2)])
    for round in range(20):
        if rank == 0 and not round % 2:
            flight = comm.all_gather(rows, [len(rows)] * 2, "rows")
            next(flight)
            flight.close()
        elif round % 2:  # the first header is stored while the second is awaited, and is stale after recovery
            wait(comm.recover())
            flights = [comm.all_gather(rows[:n], [n, n], "rows") for n in (1, 2)]
            next(flights[0]), next(flights[1]), wait(flights[1])
        wait(comm.recover())
        if not torch.equal(wait(comm.all_gather(rows, [len(rows)] * 2, "rows")), expected):
            wrong.append(f"round {round}")
    GroupMessages.of(comm.group).connections.epoch = EPOCHS - 1
    with pytest.raises(CommError, match=f"recovered {EPOCHS - 1} times.*build the layer over a new group"):
        wait(comm.recover())
    return wrong


def test_what_failed_calls_left_under_way_is_never_received(world: RankWorld) -> None:
    assert world.call(many_recoveries) == [[], []]


def receives_that_stand(rank: int) -> list[list[int]]:
    """How many receives of headers stand at the peer after each of 40 exchanges, of rows with and without counts."""
    comm, standing = DistributedCommunicator(dist.new_group(), timeout_s=20.0), list[list[int]]()
    connections = GroupMessages.of(comm.group).connections
    for number in range(40):
        if number < 30:
            going = {1 - rank: Envelope.empty(8, 1)}
            comm.give_back(comm.swap_now(going, {1 - rank: ANY}, "rows").values())
        else:
            wait(comm.exchange_counts([1, 1], "counts"))
        standing.append([len(connections.headers[1 - rank]), len(connections.read_headers[1 - rank])])
    return standing


def test_receives_of_headers_stand_at_every_peer_at_all_times(world: RankWorld) -> None:
    for standing in world.call(receives_that_stand):
        assert {sum(each) for each in standing} == {MOST_RECEIVES}
        assert {ready for ready, _ in standing} == set(range(MOST_RECEIVES // 2, MOST_RECEIVES))


def fails_at_first(times: int, error: Exception, action: Callable[..., Any]) -> Callable[..., Any]:
    left = iter(range(times))
    return lambda *given: action(*given) if next(left, None) is None else Mock(side_effect=error)()


def dies_while_the_watch_lacks(rank: int, what: str) -> dict[str, Any]:
    """Rank 1 stops for so long that rank 0 lacks threads, descriptors or memory while it waits, then it ends."""
    comm, start = DistributedCommunicator(dist.new_group(), timeout_s=30.0), threading.Thread.start
    lacking = {
        "threads": (threading.Thread, "start", RuntimeError("can't start new thread")),
        "memory to look": (Connections, "look", MemoryError()),
        "memory to report": (Connections, "_notify", MemoryError()),
        "descriptors": (WatchedProcess, "_has_ended", OSError(errno.EMFILE, "Too many open files")),
    }
    if rank == 0:
        where, name, error = lacking[what]
        setattr(where, name, fails_at_first(3, error, getattr(where, name)))
    try:
        for _ in range(4):
            wait(comm.gather_count(1, "counts"))
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
    began = time.monotonic()
    if rank == 1:
        time.sleep(1.0)
        os._exit(3)
    try:
        wait(comm.gather_count(1, "counts"))
    except CommError as error:
        watcher: Any = GroupMessages.of(comm.group).connections.watcher
        return {"peer": error.peer, "seconds": time.monotonic() - began, "watch": watcher.is_alive()}
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("lacks", ["threads", "memory to look", "memory to report", "descriptors"])
def test_the_watch_of_a_group_lives_through_what_it_lacks_and_notices_a_death(lacks: str) -> None:
    with RankWorld(2) as mortal, pytest.raises(RankError) as died:
        mortal.call(dies_while_the_watch_lacks, lacks)
    found: Any = died.value.results[0]
    assert found["peer"] == 1 and found["watch"] and 1.0 <= found["seconds"] < 5.0, found


def test_a_header_of_rows_is_one_of_this_call_only_where_every_word_of_it_is() -> None:
    headers = RowHeaders(5, b"dispatch", 7, (11, 12, 13, 14))
    envelope = Envelope.empty(32, 3)
    headers.write(envelope, 9, 64)
    memory = bytearray(envelope.memory)
    assert headers.read(memory, 9, 64, 32) == headers.read(memory, 9, 64, ANY) == (3, 32, (11, 12, 13, 14))
    written = LAYOUT.unpack_from(memory)
    names = "magic kind epoch call layer count num_bytes expected peer number started namespace host length".split()
    free = {"count", "number", "started", "namespace", "host"}
    for at, name in enumerate(names):
        changed = list(written)
        changed[at] = b"moe-mk 0" if name == "magic" else written[at] ^ 1
        other = bytearray(memory)
        LAYOUT.pack_into(other, 0, *changed)
        found = headers.read(other, 9, 64, 32)
        assert (found is not None) == (name in free), name
        if name == "count":
            assert found is not None and found[0] == 2
    other = bytearray(memory)
    other[LAYOUT.size] ^= 1
    assert headers.read(other, 9, 64, 32) is None, "another phase"
