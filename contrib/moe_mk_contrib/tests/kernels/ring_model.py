"""The ring of the Gluon GEMMs as a state machine: what each group of warps does, in every order that can happen.

`traces` runs the Python of the kernels themselves, with a `gl` that computes nothing, and records the waits, arrivals
and copies of every partition. `check` explores all interleavings of these, of copies that complete at any later time,
and of threads that arrive one before the others.

Warpgroups that share tiles of 64 rows also exchange values: each writes its own and reads those of the other one.

An mbarrier completes a phase when as many have arrived as it was initialised with, and all expected bytes have barrier;
waiting for a parity passes once a phase of that parity is complete and until the next one is.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

Action = tuple[Any, ...]
"""Name and arguments: wait bar parity, expect bar bytes, copy bar stage operands data, gather stage,
use stage operands, free bar, put place, get place."""
Barrier = tuple[str, int]
Data = tuple[int, int]
"""Unit of work and step of its reduction."""
WRITTEN = (-1, -1)
"""In place of data, while they are being written."""
APART = 1000
"""Rows from the first one of a unit to that of the next one."""


@dataclass(frozen=True)
class Traces:
    partitions: tuple[tuple[Action, ...], ...]
    counts: Mapping[Barrier, int]
    """Arrivals that complete a phase."""
    threads: int
    """Arrivals of one gathering partition for one stage."""
    order: tuple[Data, ...]
    """Unit and step of what every partition processes, one after the other."""


class Nothing:
    """A value of the kernel that does not matter here: every operation returns it."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *given: Any, **more: Any) -> Any:
        return self

    def __getitem__(self, index: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter((self,) * 2)

    def _self(self, *given: Any) -> Any:
        return self

    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = __lt__ = __truediv__ = _self
    __rtruediv__ = __mod__ = __neg__ = _self


NOTHING = Nothing()


@dataclass(frozen=True)
class View:
    """Part of a stage in shared memory: an operand, which is copied in one box or in several."""

    boxes: tuple[str, ...]
    stage: int

    def permute(self, order: Any) -> View:
        return self

    def slice(self, start: int, length: int) -> View:
        return self


@dataclass(frozen=True)
class Stages:
    boxes: tuple[str, ...]
    apart: bool = False
    """Whether each box is a view of its own."""

    def index(self, at: int) -> View:
        if not self.apart:
            return View(self.boxes, at)
        return View((self.boxes[at % len(self.boxes)],), at // len(self.boxes))

    def _reinterpret(self, dtype: Any, shape: Any, layout: Any) -> Stages:
        return Stages(self.boxes, apart=True)


@dataclass(frozen=True)
class Place:
    """Where a warpgroup leaves its values for the other one."""

    note: Callable[[Action], None]
    at: int

    def store(self, value: Any) -> None:
        self.note(("put", self.at))

    def load(self, layout: Any) -> Nothing:
        self.note(("get", self.at))
        return NOTHING


class Language(SimpleNamespace):
    """A module of which only the given names matter."""

    def __getattr__(self, name: str) -> Nothing:
        return NOTHING


class Recorder:
    """Stand-ins for the modules that the kernels use."""

    def __init__(self, tiles: int, program: int, filled: Sequence[int], boxes: int) -> None:
        self.actions: list[Action] = []
        self.partitions: list[tuple[Any, ...]] = []
        self.counts: dict[Barrier, int] = {}
        self.names = iter(("rows", "one", "two", "full", "empty", "amax", "written"))
        self.tiles, self.program, self.filled, self.boxes = tiles, program, filled, boxes

    def allocate(self, dtype: Any, shape: Any, layout: Any) -> Any:
        name = next(self.names)
        if name == "written":
            return (name, 0)
        if name in ("full", "empty"):
            return SimpleNamespace(index=lambda stage: (name, stage))
        if name == "amax":
            return SimpleNamespace(index=lambda at: Place(self.actions.append, at))
        several = name != "rows" and self.boxes > 1
        return Stages(tuple(f"{name}, box {box}" for box in range(self.boxes)) if several else (name,))

    def product(self, a: View, b: View, sums: Any, **more: Any) -> Any:
        before = self.actions[-1]
        used = (*a.boxes, *b.boxes)
        if before[:2] == ("use", a.stage):  # products that follow one another are one event
            self.actions[-1] = ("use", a.stage, (*before[2], *used))
        else:
            self.actions.append(("use", a.stage, used))
        return NOTHING

    def follow(self, barrier: Barrier, increment_count: bool) -> None:
        """Arrivals that follow the copies of their own threads: part of the copies here."""
        assert self.actions[-1][0] == "gather" and barrier == ("full", self.actions[-1][1]) and not increment_count

    def copy(self, boxes: Any, corner: Any, barrier: Barrier, view: View) -> None:
        data, before = (corner[0] // APART, corner[1] // 128), self.actions[-1]
        # Copies that follow one another are one event: before all are complete, none of their data may be read.
        if before[:3] == ("copy", barrier, view.stage) and before[4] == data:
            self.actions[-1] = ("copy", barrier, view.stage, (*before[3], *view.boxes), data)
        else:
            self.actions.append(("copy", barrier, view.stage, view.boxes, data))

    def locate(self, t: int, units: Any) -> tuple[Any, ...]:
        """Expert, first row and end: tiles, of two units each, take turns with the numbers of rows."""
        first = APART * t
        return t, first, first + self.filled[t // 2 % len(self.filled)], NOTHING

    def modules(self) -> dict[str, Any]:
        note = self.actions.append
        gl = Language(
            allocate_shared_memory=self.allocate, static_range=range, minimum=min, program_id=lambda axis: self.program,
            warp_specialize=lambda parts, warps, registers: self.partitions.extend(parts),
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            init=lambda barrier, count: self.counts.update({barrier: count}), MBarrierLayout=NOTHING,
            wait=lambda barrier, parity: note(("wait", barrier, parity)),
            expect=lambda barrier, size: note(("expect", barrier, size)),
            arrive=lambda barrier: note(("free", barrier)),
        )  # fmt: skip
        async_copy = SimpleNamespace(
            async_copy_global_to_shared=lambda view, pointer, mask: note(("gather", view.stage)),
            mbarrier_arrive=self.follow,
        )
        return {
            "gl": gl, "mbarrier": mbarrier, "async_copy": async_copy, "fence_async_shared": NOTHING, "pinned": NOTHING,
            "thread_barrier": NOTHING,
            "tma": SimpleNamespace(async_copy_global_to_shared=self.copy), "warpgroup_mma": self.product,
            "warpgroup_mma_wait": lambda pending, sums: sums if len(sums) > 1 else sums[0], "gdc_wait": NOTHING,
            "after_the_one_before": NOTHING, "locate": self.locate, "scale_at": NOTHING, "store": NOTHING,
            "store_rows": NOTHING, "store_weighted": NOTHING, "hidden_of": NOTHING, "scale_of": NOTHING,
            "from_l2": lambda pointer: self.tiles, "columns_of": lambda n, mode: 0,
        }  # fmt: skip


def plain_kernel(shared: Mapping[str, Any]) -> Callable[..., None]:
    """The Gluon kernel as plain Python. shared: stand-ins for what its modules import, by name."""
    from moe_mk_contrib.gluon import gluon_decode, gluon_gemms, gluon_middle, gluon_parts, gluon_prefill

    def plain(module: Any, **more: Any) -> dict[str, Any]:
        """The module's names, its own functions as plain Python."""
        given: dict[str, Any] = vars(module) | more | shared
        for name, value in vars(module).items():
            inner = getattr(value, "fn", None)
            if isinstance(inner, FunctionType) and inner.__module__ == module.__name__ and name not in shared:
                given[name] = FunctionType(inner.__code__, given, name, inner.__defaults__)
        return given

    parts = plain(gluon_parts)
    own = {name: value for name, value in parts.items() if isinstance(value, FunctionType)}
    ways = {
        module.__name__.split(".")[-1]: SimpleNamespace(run=plain(module, **own)["run"])
        for module in (gluon_decode, gluon_middle, gluon_prefill)
    }
    kernel = plain(gluon_gemms, **own, **ways)["_by_hand"]
    assert isinstance(kernel, FunctionType)
    return kernel


def traces(
    rows: int, *, second: bool, stages: int, steps: int, tiles: int, program: int = 0, filled: Sequence[int] = ()
) -> Traces:
    """What program `program` of 2 does for a number of tiles, two units each, with `steps` steps a unit.

    filled: rows of the tiles that exist, in turn; all of them without it.
    """
    from moe_mk_contrib.gluon.gluon_gemms import _by_hand, weight_box

    recorder = Recorder(tiles, program, filled or (rows,), 128 // weight_box(rows))
    arguments: dict[str, Any] = dict.fromkeys(inspect.signature(_by_hand.fn).parameters, NOTHING)
    arguments |= {"across": 2, "steps": steps, "ROWS": rows, "STAGES": stages, "MODE": int(second), "PROGRAMS": 2}
    arguments |= {"GATHER": not second, "SCATTER": second, "REDUCED": False, "TOP_K": 8}
    arguments |= {"rows_an_expert": APART, "second": 0}
    plain_kernel(recorder.modules())(**arguments)
    assert not recorder.actions
    found = []
    for partition, given in recorder.partitions:
        partition(*given)
        found.append(tuple(recorder.actions))
        recorder.actions.clear()
    order = tuple((unit, step) for unit in range(program, 2 * tiles, 2) for step in range(steps))
    return Traces(tuple(found), recorder.counts, 128 if rows == 128 else 32, order)


def rows_of(operand: str, tile_rows: int) -> int:
    """Rows of an operand, or of one of two boxes of it."""
    return tile_rows if operand == "rows" else 64 if "box" in operand else 128


class Broken(Exception):
    """The protocol allows something that it must not."""


@dataclass(frozen=True)
class State:
    """One moment. Contents: the data that an operand of a stage holds, WRITTEN while they change."""

    places: tuple[int, ...]
    barriers: tuple[tuple[Barrier, tuple[int, int, int]], ...]
    """Arrivals still needed, bytes still expected, and phases completed, of each barrier."""
    contents: tuple[tuple[tuple[int, str], Data], ...]
    pending: tuple[Action, ...]
    """Copies and arrivals under way: (bar, arrivals, bytes, stages and operands, data)."""


def check(given: Traces, rows: int) -> int:
    """Explore every order of events; returns the number of states. Raises Broken with the reason. Broken: an operand is
    used that does not hold the data of this step, a stage is written while it may be read, or no partition can go
    on."""
    first = State(
        (0,) * len(given.partitions), tuple(sorted((bar, (count, 0, 0)) for bar, count in given.counts.items())), (), ()
    )
    seen, left = {first}, [first]
    while left:
        state = left.pop()
        following = list(_after(given, rows, state))
        if not following and any(
            place < len(trace) for place, trace in zip(state.places, given.partitions, strict=True)
        ):
            raise Broken(f"nothing can go on at {state.places}")
        for each in following:
            if each not in seen:
                seen.add(each)
                left.append(each)
    return len(seen)


def _after(given: Traces, rows: int, state: State) -> Iterator[State]:
    for number, event in enumerate(state.pending):
        yield _completed(given, state, number, event)
    for partition, trace in enumerate(given.partitions):
        if state.places[partition] < len(trace):
            after = _acted(given, rows, state, partition, trace)
            if after is not None:
                yield after


def _completed(given: Traces, state: State, number: int, event: Action) -> State:
    bar, arrivals, size, targets, data = event
    contents = dict(state.contents) | dict.fromkeys(targets, data)
    barriers = _changed(given, state, bar, arrivals, -size)
    pending = state.pending[:number] + state.pending[number + 1 :]
    return State(state.places, barriers, tuple(sorted(contents.items())), pending)


def _changed(given: Traces, state: State, bar: Barrier, arrivals: int, size: int) -> Any:
    barriers = dict(state.barriers)
    needed, expected, phases = barriers[bar]
    needed, expected = needed - arrivals, expected + size
    if needed < 0:
        raise Broken(f"{bar} has more arrivals than a phase takes")
    if needed == 0 and expected == 0:
        needed, phases = given.counts[bar], phases + 1
    barriers[bar] = (needed, expected, phases)
    return tuple(sorted(barriers.items()))


def _acted(given: Traces, rows: int, state: State, partition: int, trace: Sequence[Action]) -> State | None:
    place = state.places[partition]
    action, contents, pending, barriers = trace[place], dict(state.contents), state.pending, state.barriers
    name = action[0]
    if name == "wait":
        if dict(barriers)[action[1]][2] % 2 == action[2]:
            return None  # the phase of this parity is under way
    elif name == "expect":
        barriers = _changed(given, state, action[1], 1, action[2])
    elif name in ("copy", "gather"):
        stage, operands = (action[2], action[3]) if name == "copy" else (action[1], ("rows",))
        data = action[4] if name == "copy" else given.order[_earlier(trace, place, "gather")]
        targets = tuple((stage, operand) for operand in operands)
        for operand in operands:
            _expect_unread(given, state, stage, operand)
        contents |= dict.fromkeys(targets, WRITTEN)
        if name == "copy":
            size = 128 * sum(rows_of(operand, rows) for operand in operands)
            pending = (*pending, (action[1], 0, size, targets, data))
        else:  # the last of the threads completes the data, the first may arrive long before
            pending = (*pending, (("full", stage), 1, 0, (), WRITTEN))
            pending = (*pending, (("full", stage), given.threads - 1, 0, targets, data))
    elif name == "use":
        wanted = given.order[_earlier(trace, place, "wait", "full") - 1]
        for operand in action[2]:
            if (found := contents.get((action[1], operand))) != wanted:
                raise Broken(f"(unit, step) {wanted} in stage {action[1]} uses {operand} of {found}")
    elif name == "put":
        contents[action[1], "amax"] = (_earlier(trace, place, "put"), 0)
    elif name == "get":
        wanted, found = (_earlier(trace, place, "put") - 1, 0), contents.get((action[1], "amax"))
        if found != wanted:
            raise Broken(f"unit {wanted[0]} reads the amax of {found}")
    elif name == "free":
        barriers = _changed(given, state, action[1], 1, 0)
    places = (*state.places[:partition], place + 1, *state.places[partition + 1 :])
    return State(places, barriers, tuple(sorted(contents.items())), tuple(sorted(pending, key=str)))


def _earlier(trace: Sequence[Action], place: int, name: str, barrier: str | None = None) -> int:
    """How often something was done earlier in a trace, on one kind of barrier."""
    return sum(action[0] == name and (barrier is None or action[1][0] == barrier) for action in trace[:place])


def _expect_unread(given: Traces, state: State, stage: int, operand: str) -> None:
    """Raise Broken if a partition has passed its wait for a stage and not freed it yet."""
    for partition, trace in enumerate(given.partitions):
        done = Counter(action[:2] for action in trace[: state.places[partition]] if action[0] in ("wait", "free"))
        if done["wait", ("full", stage)] > done["free", ("empty", stage)]:
            raise Broken(f"{operand} of stage {stage} is written while partition {partition} may read it")
