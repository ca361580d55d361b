"""Maps from experts to slots, and the slot that is nearest to each rank."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_mk.placement.balance.plan import csr_maps, dense_of_csr, nearest_slots, small_type
from moe_mk.placement.eplb import Topology, plan
from tests.placement.plans import skewed


def test_nearest_copies_are_on_the_gpu_then_on_the_node():
    load = skewed(2, 64)
    placed = plan(load, Topology(8, 2, 10), groups=8, policy="flat")
    nearest = placed.nearest()
    assert nearest.shape == (2, 8, 64) and (placed.nearest([3, 5]) == nearest[:, [3, 5]]).all()
    gpu_P, node_W = placed.topology.gpu_P, placed.topology.node_W
    assert (
        np.take_along_axis(placed.phy2log, nearest.reshape(2, -1).astype(int), 1) == np.tile(np.arange(64), 8)
    ).all()
    for layer, rank, expert in np.ndindex(2, 8, 64):
        holders = gpu_P[placed.phy2log[layer] == expert]
        chosen = gpu_P[nearest[layer, rank, expert]]
        if rank in holders:
            assert chosen == rank
        elif node_W[rank] in node_W[holders]:
            assert node_W[chosen] == node_W[rank]


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 10_000))
def test_compact_and_padded_maps_of_any_placement_are_those_of_plain_loops(experts: int, num_slots: int, seed: int):
    phy2log = np.random.default_rng(seed).integers(-1, experts, (2, num_slots))
    offsets, slots = csr_maps(phy2log, experts)
    dense = dense_of_csr(offsets, slots)
    for layer, row in enumerate(phy2log.tolist()):
        held = [[slot for slot, expert in enumerate(row) if expert == e] for e in range(experts)]
        flat = [slot for each in held for slot in each]
        assert slots[layer].tolist() == flat + [-1] * (num_slots - len(flat)), "empty slots are at the end, as -1"
        assert offsets[layer].tolist() == [sum(map(len, held[:e])) for e in range(experts + 1)]
        assert [[slot for slot in each if slot >= 0] for each in dense[layer].tolist()] == held


def test_maps_are_narrow_as_long_as_their_numbers_fit():
    assert [small_type(n) for n in (0, 2**15 - 1, 2**15, 2**16)] == [np.int16, np.int16, np.int32, np.int32]


def test_ranks_far_from_every_copy_take_turns():
    # Expert 0 lies on GPUs 0 and 1, each a node of its own; GPUs 2 and 3 are equally far from both.
    offsets, slots = csr_maps(np.array([[0, 0, 1, 2]]), 3)
    nearest = nearest_slots(offsets, slots, np.arange(4), np.arange(4), np.arange(4))
    assert nearest[0, :2, 0].tolist() == [0, 1]
    assert sorted(nearest[0, 2:, 0].tolist()) == [0, 1]
    assert nearest[0, :, 2].tolist() == [3, 3, 3, 3]


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 10_000))
def test_every_rank_takes_the_copy_with_the_least_distance_then_the_nearest_turn(gpus: int, nodes: int, seed: int):
    # Nodes of any size and order, GPUs with no slot or several, copies beside each other, ranks asked for in any order.
    rng = np.random.default_rng(seed)
    node_W, gpu_P = rng.integers(0, nodes, gpus), np.repeat(np.arange(gpus), rng.integers(0, 4, gpus))
    phy2log = rng.integers(-1, 5, (2, len(gpu_P) + 1))
    gpu_P = np.append(gpu_P, gpus - 1)
    ranks = rng.permutation(gpus)[: rng.integers(1, gpus + 1)]
    nearest = nearest_slots(*csr_maps(phy2log, 5), gpu_P, node_W, ranks)
    for layer, place, expert in np.ndindex(nearest.shape):
        rank, slots = ranks[place], np.flatnonzero(phy2log[layer] == expert)

        def queue(
            copy: int, rank: int = rank, slots: NDArray[np.int64] = slots, expert: int = expert
        ) -> tuple[int, int]:
            gpu = gpu_P[slots[copy]]
            far = 0 if gpu == rank else 1 if node_W[gpu] == node_W[rank] else 2
            return far, int((copy - rank - expert) % len(slots))

        wanted = slots[min(range(len(slots)), key=queue)] if len(slots) else -1
        assert nearest[layer, place, expert] == wanted
