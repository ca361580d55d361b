"""A rank forks a helper, which keeps nothing by which peers would take the rank to be alive, and may use no window."""

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_mk.comm import LockstepWorld
from moe_mk.comm.failure import Failure
from moe_mk.comm.network.heap import NetworkHeap
from moe_mk.comm.symmetric.heap import SymmetricHeap
from moe_mk.comm.symmetric.memory import create, unlink
from moe_mk.comm.symmetric.setup import open_heap
from moe_mk.errors import CommError
from moe_mk.flight import wait
from moe_mk.lab.testing.on_ranks import RankError, RankWorld
from moe_mk.prepare_finalize import PREPARE_FINALIZE, PrepareFinalize
from moe_mk.process import in_child
from moe_mk.trace.clock import now
from tests.support.networked_heaps import X, opened
from tests.support.one_sided_ranks import context, drawn, there_and_back, world_comm
from tests.support.worlds import world_of

NAMES = ["one_sided", "one_sided_network"]
TIMEOUT_S, HELPER_S = 30.0, 60


def answer_of_child(work: Callable[[], object]) -> object:
    """What a forked child answers; its error if it fails."""
    theirs, ours = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = work()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(ours, json.dumps(answer).encode())
        os._exit(0)
    os.close(ours)
    with os.fdopen(theirs, "rb") as pipe:
        answered = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answered)


def open_files() -> list[str]:
    """Files, sockets and the like that this process has open, without the folder that is listed."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue
    return sorted(found)


class Owner:
    """Something that weak references can follow."""


def test_actions_run_in_the_child_alone_once_and_only_for_owners_that_live() -> None:
    seen: list[str] = []
    kept, dropped = in_child(Owner(), lambda owner: seen.append("replaced")), Owner()
    in_child(kept, lambda owner: seen.append(type(owner).__name__))
    in_child(dropped, lambda owner: seen.append("dropped"))
    del dropped
    assert answer_of_child(lambda: (seen, answer_of_child(lambda: seen))) == [["Owner"], ["Owner"]]
    assert seen == []


def test_a_descriptor_that_cannot_be_closed_does_not_keep_the_others_open() -> None:
    one, other = os.pipe()
    closed_before = in_child(Owner(), lambda owner: os.close(one))
    fails = [in_child(Owner(), lambda owner: os.close(1 << 20)) for _ in range(3)]
    also_closed = in_child(Owner(), lambda owner: os.close(other))
    pipe = os.readlink(f"/proc/self/fd/{one}")
    assert pipe in open_files() and pipe not in answer_of_child(open_files)  # type: ignore[operator]
    assert closed_before and fails and also_closed
    os.close(one)
    os.close(other)


def test_virtual_ranks_go_on_in_a_child() -> None:
    """All of them lie in the one process that was forked."""
    comm, other = LockstepWorld(2).communicators()
    heap, _ = open_heap(comm, 1, 64, now), open_heap(other, 1, 64, now)
    heap.put(1, 0, X)
    assert answer_of_child(lambda: heap.get(1, 0, 12).tolist()) == list(range(12))


def test_a_child_has_pages_of_its_own_in_the_place_of_shared_ones() -> None:
    name, memory = create(10_000)
    unlink(name)
    memory.bytes.fill_(7)

    def write() -> list[object]:
        seen = memory.bytes.unique().tolist()
        memory.bytes.fill_(9)
        return [seen, name in Path("/proc/self/maps").read_text()]

    assert name in Path("/proc/self/maps").read_text()
    assert answer_of_child(write) == [[0], False]
    assert memory.bytes.unique().tolist() == [7]


world = world_of(2)


def files_of_a_child(rank: int) -> list[list[str]]:
    """Files open before windows were made, after that, and in a child of then."""
    comm = world_comm()
    dist.barrier()  # gloo connects at its first collective
    before = open_files()
    heaps = [open_heap(comm, 4, 1 << 16, now), opened(comm)]
    heaps[1].barrier()
    after, child = open_files(), answer_of_child(open_files)
    for heap in heaps:
        heap.barrier()
    assert isinstance(child, list)
    return [before, after, child]


def test_a_child_has_none_of_the_files_of_windows_and_proxies(world: RankWorld) -> None:
    for before, after, child in world.call(files_of_a_child):
        added = list((Counter(after) - Counter(before)).elements())
        for kind in ("socket:", "[eventpoll]", "[eventfd]", "/dev/shm/moe-mk-window-"):
            assert any(kind in each for each in added), (kind, added)
        kept = Counter(child) - Counter(before)  # the pipe of its answer, and what stands for files of mappings
        assert {each.partition(":")[0] for each in kept} <= {"pipe", "/dev/null"}, kept


def errors_of_a_child(heap: SymmetricHeap) -> dict[str, str]:
    """What each operation on the parent's heap raises."""
    peer, errors = 1 - heap.rank, {}
    operations: dict[str, Callable[[], object]] = {
        "put": lambda: heap.put(peer, 0, X),
        "put_signal": lambda: heap.put_signal(peer, 0, X, 0, 9),
        "signal": lambda: heap.signal(peer, 0, 9),
        "read": lambda: heap.read(peer, 0, 12),
        "data": lambda: heap.data(heap.rank, 0, 12),
        "reserve": lambda: heap.reserve(heap.rank, 0, 12),
        "wait_until": lambda: heap.wait_until({peer: 0}, 9, "dispatch"),
        "quiet": heap.quiet,
        "barrier": heap.barrier,
    }
    if isinstance(heap, NetworkHeap):
        network = heap
        operations |= {
            "add": lambda: network.add(peer, 0, 1),
            "counter": lambda: network.counter(0),
            "report": lambda: network.report(Failure("a test", network.rank), [0]),
            "close at exit": lambda: network.close.alive,
        }
    for name, operation in operations.items():
        try:
            errors[name] = f"no error: {operation()}"
        except CommError as error:
            errors[name] = str(error)
    return errors


