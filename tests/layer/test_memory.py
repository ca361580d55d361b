"""What a layer states it will take, before anything is allocated, is what it takes; nothing outlives it."""

import copy
import gc
import os
import resource
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_mk import DeepseekV3MoE, ExpertMap, MoEConfig
from moe_mk.experts.cpu_native import experts as cpu_native
from moe_mk.integrations.engine_experts import EngineExperts, EngineWeights
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.testing.transports import virtual_groups
from moe_mk.layer.hot_swap import swap_backends
from moe_mk.weights.expert_weights import SlotWeights
from tests.layer.native import NEEDS_COMPILER
from tests.support.alone import NEEDS_PEAKS, alone, peak_above


def held(slots: tuple[SlotWeights, ...]) -> int:
    """Bytes of every matrix and its scales, counted tensor by tensor."""
    parts = [part for slot in slots for q in slot.matrices.values() for part in (q.values, q.scales)]
    return sum(part.nbytes for part in parts if part is not None)


SHAPES = {
    "fp8 in ragged blocks": {"quant": "fp8", "block": (16, 16), "hidden_size": 40, "intermediate_size": 24},
    "fp8 with UE8M0 scales": {"quant": "fp8", "block": (16, 16), "power_of_two_scales": True},
    "bf16": {"quant": "bf16"},
    "no shared experts": {"quant": "fp8", "block": (16, 16), "num_shared_experts": 0},
}


@pytest.mark.row("N22")
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ep,tp", [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_weights_are_predicted_to_the_byte(tmp_path: Path, name: str, ep: int, tp: int) -> None:
    settings = {"hidden_size": 64, "intermediate_size": 32, **SHAPES[name]}
    if settings["intermediate_size"] == 24 and tp == 2:
        pytest.skip("blocks of 16 do not cut an intermediate size of 24")
    shape = CheckpointShape(num_experts=8, top_k=2, num_groups=2, top_k_groups=1, **settings)  # type: ignore[arg-type]
    write_checkpoint(tmp_path, shape)
    config = MoEConfig.from_hf(tmp_path, experts="torch_cpu", max_num_tokens=32)
    for groups in virtual_groups(ep, tp):
        layer = DeepseekV3MoE(config, groups=groups)
        report = layer.memory_report()
        layer.load_from_safetensors(tmp_path, 3)
        weights = layer.weights
        assert report.num_slots == len(weights.experts.slots)
        assert report.experts == held(tuple(weights.experts.slots))
        assert report.shared == (held((weights.shared,)) if weights.shared else 0)
        gate, bias = layer.state.backends.gate.weight_EH, layer.state.backends.gate.bias_E
        assert gate is not None and bias is not None
        assert report.gate == gate.numel() * gate.element_size() + bias.numel() * 4
        assert report.total == report.experts + report.shared + report.gate + report.buffers
        assert report.as_dict()["total"] == report.total and f"rank {layer.ep.rank}: " in str(report)


def test_buffers_grow_with_the_most_tokens_and_not_with_the_routing() -> None:
    reports = [
        DeepseekV3MoE(MoEConfig.load(Path("configs/models/tiny.yaml")).with_(max_num_tokens=most), dtype=torch.float32)
        for most in (16, 32)
    ]
    small, large = (layer.memory_report() for layer in reports)
    assert 2 * small.buffers == large.buffers and small.experts == large.experts
    for buffers, peak in ((1, 120), (30, 130)):  # an expert of the checkpoint next to all weights, or the buffers
        stated = replace(small, experts=70, shared=20, gate=10, buffers=buffers, packing=20)
        assert (stated.total, stated.peak) == (100 + buffers, peak)


EXPERTS, SIDE = 4, 256
BACKENDS = [pytest.param("cpu_native", marks=NEEDS_COMPILER), "torch_cpu", "reference"]


