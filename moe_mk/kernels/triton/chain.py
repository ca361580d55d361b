"""Programmatic dependent launch: kernels of one chain start while the previous one drains.

Each kernel waits until the previous one has finished and its writes are visible, then allows the next one to start.
Before the wait a kernel may access only memory that no kernel of the chain writes, and results of kernels before the
previous one, which were complete when the previous one allowed this launch. After the wait it may read all earlier
results. Source: CUDA programming guide, programmatic dependent launch (`griddepcontrol`, sm_90).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe_mk.kernels.triton.numerics import INTERPRETED

CHAINED = tl.constexpr(not INTERPRETED)


def chained() -> dict[str, Any]:
    """Launch options that allow an early start."""
    return {} if INTERPRETED else {"launch_pdl": True}


@triton.jit
def after_the_one_before():
    """Wait for the previous kernel, then allow the next one to start; no effect in the interpreter."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
