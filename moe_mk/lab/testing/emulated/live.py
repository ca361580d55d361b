"""Exchanges in which some ranks take no part: ranks meet in pairs, and no rank waits for one that is left out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm.threads import ThreadCommunicator
from moe_mk.errors import CommError
from moe_mk.lab.testing.emulated.exchange import Exchange, ProcessExchange

Parts = Sequence[Sequence[Tensor]]


def swap_among(exchange: Exchange, parts: Parts, ranks: Collection[int], phase: str) -> list[list[Tensor]]:
    """`Exchange.swap` among some ranks, this one included, all of which must name the same ones.

    Others get nothing and are taken to have given no rows.
    """
    peers = {rank: parts[rank] for rank in ranks if rank != exchange.rank}
    if len(peers) == exchange.size - 1:
        return exchange.swap(parts, phase)
    got = meet(exchange, peers, phase)
    got[exchange.rank] = [tensor.clone() for tensor in parts[exchange.rank]]
    return [got.get(rank, [tensor[:0] for tensor in parts[rank]]) for rank in range(exchange.size)]


def meet(exchange: Exchange, peers: Mapping[int, Sequence[Tensor]], phase: str) -> dict[int, list[Tensor]]:
    """Give each of some peers tensors and take as many from it; each of them must do the same."""
    if isinstance(exchange, ThreadCommunicator):
        return _between_threads(exchange, peers, phase)
    assert isinstance(exchange, ProcessExchange)
    return _between_processes(exchange.group, peers)


def _between_threads(
    comm: ThreadCommunicator, peers: Mapping[int, Sequence[Tensor]], phase: str
) -> dict[int, list[Tensor]]:
    """Through boxes of one source each, of negative number so that no call of all ranks has the same."""
    world, got = comm.world, {}
    with world.changed:
        for peer, tensors in peers.items():
            box = world.boxes[-1 - comm.rank, peer]
            for tensor in tensors:
                box[max(box, default=-1) + 1] = (phase, tensor.clone())
        world.changed.notify_all()
    for peer, tensors in peers.items():
        box, count = world.boxes[-1 - peer, comm.rank], len(tensors)
        with world.changed:
            if not world.changed.wait_for(lambda: len(box) >= count, world.timeout_s):  # noqa: B023  (waited for here)
                text = f"is later than {world.timeout_s:g} s"
                raise CommError(text, rank=comm.rank, phase=phase, peer=peer)
            got[peer] = [box.pop(min(box))[1] for _ in tensors]
    return got


def _between_processes(group: dist.ProcessGroup, peers: Mapping[int, Sequence[Tensor]]) -> dict[int, list[Tensor]]:
    """Counts of rows first, then all rows of a pair as one message."""
    counts = {
        peer: torch.tensor([len(t) for t in tensors], dtype=torch.int64, device="cpu")
        for peer, tensors in peers.items()
    }
    theirs = _messages(group, counts, {peer: torch.empty_like(count) for peer, count in counts.items()})
    likes = {peer: list(zip(tensors, theirs[peer].tolist(), strict=True)) for peer, tensors in peers.items()}
    # One byte more than the rows have: a message has a length.
    sizes = {peer: 1 + sum(rows * _row_bytes(like) for like, rows in pairs) for peer, pairs in likes.items()}
    arrived = _messages(
        group,
        {
            peer: torch.cat([torch.zeros(1, dtype=torch.uint8, device="cpu"), *map(_flat, t)])
            for peer, t in peers.items()
        },
        {peer: torch.empty(size, dtype=torch.uint8, device="cpu") for peer, size in sizes.items()},
    )
    return {peer: _taken_apart(arrived[peer][1:], pairs) for peer, pairs in likes.items()}


def _messages(group: dist.ProcessGroup, out: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
    """One message to each peer and one from it."""
    works = [dist.irecv(tensor, group=group, group_src=peer) for peer, tensor in into.items()]
    works += [dist.isend(tensor, group=group, group_dst=peer) for peer, tensor in out.items()]
    for work in works:
        assert work is not None, "this process is a member of the group"
        work.wait()
    return into


def _taken_apart(bytes_B: Tensor, pairs: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
    parts = torch.split(bytes_B, [rows * _row_bytes(like) for like, rows in pairs])
    shaped = [
        part.clone().view(like.dtype).view(n, *like.shape[1:]) for part, (like, n) in zip(parts, pairs, strict=True)
    ]
    return [part.to(like.device) for part, (like, _) in zip(shaped, pairs, strict=True)]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8)


def _row_bytes(like: Tensor) -> int:
    return like.element_size() * like.shape[1:].numel()