@pytest.mark.slow
@pytest.mark.parametrize("experts", BACKENDS)
@torch.no_grad()
def test_nothing_outlives_a_layer_that_was_used_in_every_way(
    experts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_native.tunings, "MEASURED_BYTES", 0)  # layers of any size are measured when they are loaded
    shape = CheckpointShape(EXPERTS, SIDE, SIDE, top_k=2, num_groups=1, top_k_groups=1)
    write_checkpoint(tmp_path, shape, threads=1)
    x_TH = torch.randn(8, SIDE).bfloat16()
    ids_TK = torch.tensor([[0, 1]]).expand(8, 2)

    def used() -> list[weakref.ref[object]]:
        layer = DeepseekV3MoE.from_checkpoint(tmp_path, 3, experts=experts, device="cpu")
        layer(x_TH)
        held: list[object] = [layer, layer.state, layer.state.experts.weights, layer.weights.experts]
        layer.load_from_safetensors(tmp_path, 3)
        layer.forward_routed(x_TH, torch.rand(8, 2), ids_TK)
        held += [layer.state.experts.weights, *layer.weights.experts.slots]
        layer.live.set_placement(ExpertMap(((3, 1, 0, 2),), num_experts=EXPERTS))
        layer(x_TH)
        assert swap_backends(layer, x_TH, limit=1.0, experts="torch_cpu").swapped
        held += [layer.state.experts.weights, layer.kernel.experts]
        held.append(twin := copy.deepcopy(layer))
        twin(x_TH)
        w13, w2 = torch.randn(EXPERTS, 2 * SIDE, SIDE).bfloat16(), torch.randn(EXPERTS, SIDE, SIDE).bfloat16()
        engine = EngineExperts("engine", EngineWeights(w13, w2), top_k=2, settings={"experts": experts})
        engine(x_TH, torch.rand(8, 2), ids_TK)
        held += [engine, engine.of_rank.weights, w13, w2]
        return [weakref.ref(each) for each in held]

    alive = used()
    gc.collect()
    assert [kept for each in alive if (kept := each()) is not None] == []


@pytest.mark.slow
@NEEDS_COMPILER
@torch.no_grad()
def test_resident_memory_stays_flat_where_layers_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_native.tunings, "MEASURED_BYTES", 0)
    shape = CheckpointShape(8, 512, 512, top_k=2, num_groups=1, top_k_groups=1, quant="int8")
    write_checkpoint(tmp_path, shape, threads=1)
    x_TH = torch.randn(8, 512).bfloat16()

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    after = []
    for _ in range(8):
        layer = DeepseekV3MoE.from_checkpoint(tmp_path, 3, experts="cpu_native", device="cpu")
        layer(x_TH)
        layer.load_from_safetensors(tmp_path, 3)
        num_bytes = layer.weights.num_bytes
        del layer
        after.append(resident())
    assert num_bytes > 6 << 20
    # A layer that stays would make it four layers more; the allocator keeps up to about one.
    assert min(after[4:]) - min(after[:4]) < 2 * num_bytes


def measured(path: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    layer = DeepseekV3MoE(MoEConfig.from_hf(path, experts="cpu_native", activations="plain", max_num_tokens=32))

    def load_and_run() -> None:
        layer.load_from_safetensors(path, 3)
        layer(torch.ones(32, layer.config.model.hidden_size, dtype=torch.bfloat16))

    peak, after = peak_above(load_and_run)
    return layer.memory_report().as_dict() | {"measured_peak": peak, "measured": after}


@NEEDS_COMPILER
@NEEDS_PEAKS
@pytest.mark.slow
def test_loading_and_serving_take_what_was_predicted_within_five_per_cent(tmp_path: Path) -> None:
    paths = []
    for name, (experts, hidden, inter) in {"small": (4, 128, 128), "large": (20, 1024, 1536)}.items():
        paths.append(tmp_path / name)
        shape = CheckpointShape(
            num_experts=experts, top_k=2, num_groups=2, top_k_groups=1, hidden_size=hidden, intermediate_size=inter,
            quant="fp8",
        )  # fmt: skip
        write_checkpoint(paths[-1], shape)
    seen = alone(measured, paths[1], first=paths[:1])
    # 20 experts and a shared one of 4.7 MB: held once, never the packed ones and the checkpoint's pages together.
    assert seen["total"] > 95e6
    assert seen["measured_peak"] == pytest.approx(seen["peak"], rel=0.05)
    assert seen["measured"] == pytest.approx(seen["total"], rel=0.05)


LIFE = """
import os, sys
import torch, torch.distributed as dist
import moe_mk
from moe_mk.rebalance import RebalanceManager, RebalanceSettings

def gloo_threads():
    names = os.popen(f"cat /proc/{os.getpid()}/task/*/comm 2>/dev/null").read().splitlines()  # one may end meanwhile
    return sorted(name for name in names if "gloo" in name)

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


@pytest.mark.slow
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
