"""The message that sends a plan from rank 0 to all ranks: slots, shares, and a digest of all bytes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.errors import MoEMKError
from moe_mk.placement.eplb import PlacementPlan

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
