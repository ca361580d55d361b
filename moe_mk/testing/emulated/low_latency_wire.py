"""What low-latency kernels put on the wire and where they place it: casts, and an order that nobody may rely on."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.external.deepep_limits import SCALE_GROUP

FP8_MAX = 448.0
AMAX_FLOOR = 1e-4


def cast_rows(x_TH: Tensor, *, round_scale: bool, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """FP8 e4m3 values as bytes, and the scale of every 128 channels: f32, or four UE8M0 exponents in an int32."""
    rows, hidden = x_TH.shape
    pieces = x_TH.float().view(rows, hidden // SCALE_GROUP, SCALE_GROUP)
    amax = pieces.abs().amax(dim=2).clamp_min(AMAX_FLOOR)
    if round_scale:
        mantissa, exponent = torch.frexp(amax / FP8_MAX)
        exponent = exponent - (mantissa == 0.5).to(exponent.dtype)  # frexp has mantissas in [0.5, 1)
        scales = torch.exp2(exponent.float())
    else:
        scales = amax / FP8_MAX
    values = (pieces / scales[..., None]).to(torch.float8_e4m3fn).view(rows, hidden).view(torch.uint8)
    if not use_ue8m0:
        return values, scales
    return values, (exponent + 127).to(torch.uint8).contiguous().view(torch.int32)


class Places:
    """Where received rows go: expert by expert, the sources of each in an order that nobody may rely on."""

    def __init__(self, expert_R: Tensor, source_R: Tensor, sizes: tuple[int, int], draw: torch.Generator) -> None:
        """sizes: local experts and ranks. Rows of one source must already be shuffled."""
        num_experts, ranks = sizes
        turn_LW = torch.rand((num_experts, ranks), generator=draw, dtype=torch.float32, device="cpu").argsort(dim=1)
        source_of_turn_LW, turn_of_source_LW = turn_LW, turn_LW.argsort(dim=1)
        expert_R, source_R = expert_R.long().cpu(), source_R.cpu()
        turn_R = expert_R * ranks + turn_of_source_LW[expert_R, source_R]
        order_R = turn_R.argsort(stable=True)
        counts_LW = torch.bincount(turn_R, minlength=num_experts * ranks).view(num_experts, ranks)
        begin_LW = counts_LW.cumsum(dim=1) - counts_LW
        first_R = (counts_LW.flatten().cumsum(dim=0) - counts_LW.flatten())[turn_R[order_R]]
        within_R = torch.arange(len(order_R), dtype=torch.int64, device="cpu") - first_R
        self.order_R, self.expert_R = order_R, expert_R[order_R]
        self.place_R = begin_LW.flatten()[turn_R[order_R]] + within_R
        self.counts_L = counts_LW.sum(dim=1).to(torch.int32)
        self.range_LW = torch.empty((num_experts, ranks), dtype=torch.int64, device="cpu")
        self.range_LW.scatter_(1, source_of_turn_LW, (begin_LW << 32) | counts_LW)


def rows_of_source(range_LW: Tensor, source: int) -> tuple[Tensor, Tensor]:
    """Local expert and place of every row that came from one rank."""
    begin_L, counts_L = range_LW[:, source] >> 32, range_LW[:, source] & 0xFFFFFFFF
    expert_X = torch.repeat_interleave(counts_L)
    first_X = (counts_L.cumsum(dim=0) - counts_L)[expert_X]
    within_X = torch.arange(len(expert_X), dtype=torch.int64, device=range_LW.device) - first_X
    return expert_X, begin_L[expert_X] + within_X
