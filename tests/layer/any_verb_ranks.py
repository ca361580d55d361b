"""Ranks of which one meets an exception, a lack of descriptors or of stack, at any step of any call that all make."""

import os
import random
import re
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk import MoELayer, ParallelGroups
from moe_mk.errors import MoEMKWarning
from moe_mk.layer import swap_backends
from moe_mk.placement.eplb import PlacementPlan
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.rebalance import RebalanceManager, RebalanceSettings
from tests.layer.failing_ranks import EXPERTS, TOP_K, outcome, references, tokens
from tests.layer.failing_ranks import built as built_over
from tests.layer.interrupted_ranks import PACKAGE, Interrupts, StepTimeout
from tests.support.layers import tensors

TIMEOUT_S = 12.0
AT_ONCE_S = TIMEOUT_S / 2
"""An error within that was reported, and not waited for."""
COUNT = 6
"""Tokens of every call."""
STEPS = 9
"""Of a manager, in which a plan is made, announced, and its experts moved."""
PLACEMENTS = ((0, 1, 2, 3, 4, 5, 6, 7), (4, 1, 6, 3, 0, 5, 2, 7))
KINDS: tuple[type[BaseException], ...] = (
    KeyboardInterrupt, MemoryError, RecursionError, OSError, RuntimeError, ArithmeticError, SystemExit,
)  # fmt: skip
"""What an instruction may raise; signal handlers raise StepTimeout too."""
TYPED = {"right", "CommError", "RegroupError", "UnsupportedError", "WeightError", "ConfigError"}


class Serving:
    """One layer over all ranks, and what belongs to it. Every verb leaves another state than it has found."""

    def __init__(self, rank: int, transport: str, timeout_s: float = TIMEOUT_S, *, is_new: bool = False) -> None:
        self.rank, self.transport, self.turn, self.version = rank, transport, 0, 0
        self.layer: MoELayer = built_over(transport, timeout_s=timeout_s, experts="torch_cpu")
        if not is_new:
            self.layer(tokens(rank, COUNT))
        settings = RebalanceSettings(sync_every=1, inline=True, bytes_per_step=1 << 20, resplit_gain=9.0)
        self.manager = RebalanceManager([self.layer], settings, planner=self.plan)

    def plan(self, load_XE: Any, machine: Any, slots_XP: Any) -> PlacementPlan:
        """The other placement of the two."""
        wanted = PLACEMENTS[int((slots_XP[0] == PLACEMENTS[0]).all())]
        share = np.ones((1, len(wanted)), np.float32)
        return SimpleNamespace(topology=machine, phy2log=np.array([wanted]), share=share, reason="a test")  # type: ignore[return-value]

    def forward(self) -> None:
        self.layer(tokens(self.rank, COUNT, self.turn))

    def routed(self) -> None:
        x_TH, draw = tokens(self.rank, COUNT, self.turn), torch.Generator().manual_seed(self.turn)
        ids_TK = torch.rand((COUNT, EXPERTS), generator=draw).topk(TOP_K).indices
        self.layer.forward_routed(x_TH, torch.full((COUNT, TOP_K), 0.5), ids_TK)

    def warm_up(self) -> None:
        self.layer.warm_up([0, 3])

    def swap(self) -> None:
        now = self.layer.decision.chosen.experts
        x_TH = tokens(self.rank, self.rank, self.turn)
        swap_backends(self.layer, x_TH, experts="reference" if now == "torch_cpu" else "torch_cpu")

    def swap_transport(self) -> None:
        other = {self.transport: "all_gather"}.get(self.layer.decision.chosen.prepare_finalize, self.transport)
        swap_backends(self.layer, tokens(self.rank, 2), prepare_finalize=other)

    def place(self) -> None:
        layer, held = self.layer, self.layer.expert_map.local_to_global(self.rank)
        wanted = PLACEMENTS[self.turn % 2]
        placed = ExpertMap.from_physical(wanted, 2, EXPERTS)
        mine = enumerate(placed.local_to_global(self.rank))
        layer.live.set_placement(placed, {at: layer.live.read_expert(e) for at, e in mine if e not in held})

    def rebalance(self) -> None:
        self.manager._planner.wanted = True
        for _ in range(STEPS):
            self.manager.step()

    def load(self) -> None:
        self.version = (self.turn + 1) % 2
        self.layer.load_weights(weights_of(self.version))

    def recover(self) -> None:
        self.layer.recover()


