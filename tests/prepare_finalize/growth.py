"""Sizes of what a transport keeps between calls: its containers, by path, and the memory of the process."""

import types
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from moe_mk.comm.network.heap import NetworkHeap

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
