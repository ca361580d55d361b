"""How even a load is, among experts and among ranks: the two numbers that show whether placement can help."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.rebalance.ledger import Ledger


@dataclass(frozen=True)
class Balance:
    """Evenness of every layer under one placement."""

    expert_cv_X: NDArray[np.float64]
    """Coefficient of variation of expert loads: what the router does, 0 is even."""
    rank_max_over_mean_X: NDArray[np.float64]
    """Time of the busiest rank over the ideal one: what placement makes of it, 1 is even."""
    step_over_ideal: float
    """Time of all layers, each as slow as its busiest rank, over the time with even ranks."""

    def as_dict(self) -> dict[str, float]:
        cv, peak = self.expert_cv_X, self.rank_max_over_mean_X
        return {
            "balance.expert_cv": float(cv.mean()),
            "balance.expert_cv_worst": float(cv.max()),
            "balance.rank_max_over_mean": float(peak.mean()),
            "balance.rank_max_over_mean_worst": float(peak.max()),
            "balance.step_over_ideal": self.step_over_ideal,
        }


def measure_balance(load_XE: NDArray[np.float64], ledger: Ledger) -> Balance:
    """Judge a load of tokens [layers, experts] under a placement; layers without load count as even."""
    time_XW, speed_W = rank_times(load_XE, ledger), ledger.topology.speed_W[ledger.living]
    # In units of a rank of mean speed, so that equal speeds give plain max over mean.
    ideal_X = (time_XW * speed_W).sum(1) / speed_W.sum()
    busiest_X = time_XW.max(1)
    peak_X = np.divide(busiest_X, ideal_X, out=np.ones_like(ideal_X), where=ideal_X > 0)
    cv = [float(coefficient_of_variation(torch.tensor(row, dtype=torch.float64, device="cpu"))) for row in load_XE]
    total = float(ideal_X.sum())
    return Balance(np.asarray(cv), peak_X, float(busiest_X.sum()) / total if total > 0 else 1.0)


def coefficient_of_variation(values: Tensor) -> Tensor:
    """Population standard deviation over mean of values >= 0: 0 when all are equal, zeros included."""
    return values.std(correction=0) / values.mean().clamp(min=torch.finfo(values.dtype).tiny)


def rank_times(load_XE: NDArray[np.float64], ledger: Ledger) -> NDArray[np.float64]:
    """Tokens over speed of every living rank [layers, ranks], when replicas take exactly their shares."""
    expected = (len(ledger.phy2log), ledger.num_experts)
    if load_XE.shape != expected:
        raise ShapeError(f"load has shape {load_XE.shape}, the placement has [layers, experts] = {expected}")
    taken_XP = np.take_along_axis(load_XE, np.maximum(ledger.phy2log, 0), 1) * ledger.share
    gpu_P, living = ledger.topology.gpu_P, ledger.living
    times = np.stack([taken_XP[:, gpu_P == rank].sum(1) / ledger.topology.speed_W[rank] for rank in living], 1)
    return times.astype(np.float64)
