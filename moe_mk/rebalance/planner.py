"""Planning on a background thread of rank 0, with a timeout: plans that fail or hang are recorded and retried.

A plan is sent to all ranks as one message: slots, shares, and a digest of all bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.errors import MoEMKError
from moe_mk.placement.eplb import PlacementPlan, Topology, plan, resplit
from moe_mk.rebalance.background import BackgroundJob
from moe_mk.rebalance.ledger import Balance, Ledger, measure_balance
from moe_mk.rebalance.load import LoadHistory
from moe_mk.rebalance.settings import RebalanceSettings
from moe_mk.rebalance.status import IncidentLog

DIGEST = 32


class BadPlanMessage(MoEMKError):
    """A plan that was damaged in transfer, or that does not start from the placement of this rank."""


@dataclass(frozen=True)
class PlanMessage:
    """A plan as sent to all ranks: [X layers, P slots], with slots numbered over all ranks, dead ones included."""

    plan_id: int
    base: int
    """Flips before it; a rank that has made another number must not follow."""
    phy2log: NDArray[np.int64]
    share: NDArray[np.float32]
    reason: str
    full: bool = True
    """Whether slots were planned anew; a message may also bring new shares alone."""

    @classmethod
    def of(cls, plan: PlacementPlan, plan_id: int, base: int, slots: NDArray[np.int64]) -> PlanMessage:
        """Take a plan up. slots: what serves now; slots that the plan leaves empty keep it and get no tokens.

        A second copy of an expert on the same rank balances nothing: the first one takes its share too.
        """
        empty = plan.phy2log < 0
        share = np.where(empty, np.float32(0), plan.share)
        phy2log = np.where(empty & plan.topology.alive_W[plan.topology.gpu_P], slots, plan.phy2log)
        for gpu in range(plan.topology.gpus):
            mine = np.flatnonzero(plan.topology.gpu_P == gpu)
            for at, first in enumerate(mine):
                for second in mine[at + 1 :]:
                    twin = (phy2log[:, first] == phy2log[:, second]) & (phy2log[:, first] >= 0)
                    share[twin, first] += share[twin, second]
                    share[twin, second] = 0
            _unallocated_last(phy2log, share, mine)
        return cls(plan_id, base, phy2log, share, plan.reason)

    def encode(self) -> Tensor:
        """Bytes as a column, ready to travel."""
        head = {
            "plan_id": self.plan_id,
            "base": self.base,
            "shape": self.phy2log.shape,
            "reason": self.reason,
            "full": self.full,
        }
        text = json.dumps(head).encode()
        body = (
            len(text).to_bytes(8, "little")
            + text
            + self.phy2log.astype("<i4").tobytes()
            + self.share.astype("<f4").tobytes()
        )
        data = hashlib.sha256(body).digest() + body
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, 1)

    @classmethod
    def decode(cls, column: Tensor) -> PlanMessage:
        """Read a column of bytes; raises BadPlanMessage if any of them has changed."""
        data = column.cpu().numpy().tobytes()
        body = data[DIGEST:]
        if hashlib.sha256(body).digest() != data[:DIGEST]:
            raise BadPlanMessage(f"a plan of {len(data)} bytes does not have the digest it was sent with")
        size = int.from_bytes(body[:8], "little")
        head = json.loads(body[8 : 8 + size])
        layers, slots = head["shape"]
        numbers = body[8 + size :]
        phy2log = np.frombuffer(numbers, "<i4", layers * slots).reshape(layers, slots).astype(np.int64)
        share = np.frombuffer(numbers, "<f4", layers * slots, 4 * layers * slots).reshape(layers, slots)
        return cls(head["plan_id"], head["base"], phy2log, share.astype(np.float32), head["reason"], head["full"])


def _unallocated_last(phy2log: NDArray[np.int64], share: NDArray[np.float32], slots: NDArray[np.intp]) -> None:
    """Reorder the slots of one rank in place, so that those without an expert come last."""
    order = np.argsort(phy2log[:, slots] < 0, axis=1, kind="stable")
    phy2log[:, slots] = np.take_along_axis(phy2log[:, slots], order, 1)
    share[:, slots] = np.take_along_axis(share[:, slots], order, 1)


Planner = Callable[[NDArray[np.float64], Topology, NDArray[np.int64]], PlacementPlan]
"""(smoothed load [layers, experts], machines, slots that serve now [layers, slots]) to a plan."""


class PlacementPlanner:
    """The planner of rank 0. The other ranks have one too, because any of them may become rank 0."""

    def __init__(self, settings: RebalanceSettings, journal: IncidentLog, planner: Planner | None) -> None:
        self.settings, self.journal = settings, journal
        self.wanted = False
        """Whether a full plan is asked for; stays set until one is announced or found not to pay."""
        self.outbox: Tensor | None = None
        """A plan that is ready to be announced, as bytes."""
        self.reason = ""
        """Why the last plan was not announced; empty after one was."""
        self._planner = planner or self._plan
        self._thread: BackgroundJob[PlanMessage | str] = BackgroundJob(
            "moe_mk planner", limit_s=settings.plan_limit_s, inline=settings.inline
        )
        self._failures, self._not_before = 0, 0
        self._full, self._windows = False, 0

    @property
    def busy(self) -> bool:
        """Whether a plan is being made or waits to be announced."""
        return self._thread.busy or self.outbox is not None

    def announced(self, *, full: bool) -> None:
        """All ranks have a plan; a full one is what was asked for."""
        self.wanted &= not full
        self.reason, self._failures = "", 0

    def restart(self, *, wanted: bool = True) -> None:
        """Forget what was planned for a state that is no more. wanted: plan anew at once."""
        self._thread.forget()
        self.outbox, self.wanted, self._not_before, self._failures = None, wanted, 0, 0

    def think(
        self, step: int, history: LoadHistory, ledger: Ledger, balance: Balance | None, plan_id: int, base: int
    ) -> None:
        """Collect what the planning thread made, report its errors, and start its next job. Never waits."""
        outcome = self._thread.poll()
        if outcome is not None and (error := outcome.error) is not None:
            self._report(error, step)
        elif outcome is not None:
            self._take(outcome.result())
        if self.busy or step < self._not_before:
            return
        load_XE = history.load(self.settings.phase)
        if self.wanted and (load_XE.any() or (ledger.phy2log < 0).any()):
            planned_XE = load_XE if load_XE.any() else np.ones_like(load_XE)

            def place(now: Ledger) -> PlanMessage:
                made = self._planner(planned_XE, now.topology, now.phy2log)
                return PlanMessage.of(made, plan_id, base, now.phy2log)

            self._begin(place, planned_XE, ledger, full=True)
        elif balance is not None and history.num_windows > self._windows and load_XE.any():
            self._windows = history.num_windows
            if balance.step_over_ideal > 1.0 + self.settings.resplit_gain:

                def split(now: Ledger) -> PlanMessage:
                    share = resplit(now.phy2log, load_XE, now.topology)
                    return PlanMessage(plan_id, base, now.phy2log, share, "shares re-solved", full=False)

                self._begin(split, load_XE, ledger, full=False)

    def _begin(
        self, make: Callable[[Ledger], PlanMessage], load_XE: NDArray[np.float64], ledger: Ledger, *, full: bool
    ) -> None:
        """Start a job. make: a message, given what serves now; one of shares alone must save enough."""
        now = replace(ledger, phy2log=ledger.phy2log.copy(), share=ledger.share.copy())

        def job() -> PlanMessage | str:
            message = make(now)
            if not np.array_equal(message.phy2log, now.phy2log):
                return message
            after = replace(now, phy2log=message.phy2log, share=message.share)
            before_time, after_time = (measure_balance(load_XE, each).step_over_ideal for each in (now, after))
            if before_time - after_time >= self.settings.resplit_gain:
                return message
            return f"nothing gained: step time {before_time:.4f} of ideal, {after_time:.4f} with new shares"

        self._full = full
        self._thread.start(job)

    def _take(self, made: PlanMessage | str) -> None:
        if isinstance(made, PlanMessage):
            self.outbox = made.encode()
            return
        self.reason = made
        self._failures = 0
        if self._full:
            self.wanted = False

    def _report(self, error: BaseException, step: int) -> None:
        self._failures += 1
        self._not_before = step + self.settings.backoff * 2 ** (self._failures - 1)
        then = f"the placement stays; the next plan is tried at step {self._not_before}"
        self.journal.record(step, f"planning failed: {type(error).__name__}: {error}", then)

    def _plan(self, load_XE: NDArray[np.float64], topology: Topology, slots: NDArray[np.int64]) -> PlacementPlan:
        s, living = self.settings, int(topology.alive_W.sum())
        return plan(
            load_XE, topology, groups=s.groups, policy=s.policy, old=slots, min_gain=s.min_gain,
            max_moves=s.max_moves, move_cost=s.move_cost, min_copies=min(s.min_copies, living),
        )  # fmt: skip
