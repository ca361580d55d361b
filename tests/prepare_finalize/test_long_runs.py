"""What a transport keeps does not grow with the number of its calls: containers, and memory of the process."""

import gc
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from moe_mk.comm import Communicator
from moe_mk.comm.network.heap import NetworkHeap
from moe_mk.comm.threads import ThreadWorld
from moe_mk.flight import interleave, wait
from moe_mk.lab.testing.on_ranks import run_ranks
from moe_mk.lab.testing.transports import world_of
from moe_mk.prepare_finalize import PREPARE_FINALIZE, PrepareFinalize
from moe_mk.tokens import Routing
from tests.support.one_sided_ranks import context, drawn, there_and_back, world_comm

HIDDEN, MOST_TOKENS, BATCHES = 32, 12, 61
MOST_GROWTH, MOST_BYTES = 40, 1 << 20
"""What a container may be longer by, as queues are fuller at one time than at another; and bytes of a whole process."""
LONG = 20_000
pytestmark = pytest.mark.slow
SLOW = (pytest.mark.stress, pytest.mark.timeout(3600))
"""Two minutes, the limit of every other test, are not enough where other work has the cores."""
QUICK = {"all_to_all": 1000, "all_gather": 1000, "one_sided": 1000, "hierarchical": 300, "one_sided_network": 300}
"""Calls that take a second or two."""


CONTAINERS = (dict, list, tuple, set, frozenset, deque, bytearray)


def containers_of(root: object) -> dict[str, int]:
    """The length of each container that is reachable from an object through what this package has made, by path."""
    found: dict[str, int] = {}
    seen, ahead = {id(root)}, [("transport", root)]
    kept = [root]  # a number of `id` means something only while its object lives
    while ahead:
        path, thing = ahead.pop()
        if isinstance(thing, CONTAINERS):
            found[path] = len(thing)
        for step, part in _parts(thing):
            if id(part) not in seen and not isinstance(part, (str, bytes, int, float, type, types.ModuleType)):
                seen.add(id(part))
                kept.append(part)
                ahead.append((path + step, part))
    return found


def _parts(thing: object) -> Iterator[tuple[str, object]]:
    if isinstance(thing, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in list(thing.items()))
    elif isinstance(thing, CONTAINERS):
        yield from ((f"[{number}]", part) for number, part in enumerate(list(thing)))
    elif isinstance(thing, partial):
        yield from ((f"<partial {number}>", part) for number, part in enumerate((thing.func, *thing.args)))
    elif isinstance(thing, types.MethodType):
        yield "<self>", thing.__self__
    elif isinstance(thing, types.FunctionType):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        yield from ((f"<closure {name}>", cell.cell_contents) for name, cell in cells)
    elif type(thing).__module__.startswith("moe_mk"):
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        names = [*getattr(thing, "__dict__", {}), *slots]
        yield from ((f".{name}", getattr(thing, name)) for name in names if hasattr(thing, name))


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """The containers that are longer, or new, with both lengths."""
    return {path: (before.get(path, 0), size) for path, size in after.items() if size > before.get(path, 0)}


def anonymous_bytes() -> int:
    """What this process holds of memory that is its own: heaps, stacks and private windows, no shared windows."""
    gc.collect()
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def touch_staging(root: object) -> None:
    """Take every page of the memory for rows on their way out, which calls would take one after the other."""
    seen, ahead = {id(root)}, [root]
    while ahead:
        thing = ahead.pop()
        if isinstance(thing, NetworkHeap):
            at, size = thing._staging.at, thing._staging.num_bytes
            thing.reserve(thing.rank, at, size)
            thing._own_bytes(at, size).fill_(0)
            continue
        for _, part in _parts(thing):
            if id(part) not in seen:
                seen.add(id(part))
                ahead.append(part)


def made(name: str, comm: Communicator) -> PrepareFinalize:
    """One rank of a transport; two ranks make a host where it knows of hosts."""
    per_node = 2 if name in ("hierarchical", "one_sided_network") else None
    asked = replace(context(comm, hidden=HIDDEN), max_num_tokens=MOST_TOKENS, ranks_per_node=per_node)
    return PREPARE_FINALIZE[name](asked)


def grows(calls: int, call: Callable[[int], object], transports: list[PrepareFinalize]) -> str:
    """Which container has grown since a tenth of the calls was made, and by how much the process; empty if none has."""
    for number in range(calls // 10):
        call(number)
    for transport in transports:
        touch_staging(transport)
    before, bytes_held = [containers_of(each) for each in transports], [anonymous_bytes()]
    middle = (calls // 10 + calls) // 2
    for half in (range(calls // 10, middle), range(middle, calls)):
        for number in half:
            call(number)
        bytes_held.append(anonymous_bytes())
    after = [containers_of(each) for each in transports]
    longer = [
        f"{path}: {one} -> {other}"
        for earlier, later in zip(before, after, strict=True)
        for path, (one, other) in grown(earlier, later).items()
        if other > one + MOST_GROWTH
    ]
    gained = [later - earlier for earlier, later in pairwise(bytes_held)]
    if min(gained) > MOST_BYTES / 2:  # what is kept at every call grows in both halves; an arena of the allocator, once
        longer.append(f"the process holds {gained[0]} and {gained[1]} bytes more after each half")
    return "; ".join(longer)


def batches(rank: int) -> list[tuple[torch.Tensor, Routing]]:
    """More batches than one, of other sizes, so that rows lie elsewhere in every call."""
    sizes = [(7 * n + 5 * rank) % (MOST_TOKENS + 1) for n in range(BATCHES)]
    return [drawn(1000 * rank + n, size, torch.float32, HIDDEN) for n, size in enumerate(sizes)]


@pytest.mark.parametrize("name,calls", [*QUICK.items(), *(pytest.param(name, LONG, marks=SLOW) for name in QUICK)])
def test_ranks_of_one_process_keep_no_more_after_many_calls(name: str, calls: int) -> None:
    world = world_of(PREPARE_FINALIZE[name].traits, 4 if name == "hierarchical" else 2)
    ranks = [made(name, comm) for comm in world.communicators()]
    batches_of = [batches(rank) for rank in range(world.size)]

    def call(number: int, rank: int | None = None) -> object:
        own = [rank] if rank is not None else list(range(world.size))
        return interleave([there_and_back(ranks[r], *batches_of[r][number % BATCHES]) for r in own])

    if not isinstance(world, ThreadWorld):
        assert grows(calls, call, ranks) == ""
        return
    jobs = [partial(grows, calls, partial(call, rank=rank), [ranks[rank]]) for rank in range(world.size)]
    assert world.together(jobs) == [""] * world.size


def grows_on_processes(rank: int, names: tuple[str, ...], calls: int) -> dict[str, str]:
    found, own = {}, batches(rank)
    for name in names:
        transport = made(name, world_comm(timeout_s=60.0))

        def call(number: int, transport: PrepareFinalize = transport) -> object:
            return wait(there_and_back(transport, *own[number % BATCHES]))

        found[name] = grows(calls, call, [transport])
    return found


@pytest.mark.parametrize("calls", [300, pytest.param(LONG, marks=SLOW)])
def test_processes_that_share_memory_keep_no_more_after_many_calls(calls: int) -> None:
    """Two ranks on one host and one on another: rows go through shared windows and over sockets."""
    names = ("one_sided", "one_sided_network")
    for found in run_ranks(grows_on_processes, 3, names, calls, timeout_s=3600.0):
        assert found == dict.fromkeys(names, "")
