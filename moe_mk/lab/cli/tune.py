"""`moe-mk tune EXPERTS`: measure a backend's parameters within a time budget; resumes after an interruption."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.table import Table

from moe_mk.config.tuned import ACTIVATIONS, WEIGHTS, tune_command
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.experts.base import EXPERTS
from moe_mk.external.device import describe, parsed_device, usable_device
from moe_mk.lab.cli import environment
from moe_mk.lab.cli.chaos import import_modules
from moe_mk.lab.cli.exits import OK, print_json
from moe_mk.lab.cli.inputs import dtype_of
from moe_mk.lab.cli.screen import Screen, table_of
from moe_mk.lab.cli.version import own_version
from moe_mk.lab.testing.experts import random_experts
from moe_mk.lab.tuning import TuneCase, TunedPoint, space_of, tune, tuned_path
from moe_mk.quant.fp8 import FP8_128x128
from moe_mk.quant.plain import plain
from moe_mk.registry import did_you_mean
from moe_mk.weights.expert_weights import ExpertWeights

DRAWN = 8


@dataclass(frozen=True)
class TuneOrder:
    """The settings of a tuning session."""

    experts: str
    hidden: int
    intermediate: int
    slots: int
    top_k: int
    tokens: tuple[int, ...]
    weights: str
    activations: str
    dtype: str
    device: str
    budget_s: float
    folder: Path | None
    dry_run: bool
    modules: tuple[str, ...] = ()
    """Modules to import first, for a backend that is not installed as a wheel."""


def tune_backend(screen: Screen, order: TuneOrder, *, as_json: bool) -> int:
    """Measure, and print the tuned file; a session that the budget ended can be resumed."""
    import_modules(order.modules)
    case, kinds = case_of(order), EXPERTS[order.experts].traits.kinds
    if not hasattr(EXPERTS[order.experts], "tuning_space") and not EXPERTS.is_foreign(order.experts):
        tunable = [name for name in EXPERTS if hasattr(EXPERTS[name], "tuning_space")]
        raise UnsupportedError(
            f"experts {order.experts!r} have no parameters to tune",
            [f"backends with parameters: {', '.join(sorted(tunable))}", "a backend declares them in tuning_space()"],
        )
    # A dry run also accepts devices that this machine does not have.
    device = parsed_device(order.device) if order.dry_run else usable_device(order.device)
    if not order.dry_run and device.type not in {"cuda" if kind == "rocm" else kind for kind in kinds}:
        raise UnsupportedError(
            f"experts {order.experts!r} run on {' or '.join(sorted(kinds))}, this device is {device}",
            ["--device cuda, on a machine with such a GPU", "--dry-run lists the candidates"],
        )
    where = "device" if order.dry_run and device.type != "cpu" else describe(device)
    path = tuned_path(where.split(",")[0], order.experts, case.name, order.folder)
    if order.dry_run:
        return print_json({"case": case.name, "path": str(path), "candidates": _tried(case, order, device)})
    meta = {"moe_mk": own_version(), "torch": torch.__version__, "device": where}
    with screen.progress("tune", in_bytes=False) as advance:
        result = tune(
            case,
            order.tokens,
            path,
            budget_s=order.budget_s,
            cores=environment.usable_cores(),
            device=device,
            meta=meta,
            stack=_stack,
            on_measured=advance,
        )
    if as_json:
        return print_json(asdict(result) | {"path": str(path)})
    screen.fact("case", f"{order.experts}: {case.name} on {where}")
    screen.fact("measured", f"{result.measured} candidates in this session, {result.resumed} in earlier ones")
    screen.console.print(points_table(result.points))
    screen.fact("file", str(path))
    if not result.complete:
        screen.fact("budget", f"{order.budget_s:g} s elapsed before completion; run the same command again to resume")
    return OK


def case_of(order: TuneOrder) -> TuneCase:
    """The case; raises ConfigError for unknown formats and contradicting sizes."""
    options = (("--weights", order.weights, WEIGHTS), ("--activations", order.activations, ACTIVATIONS))
    for what, value, known in options:
        if value not in ("plain", *known):
            raise ConfigError(f"{what} {value!r} is unknown{did_you_mean(value, ['plain', *known])}")
    if order.weights == "fp8" and order.intermediate % FP8_128x128.rows:
        raise ConfigError(f"--intermediate {order.intermediate} must be a multiple of 128 with --weights fp8")
    if order.top_k > order.slots:
        raise ConfigError(f"--top-k {order.top_k} exceeds --slots {order.slots}")
    dtype = plain(dtype_of(order.dtype))
    stored, compute = WEIGHTS.get(order.weights, dtype), ACTIVATIONS.get(order.activations, dtype)
    return TuneCase(order.experts, order.hidden, order.intermediate, order.slots, order.top_k, dtype, compute, stored)


def command_of(case: TuneCase) -> str:
    """The command that measures a case."""
    return tune_command(case.experts, case.shape, case.weights, case.compute)


def _tried(case: TuneCase, order: TuneOrder, device: torch.device) -> dict[str, int]:
    """Number of candidates per number of tokens; nothing is built or measured."""
    context, backend, cores = case.context(device), EXPERTS[case.experts], environment.usable_cores()
    return {str(count): len(space_of(backend, context, count, cores).candidates) for count in order.tokens}


def points_table(points: tuple[TunedPoint, ...]) -> Table:
    """The fastest parameters by tokens."""
    table = table_of(("tokens", "microseconds", "parameters"), left=("parameters",), pad_edge=False)
    for point in points:
        chosen = ", ".join(f"{name} {value}" for name, value in point.parameters.items()) or "built in"
        table.add_row(str(point.tokens), f"{point.microseconds:,.0f}", chosen)
    return table


def _stack(case: TuneCase, device: torch.device) -> ExpertWeights:
    """Experts of which DRAWN differ: all of a large layer in f32 would not fit."""
    drawn = min(case.num_slots, DRAWN)
    few = random_experts(case.weights, drawn, case.hidden_size, case.intermediate_size, device)
    slots = torch.arange(case.num_slots, dtype=torch.int64, device=device) % drawn

    def repeated(part: torch.Tensor) -> torch.Tensor:
        return part.view(torch.uint8)[slots].view(part.dtype)

    return replace(few, w13=few.w13.changed(repeated), w2=few.w2.changed(repeated))