VERBS = ("forward", "routed", "warm_up", "swap", "swap_transport", "rebalance", "recover", "place", "load")
UNHEARD = ("place", "load")
"""Those in which ranks do not wait for each other; who has failed makes them again."""


def weights_of(version: int) -> dict[str, Tensor]:
    """Two versions with one router: experts of one and of the other differ in their outputs alone."""
    return {name: -tensor if version and "down_proj" in name else tensor for name, tensor in tensors(EXPERTS).items()}


class Thrown(Interrupts):
    """Raises at one place of a call, named by a line of the package and the number of its places before."""

    def __init__(self, within: CodeType, at: tuple[str, int, int] | None, raised: type[BaseException], signal: bool):
        super().__init__(None, within, raised)
        self.target, self._is_of_handler, self.seen, self.raised_at = at, signal, Counter[tuple[str, int]](), 0.0

    def _error_at(self, code: CodeType, line: int, name: str) -> BaseException | None:
        at = code.co_filename, line
        self.seen[at] += 1
        if (*at, self.seen[at]) != self.target:
            return None
        self.raised_at = time.monotonic()
        return self._raised("injected")


@contextmanager
def no_descriptors(seconds: float = 0.0) -> Iterator[None]:
    """None is left within: every lower number is taken."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(taken, limits[0]), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(taken)


def code_of(verb: str) -> CodeType:
    function = getattr(Serving, verb)
    code: CodeType = function.__code__
    return code


def places_of(rank: int, transport: str, verb: str) -> list[dict[tuple[str, int], int]]:
    """By rank: the lines of the package that a verb passes, and how many places of each it passes."""
    serving = Serving(rank, transport)
    getattr(serving, verb)()
    return places_in(getattr(serving, verb), code_of(verb))


def places_in(call: Callable[[], None], code: CodeType) -> list[dict[tuple[str, int], int]]:
    """As `places_of`: those of a call of a function with this code."""
    counting = Thrown(code, None, KeyboardInterrupt, False)
    with warnings.catch_warnings(), counting.traced():
        warnings.simplefilter("ignore")
        call()
    return [dict(seen) for (seen,) in control_plane({at: count for at, count in counting.seen.items() if at[1]})]


class Throw:
    """An exception at a drawn place of a call on a drawn rank."""

    def __init__(self, draw: random.Random, places: list[dict[tuple[str, int], int]]) -> None:
        self.victim = draw.choice([rank for rank, lines in enumerate(places) if lines])
        self.signalled, kind, lines = draw.random() < 0.5, draw.choice(KINDS), places[self.victim]
        self.line = draw.choice(sorted(lines))
        self.turn = draw.choice((1, lines[self.line], draw.randint(1, lines[self.line])))
        self.kind = draw.choice((StepTimeout, KeyboardInterrupt)) if self.signalled else kind

    def __str__(self) -> str:
        where = f"{Path(self.line[0]).relative_to(PACKAGE)}:{self.line[1]}"
        handler = " of a handler" * self.signalled
        return f"{self.kind.__name__}{handler} on rank {self.victim}, time {self.turn} of {where}"

    def into(self, rank: int, call: Callable[[], None], code: CodeType) -> tuple[bool, list[str]]:
        """Make the call; returns whether it failed on this rank, and what went wrong. code: of its function."""
        at = (*self.line, self.turn) if rank == self.victim else None
        thrower = Thrown(code, at, self.kind, self.signalled)

        def run() -> Tensor:
            with thrower.traced():
                call()
            return torch.zeros(0)

        found, wrong, name = outcome(run), list[str](), self.kind.__name__
        allowed = {"right", name} if rank == self.victim and self.signalled else {*TYPED, name}
        if found["is"] not in (allowed if rank == self.victim else TYPED):
            wrong.append(f"{self}: ended in {found}")
        blamed, ended_at = found["is"] == "CommError" and found["peer"] == rank, time.monotonic()
        raised_at = max(at for (at,) in control_plane(thrower.raised_at))
        if blamed or (raised_at and ended_at - raised_at > AT_ONCE_S):
            wrong.append(f"{self}: {found}")
        return found["is"] != "right", wrong


def thrown(rank: int, transport: str, verb: str, draws: int, seed: int) -> list[str]:
    """One rank meets an exception at a drawn place of a verb, over and over; returns what went wrong."""
    warnings.simplefilter("ignore", MoEMKWarning)
    places, draw = places_of(rank, transport, verb), random.Random(f"{seed} {transport} {verb}")
    serving, expected, wrong = Serving(rank, transport), references(rank, 3, COUNT), list[str]()
    for number in range(draws):
        throw = Throw(draw, places)
        failed, wrong = throw.into(rank, getattr(serving, verb), code_of(verb))
        if serving.layer.ep.lock._is_owned():  # type: ignore[attr-defined]
            wrong.append(f"{throw}: the group stays locked")
        wrong += afterwards(serving, verb, expected, failed, f"{number}: {throw}")
        if wrong:
            break  # on all ranks: `afterwards` lets them know
    return wrong


def at_depth(left: int, call: Callable[[], object]) -> None:
    """Make a call where so many frames are left for it and what it calls."""
    frame, depth = sys._getframe(), 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]

    def deeper(frames: int) -> None:
        call() if frames <= 0 else deeper(frames - 1)

    deeper(sys.getrecursionlimit() - depth - 1 - left)


def calls_of(layer: MoELayer, manager: RebalanceManager, x_TH: Tensor) -> dict[str, Callable[[], object]]:
    """Calls of the library with nothing before them."""
    other, weights = {"torch_cpu": "reference"}.get(layer.decision.chosen.experts, "torch_cpu"), tensors(EXPERTS)
    return {
        "forward": lambda: layer(x_TH),
        "swap": lambda: swap_backends(layer, x_TH, experts=other),
        "step": lambda: manager.step(),
        "warm_up": lambda: layer.warm_up([0, 3]),
        "load": lambda: layer.load_weights(weights),
    }


def enters(left: int, call: Callable[[], object]) -> bool:
    """Whether so many frames suffice to reach this library, and not its very first instruction alone."""
    try:
        at_depth(left, call)
    except RecursionError as error:
        frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        return any(code.co_filename.startswith(PACKAGE) and line != code.co_firstlineno for code, line in frames)
    return True


def too_deep(rank: int, transport: str, verb: str, step: int) -> list[str]:
    """Rank 0 makes a call where a few frames are left, from the first of this library to where it succeeds."""
    warnings.simplefilter("ignore", MoEMKWarning)
    alone: MoELayer = built_over("auto", ParallelGroups(), experts="torch_cpu")
    single = RebalanceManager([alone])
    # One more: calls that the interpreter has specialised count a frame more or less.
    first = 1 + next(n for n in range(30) if enters(n, calls_of(alone, single, tokens(rank, COUNT))[verb]))
    serving, expected = Serving(rank, transport), references(rank, 2, COUNT)
    for left in range(first, first + 60, step):
        call = calls_of(serving.layer, serving.manager, tokens(rank, COUNT))[verb]

        def run(call: Callable[[], object] = call, left: int = left) -> Tensor:
            at_depth(left, call) if rank == 0 else call()
            return torch.zeros(0)

        found, where = outcome(run), f"{verb} with {left} frames ({first} reach the library)"
        wrong = [f"{where}: {found}"] * (found["seconds"] > AT_ONCE_S or found["is"] not in {*TYPED, "RecursionError"})
        serving.version = 0
        wrong += afterwards(serving, verb, expected, found["is"] != "right", where)
        if wrong:
            return wrong
    return []


def lacking_descriptors(rank: int, transport: str, verbs: list[str]) -> list[str]:
    """Each rank in turn has no descriptor left during the whole of a call: the first of a layer, and a later one."""
    warnings.simplefilter("ignore", MoEMKWarning)
    expected, wrong = references(rank, 2, COUNT), list[str]()
    for verb in verbs:
        serving = Serving(rank, transport)
        for victim in (0, 1, 1, 0):

            def run(serving: Serving = serving, verb: str = verb, victim: int = victim) -> Tensor:
                with no_descriptors() if rank == victim else nullcontext():
                    getattr(serving, verb)()
                return torch.zeros(0)

            found, where = outcome(run), f"{verb} without descriptors on rank {victim}"
            if found["seconds"] > AT_ONCE_S or found["is"] not in {*TYPED, "OSError"}:
                wrong.append(f"{where}: {found}")
            wrong += afterwards(serving, verb, expected, found["is"] != "right", where)
            if any(each for (each,) in control_plane(wrong)):
                return wrong
    return []


def late(rank: int, transport: str, verbs: list[str], timeout_s: float) -> list[str]:
    """Rank 1 makes each call, the first of a layer too, when rank 0 has given it up; returns what went wrong."""
    wrong = list[str]()
    for verb in verbs:
        serving, limit_s = Serving(rank, transport, timeout_s, is_new=verb == "first"), timeout_s
        call = serving.forward if verb == "first" else getattr(serving, verb)
        limit_s += (timeout_s + 1.0) * (verb == "recover")
        control_plane()
        time.sleep((limit_s + 1.5 * timeout_s) * rank)
        found = outcome(lambda call=call: call() or torch.zeros(0))  # type: ignore[misc]
        if verb == "rebalance":  # which records the error, and raises none
            found |= {"is": "CommError", "peer": 1, "text": str(serving.manager.status().incidents)}
        named = re.search(rf"rank {rank}, phase '.+', layer 'moe', peer {found['peer']}: ", found["text"])
        in_time = found["seconds"] < limit_s + 1.0 and (rank, found["peer"]) != (0, 0)
        closed = "waited for this rank longer" in found["text"] and "recovery" not in found["text"]
        closed &= "build the layer over a new group" in outcome(serving.layer.recover)["text"]  # type: ignore[arg-type]
        is_gloo = rank == 1 and verb not in ("first", "recover") and transport.startswith(("all", "hier"))
        if found["is"] != "CommError" or not named or not in_time or (is_gloo and not closed):
            wrong.append(f"{verb} on rank {rank}: {found}")
    return wrong


def control_plane(*mine: Any) -> list[tuple[Any, ...]]:
    """What an engine has apart from the layer: what each rank states."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def afterwards(serving: Serving, verb: str, expected: list[Tensor], failed: bool, where: str) -> list[str]:
    """All recover where any rank has failed, and calls are right: with another verb than a forward too."""
    wrong, rank = list[str](), serving.rank
    any_failed = any(each for (each,) in control_plane(failed))
    for _ in range(3):
        if not any(each for (each,) in control_plane(failed)):
            break
        found = outcome(lambda: serving.recover() or torch.zeros(0))
        failed = found["is"] != "right"
        if found["seconds"] > AT_ONCE_S:
            wrong.append(f"{where}: then recover took {found}")
    if failed:
        wrong.append(f"{where}: not recovered: {found}")
    if verb == "load" and any_failed:
        # Until all have loaded it again: all experts of one version, or an error with what to do.
        found = outcome(lambda: serving.layer(tokens(rank, COUNT)))
        y_TH = torch.empty(0) if found["is"] != "right" else serving.layer(tokens(rank, COUNT))
        same = [bool(torch.isclose(sign * y_TH, expected[0], atol=1e-4).all()) for sign in (1, -1) if len(y_TH)]
        every = control_plane(found["is"], same)
        if len(set(map(repr, every))) > 1 or not (any(same) or "load them there too" in found["text"]):
            wrong.append(f"{where}: before it is loaded again: {found}, {every}")
    if verb in UNHEARD and any_failed:
        getattr(serving, verb)()
    sign = 1 - 2 * serving.version
    for seed in (0, 1):
        again = outcome(lambda s=seed: serving.layer(tokens(rank, COUNT, s)), sign * expected[seed])  # type: ignore[misc]
        if again["is"] != "right":
            wrong.append(f"{where}: then {again}")
    states = control_plane(serving.layer.decision.chosen.name, serving.layer.expert_map.experts_of_rank, bool(wrong))
    if len({each[:2] for each in states}) > 1:
        wrong.append(f"{where}: ranks serve with {states}")
    serving.turn += 1
    if any(each[2] for each in states) and not wrong:
        wrong.append(f"{where}: wrong on the other rank")
    return wrong
