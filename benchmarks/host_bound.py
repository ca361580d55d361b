"""Launch costs that grow with the ranks: what a rank spends to post one message to and from every peer.

    python benchmarks/host_bound.py --output benchmarks/results/host_bound_cpu.json

Between processes of one host, by number of ranks, in turn:

    posts   rank 0 calls `torch.distributed.isend` and `irecv` for each peer (gloo), of rows of 64 bytes; peers wait
    puts    one row and its flag into the window of each peer, over the symmetric heap of `one_sided`

The time is the CPU time of the calling thread until everything is posted: its median over all rounds, and the time that
a tenth of the rounds stays below, which a loaded machine changes least. The line through the latter is that of
`plan.paths.HostBound`: what each further rank adds.
"""

import time
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from moe_mk.comm import DistributedCommunicator
from moe_mk.comm.symmetric.setup import open_heap
from moe_mk.lab.plan.paths import posts_of
from moe_mk.lab.testing.on_ranks import RankWorld
from moe_mk.trace.clock import now

WORLDS = (2, 4, 8)
ROW_BYTES = 64
WARM_UP = 20


def post_once(out: torch.Tensor, into: torch.Tensor, go: torch.Tensor) -> tuple[float, int]:
    """Microseconds of rank 0 to post one message to and from each peer, and how many were posted."""
    begin, works = time.thread_time(), []
    for peer in range(1, len(out)):
        works.append(dist.irecv(into[peer], peer))
        works.append(dist.isend(out[peer], peer))
    posted, count = time.thread_time() - begin, len(works)
    works += [dist.isend(go, peer) for peer in range(1, len(out))]
    for work in works:
        assert work is not None
        work.wait()
    return 1e6 * posted, count


def posts(rank: int, rounds: int) -> dict[str, list[float]]:
    """Times of rank 0 to post in the process group. Peers answer a second message, sent when all are posted."""
    torch.set_num_threads(1)
    ranks, measured = dist.get_world_size(), []
    out, into = (torch.zeros((ranks, ROW_BYTES), dtype=torch.uint8, device="cpu") for _ in range(2))
    go = torch.zeros(1, dtype=torch.uint8, device="cpu")
    for _ in range(WARM_UP + rounds):
        if rank == 0:
            measured.append(post_once(out, into, go))
        else:
            for message in (into[0], go):
                dist.recv(message, 0)
            dist.send(out[0], 0)
    kept = measured[WARM_UP:]
    return {"us": [us for us, _ in kept], "posted": [float(count) for _, count in kept]}


def puts(rank: int, rounds: int) -> dict[str, list[float]]:
    """Times of one put with its flag to each peer, and puts in a round."""
    torch.set_num_threads(1)
    comm = DistributedCommunicator(dist.group.WORLD, timeout_s=60.0)
    heap, row = (
        open_heap(comm, comm.size, 2 * comm.size * ROW_BYTES, now),
        torch.zeros((1, ROW_BYTES), dtype=torch.uint8),
    )
    times, count = [], 0
    for epoch in range(1, WARM_UP + rounds + 1):
        half = comm.size * (epoch % 2)  # what a slow peer has not read yet is not overwritten
        begin, count = time.thread_time(), 0
        for peer in range(comm.size):
            if peer != rank:
                heap.put_signal(peer, (half + rank) * ROW_BYTES, row, rank, epoch)
                count += 1
        times.append(1e6 * (time.thread_time() - begin))
        heap.wait_until({peer: peer for peer in range(comm.size) if peer != rank}, epoch, "puts")
    return {"us": times[WARM_UP:], "posted": [float(count)] * rounds}


def measure(rounds: int, passes: int) -> list[dict[str, Any]]:
    """By way and number of ranks, in turn."""
    worlds = {ranks: RankWorld(ranks) for ranks in WORLDS}
    found: dict[tuple[str, int], list[dict[str, list[float]]]] = {}
    try:
        for _ in range(passes):
            for ranks, world in worlds.items():
                for way in (posts, puts):
                    found.setdefault((way.__name__, ranks), []).extend(world.call(way, rounds, timeout_s=600.0))
    finally:
        for world in worlds.values():
            world.close()
    return [
        {
            "way": way,
            "ranks": ranks,
            "posted": int(median(count for each in got for count in each["posted"])),
            "median_us": round(median(us for each in got for us in each["us"]), 2),
            "tenth_us": round(quantiles((us for each in got for us in each["us"]), n=10)[0], 2),
            "of_passes_us": [round(median(each["us"]), 2) for each in got if each["us"]],
        }
        for (way, ranks), got in sorted(found.items())
    ]


def main() -> None:
    from common import about, parser_of, with_output, write  # tests import this module as part of a package

    options = with_output(parser_of(__doc__, rounds=100, passes=12)).parse_args()
    rows = measure(options.rounds, options.passes)
    for row in rows:
        times = f"{row['tenth_us']:8.2f} us, median {row['median_us']:.2f}"
        print(f"{row['way']:6} {row['ranks']} ranks {row['posted']:3} posted {times}")
    for way in ("posts", "puts"):
        fixed, each = posts_of({row["ranks"]: row["tenth_us"] for row in rows if row["way"] == way})
        print(f"{way:6} {fixed:.2f} us + {each:.2f} us for each further rank")
    what = "CPU time of one rank to post to all peers, by number of ranks"
    write(options.output, {"what": what, **about(options), "row_bytes": ROW_BYTES, "rows": rows})


if __name__ == "__main__":
    main()
