"""Columns of a trace in the narrowest dtypes that lose nothing, and back.

ids of 256 experts without a -1 take one byte each; routing weights that bf16 or f16 hold exactly take two; the tokens
of a step are named once, however many layers saw them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.trace.routing_forward import TraceError

BYTE = 256


def id_dtype(num_experts: int) -> torch.dtype:
    """The narrowest signed dtype for expert ids and -1."""
    return torch.int16 if num_experts <= 2**15 else torch.int32


def signed_ids(ids_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Ids on the CPU in a signed dtype; raises TraceError for values it cannot hold."""
    limit, ids_TK = torch.iinfo(dtype), ids_TK.cpu()
    if ids_TK.numel() and (int(ids_TK.min()) < limit.min or int(ids_TK.max()) > limit.max):
        raise TraceError(f"expert ids from {int(ids_TK.min())} to {int(ids_TK.max())} do not fit {dtype}")
    return ids_TK.to(dtype)


def pack_ids(ids_RK: Tensor, num_experts: int) -> Tensor:
    """One byte an id if all experts, and -1 as 255 where it occurs, have room in it."""
    holes = bool((ids_RK < 0).any())
    return ids_RK.to(torch.uint8) if num_experts + holes <= BYTE else ids_RK.to(id_dtype(num_experts))


def unpack_ids(ids_RK: Tensor, num_experts: int) -> Tensor:
    """Signed ids; raises TraceError for a dtype that no trace is written in."""
    if ids_RK.dtype not in (torch.uint8, torch.int16, torch.int32):
        raise TraceError(f"ids are {ids_RK.dtype}, expected uint8, int16 or int32")
    wide = signed_ids(ids_RK, id_dtype(num_experts))
    if ids_RK.dtype == torch.uint8 and num_experts < BYTE:
        wide[wide == BYTE - 1] = -1
    return wide


def pack_weights(weights_RK: Tensor) -> Tensor:
    """bf16 or f16 where that is exact, else f32 as it is."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = weights_RK.to(dtype)
        if torch.equal(narrow.to(torch.float32), weights_RK):
            return narrow
    return weights_RK


def pack_int(column: Tensor) -> Tensor:
    """int32 where that is enough."""
    fits = column.numel() == 0 or -(2**31) <= int(column.min()) <= int(column.max()) < 2**31
    return column.to(torch.int32) if fits else column


def pack_token_ids(token_ids_R: Tensor, tokens_X: Tensor) -> tuple[Tensor, Tensor]:
    """A pool of token ids, and where the tokens of each forward start in it; equal forwards share a stretch."""
    pool: list[Tensor] = []
    known: dict[bytes, int] = {}
    starts, size = [], 0
    for part in torch.split(token_ids_R, tokens_X.tolist()):
        key = part.numpy().tobytes()
        if key not in known:
            known[key] = size
            pool.append(part)
            size += len(part)
        starts.append(known[key])
    nothing = token_ids_R[:0]
    return pack_int(torch.cat([nothing, *pool])), torch.tensor(starts, dtype=torch.int64, device="cpu")


def unpack_token_ids(pool: Tensor, start_X: Tensor, tokens_X: Tensor) -> Tensor:
    """Token ids row by row; raises TraceError where a stretch leaves the pool."""
    if len(start_X) != len(tokens_X):
        raise TraceError(f"{len(start_X)} starts of token ids for {len(tokens_X)} forwards")
    if len(start_X):
        least, most, end = int(start_X.min()), int(start_X.max()), int((start_X + tokens_X).max())
        if least < 0 or max(most, end) > len(pool):  # a start near 2^63 makes an end below zero
            raise TraceError(f"token ids end at {end} and start at {least} to {most}, there are {len(pool)}")
    parts = [pool[start : start + size] for start, size in zip(start_X.tolist(), tokens_X.tolist(), strict=True)]
    return torch.cat([pool[:0], *parts]).to(torch.int64)
