"""What can be done with a layer that serves: the verbs of `tests.support.machine`."""

from __future__ import annotations

import copy
import os
import pickle
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from moe_mk import ExpertMap
from moe_mk.comm import LockstepWorld
from moe_mk.comm.groups import ParallelGroups
from moe_mk.errors import StoreError, UnsupportedError
from moe_mk.flight import interleave, wait
from moe_mk.lab.testing.bits import equal_bits
from moe_mk.layer.hot_swap import swap_steps
from moe_mk.placement.eplb import PlacementPlan, Topology, plan
from moe_mk.rebalance import RebalanceManager, RebalanceSettings, Thresholds
from moe_mk.tokens import Routing
from moe_mk.weights import MappingSource
from tests.support.machine import ALONE, PAGED, POOL_BYTES, SPREAD, SWAPPED, World, check_shares, verb
from tests.support.machine_features import EXPERTS, FEATURES, fits


@verb(whole=False)
def forward(world: World, draw: random.Random) -> None:
    """No tokens, one, or many, on each rank as it comes."""
    world.served(draw, [draw.choice((0, 1, 2, 7, 33)) for _ in range(world.ep)], "forward")


@verb()
def routed(world: World, draw: random.Random) -> None:
    """Tokens with experts and weights of an engine; ids of -1 go nowhere."""
    x, _ = world.drawn_tokens(draw, [draw.choice((1, 4, 9)) for _ in range(world.ep)])
    of, (top_k, scored) = torch.Generator().manual_seed(draw.randrange(2**31)), (world.top_k, world.plain.scored)
    ids, weights = list[Tensor](), list[Tensor]()
    for x_TH in x:
        ids_TK = torch.rand((len(x_TH), scored), generator=of).argsort(1)[:, :top_k]
        ids.append(ids_TK.masked_fill(torch.rand(ids_TK.shape, generator=of) < 0.25, -1))
        weights.append(0.2 + torch.rand(ids_TK.shape, generator=of))
    if world.replicated:
        ids, weights = [ids[0]] * world.ep, [weights[0]] * world.ep
    if len(world.layers) == 1:
        dtype = draw.choice((torch.int32, torch.int64))
        outputs = [world.layers[0].forward_routed(x[0], weights[0], ids[0].to(dtype))]
    else:
        given = [Routing(i.to(torch.int32), w.masked_fill(i < 0, 0.0)) for i, w in zip(ids, weights, strict=True)]
        flights = [
            layer.steps(x_TH, given=routing)
            for layer, x_TH, routing in zip(world.layers, world.of_rank(x), world.of_rank(given), strict=True)
        ]
        outputs = world.of_slices(interleave(flights))
    for rank, (x_TH, ids_TK, weights_TK) in enumerate(zip(x, ids, weights, strict=True)):
        weights_TE, chosen_TE = torch.zeros(len(x_TH), scored + 1).double(), torch.zeros(len(x_TH), scored + 1)
        at_TK = torch.where(ids_TK < 0, scored, ids_TK)
        weights_TE.scatter_(1, at_TK, weights_TK.double())
        chosen_TE = chosen_TE.scatter_(1, at_TK, 1.0).bool()[:, :-1]
        world.count(rank, chosen_TE)
        world.nowhere[rank] += int((ids_TK < 0).sum())
        kept_TE = world.without_lost(rank, weights_TE[:, :-1], chosen_TE)
        world.compare(outputs[rank], world.output(x_TH, kept_TE, routed_only=True), f"routed, rank {rank}")
    world.check_counts()


