"""DeepSeek's expert load balancer under its known names and with its exact answers, vectorised over layers.

Algorithm and names: DeepSeek EPLB, github.com/deepseek-ai/EPLB, read at commit d52c72d. All three maps are equal to its
own on equal input, the order of equal weights included, because ties follow `torch.sort` here as they do there.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_mk.errors import ShapeError
from moe_mk.placement.balance.greedy import pack, replicate
from moe_mk.placement.balance.topology import Floats, Ints, check_divisions, tensor_of


def rebalance_experts(
    weight: Tensor | NDArray[np.generic], num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose copies and GPUs of every expert of every layer; a drop-in for DeepSeek's function of this name.

    weight: [layers, experts] load, any dtype, any device. num_replicas: physical experts, extra copies included.
    Groups that divide among nodes stay whole on a node; otherwise nodes are ignored.
    Returns int64 CPU tensors: phy2log [layers, num_replicas], log2phy [layers, experts, most copies] padded with -1,
    logcnt [layers, experts]. Raises InfeasiblePlacement, with the next feasible value, where sizes do not divide.
    """
    load = _as_load(weight)
    if num_groups > 0 and num_nodes > 0 and num_groups % num_nodes != 0:
        num_groups = num_nodes = 1
    phy2log, rank, count = _hierarchical(load, num_replicas, num_groups, num_nodes, num_gpus)
    log2phy = dense_log2phy(phy2log, rank, count)
    return torch.from_numpy(phy2log), torch.from_numpy(log2phy), torch.from_numpy(count)


