"""What a layer leaves behind when its process group is destroyed: nothing that a process trips over on its way out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint

LIFE = """
import os, sys
import torch, torch.distributed as dist
import moe_mk
from moe_mk.rebalance import RebalanceManager, RebalanceSettings

def gloo_threads():
    threads = [open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")]
    return sorted(name for name in threads if "gloo" in name)

def serve(folder, transport):
    from moe_mk.layer.custom_op import moe_layer  # after the group, as where a program imports moe_mk alone

    config = moe_mk.MoEConfig.from_hf(folder).with_(prepare_finalize=transport, allow_emulated=True, max_num_tokens=16)
    layer = moe_mk.DeepseekV3MoE(config, groups=moe_mk.ParallelGroups(ep=dist.group.WORLD), name="layer 3")
    layer.load_from_safetensors(folder, layer=3)
    x = torch.ones(4, 256, dtype=torch.bfloat16, device="cpu")
    with torch.no_grad():
        layer(x)
        moe_layer(x, layer.expert_load, layer._entry)  # what a compiled model calls
    return layer

for transport in sys.argv[4:]:
    meeting = f"{sys.argv[2]}-{transport}"
    dist.init_process_group("gloo", init_method=meeting, rank=int(sys.argv[3]), world_size=2)
    dist.barrier()
    assert gloo_threads(), "the group has no threads to watch"
    serve(sys.argv[1], transport)
    dist.destroy_process_group()
    assert not gloo_threads(), f"{transport}: the group lives on: {gloo_threads()}"

# The process ends while a sum of loads and a forward are in flight, kept by names of this module and by a cycle.
dist.init_process_group("gloo", init_method=f"{sys.argv[2]}-end", rank=int(sys.argv[3]), world_size=2)
layer = serve(sys.argv[1], "all_to_all")
managers = [RebalanceManager([layer], RebalanceSettings(sync_every=1, inline=True)) for _ in range(2)]
for manager in managers:
    manager.step()
managers.append(managers)
next(flight := layer.steps(torch.ones(4, 256, dtype=torch.bfloat16, device="cpu")))
if int(sys.argv[3]) == 0:
    dist.destroy_process_group()
else:
    sys.exit(0)
"""
TRANSPORTS = ("one_sided", "all_to_all", "deepep_ll")


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_a_group_ends_when_it_is_destroyed_after_a_forward(tmp_path: Path) -> None:
    # A group that outlives its destruction has worker threads, and one of them may free a tensor while Python ends.
    write_checkpoint(tmp_path / "ds3", CheckpointShape(num_experts=16, hidden_size=256, intermediate_size=128))
    meeting = (tmp_path / "meeting").as_uri()
    command = [sys.executable, "-c", LIFE, str(tmp_path / "ds3"), meeting]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([*command, str(rank), *TRANSPORTS], stderr=subprocess.PIPE, text=True, env=environment)
        for rank in (0, 1)
    ]
    stated = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(stated)
