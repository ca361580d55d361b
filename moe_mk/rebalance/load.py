"""How often each expert was chosen: counted on the device without a host round trip, smoothed on the host.

Prefill and decode are kept apart, because they load experts differently and are often served by different machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.registry import did_you_mean

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)


def number_of(phase: Phase) -> int:
    """The place of a phase in PHASES; ConfigError for another word."""
    if phase not in PHASES:
        raise ConfigError(f"phase {phase!r} is unknown{did_you_mean(phase, PHASES)}; use {' or '.join(PHASES)}")
    return PHASES.index(phase)


class LoadWindow:
    """Counts of one window, [phase, layer, expert] in int64 on the device."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        self.counts_2XE = torch.zeros((len(PHASES), num_layers, num_experts), dtype=torch.int64, device=device)
        self._seen_XE: Tensor | None = None

    def gather(self, loads: Sequence[Tensor], phase: Phase) -> None:
        """Add what the counters of all layers, one [E] each, have gained since the last call; they may start over."""
        now_XE = torch.stack(list(loads))
        if self._seen_XE is not None:
            self.counts_2XE[number_of(phase)] += torch.where(now_XE >= self._seen_XE, now_XE - self._seen_XE, now_XE)
        self._seen_XE = now_XE

    def start_from(self, loads: Sequence[Tensor]) -> None:
        """Leave out what the counters hold already."""
        self._seen_XE = torch.stack(list(loads))

    def close(self) -> Tensor:
        """Hand over the counts and start the next window at zero."""
        closed, self.counts_2XE = self.counts_2XE, torch.zeros_like(self.counts_2XE)
        return closed


class LoadHistory:
    """Windows of all ranks together, smoothed: new = decay * old + (1 - decay) * window, in tokens per window.

    A phase that brought no token to a window keeps its average: an idle machine forgets nothing.
    """

    def __init__(self, num_layers: int, num_experts: int, *, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"decay={decay} must lie in [0, 1); 0 believes the last window alone")
        self.decay, self.num_windows = decay, 0
        self.average_2XE = np.zeros((len(PHASES), num_layers, num_experts))
        self._windows_of_phase = [0] * len(PHASES)

    def add(self, window_2XE: Tensor) -> None:
        counts = window_2XE.cpu().numpy().astype(np.float64)
        self.num_windows += 1
        for phase, new in enumerate(counts):
            if not new.any():
                continue
            keep = self.decay if self._windows_of_phase[phase] else 0.0
            self.average_2XE[phase] = keep * self.average_2XE[phase] + (1.0 - keep) * new
            self._windows_of_phase[phase] += 1

    def load(self, phase: Phase | Literal["all"]) -> NDArray[np.float64]:
        """Smoothed tokens of each layer and expert [X, E]; "all" adds up both phases."""
        if phase == "all":
            total: NDArray[np.float64] = self.average_2XE.sum(0)
            return total
        one: NDArray[np.float64] = self.average_2XE[number_of(phase)].copy()
        return one
