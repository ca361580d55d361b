"""Experts move between four processes while serving: the load changes, a plan is made, weights are sent, maps switch.

python examples/06_live_rebalance.py                   # starts four ranks

Tokens favour a few experts of a linear placement with one spare slot per rank. `RebalanceManager.step` is called
between forward passes; serving continues, and all ranks always use the same placement.
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
from moe_mk.rebalance import RebalanceManager, RebalanceSettings, Thresholds

RANKS, EXPERTS, TOKENS = 4, 16, 64
LIMIT, AFTER = 2000, 40  # steps in which the experts must have moved, and steps served after they have
# Four experts a rank in their order, and in every rank's fifth slot a second copy of a neighbour's.
PLACEMENT = tuple(e for rank in range(RANKS) for e in (*range(4 * rank, 4 * rank + 4), (4 * rank + 4) % EXPERTS))


def hot_tokens(layer: moe_mk.MoELayer, rank: int) -> Tensor:
    """Tokens that lean towards what the gate reads as the experts of rank 2."""
    generator = torch.Generator(device="cpu").manual_seed(rank)
    noise = torch.randn(TOKENS, 256, generator=generator, dtype=torch.float32, device="cpu")
    lean_H = layer.weights.gate_EH[8:12].float().mean(0)
    return (noise + 12 * lean_H / lean_H.norm()).to(torch.bfloat16)


def run_rank(rank: int, folder: str) -> None:
    """Serve, and print what changed."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    config = moe_mk.MoEConfig.from_hf(folder, placement=PLACEMENT)
    layer = moe_mk.DeepseekV3MoE(config, groups=moe_mk.ParallelGroups(ep=dist.group.WORLD), name="layer 3")
    layer.load_from_safetensors(folder, layer=3)
    settings = RebalanceSettings(sync_every=4, bytes_per_step=100_000, thresholds=Thresholds(1.15, 1.05, dwell=50))
    manager = RebalanceManager([layer], settings)

    x_TH = hot_tokens(layer, rank)
    first_TH, seen = layer(x_TH), ("", 0)
    step, last = 0, LIMIT
    while step < last:  # all ranks take up a placement at the same step, so all of them stop at the same step
        step += 1
        y_TH = layer(x_TH)
        manager.step("prefill")
        status = manager.status()
        if rank == 0 and status.balance and (status.state, layer.epoch) != seen:
            uneven = status.balance["balance.rank_max_over_mean"]
            print(f"step {step:2d}: epoch {layer.epoch}, {status.state}, busiest rank {uneven:.2f} x mean", flush=True)
            seen = status.state, layer.epoch
        if layer.epoch and last == LIMIT:
            last = step + AFTER
        error = float((y_TH.float() - first_TH.float()).norm() / first_TH.float().norm())
        # Sums of other ranks' parts are rounded to bf16 in another order, nothing more.
        assert error < 2**-7, f"step {step}: the output changed by {error:.1e}"
    status = manager.status()
    moved = torch.tensor([status.received_bytes], dtype=torch.int64, device="cpu")
    dist.all_reduce(moved)
    if rank == 0:
        print(f"experts of each rank now: {layer.expert_map.experts_of_rank}")
        print(f"moved {int(moved):,} B of {status.predicted_bytes:,} B predicted; incidents: {len(status.incidents)}")
        print(f"busiest rank {status.balance['balance.rank_max_over_mean']:.2f} x mean; why: {status.reason}")


def spawned(rank: int, folder: str) -> None:
    """One of the four."""
    meeting = (Path(folder) / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    try:
        run_rank(rank, str(Path(folder) / "ds3"))
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Write a small checkpoint and start the ranks."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        shape = CheckpointShape(num_experts=EXPERTS, hidden_size=256, intermediate_size=128)
        write_checkpoint(Path(folder) / "ds3", shape)
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
