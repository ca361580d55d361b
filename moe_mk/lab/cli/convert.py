"""`moe-mk convert`: convert the experts of a checkpoint to another format, with the error of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe_mk.lab.checkpoints.conversion_report import ExpertError
from moe_mk.lab.checkpoints.convert import REPORT, convert_checkpoint
from moe_mk.lab.cli.exits import OK
from moe_mk.lab.cli.screen import Screen
from moe_mk.text import amount
from moe_mk.trace.clock import now


@dataclass(frozen=True)
class ConvertOrder:
    """A checkpoint to convert."""

    source: Path
    target: Path
    to: str


def convert(screen: Screen, order: ConvertOrder) -> int:
    """Convert, and print sizes and errors per layer."""
    start = now()
    with screen.progress("convert") as advance:
        report = convert_checkpoint(order.source, order.target, order.to, on_progress=advance)
    size = f"{amount(report.bytes_read)} to {amount(report.bytes_written)} in {now() - start:.1f} s"
    screen.fact("converted", f"{order.target}: experts in {order.to}, {size}")
    for layer in dict.fromkeys(error.layer for error in report.errors):
        screen.fact(f"layer {layer}", _summary([error for error in report.errors if error.layer == layer]))
    for line in report.dropped:
        screen.fact("dropped", line)
    screen.fact("report", f"{order.target / REPORT}: the error of every expert and matrix")
    return OK


def _summary(errors: list[ExpertError]) -> str:
    """Mean and worst relative distance of the weights of one layer."""
    worst = max(errors, key=lambda error: error.worst)
    mean = sum(error.worst for error in errors) / len(errors)
    which = "the shared experts" if worst.expert is None else f"expert {worst.expert}"
    return f"relative change of {len(errors)} experts: mean {mean:.2e}, maximum {worst.worst:.2e} ({which})"