@verb()
def again(world: World, draw: random.Random) -> None:
    """The same tokens have the same bits in every call, prepared or stage by stage, and in part where that is asked."""
    x, ids = world.drawn_tokens(draw, [draw.choice((1, 3, 12)) for _ in range(world.ep)])
    first = world.call(x, ids)
    for rank in range(world.ep):
        world.compare(first[rank], world.expected(rank, x[rank], ids[rank]), "again")
    for layer in world.layers:
        layer.prepare()
    second = world.call(x, ids)
    assert all(map(equal_bits, first, second)), "a second call has other bits"
    for rank in range(world.ep):
        world.expected(rank, x[rank], ids[rank])
    if len(world.layers) == 1:
        layer = world.layers[0]
        with torch.no_grad():
            assert equal_bits(wait(layer.steps(x[0], token_ids_T=ids[0])), first[0]), "stages have other bits"
        world.expected(0, x[0], ids[0])
    if world.row["bits"] in ("batch_invariant", "invariant") and len(world.layers) == 1:
        last = [None if ids[0] is None else ids[0][-1:]]
        assert equal_bits(world.call([x[0][-1:]], last)[0], first[0][-1:]), "the bits depend on the batch"
        world.expected(0, x[0][-1:], last[0])


@verb(ALONE)
def batch(world: World, draw: random.Random) -> None:
    """Sequences with padding, and tokens that are not dense."""
    layer = world.layers[0]
    x, ids = world.drawn_tokens(draw, [12])
    active_T = torch.rand(12, generator=torch.Generator().manual_seed(draw.randrange(99))) < 0.6
    shaped = x[0].view(3, 4, -1), None if ids[0] is None else ids[0].view(3, 4)
    y_TH = layer(*shaped, active_T=active_T.view(3, 4)).view(12, -1)
    kept = x[0][active_T], None if ids[0] is None else ids[0][active_T]
    world.compare(y_TH[active_T], world.expected(0, *kept), "active tokens")
    assert not y_TH[~active_T].any(), "padding is not 0"
    wide_TH = torch.cat((x[0], x[0]), 1)[:, : world.plain.hidden]
    world.compare(layer(wide_TH, ids[0]), world.expected(0, wide_TH, ids[0]), "strided tokens")
    world.compare(layer((-x[0]).neg(), ids[0]), world.expected(0, x[0], ids[0]), "negated tokens")


@verb()
def listen(world: World, draw: random.Random) -> None:
    """A listener is given the logical routing of the forwards that it hears."""
    heard: list[list[Routing]] = [[] for _ in world.layers]
    for layer, own in zip(world.layers, heard, strict=True):
        layer.on_routing = own.append
    x, ids = world.drawn_tokens(draw, [draw.randint(1, 5) for _ in range(world.ep)])
    outputs = world.call(x, ids)
    for layer in world.layers:
        layer.on_routing = None
    for at, own in enumerate(heard):
        rank = at // world.tp
        assert len(own) == 1 or world.row["tiles"] == "three", f"rank {at} heard {len(own)} calls"
        _, chosen_TE = world.routing_of(rank, x[rank], ids[rank])
        counts_E = torch.cat([each.ids_TK.flatten() for each in own])
        wanted_E = chosen_TE[:, :EXPERTS].sum(0)
        assert torch.bincount(counts_E[counts_E >= 0].long(), minlength=EXPERTS).tolist() == wanted_E.tolist()
    for rank in range(world.ep):
        world.compare(outputs[rank], world.expected(rank, x[rank], ids[rank]), "listen")


@verb()
def poison(world: World, draw: random.Random) -> None:
    """A token with a NaN has no experts, and changes no other token."""
    x, ids = world.drawn_tokens(draw, [draw.randint(2, 6) for _ in range(world.ep)])
    at = draw.randrange(2)
    for x_TH in {id(each): each for each in x}.values():
        x_TH[at, draw.randrange(world.plain.hidden)] = float("nan")
    outputs = world.call(x, ids)
    for rank in range(world.ep):
        sound = torch.arange(len(x[rank])) != at
        own = None if ids[rank] is None else ids[rank][sound]
        wanted_TH = world.expected(rank, x[rank][sound], own)
        world.compare(outputs[rank][sound], wanted_TH, f"next to a NaN, rank {rank}")
        world.tokens[rank] += 1
        world.nowhere[rank] += world.top_k
    world.check_counts()


# Changes of weights.


