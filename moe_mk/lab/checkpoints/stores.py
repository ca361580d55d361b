"""Write the stores of `kernel.residency` ahead of time: the packed experts of layers of a checkpoint, for every rank.

A layer that is loaded with the same checkpoint, sizes of groups and placement finds its store by its content. A store
that is there already is kept, so that an interrupted run is continued by the same command.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from moe_mk.errors import StoreError, unless_signalled
from moe_mk.experts.cpu_native.paged import PagedExperts
from moe_mk.layer.settings import config_of, decide, expert_map_of, layer_spec_of, stated
from moe_mk.oracle.assemble import Parts, build_experts, experts_context
from moe_mk.oracle.memory import slot_bytes
from moe_mk.oracle.verdict import Decision
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.text import amount
from moe_mk.weights.checkpoint import load_layer
from moe_mk.weights.gguf_source import open_source
from moe_mk.weights.layer_spec import LayerSpec
from moe_mk.weights.scan import Progress

CPU = torch.device("cpu")


@dataclass(frozen=True)
class WrittenStore:
    """The store of one layer and rank."""

    layer: int
    rank: int
    file: Path
    experts: int
    num_bytes: int
    written: bool
    """False: it was there already."""

    def as_dict(self) -> dict[str, Any]:
        """The store as JSON."""
        return asdict(self) | {"file": str(self.file)}


@dataclass(frozen=True)
class StorePlan:
    """The stores of one layer, before anything is read."""

    layer: int
    decision: Decision
    experts: ExpertMap
    spec: LayerSpec
    """The tensors of the checkpoint. The decision may hold its experts in another format."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the records of all ranks."""
        problem = self.decision.problem
        slots = sum(self.experts.num_slots(rank) for rank in range(problem.ranks))
        return slots * problem.config.parallel.tp * slot_bytes(problem)


def plan_stores(
    checkpoint: Path, folder: Path, layers: list[int], overrides: Mapping[str, Any], *, ranks: int, tp: int
) -> list[StorePlan]:
    """Choose the backends of every layer. ranks: of the EP groups; tp: of the TP groups.

    Raises ConfigError, or UnsupportedError where no experts backend of this machine pages these experts; StoreError
    where the stores do not fit the disk, with those that are in the folder already counted as a part of them.
    """
    residency = {"slots": 1, "store": str(folder.absolute())}
    plans = []
    for layer in layers:
        config = stated(config_of(checkpoint, layer, **(dict(overrides) | {"residency": residency})), checkpoint, layer)
        config = config.with_(ep=ranks, tp=tp)
        plans.append(
            StorePlan(layer, decide(config, torch.bfloat16, CPU), expert_map_of(config), layer_spec_of(config))
        )
    needed, there = sum(plan.num_bytes for plan in plans), 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there, free = sum(file.stat().st_size for file in folder.glob("*.experts")), shutil.disk_usage(folder).free
    except unless_signalled(OSError) as problem:
        raise StoreError(f"the folder {folder} cannot be used for stores: {problem.strerror}") from problem
    if needed - there > free:
        raise StoreError(
            f"the stores need {amount(needed)}, of which {amount(there)} are in {folder}, and {amount(free)} are free "
            "there; name another folder, or fewer layers"
        )
    return plans


def write_layer(
    checkpoint: Path, plan: StorePlan, on_progress: Callable[[int], Progress] | None = None
) -> list[WrittenStore]:
    """Write the stores of one layer, one a rank, or find those that are there.

    on_progress: returns for a rank what is called with (stage, bytes so far, bytes in total). Raises WeightError for a
    damaged checkpoint, StoreError for a store that is damaged or cannot be written.
    """
    decision, problem, source, stores = plan.decision, plan.decision.problem, open_source(checkpoint), []
    parts = Parts(plan.experts, CPU)
    for rank in range(problem.ranks * problem.config.parallel.tp):
        owner, slice_of = divmod(rank, problem.config.parallel.tp)
        context = experts_context(decision, parts, plan.experts.num_slots(owner), problem.intermediate)
        advance, packed = on_progress(rank) if on_progress is not None else None, False

        def noting(stage: str, done: int, total: int, advance: Progress | None = advance) -> None:
            nonlocal packed
            packed |= stage == "pack"
            if advance is not None:
                advance(stage, done, total)

        weights = load_layer(
            source,
            plan.layer,
            plan.spec,
            owned=plan.experts.local_to_global(owner),
            tp_rank=slice_of,
            tp_size=problem.config.parallel.tp,
            on_progress=noting,
        )
        paged = build_experts(decision, decision.chosen.experts, context).relayout(weights.experts, noting)
        assert isinstance(paged, PagedExperts), f"{decision.chosen.experts} has traits.pages"
        with paged.cache.store as store:
            size = store.path.stat().st_size
            stores.append(WrittenStore(plan.layer, rank, store.path, store.num_experts, size, packed))
    return stores
