"""Ranks compare decisions before the first collective, so that a difference raises an error, not a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from moe_mk.comm.communicator import Communicator
from moe_mk.errors import CommError
from moe_mk.flight import Flight

PHASE = "agreement"


def digest(notes: Mapping[str, str]) -> bytes:
    """32 bytes that differ when any note differs."""
    return hashlib.sha256(_text(notes).encode()).digest()


def agree(comm: Communicator, notes: Mapping[str, str], layer: str = "") -> Flight[None]:
    """Check that every rank of the group brings the same notes.

    notes: what must be equal, by name. Only a digest travels, unless ranks differ; then all notes do, and every rank
    raises CommError with the value of each differing name on each rank.
    """
    mine = torch.tensor([list(digest(notes))], dtype=torch.uint8, device="cpu")
    digests = (yield from comm.all_gather(mine, [1] * comm.size, PHASE)).tolist()
    if all(other == digests[0] for other in digests):
        return
    texts = yield from comm.gather_texts(_text(notes), PHASE)
    problem = "ranks decided differently:\n" + diff(texts)
    raise CommError(problem, rank=comm.rank, phase=PHASE, layer=layer, on_all_ranks=True)


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
