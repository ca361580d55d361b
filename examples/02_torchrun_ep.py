"""Expert parallelism over two processes: each rank owns half of the experts and has its own tokens.

torchrun --standalone --nproc-per-node 2 examples/02_torchrun_ep.py
python examples/02_torchrun_ep.py                                     # starts the two ranks by itself

The layer uses the given group and creates none. Rank 1 has fewer tokens, because ranks may have different numbers.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import moe_mk
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint

RANKS = 2
TOKENS_OF_RANK = (48, 5)


def tokens_of(rank: int) -> Tensor:
    """(T, H) of one rank."""
    generator = torch.Generator(device="cpu").manual_seed(rank)
    shape = (TOKENS_OF_RANK[rank % RANKS], 256)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(torch.bfloat16)


def run_rank(rank: int, checkpoint: str) -> None:
    """Run one rank of an initialised default group, and compare with one rank that owns all experts."""
    if rank == 0:
        write_checkpoint(checkpoint, CheckpointShape(num_experts=16, hidden_size=256, intermediate_size=128))
    dist.barrier()

    config = moe_mk.MoEConfig.from_hf(checkpoint)
    layer = moe_mk.DeepseekV3MoE(config, groups=moe_mk.ParallelGroups(ep=dist.group.WORLD))
    layer.load_from_safetensors(checkpoint, layer=3)
    y = layer(tokens_of(rank))

    alone = moe_mk.DeepseekV3MoE.from_checkpoint(checkpoint, layer=3)
    expected = alone(tokens_of(rank))
    error = float((y - expected).float().norm() / expected.float().norm())
    lines: list[str | None] = [None] * dist.get_world_size()
    sent = sum(layer.ep.traffic.bytes_by_phase.values())
    owned = layer.expert_map.local_to_global(layer.ep.rank)
    dist.all_gather_object(
        lines,
        f"rank {rank}: experts {owned[0]}-{owned[-1]}, {len(y)} tokens, sent {sent:,} B, "
        f"relative difference from one rank {error:.1e}",
    )
    if rank == 0:
        print(f"{layer.decision.chosen.name}: {layer.decision.because}")
        print(*lines, sep="\n")


def spawned(rank: int, folder: str) -> None:
    """One rank that this script started itself."""
    dist.init_process_group(
        "gloo",
        init_method=(Path(folder) / "meeting").as_uri(),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    try:
        run_rank(rank, str(Path(folder) / "ds3"))
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Be one rank under torchrun, else start all of them."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        with tempfile.TemporaryDirectory() as folder:
            shared = [folder]
            dist.broadcast_object_list(shared)  # the folder of rank 0, for all
            run_rank(dist.get_rank(), shared[0])
            dist.barrier()
        dist.destroy_process_group()
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # both ranks are on this machine
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=spawned, args=(rank, folder)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        failed = [rank for rank, process in enumerate(ranks) if process.exitcode != 0]
        for process in ranks:
            process.kill()
    if failed:
        raise SystemExit(f"ranks {failed} failed")


if __name__ == "__main__":
    main()
