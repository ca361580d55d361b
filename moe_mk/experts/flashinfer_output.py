"""Where a call of FlashInfer writes: bf16 rows, straight into the tensor that is asked for wherever it can be used."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_mk.tokens import ExpertOutput, OutputStage, RowTokens


def summed_rows(tokens: RowTokens, wide: int, call: Callable[[Tensor], None]) -> ExpertOutput:
    """Let a call fill (R, wide) rows, unless there are none, and hand over those columns that the tokens have."""
    (rows, hidden), asked = tokens.x_RH.shape, tokens.out_RH
    fits = asked is not None and asked.dtype is torch.bfloat16 and asked.is_contiguous() and wide == hidden
    out = (
        asked
        if asked is not None and fits
        else torch.empty((rows, wide), dtype=torch.bfloat16, device=tokens.ids_RK.device)
    )
    if rows:
        call(out)
    if not fits and asked is not None:
        out = asked.copy_(out[:, :hidden])
    elif wide != hidden:
        out = out[:, :hidden].contiguous()
    return ExpertOutput(out, OutputStage.REDUCED)
