"""Ranks of which one meets an exception, a lack of descriptors or of stack, at any step of any call that all make."""

import os
import random
import resource
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk import MoELayer
from moe_mk.errors import MoEMKWarning
from moe_mk.layer import swap_backends
from moe_mk.placement.eplb import PlacementPlan
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.rebalance import RebalanceManager, RebalanceSettings
from tests.layer.failing_ranks import EXPERTS, TOP_K, outcome, references, tokens
from tests.layer.failing_ranks import built as built_over
from tests.layer.interrupted_ranks import CHECKED, PACKAGE, Interrupts, StepTimeout

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

    def __init__(self, rank: int, transport: str) -> None:
        self.rank, self.transport, self.turn = rank, transport, 0
        self.layer: MoELayer = built_over(transport, timeout_s=TIMEOUT_S, experts="torch_cpu")
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

    def recover(self) -> None:
        self.layer.recover()


VERBS = ("forward", "routed", "warm_up", "swap", "swap_transport", "rebalance", "recover", "place")


class Thrown(Interrupts):
    """Raises at one place of a call, named by a line of the package and the number of its places before."""

    def __init__(self, within: CodeType, at: tuple[str, int, int] | None, raised: type[BaseException], signal: bool):
        super().__init__(None, within, raised)
        self.target, self.of_handler, self.seen, self.raised_at = at, signal, Counter[tuple[str, int]](), 0.0

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code is self._within:
            self._inside += 1
        if not self._inside or not code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        last = frame.f_lasti

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal last
            if event == "return" and code is self._within:
                self._inside -= 1
            if event != "opcode":
                return trace
            before, last = last, frame.f_lasti
            back = frame.f_back
            first = code is self._within or (back is not None and back.f_code is self._within)
            if (name := self._name(code, before)) not in CHECKED or (first and name == "RESUME"):
                return trace  # at its very first instruction nothing of a call has begun
            line = code.co_filename, frame.f_lineno
            self.seen[line] += 1
            if (*line, self.seen[line]) == self.target:
                self.raised_at = time.monotonic()
                error = self._raised("injected")
                if self.of_handler:
                    raise error
                del frame, _  # else it passes for an exception of a signal handler
                raise error
            return trace

        return trace


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
    counting = Thrown(code_of(verb), None, KeyboardInterrupt, False)
    with warnings.catch_warnings(), counting.traced():
        warnings.simplefilter("ignore")
        getattr(serving, verb)()
    return [dict(seen) for (seen,) in control_plane({at: count for at, count in counting.seen.items() if at[1]})]


def thrown(rank: int, transport: str, verb: str, draws: int, seed: int) -> list[str]:
    """One rank meets an exception at a drawn place of a verb, over and over; returns what went wrong."""
    warnings.simplefilter("ignore", MoEMKWarning)
    places, draw = places_of(rank, transport, verb), random.Random(f"{seed} {transport} {verb}")
    serving, expected, wrong = Serving(rank, transport), references(rank, 3, COUNT), list[str]()
    for number in range(draws):
        victim, signalled, kind = draw.randrange(2), draw.random() < 0.5, draw.choice(KINDS)
        line = draw.choice(sorted(places[victim]))
        turn = draw.choice((1, places[victim][line], draw.randint(1, places[victim][line])))
        kind = draw.choice((StepTimeout, KeyboardInterrupt)) if signalled else kind
        thrower = Thrown(code_of(verb), (*line, turn) if rank == victim else None, kind, signalled)

        def run(verb: str = verb, thrower: Thrown = thrower) -> Tensor:
            with thrower.traced():
                getattr(serving, verb)()
            return torch.zeros(0)

        found = outcome(run)
        where = f"{number}: {kind.__name__}{' of a handler' * signalled} on rank {victim}, time {turn} of "
        where += f"{Path(line[0]).relative_to(PACKAGE)}:{line[1]}"
        allowed = {"right", kind.__name__} if rank == victim and signalled else {*TYPED, kind.__name__}
        if found["is"] not in (allowed if rank == victim else TYPED):
            wrong.append(f"{where}: ended in {found}")
        blamed, ended_at = found["is"] == "CommError" and found["peer"] == rank, time.monotonic()
        raised_at = max(at for (at,) in control_plane(thrower.raised_at))
        if blamed or (raised_at and ended_at - raised_at > AT_ONCE_S):
            wrong.append(f"{where}: {found}")
        wrong += afterwards(serving, verb, expected, found["is"] != "right", where)
        if wrong:
            break  # on all ranks: `afterwards` lets them know
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
    if verb == "place" and any_failed:
        serving.place()  # which no rank waits for: it is made again
    for seed in (0, 1):
        again = outcome(lambda s=seed: serving.layer(tokens(rank, COUNT, s)), expected[seed])  # type: ignore[misc]
        if again["is"] != "right":
            wrong.append(f"{where}: then {again}")
    states = control_plane(serving.layer.decision.chosen.name, serving.layer.expert_map.experts_of_rank, bool(wrong))
    if len({each[:2] for each in states}) > 1:
        wrong.append(f"{where}: ranks serve with {states}")
    serving.turn += 1
    if any(each[2] for each in states) and not wrong:
        wrong.append(f"{where}: wrong on the other rank")
    return wrong
