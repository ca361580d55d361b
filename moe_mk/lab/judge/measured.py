"""The distance of a recorded tensor from its replay, in standard deviations of what the number formats cause.

A stage departs where the recorded value is farther from the replayed one than `ALL_TOKENS` standard deviations in root
mean square over all rows, `ONE_TOKEN` over one row, or `ONE_BLOCK` over 128 columns of a row: a uniform rounding error
never exceeds sqrt(3) standard deviations, and limits of rows and tokens are those of `moe_mk.oracle.expected_error`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.oracle.expected_error import ALL_TOKENS, ONE_TOKEN

BLOCK, ONE_BLOCK = 128, 4.0


@dataclass(frozen=True)
class Check:
    """The comparison of one recorded tensor with the replay."""

    stage: str
    tensor: str
    """The name in the case file."""
    rows: int
    error: float
    """Relative L2 over all rows."""
    deviations: float
    """The error in standard deviations: root mean square over all rows, and of the worst row and block."""
    worst_row: float
    worst_block: float
    wrong_rows: int

    @property
    def passed(self) -> bool:
        return self.deviations <= ALL_TOKENS and self.worst_row <= ONE_TOKEN and self.worst_block <= ONE_BLOCK


@dataclass(frozen=True)
class Measured:
    """Deviations of a tensor: of each row (leading axes flattened) and of its blocks of columns."""

    row_R: Tensor
    block_RB: Tensor
    squares_R: Tensor
    variances_R: Tensor
    judged_R: Tensor
    error: float

    @property
    def deviations(self) -> float:
        total = float(self.variances_R[self.judged_R].sum())
        gone = float(self.squares_R[self.judged_R].sum())
        return math.sqrt(gone / total) if total else (0.0 if gone == 0 else math.inf)

    def check(self, stage: str, tensor: str) -> Check:
        """Compared with the limits."""
        row, block = (float(each.max()) if each.numel() else 0.0 for each in (self.row_R, self.block_RB))
        return Check(
            stage, tensor, int(self.judged_R.sum()), self.error, self.deviations, row, block, int(self.wrong_R.sum())
        )

    @property
    def wrong_R(self) -> Tensor:
        """Rows beyond a limit."""
        return (self.row_R > ONE_TOKEN) | (self.block_RB > ONE_BLOCK).any(-1)


def measure(got: Tensor, want: Tensor, var: Tensor) -> Measured:
    """Compare (..., X) with the replay. Rows that are not finite in the replay are not judged; NaN in others counts as
    an infinite error.
    """
    got, want, var = (each.reshape(-1, each.shape[-1]).double() for each in (got, want, var))
    judged = want.isfinite().all(-1)
    want = torch.where(judged[:, None], want, 0.0)
    square = torch.where(judged[:, None], torch.nan_to_num((got - want) ** 2, nan=math.inf), 0.0)
    # Not below a few roundings of f32: the replay's own inputs are no more exact.
    var = torch.where(judged[:, None], var, 0.0) + (2.0**-22 * want) ** 2
    columns = _by_block(square)
    spread = _by_block(var)
    # A block of small values of a large row takes part in the roundings of sums: half of the row's mean at least.
    spread_b = torch.maximum(spread, 0.25 * var.mean(-1, keepdim=True) * (spread > 0) * min(BLOCK, var.shape[1]))
    total, size = square.sum(), (want**2).sum()
    error = float((total / size.clamp_min(torch.finfo(torch.float64).tiny)).sqrt())
    return Measured(
        _ratio(square.sum(-1), var.sum(-1)), _ratio(columns, spread_b), square.sum(-1), var.sum(-1), judged, error
    )


def _by_block(values: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK))
    return padded.reshape(len(values), padded.shape[1] // BLOCK, BLOCK).sum(-1)


def _ratio(squares: Tensor, variances: Tensor) -> Tensor:
    return torch.where(squares == 0, 0.0, (squares / variances).sqrt())