@verb(whole=False)
def reload(world: World, draw: random.Random) -> None:
    """Other weights: from memory, tensor by tensor, or from a file."""
    world.version += 1
    world.plain = world.weights_of(world.version)
    how = draw.choice(("memory", "pieces", "file"))
    tensors = world.plain.tensors
    path = world.folder / f"{world.version}.safetensors"
    if how == "file":
        prefix = "model.layers.{N}.mlp."
        named = {prefix.replace("{N}", "3") + name: t.contiguous().clone() for name, t in tensors.items()}
        save_file(named, path)
    for layer in world.layers:
        if how == "memory":
            layer.load_weights(tensors)
        elif how == "file":
            layer.load(path, 3, prefix=prefix)
        else:
            loader = layer.loader()
            names = list(tensors)
            random.Random(draw.random()).shuffle(names)
            for name in names:
                loader.feed(name, tensors[name])
            loader.finish()
            layer.read_from(MappingSource(tensors), 0)


@verb()
def release(world: World, draw: random.Random) -> None:
    """Without the checkpoint's experts a layer serves, and refuses to move and to be copied, until it is loaded."""
    try:
        for layer in world.layers:
            layer.release_weights()
    except UnsupportedError:
        assert world.row["experts"] != "cpu_native"
        return
    world.served(draw, [2] * world.ep, "released")
    layer = world.layers[0]
    with pytest.raises(UnsupportedError):
        copy.deepcopy(layer)
    with pytest.raises(UnsupportedError):
        layer.live.export_slot(0)
    world.load_all()


@verb({"bias": {"correction", "both"}})
def correct(world: World, draw: random.Random) -> bool | None:
    """The bias that selects is corrected in place, as in training, and stays so whatever comes next."""
    if world.plain.bias_E is None:
        return False
    of = torch.Generator().manual_seed(draw.randrange(2**31))
    fused = world.config.model.num_fused_shared_experts
    change_E = torch.randn(world.plain.scored, generator=of) * 0.5
    change_E[world.plain.scored - fused :] = 0.0
    for layer in world.layers:
        bias_E = layer.state.backends.gate.bias_E
        assert bias_E is not None
        bias_E += change_E
    world.plain.bias_E = (world.plain.bias_E.float() + change_E).double()
    world.plain.tensors = dict(world.plain.tensors)
    for name, tensor in world.plain.tensors.items():
        if name.endswith(("e_score_correction_bias", "exp_probs_b.bias")):
            world.plain.tensors[name] = tensor + change_E[: len(tensor)]
    for layer in world.layers:
        layer.read_from(MappingSource(world.plain.tensors), 0)
    return None


# Copies.


@verb()
def duplicate(world: World, draw: random.Random) -> None:
    """Copies serve on; the originals are given other weights, which no copy sees."""
    originals = world.layers
    world.layers = copy.deepcopy(originals)
    if world.row["grid"] == "alone":
        world.layers = [pickle.loads(pickle.dumps(world.layers[0]))]
    before, world.pool = world.pool, world.layers[0].pool
    assert (before is None) == (world.pool is None) and (before is None or before is not world.pool), "their own pool"
    world.dropped = [0] * world.ep
    other = world.weights_of(world.version + 500)
    for layer in originals:
        layer.load_weights(other.tensors)
    for layer in world.layers:
        layer.read_from(MappingSource(world.plain.tensors), 0)


# Changes of the placement and of the backends.


def drawn_map(world: World, draw: random.Random, without: Sequence[int] = ()) -> ExpertMap:
    """Every expert at least once but for some, on each rank at least one, sometimes replicas with shares."""
    experts = [e for e in range(EXPERTS) if e not in without]
    draw.shuffle(experts)
    rows: list[list[int]] = [[] for _ in range(world.ep)]
    for at, expert in enumerate(experts):
        rows[at if at < world.ep else draw.randrange(world.ep)].append(expert)
    if draw.random() < 0.7:
        for row in rows:
            able = [e for e in experts if e not in row]
            row += draw.sample(able, min(len(able), draw.randint(0, 2)))
    for row in rows:
        draw.shuffle(row)
    shares = None
    if draw.random() < 0.7:
        placed = [e for row in rows for e in row]
        parts = [draw.uniform(0.1, 1.0) for _ in placed]
        totals = {e: sum(p for q, p in zip(placed, parts, strict=True) if q == e) for e in placed}
        shares = tuple(part / totals[e] for e, part in zip(placed, parts, strict=True))
    return ExpertMap(tuple(map(tuple, rows)), EXPERTS, shares, frozenset(without))


