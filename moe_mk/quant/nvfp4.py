"""NVFP4: e2m1 values, two a byte; 16 along a row share an e4m3 scale, and a matrix one f32 scale above them.

Weights get their global scale from their own largest magnitude. Activations have it in the scheme, because the scale
must be the same on all ranks: 4,032 B for 7,168 values. Source: NVIDIA's description of the format for Blackwell.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.kernels.reference.quantize import block_amax, fp8_scales, global_scales, spread
from moe_mk.quant.blocked import E2M1, WHOLE, BlockedScheme, expected_error
from moe_mk.quant.tensor import QuantTensor

GROUP = 16


@dataclass(frozen=True)
class Nvfp4(BlockedScheme):
    """e2m1 values with e4m3 block scales and one global f32 scale.

    fixed_scale: the f32 scale as part of the scheme, for activations; None finds one for each matrix, for weights.
    """

    name: str
    fixed_scale: float | None = None
    rows: int = 1
    columns: int = GROUP
    family, element, scale_dtype = "nvfp4", E2M1, torch.float8_e4m3fn
    stored_scale_dtypes = (torch.float8_e4m3fn,)

    @property
    def has_global_scale(self) -> bool:  # type: ignore[override]
        """Whether a matrix has its own f32 scale."""
        return self.fixed_scale is None

    @property
    def relative_rms(self) -> float:
        """A scale is amax / 6, rounded to e4m3 by at most one part in 16."""
        return expected_error(E2M1, (1.0 + 2.0**-4) / E2M1.largest, self.columns)

    def quantize(self, x: Tensor) -> QuantTensor:
        """Quantise (rows, columns), with any leading dimensions, each matrix by its own amax if no scale is fixed.

        Raises ShapeError for an odd number of columns.
        """
        n, k = x.shape[-2:]
        self.expect_even(k)
        found = global_scales(block_amax(x, (WHOLE, WHOLE)), E2M1.largest) if self.fixed_scale is None else None
        above = self.fixed_scale if found is None else found
        assert above is not None
        scales = fp8_scales(block_amax(x, self.block), E2M1.largest, above)
        # One product of both scales, rounded to f32 once, in both directions.
        values = E2M1.encode(x.to(torch.float32) / (spread(scales, n, k, self.block) * above))
        return QuantTensor(values, scales.to(self.scale_dtype), self, found)

    def spread_scales(self, q: QuantTensor) -> Tensor:
        scales = super().spread_scales(q)
        return scales if self.fixed_scale is None else scales * self.fixed_scale


NVFP4 = Nvfp4("nvfp4")
NVFP4_TOKENS = Nvfp4("nvfp4_1x16", fixed_scale=1.0)


def nvfp4_tokens(fixed_scale: float = 1.0) -> Nvfp4:
    """The activation scheme of a global scale; raises ConfigError for one that is not positive."""
    if not fixed_scale > 0 or fixed_scale == float("inf"):
        raise ConfigError(f"an activation scale must be positive and finite, got {fixed_scale}")
    return NVFP4_TOKENS if fixed_scale == 1.0 else Nvfp4(f"nvfp4_1x16_x{fixed_scale:g}", fixed_scale)
