"""Adding up what came home: rows of each rank to their tokens, rank after rank in f32, rounded once.

Tokens are finished a few at a time, while their sums lie in the cache. Most tokens visit the same ranks as their
neighbours, and a run of those needs no index: its rows lie one behind the other in every part. Two 16-bit rows are
added without a detour, because torch widens, adds and rounds them in one pass; that gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TOKENS_AT_ONCE = 64
"""Tokens that are added up together: their f32 sums at H = 7168 are 1.8 MB, which a core keeps in its cache."""
TOKENS_OF_A_RUN = 8
"""Below this many on average an index is cheaper than one operation a run."""


def add_up(parts: Sequence[Tensor], token_of_W: Sequence[Tensor], num_tokens: int) -> Tensor:
    """Add the rows of each rank to their tokens; (T, H) in the rows' dtype, zero where no rank has any.

    token_of_W: ascending and each once.
    """
    hidden, dtype, device = parts[0].shape[1], parts[0].dtype, parts[0].device
    y_TH = torch.empty((num_tokens, hidden), dtype=dtype, device=device)
    edges = segments(token_of_W, num_tokens)
    cuts_of_W = [torch.searchsorted(token_X, edges).tolist() for token_X in token_of_W]
    longest = min(num_tokens, TOKENS_AT_ONCE)
    total_XH, wide_XH = (torch.empty((longest, hidden), dtype=torch.float32, device=device) for _ in range(2))
    for number, (first, last) in enumerate(zip(edges.tolist(), edges.tolist()[1:], strict=False)):
        rows_of_W = [slice(cuts[number], cuts[number + 1]) for cuts in cuts_of_W]
        pieces = [
            (part_XH[rows], token_X[rows] - first)
            for part_XH, token_X, rows in zip(parts, token_of_W, rows_of_W, strict=True)
            if rows.stop > rows.start
        ]
        _add_segment(y_TH[first:last], pieces, total_XH[: last - first], wide_XH)
    return y_TH


def segments(token_of_W: Sequence[Tensor], num_tokens: int) -> Tensor:
    """Where to cut the tokens, int64 from 0 to T: at every few, and between runs that visit the same ranks if long."""
    device = token_of_W[0].device
    regular = torch.arange(0, num_tokens + TOKENS_AT_ONCE, TOKENS_AT_ONCE, dtype=torch.int64, device=device)
    edges = regular.clamp_max_(num_tokens)
    if all(len(token_X) == num_tokens for token_X in token_of_W):
        return edges
    visits_WT = torch.zeros((len(token_of_W), num_tokens), dtype=torch.bool, device=device)
    for visits_T, token_X in zip(visits_WT, token_of_W, strict=True):
        visits_T[token_X] = True
    changes = torch.nonzero((visits_WT[:, 1:] != visits_WT[:, :-1]).any(dim=0)).flatten() + 1
    return edges if len(changes) * TOKENS_OF_A_RUN > num_tokens else torch.unique(torch.cat((edges, changes)))


def _add_segment(y_XH: Tensor, pieces: Sequence[tuple[Tensor, Tensor]], total_XH: Tensor, wide_XH: Tensor) -> None:
    """Write the sums of a few tokens. pieces: rows of each rank that has any, and their places among the tokens."""
    whole = [rows_XH for rows_XH, _ in pieces if rows_XH.shape[0] == y_XH.shape[0]]
    if len(whole) == len(pieces) == 1:
        y_XH.copy_(whole[0])
    elif len(whole) == len(pieces) == 2:
        torch.add(*whole, out=y_XH)
    else:
        total_XH.zero_()
        for number, (rows_XH, place_X) in enumerate(pieces):
            if rows_XH.shape[0] < y_XH.shape[0]:
                total_XH.index_add_(0, place_X, wide_XH[: rows_XH.shape[0]].copy_(rows_XH))
            elif number:
                total_XH += wide_XH[: rows_XH.shape[0]].copy_(rows_XH)
            else:
                total_XH.copy_(rows_XH)
        y_XH.copy_(total_XH)
