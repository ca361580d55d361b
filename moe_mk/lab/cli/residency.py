"""Experts larger than memory in `run`, `bench` and `fit`: budget, measured and predicted reads, and their picture.

Every step has tokens of its own, the same for each layer. Its experts are noted, and the simulator of `moe-mk fit` runs
over them with the rates at which this machine read the store and multiplied resident experts. The first half of the
steps fills the slots, the second half is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

from moe_mk.comm.communicator import Communicator
from moe_mk.errors import ConfigError
from moe_mk.experts.cpu_native.paged import PagedExperts
from moe_mk.experts.paged import memory_of
from moe_mk.experts.residency import READERS, Policy, ResidencyPool
from moe_mk.flight import wait
from moe_mk.jobs import Threads, all_results
from moe_mk.kernels.native.packed import on_huge_pages
from moe_mk.lab.cli.inputs import Batch
from moe_mk.lab.cli.measure import StageSample, sample_of
from moe_mk.lab.cli.options import bytes_of, enough
from moe_mk.lab.cli.outputs import new_figure, save_picture
from moe_mk.lab.cli.screen import table_of
from moe_mk.lab.plan.residency import Machine, Outcome, Recorded, simulate, simulate_page_cache
from moe_mk.layer import MoELayer
from moe_mk.oracle.memory import slot_bytes
from moe_mk.oracle.verdict import Decision
from moe_mk.text import amount
from moe_mk.trace.clock import now

STORE = "experts.store"
"""The folder in a checkpoint that is used without --store."""
POLICY = "kernel.residency.policy"
CALIBRATED = 5
"""Calls with resident experts whose median is the time of a product."""
MOST_READ = 1 << 29
"""Bytes that are read to measure the disk."""


def with_budget(
    settings: Mapping[str, Any], memory: str | None, store: Path | None, checkpoint: Path, ranks: int
) -> dict[str, Any]:
    """The settings with a budget of all ranks, if there is one. The policy is that of kernel.residency.policy.

    Raises ConfigError for a budget that is no amount, and for a store without one.
    """
    if memory is None:
        if store is not None:
            raise ConfigError(f"--store {store} needs --memory, such as --memory 3GB")
        return dict(settings)
    policy = {"policy": settings[POLICY]} if POLICY in settings else {}
    folder = store or (checkpoint if checkpoint.is_dir() else checkpoint.parent) / STORE
    share = max(1, bytes_of("--memory", memory) // ranks)
    others = {key: each for key, each in settings.items() if key != POLICY}
    return others | {"residency": {"bytes": share, "store": str(folder.absolute()), **policy}}


def pooled(settings: Mapping[str, Any], layers: int) -> tuple[dict[str, Any], ResidencyPool | None]:
    """The settings of each layer, and the pool of several; their budget is that of `with_budget`."""
    if layers == 1:
        return dict(settings), None
    others = {key: value for key, value in settings["residency"].items() if key != "bytes"}
    return dict(settings) | {"residency": others}, ResidencyPool(settings["residency"]["bytes"])


def expect_budget(decision: Decision, memory: str | None, layers: int = 1) -> None:
    """Raise ConfigError with the least budget if not one expert of each layer a rank fits into it."""
    ranks, each = decision.problem.ranks * decision.problem.config.parallel.tp, layers * slot_bytes(decision.problem)
    if memory is not None and bytes_of("--memory", memory) // ranks < each:
        on = f" in each of {layers} layers" * (layers > 1) + f" on each of {ranks} ranks" * (ranks > 1)
        raise ConfigError(
            f"--memory {memory} is less than one expert of {amount(each // layers)}{on}; give at least "
            f"{enough(ranks * each)}"
        )


class _Noting(Policy):
    """Evicts as the policy of a layer does, and notes the experts of every call."""

    def __init__(self, num_experts: int, inner: Policy) -> None:
        super().__init__(num_experts)
        self.inner, self.calls = inner, list[tuple[int, ...]]()

    def used(self, experts: Sequence[int]) -> None:
        self.calls.append(tuple(experts))
        self.inner.used(experts)

    def worth(self, expert: int) -> float:
        return self.inner.worth(expert)


@dataclass(frozen=True)
class PagedSteps:
    """Uses, hits and reads of a layer in the counted steps: per step, over all ranks."""

    name: str
    uses: list[float]
    hits: list[float]
    read_bytes: list[float]
    seconds: list[float]
    """Of the slowest rank."""

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON."""
        steps = len(self.seconds)
        rates = [hit / use if use else 1.0 for hit, use in zip(self.hits, self.uses, strict=True)]
        return {
            "name": self.name,
            "hit_rate": sum(self.hits) / max(sum(self.uses), 1),
            "read_bytes_per_step": sum(self.read_bytes) / steps,
            "step_ms": 1e3 * (sum(self.seconds) / steps),
            "hit_rate_by_step": rates,
            "read_bytes_by_step": self.read_bytes,
        }


