"""Idle time of pipeline stages: while the first micro-batches come in and the last go out, some stages have nothing.

    stage 0   1 2 3 4 . .        3 stages, 4 micro-batches: 6 steps, of which each stage works in 4
    stage 1   . 1 2 3 4 .
    stage 2   . . 1 2 3 4

Source: Huang et al. 2019, GPipe (arXiv 1811.06965), section 2.3.
"""

from __future__ import annotations

from fractions import Fraction

from moe_mk.errors import ConfigError


def bubble(stages: int, micro_batches: int) -> Fraction:
    """The part of a forward in which a stage is idle, (S - 1) / (M + S - 1) for equal stages.

    Raises ConfigError below one stage or micro-batch.
    """
    if min(stages, micro_batches) < 1:
        raise ConfigError(f"{stages} stages, {micro_batches} micro-batches: let both be 1 or more")
    return Fraction(stages - 1, micro_batches + stages - 1)