def use_in_a_child(rank: int) -> list[dict[str, str]]:
    comm, found = world_comm(), []
    for heap in (open_heap(comm, 4, 1 << 16, now), opened(comm)):
        heap.barrier()
        answer = answer_of_child(lambda heap=heap: errors_of_a_child(heap))
        assert isinstance(answer, dict), answer
        found.append(answer)
        heap.barrier()
        heap.put_signal(1 - rank, 0, X, 0, 1)  # the parent goes on
        assert heap.wait_until({1 - rank: 0}, 1, "dispatch") == {1 - rank: len(X)}
        assert torch.equal(heap.data(rank, 0, 12), X.flatten())
        heap.barrier()
    return found


def test_every_operation_on_windows_of_the_parent_names_the_way_out(world: RankWorld) -> None:
    for rank, both in enumerate(world.call(use_in_a_child)):
        for errors in both:
            assert errors.pop("report", "no error: None") == "no error: None"
            assert errors.pop("close at exit", "no error: False") == "no error: False"
            for name, text in errors.items():
                assert text.startswith(f"rank {rank}, phase 'windows', layer 'layers.3': this process was forked"), name
                assert "spawn" in text and "fork before the layer is built" in text


def whole_call(rank: int, transport: PrepareFinalize) -> list[float]:
    return wait(there_and_back(transport, *drawn(rank, 4, torch.float32, hidden=256))).flatten().tolist()  # type: ignore[no-any-return]


def transports_in_a_child(rank: int) -> list[object]:
    """For each transport: what calls in children raise, and whether the parent's next call has the bits of its last."""
    found: list[object] = []
    for name in NAMES:
        transport = PREPARE_FINALIZE[name](context(world_comm()))
        before = whole_call(rank, transport)
        for _ in range(3):
            found.append(answer_of_child(lambda transport=transport: whole_call(rank, transport)))
        dist.barrier()
        found.append(whole_call(rank, transport) == before)
    return found


def test_a_call_in_a_child_raises_and_leaves_the_calls_of_the_parent_as_they_were(world: RankWorld) -> None:
    for found in world.call(transports_in_a_child):
        *refused, same = found[:4]
        *refused_too, same_too = found[4:]
        assert same is True and same_too is True
        for text in refused + refused_too:
            assert isinstance(text, str) and text.startswith("CommError: rank "), text
            assert "this process was forked" in text or "an earlier call failed" in text


def forks_and_dies(rank: int, sign: str) -> dict[str, list[object]]:
    """What rank 0 meets when rank 1 has forked a helper that lives on, and is killed."""
    made = {name: PREPARE_FINALIZE[name](context(world_comm(TIMEOUT_S))) for name in NAMES}
    for transport in made.values():
        whole_call(rank, transport)
    dist.barrier()
    if rank == 1:
        helper = os.fork()
        if helper == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(HELPER_S)  # should the test end without having killed it
            signal.pause()
            os._exit(0)
        Path(f"{sign}.new").write_text(str(helper))
        Path(f"{sign}.new").rename(sign)
        os.kill(os.getpid(), signal.SIGKILL)
    outcomes: dict[str, list[object]] = {}
    for name, transport in made.items():
        began = now()
        try:
            whole_call(rank, transport)
        except CommError as error:
            outcomes[name] = [now() - began, error.peer, str(error)]
    helper = int(Path(sign).read_text())
    os.kill(helper, 0)  # it lived all the time
    os.kill(helper, signal.SIGKILL)  # the pipe of the world is among what it holds
    return outcomes


# Last of all: the world does not outlive it.
def test_the_peer_of_a_killed_rank_hears_of_it_at_once_although_its_helper_lives(
    world: RankWorld, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match="1 of 2 ranks failed\nrank 1: the process ended with exit code -9") as caught:
        world.call(forks_and_dies, str(tmp_path / "helper"))
    outcomes = caught.value.results[0]
    assert isinstance(outcomes, dict) and list(outcomes) == NAMES
    for name, (seconds, peer, text) in outcomes.items():
        assert peer == 1 and seconds < TIMEOUT_S / 2, f"{name}: {seconds:.1f} s, {text}"
        assert "has ended" in text, text