def measure_residency(
    layers: Sequence[MoELayer], batches: Sequence[Batch], team: Communicator
) -> tuple[dict[str, Any], list[StageSample]]:
    """Run layers on batches, from empty slots; all ranks of the team call this with as many batches.

    Several layers share a pool. Returns the figures as JSON, equal on every rank, and the stages of the counted steps
    on this rank, of all layers together. Raises ConfigError for layers with experts of several sizes.
    """
    held: list[PagedExperts] = [layer.state.experts.weights for layer in layers]
    if len(sizes := {(each.counts.record_bytes, each.num_slots) for each in held}) > 1:
        raise ConfigError(f"layers of one pool are measured with experts of one size and number, not {sorted(sizes)}")
    half, samples, steps, counts = len(batches) // 2, [], list[list[tuple[int, ...]]](), list[list[int]]()
    for each in held:
        each.cache.clear()
        each.cache.policy = _Noting(each.num_slots, each.cache.policy)
    for batch in batches:
        before = _counted(held)
        calls = [len(each.cache.policy.calls) for each in held]  # type: ignore[attr-defined]
        parts = [
            sample_of(layer, lambda layer=layer, batch=batch: layer(batch.x_TH, batch.token_ids_T))  # type: ignore[misc]
            for layer in layers
        ]
        samples.append({stage: sum(part[stage] for part in parts) for stage in parts[0]})
        counts.append([new - old for new, old in zip(_counted(held), before, strict=True)])
        since = [each.cache.policy.calls[start:] for each, start in zip(held, calls, strict=True)]  # type: ignore[attr-defined]
        steps.append([tuple(sorted({expert for call in of_layer for expert in call})) for of_layer in since])
    shares = [each.cache.share for each in held]
    for each in held:
        each.cache.policy = each.cache.policy.inner  # type: ignore[attr-defined]
    weights = held[0]
    machine = _machine(layers[0], weights, batches, steps, samples, team)
    recorded, policy = Recorded(steps, weights.num_slots, 1), weights.cache.config.policy
    pool = weights.cache.pool.num_bytes // machine.expert_bytes if len(held) > 1 else None
    slots = shares[0] if pool is None else min(pool // len(held), weights.num_slots)
    simulated = [simulate(recorded, machine, slots, name, pool=pool) for name in (policy, "belady")]
    simulated.append(simulate_page_cache(recorded, machine, slots))
    measured = [[*each, sample["total"]] for each, sample in zip(counts[half:], samples[half:], strict=True)]
    rows = [_over_ranks("measured", measured, team)]
    for one in simulated:
        rows.append(_over_ranks(f"predicted, {one.name}", _rows_of(one, machine.expert_bytes), team))
    figures = {
        "slots": slots, "shares": shares, "experts": weights.num_slots, "record_bytes": machine.expert_bytes,
        "policy": policy, "steps": len(measured), "disk_bytes_per_s": machine.disk, "ram_bytes_per_s": machine.memory,
        "other_ms": 1e3 * machine.other_s, "rows": [row.as_dict() for row in rows],
    }  # fmt: skip
    return figures, samples[half:]


def _counted(held: Sequence[PagedExperts]) -> list[int]:
    """Uses, hits and bytes read so far, of all layers."""
    counts = [each.counts for each in held]
    return [sum(getattr(each, name) for each in counts) for name in ("uses", "hits", "read_bytes")]


def _rows_of(one: Outcome, expert_bytes: int) -> list[list[float]]:
    pairs = zip(one.by_step, one.seconds, strict=True)
    return [[uses, hits, reads * expert_bytes, seconds] for (uses, hits, reads), seconds in pairs]


def _over_ranks(name: str, mine: Sequence[Sequence[float]], team: Communicator) -> PagedSteps:
    """Counts added up over ranks, and the time of the slowest one. mine: uses, hits, bytes and seconds of each step."""
    row = torch.tensor(mine, dtype=torch.float64, device="cpu").reshape(1, -1)
    everyone = wait(team.all_gather(row, [1] * team.size, "report")).view(team.size, len(mine), 4)
    uses, hits, num_bytes = (everyone[..., column].sum(0).tolist() for column in range(3))
    return PagedSteps(name, uses, hits, num_bytes, everyone[..., 3].amax(0).tolist())


def _machine(
    layer: MoELayer,
    weights: PagedExperts,
    batches: Sequence[Batch],
    steps: Sequence[Sequence[tuple[int, ...]]],
    samples: Sequence[StageSample],
    team: Communicator,
) -> Machine:
    """The rates of this machine: of direct reads, of products with resident experts, and what is left of a step."""
    used = max(1, round(sum(len(layer) for step in steps for layer in step) / sum(map(len, steps))))
    tokens = max(len(batch.x_TH) for batch in batches)
    product_s = _product_s(layer, weights, tokens, used)
    rate = _read_rate(weights)
    other = median(sample["total"] - sample["experts"] for sample in samples[len(samples) // 2 :]) / len(steps[0])
    row = torch.tensor([[product_s, -rate, other]], dtype=torch.float64, device="cpu")
    product_s, rate, other = wait(team.all_gather(row, [1] * team.size, "report")).amax(0).tolist()
    size = weights.counts.record_bytes
    return Machine(size, -rate, size / max(product_s, 1e-9), max(other, 0.0))


def _product_s(layer: MoELayer, weights: PagedExperts, tokens: int, used: int) -> float:
    """Seconds of one resident expert with as many rows as those of the steps have. used: distinct experts of a step."""
    top_k, mine = layer.config.router.top_k, layer.expert_map.local_to_global(layer.ep.rank)
    some = min(weights.cache.share, used)
    each = min(top_k, some)
    count = max(1, round(some * tokens * top_k / used / each))
    ids_TK = torch.full((count, top_k), -1, dtype=torch.int32, device="cpu")
    for token in range(count):
        for choice in range(each):
            ids_TK[token, choice] = mine[(token * each + choice) % some]
    x_TH = torch.ones((count, layer.config.model.hidden_size), dtype=layer.dtype, device="cpu")
    weights_TK = torch.full((count, top_k), 1 / top_k, dtype=torch.float32, device="cpu")
    layer.forward_routed(x_TH, weights_TK, ids_TK)  # reads what is missing
    calls = [sample_of(layer, lambda: layer.forward_routed(x_TH, weights_TK, ids_TK)) for _ in range(CALIBRATED)]
    return median(call["experts"] for call in calls) / some


def _read_rate(weights: PagedExperts) -> float:
    """Bytes per second of direct reads, with the requests and threads of a call."""
    store = weights.cache.store
    record = memory_of(on_huge_pages(1, weights.cache.record_bytes)[0])
    experts = range(max(1, min(store.num_experts, MOST_READ // store.record_bytes)))
    reads = [partial(store.read_piece, expert, at, record) for expert in experts for at in store.pieces()]
    start = now()
    all_results(Threads(READERS), reads)
    return len(experts) * store.record_bytes / max(now() - start, 1e-9)


def residency_lines(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Slots, and the rates that were measured."""
    shares = ", ".join(map(str, figures["shares"]))
    held = f"{shares} of {figures['experts']} experts of {amount(figures['record_bytes'])} in memory a rank"
    disk, ram = (f"{amount(figures[f'{name}_bytes_per_s'])}/s" for name in ("disk", "ram"))
    return [("residency", f"{held}, {figures['policy']}; measured here: disk {disk}, ram {ram}")]


def residency_table(figures: Mapping[str, Any], tokens: int) -> Table:
    """Measured and predicted hits, reads and time of a step."""
    many = "token" if tokens == 1 else "tokens"
    title = f"{figures['steps']} steps of {tokens} {many} a rank, after others that fill the slots; all ranks"
    table = table_of(("", "hits", "read/step", "ms/step", "tokens/s"), left=("",), title=title)
    for row in figures["rows"]:
        table.add_row(
            row["name"], f"{100 * row['hit_rate']:.1f} %", amount(row["read_bytes_per_step"]),
            f"{row['step_ms']:.4g}", f"{1e3 * tokens / row['step_ms']:.4g}",
        )  # fmt: skip
    return table


@dataclass(frozen=True)
class Curve:
    """One line of the picture."""

    name: str
    hit_rate_N: Sequence[float]
    read_bytes_N: Sequence[float]
    dashed: bool = False
    every: int = 1
    """Steps between two points."""


def curves_of(figures: Mapping[str, Any], tokens: int) -> list[Curve]:
    """The measured curve of a batch size, and the predicted one."""
    return [
        Curve(f"{tokens} tokens, {row['name']}", row["hit_rate_by_step"], row["read_bytes_by_step"], dashed)
        for row, dashed in zip(figures["rows"][:2], (False, True), strict=True)
    ]


def save_residency_plot(curves: Sequence[Curve], file: Path) -> None:
    """Draw hits and bytes read over the steps. Raises LibraryMissing without matplotlib."""
    figure = new_figure((9, 6))
    above, below = figure.subplots(2, sharex=True)
    for curve in curves:
        style: dict[str, Any] = {"label": curve.name, "linestyle": "--" if curve.dashed else "-", "linewidth": 1}
        steps = [at * curve.every for at in range(len(curve.hit_rate_N))]
        above.plot(steps, [100 * rate for rate in curve.hit_rate_N], **style)
        below.plot(steps, [num_bytes / 1e6 for num_bytes in curve.read_bytes_N], **style)
    above.set_ylabel("hits, %")
    above.legend(fontsize="small")
    below.set_ylabel("MB read per step")
    below.set_xlabel("counted step")
    save_picture(figure, file)
