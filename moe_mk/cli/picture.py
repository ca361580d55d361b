"""Expert load as a picture, for --plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moe_mk.cli.outputs import save_picture
from moe_mk.external.library import find


def save_load_plot(load_E: Sequence[int], experts_of_rank: Sequence[Sequence[int]], file: Path) -> None:
    """Bars of tokens an expert, one colour a rank, with the mean. Raises LibraryMissing without matplotlib."""
    find("matplotlib")
    figures, agg = find("matplotlib.figure"), find("matplotlib.backends.backend_agg")
    figure = figures.Figure(figsize=(10, 3.2), layout="constrained")
    agg.FigureCanvasAgg(figure)
    axes = figure.subplots()
    for rank, experts in enumerate(experts_of_rank):
        axes.bar(list(experts), [load_E[expert] for expert in experts], width=0.9, label=f"rank {rank}")
    mean = sum(load_E) / max(len(load_E), 1)
    axes.axhline(mean, color="black", linewidth=0.8, linestyle="--", label=f"mean {mean:.1f}")
    axes.set_xlabel("expert")
    axes.set_ylabel("tokens")
    axes.set_title(f"expert load, max/mean {max(load_E, default=0) / max(mean, 1e-9):.2f}")
    axes.legend(ncols=4, fontsize="small")
    save_picture(figure, file)
