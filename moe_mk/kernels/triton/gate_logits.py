"""Router logits of few tokens, (T, H) x (E, H) to f32 (T, E): one program an expert, for up to 16 tokens.

Reads the weight once and x once for each expert, from the cache; writes T x E logits. 2 x T x E x H flops. Bound by
the weight: 3.7 MB in bf16 for DeepSeek-V3 (256 x 7168). Products are exact in f32 and are summed in f32, in an order
that depends on T's power of two and not on other rows. x is bf16 or f32, the weight bf16 or f32; rows of both are
contiguous. The next kernel of the chain may start when all logits are about to be written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_mk.kernels.triton.launch import after_the_one_before, chained

MOST_TOKENS = 16
COLUMNS = 512
"""Values of a row that a program multiplies at a time: 16 tokens of them are 64 registers of each of 128 threads."""
READS = (torch.bfloat16, torch.float32)


def serves(x_TH: Tensor, weight_EH: Tensor) -> bool:
    """Whether the kernel computes a case. It has no gradient."""
    return (
        x_TH.shape[0] <= MOST_TOKENS
        and x_TH.dtype in READS
        and weight_EH.dtype in READS
        and x_TH.stride(-1) == weight_EH.stride(-1) == 1
        and not (torch.is_grad_enabled() and (x_TH.requires_grad or weight_EH.requires_grad))
    )


def gate_logits(x_TH: Tensor, weight_EH: Tensor) -> Tensor:
    """f32 logits (T, E) of up to 16 tokens, see `serves`."""
    (num_tokens, hidden), num_experts = x_TH.shape, weight_EH.shape[0]
    logits_TE = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=x_TH.device)
    if num_tokens == 0:
        return logits_TE
    _gate_logits[(num_experts,)](
        x_TH, weight_EH, logits_TE, num_tokens, hidden, x_TH.stride(0), weight_EH.stride(0), num_experts,
        TOKENS=triton.next_power_of_2(num_tokens), COLUMNS=min(COLUMNS, triton.next_power_of_2(hidden)),
        num_warps=4, **chained(),
    )  # fmt: skip
    return logits_TE


@triton.jit
def _gate_logits(
    x_ptr, weight_ptr, logits_ptr, num_tokens, hidden, x_stride, weight_stride, num_experts,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    after_the_one_before()
    expert = tl.program_id(0).to(tl.int64)
    token, column = tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    rows = x_ptr + token[:, None].to(tl.int64) * x_stride
    sums = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for start in range(0, hidden, COLUMNS):
        at = start + column
        inside = at < hidden
        weight = tl.load(weight_ptr + expert * weight_stride + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(rows + at[None, :], mask=(token[:, None] < num_tokens) & inside[None, :], other=0.0)
        sums += x.to(tl.float32) * weight[None, :]
    logits = tl.sum(sums, axis=1)
    tl.store(logits_ptr + token.to(tl.int64) * num_experts + expert, logits, mask=token < num_tokens)
