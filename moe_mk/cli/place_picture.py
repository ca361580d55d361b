"""GPU load before and after placing, and what policies trade, as a picture, for `moe-mk place --plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_mk.cli.outputs import save_picture
from moe_mk.cli.place_compare import Offer
from moe_mk.external.library import find
from moe_mk.placement.eplb import Topology


def save_placement_plot(
    before_XW: NDArray[np.float64],
    after_XW: NDArray[np.float64],
    topology: Topology,
    policy: str,
    file: Path,
    offers: Sequence[Offer] = (),
) -> None:
    """Two heat maps, layer by GPU, in units of the layer's ideal time, and the busiest GPU of every layer below.

    Beside that, where a trace tells what crosses nodes, every policy by balance, remote nodes and what it moves.
    Raises LibraryMissing without matplotlib.
    """
    find("matplotlib")
    figures, agg = find("matplotlib.figure"), find("matplotlib.backends.backend_agg")
    figure = figures.Figure(figsize=(11, 6.2), layout="constrained")
    agg.FigureCanvasAgg(figure)
    top, bottom = figure.subfigures(2, 1, height_ratios=(2, 1))
    sides = top.subplots(1, 2, sharey=True)
    speed_W = topology.speed_W
    relative = [each / np.maximum(each @ speed_W / speed_W.sum(), 1e-300)[:, None] for each in (before_XW, after_XW)]
    for axes, values, title in zip(sides, relative, ("before: experts in order", f"after: {policy}"), strict=True):
        image = axes.imshow(values, aspect="auto", cmap="RdBu_r", vmin=0.0, vmax=2.0, interpolation="none")
        axes.set_title(f"{title}, busiest GPU {values.max(1).mean():.3f} x ideal")
        axes.set_xlabel("GPU")
        for node in range(1, topology.nodes):
            axes.axvline(node * topology.gpus / topology.nodes - 0.5, color="black", linewidth=0.6)
    sides[0].set_ylabel("layer")
    top.colorbar(image, ax=list(sides), label="time over the layer's ideal", extend="max")
    traced = [offer for offer in offers if offer.nodes is not None]
    line, *rest = np.atleast_1d(bottom.subplots(1, 2 if traced else 1))
    for axes in rest:
        _draw_trade(axes, traced)
    layers = np.arange(len(before_XW))
    line.plot(layers, relative[0].max(1), color="tab:red", label="before", marker="." if len(layers) < 5 else None)
    line.plot(layers, relative[1].max(1), color="tab:blue", label="after", marker="." if len(layers) < 5 else None)
    line.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    line.set_xlabel("layer")
    line.set_ylabel("busiest GPU")
    line.legend()
    save_picture(figure, file)


def _draw_trade(axes: Any, offers: Sequence[Offer]) -> None:
    """Remote nodes against balance; the more an offer moves the larger its disc, and what nothing beats is filled."""
    most = max(max(offer.moved_experts for offer in offers), 1)
    for offer in offers:
        assert offer.nodes is not None
        at, size = (offer.nodes.remote, 1.0 / offer.step_over_ideal), 30 + 270 * offer.moved_experts / most
        colour = "tab:green" if offer.best else "none"
        axes.scatter(*at, s=size, facecolor=colour, edgecolor="tab:green", alpha=0.7)
        axes.annotate(offer.name, at, textcoords="offset points", xytext=(6, 4), fontsize="small")
    axes.margins(0.25)
    axes.set_xlabel("remote nodes a token")
    axes.set_ylabel("balance")