def placed(world: World, expert_map: ExpertMap, draw: random.Random) -> None:
    """Serve with a map; experts come from other ranks, or from the source of the layers."""
    held: dict[tuple[int, int], object] = {}
    for at, layer in enumerate(world.layers):
        for slot, expert in enumerate(layer.expert_map.local_to_global(layer.ep.rank)):
            held[at % world.tp, expert] = layer.live.export_slot(slot)
    reads = draw.random() < 0.3
    arrived = list[dict[int, object]]()
    for at, layer in enumerate(world.layers):
        own = set(layer.expert_map.local_to_global(layer.ep.rank))
        wanted = enumerate(expert_map.local_to_global(at // world.tp))
        missing = {slot: e for slot, e in wanted if e not in own}
        arrived.append({
            slot: layer.live.read_expert(e) if reads or (at % world.tp, e) not in held else held[at % world.tp, e]
            for slot, e in missing.items()
        })  # fmt: skip
    for layer, each in zip(world.layers, arrived, strict=True):
        layer.live.set_placement(expert_map, each)  # type: ignore[arg-type]
    world.lost = set(expert_map.lost)


@verb(whole=False)
def move(world: World, draw: random.Random) -> None:
    """Another placement, which repairs what was lost."""
    epoch = world.layers[0].epoch
    placed(world, drawn_map(world, draw), draw)
    assert {layer.epoch for layer in world.layers} == {epoch + 1}
    check_shares(world)


@verb(whole=False)
def lose(world: World, draw: random.Random) -> None:
    """One to three experts have no copy, while the layer serves on or refuses as its setting states."""
    without = draw.sample(range(EXPERTS), draw.randint(1, min(3, EXPERTS - world.ep)))
    placed(world, drawn_map(world, draw, without), draw)
    world.served(draw, [5] * world.ep, "lost")
    if draw.random() < 0.5:
        placed(world, drawn_map(world, draw), draw)


@verb()
def swap(world: World, draw: random.Random) -> None:
    """Other experts, another transport, or another setting of kernels, if it can serve; else nothing changes."""
    features = (*SWAPPED, "transport")
    values = [(feature, value) for feature in features for value in FEATURES[feature] if world.row[feature] != value]
    able = [each for each in values if fits(world.row | dict([each]))]
    if (others := [each for each in able if each[0] == "experts"]) and draw.random() < 0.6:
        able = others
    feature, value = draw.choice(able if able and draw.random() < 0.8 else values)
    row = world.row | {feature: value}
    kernel = {key.partition(".")[2]: setting for key, setting in FEATURES[feature][value].items()}
    defaults = {"transport": {"prepare_finalize": "auto"}, "tiles": {"tiles": 1}, "threads": {"threads": "auto"},
                "fused_router": {"fused_router": True}, "instruction_set": {"instruction_set": "auto"}}  # fmt: skip
    kernel = defaults.get(feature, {}) | {key: setting for key, setting in kernel.items() if key != "relay_tokens"}
    if feature == "transport" and (
        value in ("replicated", "hierarchical") or world.replicated or world.ep != world.first_ep
    ):
        feature, value, row, kernel = "experts", world.row["experts"], world.row, {"experts": world.row["experts"]}
    if world.ep != world.first_ep:  # a transport that is pinned may need the ranks that are lost
        kernel = {"prepare_finalize": "auto"} | kernel
    x, ids = world.drawn_tokens(draw, [draw.choice((0, 1, 5)) for _ in range(world.ep)])
    first = world.layers[0]
    epoch, name, was = first.epoch, first.decision.chosen.name, first.live.generation
    reports = interleave([
        swap_steps(layer, x_TH, limit=0.1, settings=kernel, token_ids_T=ids_T)
        for layer, x_TH, ids_T in zip(world.layers, world.of_rank(x), world.of_rank(ids), strict=True)
    ])  # fmt: skip
    assert len({report.failed_ranks for report in reports}) == 1 and all(each.old == name for each in reports)
    assert reports[0].swapped == fits(row), (row, reports[0])
    assert first.epoch == epoch + reports[0].swapped
    assert (first.live.generation != was) == reports[0].swapped, "what was staged for another pair is stale"
    if reports[0].swapped:
        world.row = row
        assert [report.tokens for report in reports] == [len(each) for each in world.of_rank(x)]
        assert feature != "experts" or all(each.decision.chosen.experts == value for each in world.layers)


@verb(SPREAD)
def rebalance(world: World, draw: random.Random) -> None:
    """A manager plans, moves experts and switches while the layers serve; every byte that travels is counted."""
    settings = RebalanceSettings(
        sync_every=2, decay=0.0, bytes_per_step=draw.choice((world.plain.bytes_of_expert // 2, 1 << 20)), inline=True,
        backoff=2, min_gain=0.0, move_cost=0.0, thresholds=Thresholds(1.01, 1.005, dwell=10_000),
    )  # fmt: skip
    load_1E = np.array([[draw.choice((1.0, 5.0, 40.0)) for _ in range(EXPERTS)]])

    def planner(_: NDArray[np.float64], topology: Topology, slots: NDArray[np.int64]) -> PlacementPlan:
        given = {"policy": settings.policy, "old": slots, "min_gain": 0.0, "max_moves": None, "move_cost": 0.0}
        return plan(load_1E, topology, groups=1, min_copies=1, **given)

    managers = [RebalanceManager([layer], settings, planner=planner) for layer in world.layers]
    for manager in managers:
        manager.plan_soon()
    arrived = [0] * len(world.layers)
    for step in range(60):
        before = [set(layer.expert_map.local_to_global(layer.ep.rank)) for layer in world.layers]
        if step % 5 == 0:
            world.served(draw, [6] * world.ep, "rebalance")
        interleave([manager.steps() for manager in managers])
        for at, layer in enumerate(world.layers):
            arrived[at] += len(set(layer.expert_map.local_to_global(layer.ep.rank)) - before[at])
        if managers[0].state == "watching" and managers[0].status().plan_id:
            break
    assert managers[0].state == "watching", managers[0].status()
    for at, manager in enumerate(managers):
        status = manager.status()
        assert status.incidents == (), status
        if world.tp == 1:
            wanted = arrived[at] * world.plain.bytes_of_expert
            assert status.received_bytes == wanted, (at, arrived, status)
    received = [manager.status().received_bytes for manager in managers]
    assert sum(received) == managers[0].status().predicted_bytes, "bytes as predicted"
    for manager in managers:
        manager.close()


@verb(SPREAD)
def lose_rank(world: World, draw: random.Random) -> bool | None:
    """A rank is gone with its experts; the others go on, and repair what had no other copy."""
    if world.ep == 1:
        return False
    settings = RebalanceSettings(sync_every=2, inline=True, backoff=2)
    managers = [RebalanceManager([layer], settings) for layer in world.layers]
    dead = draw.randrange(world.ep)
    left = [at for at in range(len(world.layers)) if at // world.tp != dead]
    gone = world.layers[dead * world.tp].expert_map
    only = {e for e in range(EXPERTS) if {gone.rank_of_physical[p] for p in gone.physical_of_logical[e]} == {dead}}
    comms = [LockstepWorld(world.ep - 1).communicators() for _ in range(world.tp)]
    new = [comms[at % world.tp][number // world.tp] for number, at in enumerate(left)]
    epoch = world.layers[0].epoch
    interleave([managers[at].rank_lost_steps(dead, comm) for at, comm in zip(left, new, strict=True)])
    world.layers, world.ep = [world.layers[at] for at in left], world.ep - 1
    assert {layer.epoch for layer in world.layers} == {epoch + 1}
    for counted in (world.load, world.zero, world.dropped, world.tokens, world.nowhere):
        counted.pop(dead)  # type: ignore[attr-defined]
    world.row = world.row | {"transport": "auto"} if world.row["transport"] != "replicated" else world.row
    world.lost = set() if world.row["lost"] == "raise" else only
    world.served(draw, [4] * world.ep, "without a rank")
    for _ in range(40):
        if not world.lost:
            break
        interleave([managers[at].steps() for at in left])
        world.lost = set(world.layers[0].expert_map.lost)
        world.served(draw, [2] * world.ep, "repairing")
    assert not world.lost
    for at in left:
        managers[at].close()
    return None


# Failures.


@verb()
def fail(world: World, draw: random.Random) -> None:
    """A call fails on one rank; after a recovery all go on."""
    world.served(draw, [1] * world.ep, "before a failure")  # opens the buffers of the transport
    broken = draw.randrange(len(world.layers))

    def listener(routing: Routing) -> None:
        raise ZeroDivisionError

    world.layers[broken].on_routing = listener
    x, ids = world.drawn_tokens(draw, [2] * world.ep)
    with pytest.raises(ZeroDivisionError):
        world.call(x, ids)
    world.layers[broken].on_routing = None
    interleave([layer.state.experts.grid.recover() for layer in world.layers])
    world.forget_counts()


@verb(PAGED)
def damage(world: World, draw: random.Random) -> bool | None:
    """Of a store whose records were damaged every read is refused, not only the first, until it is written anew."""
    world.load_all()
    layer, cache = world.layers[0], world.layers[0].state.experts.weights.cache
    path = cache.store.path
    if not path.exists():  # that of a placement, which has no name
        return False
    state = path.stat()
    size = state.st_size - EXPERTS * cache.record_bytes
    with path.open("r+b") as file:
        for expert in range(len(layer.expert_map.local_to_global(0))):
            at = size + expert * cache.record_bytes + draw.randrange(world.plain.bytes_of_expert // 2)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 32]))
    if draw.random() < 0.7:
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    x, ids = world.drawn_tokens(draw, [3])
    for _ in range(3):
        with pytest.raises(StoreError):
            layer(x[0], ids[0])
    path.unlink()
    world.load_all()
    world.forget_counts()
    return None


@verb(PAGED)
def page(world: World, draw: random.Random) -> None:
    """Many calls of one token each, in which the policy decides."""
    _ = [world.served(draw, [1], "page") for _ in range(12)]


@verb({"grid": {"alone"}, "residency": {"pool"}})
def share_pool(world: World, draw: random.Random) -> None:
    """Layers join the pool, use it more, and leave; each has the numbers of its own weights."""
    others = []
    for number in range(draw.randint(1, 2)):
        plain = world.weights_of(world.version + 600 + number)
        others.append((plain, world.built(ParallelGroups()).load_weights(plain.tensors)))
    own = world.plain, world.layers
    for _ in range(draw.choice((3, 40))):
        plain, layer = draw.choice(others)
        world.plain, world.layers = plain, [layer]
        x, ids = world.drawn_tokens(draw, [draw.randint(1, 3)])
        weights_TE, _ = world.routing_of(0, x[0], ids[0])
        world.compare(layer(x[0], ids[0]), world.output(x[0], weights_TE, routed_only=False), "next to it")
    world.plain, world.layers = own
    caches = [each.state.experts.weights.cache for each in (*world.layers, *(layer for _, layer in others))]
    for held in ([len(cache.slots) for cache in caches], [cache.counts.slots for cache in caches]):
        assert min(held) >= 1 and sum(held) * caches[0].record_bytes <= POOL_BYTES, held


@verb(whole=False)
def reset(world: World, draw: random.Random) -> None:
    """Counters begin anew, and warm-up runs leave no trace in them."""
    world.forget_counts()
    if len(world.layers) == 1 and not world.lost:
        world.layers[0].warm_up([0, 1, 5])
    world.check_counts()
