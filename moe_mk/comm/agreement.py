"""Ranks compare decisions before the first collective, so that a difference raises an error, not a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from moe_mk.comm.communicator import Communicator
from moe_mk.errors import CommError
from moe_mk.flight import Flight

PHASE = "agreement"
DIGEST = 32
Loads = tuple[int, ...]
"""How many agreements there were, and how often each rank had loaded weights at the last one; empty before the first.

Numbers of loads differ between ranks for good once a load was interrupted on one of them. What must be equal is
whether there was one since the last agreement, which may have been interrupted too: ranks that know of it decide.
"""


def digest(notes: Mapping[str, str]) -> bytes:
    """`DIGEST` bytes that differ when any note differs."""
    return hashlib.sha256(_text(notes).encode()).digest()


def agree(
    comm: Communicator, notes: Mapping[str, str], layer: str = "", loads: int = 0, before: Loads = ()
) -> Flight[Loads]:
    """Check that every rank of the group brings the same notes, and that all or none have loaded weights again.

    notes: what must be equal, by name. Only a digest travels, unless ranks differ; then all notes do, and every rank
    raises CommError with the value of each differing name on each rank. loads: how often this rank has loaded weights.
    before: what the last agreement returned on this rank. That ranks have loaded the same checkpoint cannot be seen:
    each may read its share from files of its own.
    """
    numbers = torch.tensor([loads, *(before or [0] * (1 + comm.size))], dtype=torch.int64, device="cpu")
    mine = torch.tensor([list(digest(notes))], dtype=torch.uint8, device="cpu")
    mine = torch.cat((mine, numbers.view(1, -1).view(torch.uint8)), 1)
    rows = yield from comm.all_gather(mine, [1] * comm.size, PHASE)
    digests, numbers_WX = rows[:, :DIGEST].tolist(), rows[:, DIGEST:].contiguous().view(torch.int64).tolist()
    if any(other != digests[0] for other in digests):
        texts = yield from comm.gather_texts(_text(notes), PHASE)
        problem = "ranks decided differently:\n" + diff(texts)
        raise CommError(problem, rank=comm.rank, phase=PHASE, layer=layer, on_all_ranks=True)
    loads_W = [row[0] for row in numbers_WX]
    agreements, *loads_then_W = max(row[1:] for row in numbers_WX)
    again = [rank for rank, count in enumerate(loads_W) if count != loads_then_W[rank]]
    if agreements and 0 < len(again) < comm.size:
        others = [rank for rank in range(comm.size) if rank not in again]
        problem = f"weights were loaded again on ranks {again} and not on ranks {others}; load them there too"
        raise CommError(problem, rank=comm.rank, phase=PHASE, layer=layer, on_all_ranks=True)
    return agreements + 1, *loads_W


def diff(texts: list[str]) -> str:
    """List the names whose values differ between ranks, with the value of each rank."""
    notes = [dict(line.split("=", 1) for line in text.splitlines()) for text in texts]
    names = sorted({name for note in notes for name in note})
    lines = []
    for name in names:
        values = [note.get(name, "(nothing)") for note in notes]
        if len(set(values)) > 1:
            lines += [f"  {name}:"] + [f"    rank {rank}: {value}" for rank, value in enumerate(values)]
    return "\n".join(lines)


def _text(notes: Mapping[str, str]) -> str:
    return "\n".join(f"{name}={' '.join(str(value).split())}" for name, value in sorted(notes.items()))
