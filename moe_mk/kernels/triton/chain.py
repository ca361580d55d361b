"""Programmatic dependent launch: kernels of one chain start while the one before still drains.

Each first waits until the one before has finished and its writes are seen, then lets the next one start. So whatever
runs before the wait may touch only what no kernel of the chain writes, and what those before the one before wrote: they
were complete when it let this one start. After it, a kernel may read what any earlier one wrote. Source: CUDA
programming guide, programmatic dependent launch (`griddepcontrol`, sm_90).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe_mk.kernels.triton.numerics import INTERPRETED

CHAINED = tl.constexpr(not INTERPRETED)


def chained() -> dict[str, Any]:
    """What a launch says so that it may start early."""
    return {} if INTERPRETED else {"launch_pdl": True}


@triton.jit
def after_the_one_before():
    """Wait for the kernel before, then let the next one start; nothing in the interpreter."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
