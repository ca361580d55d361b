"""Grouped GEMMs for Hopper in Gluon, an engine of the Triton experts: one producer warp, the others multiply.

No GPU has run them: they are compiled for sm_90, interpreted one thread for each warp, and their ring is model-checked.
Importing this package needs no triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_mk.kernels.triton.tile import BLOCK, Engine

ROWS = {True: (8, 16, 32), False: (64, 128)}
TRIED = (
    *((rows, True, 4, stages) for rows in ROWS[True] for stages in (4, 6)),
    *((64, False, 4, stages) for stages in (4, 5)),
    *((128, False, 4, stages) for stages in (3, 4)),
)


def gemms(experts: Any, hidden: int) -> tuple[Callable[..., None] | None, Callable[..., None] | None]:
    """Both GEMMs; None where the Triton kernel serves: these compute SwiGLU in FP8, in whole blocks, without biases."""
    from moe_mk.kernels.triton.grouped_w13 import CLAMPED

    if experts.format.name != "fp8" or experts.b13 is not None:
        return None, None
    from moe_mk_contrib.gluon import gluon_gemms

    first = experts.gated and experts.activation in ("silu", *CLAMPED) and hidden % BLOCK == 0
    second = experts.inner % BLOCK == 0 and hidden % (2 * BLOCK) == 0
    return gluon_gemms.grouped_w13 if first else None, gluon_gemms.grouped_w2 if second else None


GLUON = Engine("gluon", rows=ROWS, archs=frozenset({9}), gemms=gemms, tried=TRIED)
"""Its kernels use warpgroup products of Hopper."""
