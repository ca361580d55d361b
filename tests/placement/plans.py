"""Loads like those of a served model, what every plan promises, and where groups lie."""

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_mk.placement.eplb import PlacementPlan

Doubles = NDArray[np.float64]


def skewed(layers: int = 6, experts: int = 256, groups: int = 8, seed: int = 0) -> Doubles:
    """Loads with hot experts and hot groups, like those of a served model."""
    rng = np.random.default_rng(seed)
    load = np.exp(
        0.75 * rng.normal(size=(layers, groups, experts // groups)) + 0.4 * rng.normal(size=(layers, groups, 1))
    )
    return rng.poisson(load.reshape(layers, experts) * 2000).astype(float)


def check(placed: PlacementPlan, load: Doubles) -> None:
    """What every plan promises, whatever the policy."""
    layers, experts = load.shape
    topology = placed.topology
    dead = ~topology.alive_W[topology.gpu_P]
    assert (placed.phy2log[:, dead] == -1).all() and (placed.phy2log[:, ~dead] >= 0).all()
    total = np.zeros_like(load)
    row = np.arange(layers)[:, None]
    np.add.at(total, (row, placed.phy2log[:, ~dead]), placed.share[:, ~dead])
    assert total == pytest.approx(np.ones_like(load), abs=1e-5)
    assert placed.share.min() >= 0 and (placed.share[:, dead] == 0).all()
    assert placed.offsets.shape == (layers, experts + 1) and placed.slots.shape == placed.phy2log.shape
    assert (placed.logcnt == (placed.log2phy >= 0).sum(2)).all()


def nodes_per_group(placed: PlacementPlan, groups: int) -> float:
    """How many nodes hold experts of a group, on average."""
    size = int(placed.phy2log.max() + 1) // groups
    node = placed.topology.node_W[placed.topology.gpu_P]
    seen = {
        (x, e // size, n)
        for x, row in enumerate(placed.phy2log.tolist())
        for e, n in zip(row, node, strict=True)
        if e >= 0
    }
    return len(seen) / len(placed.phy2log) / groups
