"""Real processes of which one is killed: the others agree, repair every expert, and come back whole or not at all."""

import os
import re
import signal
import warnings
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk import MoELayer, ParallelGroups, WeightError
from moe_mk.comm import DistributedCommunicator
from moe_mk.comm.symmetric import setup as symmetric_setup
from moe_mk.errors import CommError, FallbackWarning, RegroupError
from moe_mk.lab.testing import on_ranks as processes
from moe_mk.lab.testing.on_ranks import RankError, RankWorld
from moe_mk.layer import live
from moe_mk.prepare_finalize.all_to_all import AllToAll
from moe_mk.prepare_finalize.one_sided.transport import OneSided
from moe_mk.rebalance import RebalanceManager, RebalanceSettings, RebalanceWarning
from tests.support import layers as build
from tests.support.worlds import world_of

Report = dict[str, Any]
EXPERTS, TOP_K, LAYERS, TOKENS = 8, 3, 2, 20
TRANSPORTS = {"all_to_all": AllToAll, "one_sided": OneSided}
TIMEOUT_S, LONG_S = 20.0, 110.0


def tokens(rank: int) -> Tensor:
    return torch.randn(TOKENS, build.HIDDEN, generator=torch.Generator().manual_seed(rank))


def reference(layer: MoELayer, x_TH: Tensor) -> Tensor:
    """Every token on its own, in f64, from the tensors of the checkpoint."""
    weights = {name: t.double() for name, t in build.tensors(EXPERTS).items()}
    routing = layer.route(x_TH)
    y_TH = torch.zeros_like(x_TH, dtype=torch.float64)
    for t, (ids, parts) in enumerate(zip(routing.ids_TK.tolist(), routing.weights_TK.tolist(), strict=True)):
        for expert, part in zip(ids, parts, strict=True):
            y_TH[t] += part * build.mlp(x_TH[t].double(), weights, f"experts.{expert}")
    return y_TH


def settings() -> RebalanceSettings:
    return RebalanceSettings(sync_every=2, inline=True)


def layers_over(comm: Any, transport: str, **changes: object) -> list[MoELayer]:
    chosen = {"experts": "torch_cpu", "prepare_finalize": transport, "timeout_s": TIMEOUT_S} | changes
    made = [
        MoELayer(
            build.config(EXPERTS, TOP_K, **chosen),
            dtype=torch.float32,
            groups=ParallelGroups(ep=comm),
            name=f"{transport} {x}",
        )
        for x in range(LAYERS)
    ]
    return [layer.load_weights(build.tensors(EXPERTS)) for layer in made]


def over(group: Any) -> DistributedCommunicator:
    return DistributedCommunicator(group, timeout_s=TIMEOUT_S)


def group_of(ranks: list[int]) -> Any:
    return dist.new_group(ranks, timeout=timedelta(seconds=LONG_S), use_local_synchronization=True)


