"""Who permutes, and who weighs and sums: three layouts, two conversions, one way back.

    rows      x_RH, ids_RK           (r0: e1 e0) (r1: e0 -1) (r2: e1 e0)
    grouped   sorted by expert       (e0,r0) (e0,r1) (e0,r2) (e1,r0) (e1,r2)
    batched   one block an expert    [e0: r0 r1 r2] [e1: r0 r2 --]

`permute` goes down this list, `weight_and_reduce` brings the output of any of them back to one row a received token.
On NVIDIA GPUs with Triton, grouping and its sum run on the device, with sizes from shapes only, so that they can be
captured in a CUDA graph; blocks are always sized on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_mk.comm.communicator import add_in_order
from moe_mk.external.device import has_kernels
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import (
    LAYOUT_NAMES,
    BatchedTokens,
    ExpertOutput,
    GroupedTokens,
    OutputStage,
    RowsOfSlots,
    RowTokens,
    Tokens,
)


def can_permute(produced: type, consumed: type) -> bool:
    """Whether tokens of one layout can be brought into another: rows into anything, the others only into themselves."""
    return produced is consumed or produced is RowTokens


def permute(tokens: Tokens, into: Sequence[type]) -> Tokens:
    """Bring tokens into a layout the experts read; tokens that already have one stay as they are.

    into: the layouts the experts read, best first. Blocks read counts on the host and so wait for a GPU; groups only
    where there are no kernels for it.
    """
    if isinstance(tokens, tuple(into)):
        return tokens
    assert isinstance(tokens, RowTokens), (
        f"{LAYOUT_NAMES[type(tokens)]} tokens cannot be permuted; the oracle refuses this"
    )
    if into[0] is not GroupedTokens:
        return batch(group(tokens))
    return group_on_device(tokens) if has_kernels(tokens.ids_RK.device) else group(tokens)


def group_on_device(tokens: RowTokens) -> GroupedTokens:
    """`group` without reading a count: as many rows as ids, those behind the last assignment undefined."""
    from moe_mk.kernels.triton.permute import first_kept, group_rows

    x, ids_RK, weights_RK = tokens.x_RH, tokens.ids_RK, tokens.weights_RK
    if tokens.most_K is not None and tokens.most_K < ids_RK.shape[1]:
        ids_RK, weights_RK = first_kept(ids_RK.contiguous(), weights_RK.contiguous(), tokens.most_K)
    made = group_rows(x.values, x.scales, ids_RK, weights_RK, tokens.num_slots)
    return GroupedTokens(
        x_NH=replace(x, values=made.values, scales=made.scales), counts_L=made.counts_L, row_N=made.row_N,
        weights_N=made.weights_N, num_rows=ids_RK.shape[0], handle=tokens.handle, out_RH=tokens.out_RH,
        expected_N=tokens.expected_N, position_RK=made.position_RK,
    )  # fmt: skip


def group(tokens: RowTokens) -> GroupedTokens:
    """Sort assignments by local expert, keeping the order of rows inside one; -1 drops out."""
    ids_N = tokens.ids_RK.flatten().long()
    order_N = torch.argsort(torch.where(ids_N >= 0, ids_N, tokens.num_slots), stable=True)
    counts_L = torch.bincount(torch.where(ids_N >= 0, ids_N, tokens.num_slots), minlength=tokens.num_slots + 1)
    kept_N = order_N[: order_N.shape[0] - int(counts_L[-1])]
    top_k = max(tokens.ids_RK.shape[1], 1)
    row_N = torch.div(kept_N, top_k, rounding_mode="floor")
    return GroupedTokens(
        x_NH=tokens.x_RH[row_N],
        counts_L=counts_L[:-1],
        row_N=row_N,
        weights_N=tokens.weights_RK.flatten()[kept_N],
        num_rows=tokens.ids_RK.shape[0],
        handle=tokens.handle,
        out_RH=tokens.out_RH,
    )


def batch(tokens: GroupedTokens) -> BatchedTokens:
    """Give each expert a block of its own, as long as the fullest one; padding is left uninitialised."""
    num_slots, longest = tokens.counts_L.shape[0], max(int(tokens.counts_L.max()), 1)
    expert_N, place_N = places(tokens.counts_L)
    row_LS = torch.full((num_slots, longest), -1, dtype=torch.int64, device=tokens.row_N.device)
    weights_LS = torch.zeros((num_slots, longest), dtype=torch.float32, device=tokens.row_N.device)
    row_LS[expert_N, place_N] = tokens.row_N
    weights_LS[expert_N, place_N] = tokens.weights_N
    return BatchedTokens(
        x_LSH=_blocks(tokens.x_NH, expert_N, place_N, num_slots, longest),
        counts_L=tokens.counts_L,
        home=RowsOfSlots(row_LS, weights_LS, tokens.num_rows, tokens.out_RH),
        handle=tokens.handle,
    )


def places(counts_L: Tensor) -> tuple[Tensor, Tensor]:
    """Expert and place inside its block of every assignment of a grouped order."""
    expert_N = torch.repeat_interleave(counts_L)
    starts_L = torch.cumsum(counts_L, dim=0) - counts_L
    place_N = torch.arange(expert_N.shape[0], dtype=torch.int64, device=counts_L.device) - starts_L[expert_N]
    return expert_N, place_N


def weight_and_reduce(output: ExpertOutput, tokens: Tokens, until: OutputStage) -> ExpertOutput:
    """Advance an output: times its routing weight, then summed to one row a received token, as far as `until`.

    Sums run in f32 and are rounded once, to the dtype of the output, and written to the
    transport's output if it has one. A stage is never undone: the oracle refuses pairs that would need it.
    """
    assert output.stage <= until, f"{output.stage.name} output cannot go back to {until.name}; the oracle refuses this"
    if output.stage == until:
        return output
    if until is OutputStage.WEIGHTED:
        return ExpertOutput(_weighted(output.y, tokens), OutputStage.WEIGHTED)
    return ExpertOutput(_reduced(output.y, tokens, weigh=output.stage is OutputStage.RAW), OutputStage.REDUCED)


def reduce_rows(y: Tensor, weights: Tensor | None, rows: Tensor, num_rows: int, out_RH: Tensor | None = None) -> Tensor:
    """Add rows of y, each times its weight, at their row numbers: (num_rows, H) in the dtype of y, summed in f32.

    out_RH: where to write them; made when not given. Rows of one number are added in the order in which they lie, so
    that equal inputs give equal bits on every device.
    """
    wide = y.to(torch.float32)
    if weights is not None:
        wide = wide * weights[:, None]
    if y.device.type == "cuda":  # index_add_ adds by atomics there, in the order of their arrival
        total_RH = sum_in_order(wide, rows, num_rows)
    else:
        total_RH = torch.zeros((num_rows, y.shape[-1]), dtype=torch.float32, device=y.device)
        total_RH.index_add_(0, rows, wide)
    return total_RH.to(y.dtype) if out_RH is None else out_RH.copy_(total_RH)


def sum_in_order(wide: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """index_add_ into zeros without atomics: every sum goes through its rows one after the other, as they lie.

    wide: f32 (N, H). rows: (N,), in [0, num_rows). As many passes as the most rows of one number; reads that number on
    the host, so it waits for a GPU.
    """
    order_N = torch.argsort(rows, stable=True)
    counts_R = torch.bincount(rows, minlength=num_rows)
    row_N, place_N = places(counts_R)
    passes = int(counts_R.max()) if num_rows else 0
    # source_RX[r, i] is the i-th row to add to sum r; behind the last one stands a row of zeros.
    source_RX = torch.full((num_rows, passes), len(wide), dtype=torch.int64, device=wide.device)
    source_RX[row_N, place_N] = order_N
    padded = torch.cat((wide, wide.new_zeros((1, wide.shape[1]))))
    total_RH = torch.zeros((num_rows, wide.shape[1]), dtype=torch.float32, device=wide.device)
    return add_in_order(total_RH, ((padded[source_R], None) for source_R in source_RX.unbind(1)))


def _weighted(y: Tensor, tokens: Tokens) -> Tensor:
    if isinstance(tokens, GroupedTokens):
        return (y.to(torch.float32) * tokens.weights_N[:, None]).to(y.dtype)
    assert isinstance(tokens, BatchedTokens) and tokens.home is not None
    return (y.to(torch.float32) * tokens.home.weights_LS[..., None]).to(y.dtype)


def _reduced(y: Tensor, tokens: Tokens, *, weigh: bool) -> Tensor:
    if isinstance(tokens, GroupedTokens):
        if tokens.position_RK is not None:
            from moe_mk.kernels.triton.permute import sum_rows

            return sum_rows(y, tokens.position_RK, tokens.weights_N if weigh else None, out=tokens.out_RH)
        return reduce_rows(y, tokens.weights_N if weigh else None, tokens.row_N, tokens.num_rows, tokens.out_RH)
    assert isinstance(tokens, BatchedTokens) and tokens.home is not None
    source = tokens.home
    filled_LS = source.row_LS >= 0  # padding may hold NaN: it is dropped, not multiplied by 0
    weights_N = source.weights_LS[filled_LS] if weigh else None
    return reduce_rows(y[filled_LS], weights_N, source.row_LS[filled_LS], source.num_rows, source.out_RH)


def _blocks(x_NH: QuantTensor, expert_N: Tensor, place_N: Tensor, num_slots: int, longest: int) -> QuantTensor:
    def spread(part: Tensor) -> Tensor:
        blocks = torch.empty((num_slots, longest, *part.shape[1:]), dtype=part.dtype, device=part.device)
        if part.element_size() == 1:  # torch writes UE8M0 scales by index only as bytes (2.13)
            blocks.view(torch.uint8)[expert_N, place_N] = part.view(torch.uint8)
        else:
            blocks[expert_N, place_N] = part
        return blocks

    return x_NH.changed(spread)
