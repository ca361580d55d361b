"""Error limits between two correct results, derived from the number formats only."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.errors import MoEMKError
from moe_mk.verify.compare import ALL_TOKENS, ONE_TOKEN


class NonConforming(MoEMKError, AssertionError):
    """A backend violates its contract; the message contains the case and the difference."""


def require(holds: bool, what: str) -> None:
    """Raise NonConforming unless something holds."""
    if not holds:
        raise NonConforming(what)


def require_close(got_TH: Tensor, expected_TH: Tensor, error: float, what: str) -> None:
    """Relative L2 error: of all tokens within 1.5 errors, of each within 3. Tokens that should be zero must be zero."""
    require(got_TH.shape == expected_TH.shape, f"{what}: shape {tuple(got_TH.shape)}, not {tuple(expected_TH.shape)}")
    require(bool(got_TH.isfinite().all()), f"{what}: the output is not finite")
    distance_T = (got_TH.double() - expected_TH.double()).norm(dim=-1)
    size_T = expected_TH.double().norm(dim=-1)
    worst = distance_T / size_T.clamp_min(torch.finfo(torch.float32).tiny)
    beyond = torch.nonzero(distance_T > ONE_TOKEN * error * size_T).flatten().tolist()
    require(
        not beyond,
        f"{what}: tokens {beyond[:8]} are up to {float(worst.max()) if beyond else 0.0:.2e} away, "
        f"the limit is {ONE_TOKEN * error:.2e}",
    )
    total, limit = float(distance_T.norm()), ALL_TOKENS * error * float(size_T.norm())
    require(total <= limit, f"{what}: all tokens together are {total:.2e} away, limit {limit:.2e}")