@pytest.fixture(autouse=True)
def survivors_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is killed at the beginning here: what is tried comes after that, on machines of any speed."""
    monkeypatch.setattr(processes, "GRACE_S", LONG_S)


def fresh(layer: MoELayer, group: Any, transport: str) -> MoELayer:
    """The same layer built for the group it has now, on the same placement."""
    comm = over(group)
    (made, *_) = layers_over(comm, transport if comm.size > 1 else "auto")
    rows = layer.expert_map.local_to_global(comm.rank)
    made.live.set_placement(layer.expert_map, {slot: made.live.read_expert(expert) for slot, expert in enumerate(rows)})
    return made


def serve(manager: RebalanceManager, rank: int, steps: int) -> None:
    for _ in range(steps):
        for layer in manager.layers:
            assert isinstance(layer, MoELayer)
            layer(tokens(rank))
        manager.step()


def judged(layers: list[MoELayer], group: Any, transport: str, rank: int) -> Report:
    """What these layers give, beside the reference and beside layers that were built as they are now."""
    x_TH, reported = tokens(rank), Report(transports=[], maps=[], worst=0.0, equal=True, lost=0)
    for layer in layers:
        y_TH, other = layer(x_TH), fresh(layer, group, transport)
        reported["worst"] = max(reported["worst"], float((y_TH.double() - reference(layer, x_TH)).abs().max()))
        reported["equal"] &= torch.equal(y_TH, other(x_TH))
        reported["transports"] += [layer.decision.chosen.prepare_finalize, other.decision.chosen.prepare_finalize]
        reported["maps"] += [[list(row) for row in layer.expert_map.experts_of_rank]]
        reported["lost"] += len(layer.expert_map.lost)
        layer.report().require_as_planned()
    return reported


FAULTS: dict[str, tuple[object, str, Exception]] = {
    "memory": (live, "with_experts", MemoryError("no room for the experts")),
    "transport": (live, "build_state", RuntimeError("the transport cannot be set up")),
    "window": (symmetric_setup, "create", OSError("no space left in /dev/shm")),
}


def fault(name: str, layers: list[MoELayer], rank: int) -> AbstractContextManager[object]:
    """Something that fails on one rank, the lowest that is left."""
    if rank != 0:
        return nullcontext()
    if name == "reading":
        unreadable = mock.Mock(side_effect=WeightError("expert 0: the file cannot be read"))
        return build.live_method(layers[-1], "read_expert", unreadable)
    owner, function, error = FAULTS[name]
    return mock.patch.object(owner, function, side_effect=error)


def with_a_death(number: int, ranks: int) -> Report:
    """All ranks serve, the last one is killed, the others come back after every fault that can be put in."""
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore", RebalanceWarning)
    warnings.simplefilter("ignore", FallbackWarning)
    victim, managers = ranks - 1, {}
    for transport in TRANSPORTS:
        managers[transport] = RebalanceManager(layers_over(over(dist.group.WORLD), transport), settings())
    for manager in managers.values():
        serve(manager, number, 3)
    if number == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    reported = Report()
    for manager in managers.values():
        with pytest.raises(CommError):
            serve(manager, number, 2)
    group = group_of(list(range(victim)))
    for transport, manager in managers.items():
        layers = list(manager.layers)
        before = [(layer.expert_map, layer.epoch, layer.decision, layer.state) for layer in layers]
        seen = reported[transport] = Report(refused=[])
        faults = ["reading", "memory", "transport"] + ["window"] * (transport == "one_sided" and victim > 1)
        comm = over(group)
        for name in faults:
            with fault(name, layers, number), pytest.raises(RegroupError) as refused:
                manager.rank_lost(victim, comm)
            seen["refused"].append(str(refused.value))
            after = [(layer.expert_map, layer.epoch, layer.decision, layer.state) for layer in layers]
            seen["untouched"] = all(map(same, before, after)) and len(manager.ledger.living) == ranks
            assert comm.kept == {}
        manager.rank_lost(victim, comm)
        seen |= judged(layers, group, transport, number)
        serve(manager, number, 6)
        seen |= {"later": judged(layers, group, transport, number), "state": manager.state}
        seen["incidents"] = [str(each) for each in manager.status().incidents]
        seen["read"] = manager.status().read_bytes
    return reported


def same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return all(a is b or a == b for a, b in zip(one[:3], other[:3], strict=True)) and one[3] is other[3]


@pytest.mark.parametrize(("ranks", "maps"), [(4, [[0, 1, 6], [2, 3, 7], [4, 5]]), (2, [[0, 1, 2, 3, 4, 5, 6, 7]])])
@pytest.mark.stress
def test_survivors_of_a_killed_rank_serve_every_expert_again(ranks: int, maps: list[list[int]]) -> None:
    with RankWorld(ranks) as world, pytest.raises(RankError) as failed:
        world.call(with_a_death, ranks, timeout_s=LONG_S)
    assert list(failed.value.problems) == [ranks - 1], failed.value
    survivors = list(failed.value.results.values())
    assert len(survivors) == ranks - 1
    for reported in survivors:
        assert isinstance(reported, dict)
        for transport in TRANSPORTS:
            seen = reported[transport]
            wanted = [
                r"reading experts failed.*rank 0: reading 'TR 1' failed: WeightError: expert \d: the file",
                "staging failed.*rank 0: MemoryError: no room for the experts",
                "staging failed.*rank 0: RuntimeError: the transport cannot be set up",
                "trying out failed.*no space left in /dev/shm",
            ]
            for text, pattern in zip(seen["refused"], wanted, strict=False):
                assert re.search(pattern.replace("TR", transport), text, re.DOTALL), text
            assert seen["untouched"] and seen["maps"] == [maps] * LAYERS and seen["lost"] == 0
            assert seen["transports"] == [transport if ranks > 2 else "no_ep"] * 2 * LAYERS
            assert seen["equal"] and seen["worst"] < 1e-5
            assert seen["later"]["equal"] and seen["later"]["worst"] < 1e-5 and seen["later"]["lost"] == 0
            assert "all experts serve" in seen["incidents"][0]
        assert sum(each["all_to_all"]["read"] for each in survivors) > 0


world = world_of(4)
