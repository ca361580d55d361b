"""`moe-mk make-checkpoint` and `moe-mk inspect-checkpoint`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import typer

from moe_mk.lab.checkpoints import CheckpointShape, is_complete, write_checkpoint
from moe_mk.lab.cli.exits import MISMATCH, OK
from moe_mk.lab.cli.screen import Screen
from moe_mk.text import amount
from moe_mk.trace.clock import now
from moe_mk.weights.inspect import CheckpointFacts, LayerFacts

FULL = CheckpointShape()


@dataclass(frozen=True)
class WriteOrder:
    """A checkpoint to write."""

    directory: Path
    shape: CheckpointShape
    seed: int = 0
    force: bool = False
    """Overwrite a complete checkpoint."""


def make(screen: Screen, order: WriteOrder) -> int:
    """Write a checkpoint unless it is already there."""
    if not order.force and is_complete(order.directory, order.shape, order.seed):
        screen.fact("checkpoint", f"{order.directory} is already complete; --force overwrites it")
        return OK
    start, shape = now(), order.shape
    with screen.progress("write") as advance:
        total = write_checkpoint(order.directory, shape, seed=order.seed, on_progress=advance)
    kept = ""
    if shape.num_experts != FULL.num_experts:
        groups = f"{shape.num_groups} groups of {shape.num_experts // shape.num_groups}"
        kept = f" of DeepSeek-V3's {FULL.num_experts}, in {groups}"
    if shape.hash_vocabulary is not None:
        kept = f", routed by a table of {shape.hash_vocabulary} token ids, top-{shape.top_k}"
    layers = ", ".join(map(str, shape.layers))
    size = f"{amount(total)} in {now() - start:.1f} s"
    screen.fact("checkpoint", f"{order.directory}: layer {layers}, {shape.num_experts} experts{kept}, {size}")
    return OK


def inspect(screen: Screen, facts: CheckpointFacts, *, as_json: bool) -> int:
    """Print the contents of a checkpoint; exit code 1 if it has defects."""
    if as_json:
        typer.echo(json.dumps(facts.as_dict(), indent=2))
        return OK if facts.sound else MISMATCH
    show_checkpoint(screen, facts)
    screen.fact("verdict", "sound" if facts.sound else "not usable")
    return OK if facts.sound else MISMATCH


def show_checkpoint(screen: Screen, facts: CheckpointFacts) -> None:
    """Print the contents of a checkpoint."""
    block = f", FP8 blocks {facts.block[0]}x{facts.block[1]}" if facts.block else ""
    files = f"{facts.num_files} {'file' if facts.num_files == 1 else 'files'}"
    size = f"{files}, {facts.num_tensors} tensors, {amount(facts.num_bytes)}"
    screen.fact("checkpoint", f"{facts.where}: {facts.model_type or 'no config.json'}{block}, {size}")
    for layer in facts.layers:
        screen.fact(f"layer {layer.layer}", _described(layer))
    for problem in (*facts.problems, *(p for layer in facts.layers for p in layer.problems)):
        screen.fact("problem", problem)


def _what_chooses(layer: LayerFacts) -> str:
    if layer.table is not None:
        return f"routed by a table of {layer.table[0]} token ids"
    return "with a gate bias" if layer.has_gate_bias else "no gate bias"


def _described(layer: LayerFacts) -> str:
    scales = f" with {layer.scale_dtype} scales" if layer.scale_dtype else ""
    return ", ".join(
        [
            f"{layer.num_experts} experts",
            f"hidden {layer.hidden_size}",
            f"intermediate {layer.intermediate_size}",
            f"shared {layer.shared_intermediate_size}",
            f"{layer.dtype}{scales}",
            _what_chooses(layer),
            f"{layer.convention} names",
            amount(layer.num_bytes),
        ]
    )