def rebalance_experts_hierarchical(
    weight: Tensor, num_physical_experts: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Groups to nodes, copies inside nodes, copies to GPUs. Returns phy2log, copy number of each slot, and logcnt."""
    maps = _hierarchical(_as_load(weight), num_physical_experts, num_groups, num_nodes, num_gpus)
    phy2log, rank, count = (torch.from_numpy(each) for each in maps)
    return phy2log, rank, count


def balanced_packing(weight: Tensor, num_packs: int) -> tuple[Tensor, Tensor]:
    """Pack each row's n items into packs of n / num_packs: heaviest first, to the lightest pack that has room.

    Returns pack of each item and rank inside its pack, int64 [X, n]. Sums are made in the dtype of `weight`.
    """
    _check_matrix(weight)
    check_divisions(("items", weight.shape[1], "num_packs", num_packs))
    packs, ranks = pack(weight.detach().cpu().numpy(), num_packs)
    return torch.from_numpy(np.array(packs)), torch.from_numpy(ranks)


def replicate_experts(weight: Tensor, num_phy: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copy the heaviest expert per copy, again and again, until `num_phy` physical experts exist.

    Returns phy2log [X, num_phy], the copy number of each physical expert [X, num_phy], and copies per expert [X, E].
    """
    _check_matrix(weight)
    load = weight.detach().cpu()
    phy2log, rank, count = _replicated((load if load.is_floating_point() else load.float()).numpy(), num_phy)
    return torch.from_numpy(phy2log), torch.from_numpy(rank), torch.from_numpy(count)


def inverse(permutation: Ints) -> Ints:
    """The permutation that undoes one, row by row."""
    undone = np.empty_like(permutation)
    np.put_along_axis(undone, permutation, np.broadcast_to(np.arange(permutation.shape[1]), permutation.shape), 1)
    return undone


def dense_log2phy(phy2log: Ints, rank: Ints, count: Ints) -> Ints:
    """The slots of every expert, copy number as last axis, -1 where an expert has fewer copies."""
    (layers, num_slots), num_experts = phy2log.shape, count.shape[1]
    width = int(count.max()) if count.size else 0
    dense = np.full((layers, num_experts * width), -1, np.int64)
    np.put_along_axis(dense, phy2log * width + rank, np.broadcast_to(np.arange(num_slots), phy2log.shape), 1)
    return dense.reshape(layers, num_experts, width)


def _replicated(load: Floats, num_phy: int) -> tuple[Ints, Ints, Ints]:
    rows, num_experts = load.shape
    check_divisions(at_least=("physical experts", num_phy, "experts", num_experts))
    extra, copy, count = replicate(load, num_phy - num_experts)
    first = np.broadcast_to(np.arange(num_experts), (rows, num_experts))
    rank = np.zeros((rows, num_phy), np.int64)
    rank[:, num_experts:] = copy
    return np.concatenate([first, extra], 1), rank, count


def _hierarchical(
    load: NDArray[np.float32], num_slots: int, groups: int, nodes: int, gpus: int
) -> tuple[Ints, Ints, Ints]:
    layers, num_experts = load.shape
    check_divisions(
        ("experts", num_experts, "num_groups", groups),
        ("num_groups", groups, "num_nodes", nodes),
        ("num_gpus", gpus, "num_nodes", nodes),
        ("num_replicas", num_slots, "num_gpus", gpus),
        at_least=("num_replicas", num_slots, "experts", num_experts),
    )
    permutation = groups_to_nodes(load, groups, nodes)
    local = load if permutation is None else np.take_along_axis(load, inverse(permutation), 1)
    local = local.reshape(layers * nodes, num_experts // nodes)
    copies, rank, count = _replicated(local, num_slots // nodes)
    slot_load: NDArray[np.float32] = np.take_along_axis(np.divide(local, count.astype(np.float32)), copies, 1)
    packs, in_pack = pack(slot_load, gpus // nodes)
    slot = packs * (num_slots // gpus) + in_pack
    placed, placed_rank = np.empty_like(copies), np.empty_like(rank)
    np.put_along_axis(placed, slot, copies, 1)
    np.put_along_axis(placed_rank, slot, rank, 1)
    count, placed_rank = count.reshape(layers, num_experts), placed_rank.reshape(layers, num_slots)
    if permutation is None:
        return placed, placed_rank, count
    placed = placed.reshape(layers, nodes, -1) + (np.arange(nodes) * (num_experts // nodes))[:, None]
    phy2log = np.take_along_axis(inverse(permutation), placed.reshape(layers, num_slots), 1)
    return phy2log, placed_rank, np.take_along_axis(count, permutation, 1)


def groups_to_nodes(load: NDArray[np.float32], groups: int, nodes: int) -> Ints | None:
    """Position of every expert [layers, E] once groups are packed to nodes, node by node; None: they all stay put."""
    if groups == 1 and nodes == 1:
        return None
    layers, num_experts = load.shape
    size = num_experts // groups
    # The sum is torch's: another order of adding would round to another tie.
    group_load = torch.from_numpy(load).view(layers, groups, size).sum(-1).numpy()
    node, rank = pack(group_load, nodes)
    first = (node * (groups // nodes) + rank) * size
    permutation: Ints = (first[..., None] + np.arange(size)).reshape(layers, num_experts)
    return permutation


def _as_load(weight: Tensor | NDArray[np.generic]) -> NDArray[np.float32]:
    tensor = tensor_of(weight).detach().float()
    _check_matrix(tensor)
    load: NDArray[np.float32] = tensor.cpu().contiguous().numpy()
    return load


def _check_matrix(weight: Tensor) -> None:
    """Raise ShapeError unless weight is [rows, items], not negative and finite, sums of rows too.

    Packing orders loads by their bits, and marks a full pack by infinity.
    """
    if weight.dim() != 2 or weight.numel() == 0:
        raise ShapeError(
            f"weight has shape {tuple(weight.shape)}, expected [layers, experts] with at least one of each"
        )
    values = weight.detach().double()
    low, high, most = (x.item() for x in (values.min(), values.max(), values.sum(1).max()))
    if not (low >= 0 and high < float("inf")):
        raise ShapeError(f"weight has values from {low} to {high}, expected finite loads of at least 0")
    limit = torch.finfo(torch.float64 if weight.dtype == torch.float64 else torch.float32).max
    if not most <= limit:
        raise ShapeError(f"weight has a row that adds up to {most}, beyond {limit:.3g}; scale the loads down")
