"""Shares of copies, window fill and clusters: what an uneven split of tokens can reach."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from moe_mk.errors import ConfigError, ShapeError
from moe_mk.placement.balance.greedy import replicate
from moe_mk.placement.balance.policies import cluster_fill, clusters_of
from moe_mk.placement.balance.shares import balance_of, copies_of, gpu_time, poured_shares
from moe_mk.placement.balance.spread import (
    fill_empty,
    fill_limit,
    imbalance,
    num_twins,
    spread,
    swap_refined,
    window_fill,
)  # fmt: skip
from moe_mk.placement.balance.topology import Sites
from moe_mk.placement.eplb import Cost, Topology, plan, resplit

Doubles = NDArray[np.float64]


def sites_of(gpus: int, slots: int | tuple[int, ...], speeds: tuple[float, ...] | None = None) -> Sites:
    return Topology(gpus, 1, slots, speeds).live_sites()


def best_largest_time(experts: NDArray[np.int64], load: Doubles, sites: Sites) -> float:
    """The same question to a linear solver: minimise t with GPU times <= t and shares summing to 1."""
    used = np.flatnonzero(experts >= 0)
    time = np.zeros((sites.num_gpus, len(used) + 1))
    time[sites.site_P[used], np.arange(len(used))] = load[experts[used]] / sites.speed_W[sites.site_P[used]]
    time[:, -1] = -1
    whole = np.zeros((len(load), len(used) + 1))
    whole[experts[used], np.arange(len(used))] = 1
    target = np.append(np.zeros(len(used)), 1.0)
    solved = linprog(target, A_ub=time, b_ub=np.zeros(sites.num_gpus), A_eq=whole, b_eq=np.ones(len(load)))
    return float(solved.fun)


def test_water_runs_to_the_idle_gpu_first():
    # GPU 0: experts 0 (60) and 1 (30). GPU 1: expert 0 again and 2 (10). 60 poured over 30 and 10: both end at 50.
    experts = np.array([[0, 1, 0, 2]])
    load = np.array([[60.0, 30.0, 10.0]])
    share = poured_shares(experts, load, sites_of(2, 2))
    assert share[0].tolist() == pytest.approx([20 / 60, 1, 40 / 60, 1])
    # GPU 1 twice as fast: 100 in all is 33.3 for GPU 0 and 66.7 for GPU 1, so expert 0 leaves 3.3 on GPU 0.
    share = poured_shares(experts, load, sites_of(2, 2, (1.0, 2.0)))
    assert share[0].tolist() == pytest.approx([10 / 3 / 60, 1, 1 - 10 / 3 / 60, 1])


def test_a_second_copy_on_the_same_gpu_takes_nothing():
    experts = np.array([[0, 0, 0, 1]])
    share = poured_shares(experts, np.array([[10.0, 4.0]]), sites_of(2, 2))
    assert share[0].tolist() == pytest.approx([0.7, 0.0, 0.3, 1.0])


def test_experts_without_load_share_evenly_and_empty_slots_take_nothing():
    experts = np.array([[0, 1, 0, -1]])
    share = poured_shares(experts, np.zeros((1, 2)), sites_of(2, 2))
    assert share.tolist() == [[0.5, 1.0, 0.5, 0.0]]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.booleans())
def test_poured_shares_agree_with_a_linear_solver(seed: int, uneven: bool, chains: bool):
    rng = np.random.default_rng(seed)
    load = rng.lognormal(0, 1, (3, 32))
    sites = sites_of(8, 5, tuple(rng.uniform(0.5, 1, 8)) if uneven else None)
    placed = window_fill(load, np.tile(np.arange(32), (3, 1)), sites)[0] if chains else spread(load, sites)[0]
    placed[(copies_of(placed, 32) == 0).any(1)] = spread(load, sites)[0][(copies_of(placed, 32) == 0).any(1)]
    load = load * rng.lognormal(0, 0.2, load.shape)
    time = gpu_time(placed, poured_shares(placed, load, sites), load, sites).max(1)
    for layer in range(3):
        assert time[layer] == pytest.approx(best_largest_time(placed[layer], load[layer], sites), rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([Cost(), Cost(0.0, 1.0), Cost(2.0, 5.0)]))
def test_times_and_balance_are_those_of_their_definition(seed: int, cost: Cost):
    """GPUs of other speeds and slots, empty slots, copies that take nothing, and experts without load."""
    rng = np.random.default_rng(seed)
    slots = rng.integers(1, 4, 3)
    sites = sites_of(3, tuple(slots.tolist()), tuple(rng.choice([0.5, 1.0, 4.0], 3)))
    experts = rng.integers(-1, 4, (2, slots.sum()))
    load, share = rng.integers(0, 3, (2, 4)) * 10.0, rng.integers(0, 3, experts.shape) / 2
    time = gpu_time(experts, share, load, sites, cost)
    for layer in range(2):
        work = [0.0] * 3
        for gpu, expert, part in zip(sites.site_P, experts[layer], share[layer], strict=True):
            if expert >= 0 and (tokens := load[layer, expert] * part) > 0:
                work[gpu] += cost.per_token * tokens + cost.per_expert
        expected = [each / speed for each, speed in zip(work, sites.speed_W, strict=True)]
        assert time[layer] == pytest.approx(np.array(expected))
        least = sum(work) / sites.speed_W.sum()
        assert balance_of(time, sites.speed_W)[layer] == pytest.approx(least / max(expected) if sum(work) else 1.0)


def test_shares_that_are_the_best_already_stay():
    load = np.random.default_rng(3).lognormal(0, 1, (4, 32))
    topology = Topology(8, 2, 5)
    placed = plan(load, topology, groups=4, policy="hybrid")
    assert resplit(placed, load * 3) == pytest.approx(placed.share, abs=1e-5)
    anew = resplit(placed.phy2log, load, topology)
    assert np.abs(anew - placed.share).max() > 0.01, "there are other shares as good"


def test_one_cut_expert_makes_two_gpus_even():
    # 1 2 3 8 on 2 GPUs of 3 slots (4 + 2 - 1 = 5 <= 6). Capacity 7: windows of 3 are 6 and 13; take 2 3 whole and
    # 2 of the 8; what is left is 1 and 6.
    placed, piece, fits = window_fill(np.array([[1.0, 2.0, 3.0, 8.0]]), np.array([[0, 1, 2, 3]]), sites_of(2, 3))
    assert fits.all()
    assert placed.tolist() == [[1, 2, 3, 0, 3, -1]]
    assert piece.tolist() == [[2, 3, 2, 1, 6, 0]]


HOSTILE = ("random", "one hot", "zeros", "ties", "huge range", "zipf")


def hostile_load(kind: str, experts: int, rng: np.random.Generator) -> Doubles:
    loads = {
        "random": rng.random((2, experts)),
        "one hot": np.where(np.arange(experts) == 0, 1.0, 0.0)[None].repeat(2, 0),
        "zeros": np.where(rng.random((2, experts)) < 0.7, 0, rng.random((2, experts))),
        "ties": rng.integers(0, 3, (2, experts)).astype(float),
        "huge range": 10.0 ** rng.uniform(-9, 9, (2, experts)),
        "zipf": rng.permuted(np.tile(np.arange(1.0, experts + 1) ** -1.5, (2, 1)), axis=1),
    }
    return loads[kind]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.integers(2, 24), st.integers(2, 8), st.sampled_from(HOSTILE), st.integers(0, 10_000), st.integers(0, 3))
def test_any_load_is_even_once_slots_reach_experts_plus_gpus(gpus: int, slots: int, kind: str, seed: int, spare: int):
    experts = max(gpus * (slots - 1) + 1 - spare, 2)  # slots >= experts + gpus - 1
    load = hostile_load(kind, experts, np.random.default_rng(seed))
    result = plan(load, Topology(gpus, 1, slots), policy="flat", target=1.0)
    assert result.logcnt.min() >= 1
    total = np.zeros_like(load)
    np.add.at(total, (np.arange(2)[:, None], result.phy2log), result.share)
    assert total == pytest.approx(np.ones_like(load), abs=1e-6)
    gpu = (np.take_along_axis(load, result.phy2log, 1) * result.share).reshape(2, gpus, slots).sum(2)
    assert (gpu.max(1) <= gpu.mean(1) * (1 + 1e-6)).all()
    assert result.balance_X.min() >= 1 - 1e-6


def test_zipf_load_that_defeats_whole_copies_is_cut_even():
    load = hostile_load("zipf", 256, np.random.default_rng(0))
    result = plan(load, Topology(32, 4, 9), groups=8)
    assert result.balance_X.min() > 0.999
    assert plan(load, Topology(32, 4, 9), groups=8, policy="compat", split="equal").balance_X.max() < 0.5


def test_window_fill_serves_slow_gpus_first():
    rng = np.random.default_rng(2)
    load = rng.lognormal(0, 0.8, (8, 256))
    sites = sites_of(32, 9, (0.6,) * 16 + (1.0,) * 16)
    assert fill_limit(sites) == 257
    placed, piece, fits = window_fill(load, np.tile(np.arange(256), (8, 1)), sites)
    gpu = piece.reshape(8, 32, 9).sum(2)
    assert fits.all() and (copies_of(placed, 256) > 0).all()
    assert gpu[:, :16].sum(1) / gpu[:, 16:].sum(1) == pytest.approx(np.full(8, 0.6))
    assert gpu / sites.speed_W == pytest.approx(np.tile(load.sum(1, keepdims=True) / 25.6, (1, 32)))


def test_clusters_hold_every_expert_and_never_lose_to_whole_copies_by_much():
    # Two slots a GPU, fewer spare slots than GPUs: 16 experts on 10 GPUs have 4 copies to give.
    rng = np.random.default_rng(0)
    load = rng.lognormal(0, 1, (20, 16))
    sites = sites_of(10, 2)
    placed, piece, fits = cluster_fill(load, sites)
    assert fits.all() and (copies_of(placed, 16) > 0).all()
    assert piece.sum(1) == pytest.approx(load.sum(1))
    time = piece.reshape(20, 10, 2).sum(2)
    assert balance_of(time, sites.speed_W).mean() > 0.5


def test_no_swap_of_two_experts_improves_the_worst_cluster():
    rng = np.random.default_rng(1)
    for _ in range(10):
        load = rng.lognormal(0, 1, 16)
        _, _, copies = replicate(load[None], 4)
        parts = clusters_of(load, copies[0], 10, 2)
        assert parts is not None and sorted(np.concatenate([e for e, _ in parts]).tolist()) == list(range(16))
        time = [load[experts].sum() / gpus for experts, gpus in parts]
        worst = int(np.argmax(time))
        experts, gpus = parts[worst]
        for other, (theirs, more) in enumerate(parts):
            if other != worst:
                moved = load[experts][:, None] - load[theirs]
                after = np.maximum(time[worst] - moved / gpus, time[other] + moved / more)
                assert after.min() >= time[worst] * (1 - 1e-8)


def test_swaps_only_ever_lower_the_busiest_gpu():
    rng = np.random.default_rng(4)
    load = rng.lognormal(0, 1, (10, 24))
    sites = sites_of(6, 5)
    placed, piece = spread(load, sites)
    shuffled = rng.permuted(np.arange(30)[None].repeat(10, 0), axis=1)
    start, held = np.take_along_axis(placed, shuffled, 1), np.take_along_axis(piece, shuffled, 1)
    after, moved = swap_refined(start, held, sites)
    assert (moved.reshape(10, 6, 5).sum(2).max(1) <= held.reshape(10, 6, 5).sum(2).max(1) * (1 + 1e-12)).all()
    assert (np.sort(after, 1) == np.sort(start, 1)).all()
    assert (num_twins(after, sites) <= num_twins(start, sites)).all()


def test_whole_copies_never_meet_on_one_gpu():
    load = np.tile(np.where(np.arange(16) < 2, 50.0, 1.0), (2, 1))
    for sites in (sites_of(8, 4), sites_of(4, (9, 8, 7, 8)), sites_of(4, 8, (1.0, 0.5, 1.0, 2.0))):
        placed, _ = spread(load, sites)
        assert num_twins(placed, sites).tolist() == [0, 0]
        assert copies_of(placed, 16).max() <= sites.num_gpus


def test_resplit_follows_the_load_without_moving_weights():
    rng = np.random.default_rng(5)
    load = rng.lognormal(0, 1, (4, 64))
    placed = plan(load, Topology(8, 1, 9), policy="flat")
    drifted = load * rng.lognormal(0, 0.1, load.shape)
    before = placed.share.copy()
    share = resplit(placed, drifted)
    assert (placed.share == before).all()
    sites = placed.topology.live_sites()
    stale, new = (gpu_time(placed.phy2log, s.astype(float), drifted, sites).max(1) for s in (placed.share, share))
    assert (new < stale).all()
    assert resplit(torch.from_numpy(placed.phy2log), torch.from_numpy(drifted), placed.topology) == pytest.approx(
        share, abs=0.3
    )


def test_resplit_wants_exactly_one_topology():
    placed = plan(np.ones((1, 4)), Topology(2, 1, 3))
    with pytest.raises(ConfigError, match="leave topology out"):
        resplit(placed, np.ones((1, 4)), placed.topology)
    with pytest.raises(ConfigError, match="without topology="):
        resplit(placed.phy2log, np.ones((1, 4)))
    with pytest.raises(ShapeError, match=r"shape \(1, 6\).* = \(2, 6\)"):
        resplit(placed, np.ones((2, 4)))


def test_empty_slots_get_the_heaviest_expert_per_copy_that_is_not_there_yet():
    # Loads 8 6 1. GPU 0 has expert 0: its empty slot takes 1 (6 a copy). GPU 1 has 1 and 2: it takes 0, 4 a copy now.
    placed, load = np.array([[0, -1, 1, 2, -1]]), np.array([[8.0, 6.0, 1.0]])
    sites = Sites(np.array([2, 3]), np.ones(2), np.zeros(2, dtype=np.int64), np.arange(5))
    assert fill_empty(placed, load, sites).tolist() == [[0, 1, 1, 2, 0]]
    assert placed.tolist() == [[0, -1, 1, 2, -1]]


def test_imbalance_by_hand_and_of_no_load() -> None:
    # Speeds 1 and 3 with 2 slots each: 2 and 6 are even; 4 and 4 take 4 where 8 over 4 are 2.
    piece = np.array([[1.0, 1.0, 2.0, 4.0], [4.0, 0.0, 4.0, 0.0], [0.0] * 4])
    assert imbalance(piece, sites_of(2, 2, (1.0, 3.0))).tolist() == [1.0, 2.0, 1.0]
