"""`moe-mk convert`: to another format with the error of each expert, or to stores of experts larger than memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_mk.lab.checkpoints.conversion_report import ExpertError
from moe_mk.lab.checkpoints.convert import REPORT, convert_checkpoint
from moe_mk.lab.checkpoints.stores import WrittenStore, plan_stores, write_layer
from moe_mk.lab.cli.exits import OK, print_json
from moe_mk.lab.cli.inputs import layers_of
from moe_mk.lab.cli.screen import Screen
from moe_mk.lab.files import new_folders
from moe_mk.text import amount
from moe_mk.trace.clock import now
from moe_mk.weights.scan import Progress


def convert(screen: Screen, source: Path, target: Path, to: str, *, as_json: bool) -> int:
    """Convert, and print sizes and errors per layer."""
    start = now()
    with screen.progress("convert") as advance:
        report = convert_checkpoint(source, target, to, on_progress=advance)
    if as_json:
        print_json(report.as_dict())
    size = f"{amount(report.bytes_read)} to {amount(report.bytes_written)} in {now() - start:.1f} s"
    screen.fact("converted", f"{target}: experts in {to}, {size}")
    for layer in dict.fromkeys(error.layer for error in report.errors):
        screen.fact(f"layer {layer}", _summary([error for error in report.errors if error.layer == layer]))
    for line in report.dropped:
        screen.fact("dropped", line)
    screen.fact("report", f"{target / REPORT}: the error of every expert and matrix")
    return OK


@dataclass(frozen=True)
class StoreOrder:
    """A checkpoint whose experts are written to stores."""

    source: Path
    target: Path
    layers: tuple[int, ...]
    """Empty: all with experts."""
    ranks: int
    tp: int
    overrides: Mapping[str, Any]


def convert_to_stores(screen: Screen, order: StoreOrder, *, as_json: bool) -> int:
    """Write the stores of every layer and rank, and print each with the time it took."""
    layers = list(order.layers) or layers_of(order.source)
    with new_folders(order.target):
        stores = _write_stores(screen, order, layers)
    if as_json:
        print_json({"folder": str(order.target), "stores": [each.as_dict() for each in stores]})
    screen.fact("use", f"moe-mk run {order.source} --memory SIZE --store {order.target}, or kernel.residency.store")
    return OK


def _write_stores(screen: Screen, order: StoreOrder, layers: list[int]) -> list[WrittenStore]:
    plans = plan_stores(order.source, order.target, layers, order.overrides, ranks=order.ranks, tp=order.tp)
    stores: list[WrittenStore] = []
    for plan in plans:
        start = now()
        with screen.progress(f"layer {plan.layer}") as advance:

            def labelled(rank: int, advance: Progress = advance) -> Progress:
                return lambda stage, done, total: advance(f"rank {rank} {stage}", done, total)

            found = write_layer(order.source, plan, labelled)
        stores += found
        written = sum(store.num_bytes for store in found if store.written)
        how = f"{amount(written)} written in {now() - start:.1f} s" if written else "there already"
        for store in found:
            what = how if len(found) == 1 else ("written" if store.written else "there already")
            rank = f"rank {store.rank}, " if len(found) > 1 else ""
            text = f"{rank}{store.experts} experts, {amount(store.num_bytes)}, {what}: {store.file.name}"
            screen.fact(f"layer {store.layer}", text)
    return stores


def _summary(errors: list[ExpertError]) -> str:
    """Mean and worst relative distance of the weights of one layer."""
    worst = max(errors, key=lambda error: error.worst)
    mean = sum(error.worst for error in errors) / len(errors)
    which = "the shared experts" if worst.expert is None else f"expert {worst.expert}"
    return f"relative change of {len(errors)} experts: mean {mean:.2e}, maximum {worst.worst:.2e} ({which})"
