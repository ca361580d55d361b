"""A layer of any features under any sequence of verbs, compared with `PlainLayer` and with a ledger after each of them.

    world = World(row, seed=3, folder=tmp_path)
    world.run([("forward", 1), ("move", 2), ("lose", 5)])

All ranks of an EP x TP grid live in this process and advance together. A verb draws what it needs from its number, so a
row, a seed and a list of verbs are a program; an error of a step ends with the one that repeats it.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from moe_mk import LostExpertError, MoEConfig, MoELayer, Problem
from moe_mk.comm import LockstepWorld
from moe_mk.comm.groups import ParallelGroups
from moe_mk.config.moe import KernelConfig
from moe_mk.errors import FallbackWarning
from moe_mk.experts.residency import Policy, ResidencyCounts, ResidencyPool
from moe_mk.flight import Flight, interleave
from moe_mk.lab.testing.bits import equal_bits
from moe_mk.layer import settings
from moe_mk.oracle import select
from moe_mk.oracle.verdict import Decision
from moe_mk.weights.expert_weights import ReleasedSlots
from tests.support.machine_features import EXPERTS, FEATURES, VOCABULARY, Row, rounding_of, settings_of
from tests.support.plain_layer import AS_IS, PlainLayer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LIMITS = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 2.5e-2}
"""Norm of the difference over that of the output, by dtype of the layer."""
ROUNDED_LIMITS = {"fp32": 2e-2, "fp16": 3e-2, "bf16": 6e-2}
"""The same where activations are rounded: of a value near the middle of two codes either may be taken."""

SWAPPED = "experts", "tiles", "fused_router", "threads", "instruction_set"
"""Features of kernels that a swap sets."""
POOL_BYTES = 640 << 10
"""All experts of four ranks, or of a few layers some."""
Needs = Mapping[str, set[str]]
"""Values of features without which a world cannot do a verb."""
ALONE: Needs = {"grid": {"alone"}}
SPREAD: Needs = {"grid": {"ep2", "ep2tp2", "ep4"}}
PAGED: Needs = {"grid": {"alone"}, "residency": {"slots", "bytes", "pool"}}


@dataclass(frozen=True)
class Verb:
    """Something that can be done with a layer."""

    does: Callable[[World, random.Random], bool | None]
    """Returns False where there was nothing to do."""
    needs: Needs
    whole: bool
    """Whether every expert must have a copy: what is lost is repaired before."""

    def applies(self, row: Row) -> bool:
        return all(row[feature] in values for feature, values in self.needs.items())


VERBS: dict[str, Verb] = {}


def verb(needs: Needs | None = None, *, whole: bool = True) -> Callable[[Any], Any]:
    """Register a verb by the name of its function."""

    def register(function: Any) -> Any:
        VERBS[function.__name__] = Verb(function, needs or {}, whole)
        return function

    return register


class World:
    """Layers of all ranks, the plain layer with the same weights, and what should have been counted."""

    def __init__(self, row: Row, *, seed: int, folder: Path) -> None:
        self.row, self.seed, self.folder, self.version = dict(row), seed, folder, 0
        self.settings, self.program = settings_of(row), list[tuple[str, int]]()
        self.dtype, self.done = DTYPES[row["dtype"]], set[str]()
        self.pool: ResidencyPool | None = None
        if row["residency"] != "none":
            residency = self.settings["kernel"].setdefault("residency", {})
            residency |= {"store": str(folder / "stores"), "policy": row["policy"]}
            if row["residency"] == "pool":
                self.pool = ResidencyPool(POOL_BYTES)
        self.config = MoEConfig.parse(self.settings, "a drawn row")
        self.settings = {name: self.settings[name] for name in ("model", "router", "parallel", "kernel")}
        self.ep, self.tp = self.config.parallel.ep, self.config.parallel.tp
        self.replicated = row["transport"] == "replicated"
        self.plain = self.weights_of(0)
        with remembered_decisions():
            self.layers = [self.built(groups) for groups in grid_of(self.ep, self.tp)]
        self.load_all()
        self.watched: tuple[Policy, list[set[int]]] | None = None
        """The experts that each call of the cache has used since its policy was made; None: not all are known."""
        self.lost, self.first_ep, self.top_k = set[int](), self.ep, self.config.router.top_k
        self.load = [torch.zeros(EXPERTS, dtype=torch.int64) for _ in range(self.ep)]
        self.zero, self.dropped, self.tokens, self.nowhere = ([0] * self.ep for _ in range(4))

    # Building.

    def weights_of(self, version: int) -> PlainLayer:
        _, _, rest = self.row["weights"].partition(" down=")[0].partition(" ")
        packing, _, ordered = rest.partition(" ")
        names = self.row["names"] if not packing else "official"
        return PlainLayer(self.settings, names, packing, seed=1000 * self.seed + version, ordered=ordered == "ordered")

    def built(self, groups: ParallelGroups) -> MoELayer:
        return MoELayer(self.config, dtype=self.dtype, groups=groups, name="drawn", pool=self.pool)

    def load_all(self) -> None:
        for layer in self.layers:
            layer.load_weights(self.plain.tensors)

    # Tokens, calls, and what they should return.

    def drawn_tokens(self, draw: random.Random, counts: Sequence[int]) -> tuple[list[Tensor], list[Tensor | None]]:
        """Tokens and token ids of each EP rank."""
        if self.replicated:
            counts = [counts[0]] * self.ep
        of = torch.Generator().manual_seed(draw.randrange(2**31))
        x = [torch.randn((n, self.plain.hidden), generator=of).to(self.dtype) for n in counts]
        ids: list[Tensor | None] = [torch.randint(0, VOCABULARY, (n,), generator=of) for n in counts]
        if not self.by_id:
            ids = [None] * self.ep
        if self.replicated:
            x, ids = [x[0]] * self.ep, [ids[0]] * self.ep
        return x, ids

    @property
    def by_id(self) -> bool:
        return self.row["choice"] in ("table", "images", "images and table")

    def of_rank(self, parts: Sequence[Any]) -> list[Any]:
        """What EP ranks have, for each layer."""
        return [parts[rank // self.tp] for rank in range(len(self.layers))]

    def call(self, x: Sequence[Tensor], ids: Sequence[Tensor | None]) -> list[Tensor]:
        """One forward of all ranks; the outputs of EP ranks, which are equal on all of their TP ranks."""
        if len(self.layers) == 1:
            return [self.layers[0](x[0], ids[0])]
        flights = [
            layer.steps(x_TH, token_ids_T=ids_T)
            for layer, x_TH, ids_T in zip(self.layers, self.of_rank(x), self.of_rank(ids), strict=True)
        ]
        return self.of_slices(interleave(flights))

    def of_slices(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        for at, y_TH in enumerate(outputs):
            first_TH = outputs[at - at % self.tp]
            assert equal_bits(y_TH.nan_to_num(), first_TH.nan_to_num()), f"TP rank {at % self.tp} returns other bits"
        return list(outputs[:: self.tp])

    def expected(self, rank: int, x_TH: Tensor, ids_T: Tensor | None) -> Tensor:
        """The output of an EP rank in f64; enters what is counted."""
        weights_TE, chosen_TE = self.routing_of(rank, x_TH, ids_T)
        self.count(rank, chosen_TE)
        return self.output(x_TH, self.without_lost(rank, weights_TE, chosen_TE), routed_only=False)

    def output(self, x_TH: Tensor, weights_TE: Tensor, *, routed_only: bool) -> Tensor:
        tokens, hidden = rounding_of(self.row, self.settings)
        shared = None if routed_only else rounding_of(self.row, self.settings, shared=True)
        return self.plain.forward(x_TH, weights_TE, tokens=tokens, hidden=hidden, shared=shared, slices=self.tp)

    def routing_of(self, rank: int, x_TH: Tensor, ids_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights and choice of every scored expert: those of the plain layer, but for ties within rounding."""
        coarse = self.dtype if self.row["router_dtype"] == "model" else None
        wanted = self.plain.choose(x_TH, ids_T, coarse if coarse is not torch.float32 else None)
        routing = self.layers[rank * self.tp].route(x_TH, ids_T)
        got_TE = torch.zeros_like(wanted.chosen_TE)
        weights_TE = torch.zeros_like(wanted.weights_TE)
        for k in range(routing.ids_TK.shape[1]):
            ids_T1 = routing.ids_TK[:, k : k + 1].long()
            assert bool((ids_T1 >= 0).all())
            got_TE.scatter_(1, ids_T1, True)
            weights_TE.scatter_(1, ids_T1, routing.weights_TK[:, k : k + 1].double())
        slack, limit = self.router_limits
        other_T = (got_TE != wanted.chosen_TE).any(1)
        if bool(other_T.any()):
            lowest_T = wanted.select_TE.masked_fill(~wanted.chosen_TE, torch.inf).amin(1)
            found_T = wanted.select_TE.masked_fill(~got_TE, torch.inf).amin(1)
            near_T = (lowest_T - found_T).abs() <= slack * (1 + lowest_T.abs())
            if slack > 1e-5 and self.config.router.num_expert_group > 1:
                near_T |= other_T.sum() <= 1 + len(x_TH) // 8  # groups of equal scores in a narrow dtype
            assert bool((near_T | ~other_T).all()), (
                f"tokens {torch.nonzero(other_T & ~near_T).flatten().tolist()} have other experts"
            )
        same_T = ~other_T
        off_TE = (weights_TE - wanted.weights_TE).abs()[same_T]
        assert bool((off_TE <= limit * (1 + wanted.weights_TE[same_T].abs())).all()), (
            f"weights are off by {off_TE.max()}"
        )
        exact_TE = wanted.weights_TE if limit == 1e-5 else weights_TE
        return torch.where(other_T[:, None], weights_TE, exact_TE), got_TE

    @property
    def router_limits(self) -> tuple[float, float]:
        """Of scores between which either expert may be chosen, and of weights."""
        if self.dtype is torch.float32:
            return 1e-5, 1e-5
        if self.row["router_dtype"] == "model":
            return 2e-2, 4e-2
        # The gate reads rows that were normalised and rounded to the dtype of the layer.
        return (2e-3, 4e-3) if self.row["frame"] == "input_norm" else (1e-5, 1e-5)

    def without_lost(self, rank: int, weights_TE: Tensor, chosen_TE: Tensor) -> Tensor:
        if not self.lost:
            return weights_TE
        lost_E = torch.zeros(weights_TE.shape[1], dtype=torch.bool)
        lost_E[sorted(self.lost)] = True
        self.dropped[rank] += int((chosen_TE & lost_E).sum())
        kept_TE = weights_TE.masked_fill(lost_E, 0.0)
        if self.row["lost"] == "renormalise":
            routed = slice(0, EXPERTS)
            asked, kept = weights_TE[:, routed].sum(1), kept_TE[:, routed].sum(1)
            factor_T = torch.where(kept != 0, asked / kept.where(kept != 0, torch.ones_like(kept)), 1.0)
            hit_T = (chosen_TE & lost_E).any(1)
            kept_TE[hit_T, routed] *= factor_T[hit_T, None]
        return kept_TE

    def count(self, rank: int, chosen_TE: Tensor) -> None:
        self.load[rank] += chosen_TE[:, :EXPERTS].sum(0)
        self.zero[rank] += int(chosen_TE[:, EXPERTS:].sum())
        self.tokens[rank] += len(chosen_TE)

    def compare(self, y_TH: Tensor, wanted_TH: Tensor, what: str) -> None:
        """Raise unless an output is that of the plain layer: as a whole, and in every single number."""
        assert y_TH.shape == wanted_TH.shape and y_TH.dtype is self.dtype, f"{what}: {y_TH.shape} {y_TH.dtype}"
        if not y_TH.numel():
            return
        is_plain = rounding_of(self.row, self.settings)[0] == AS_IS
        limit = (LIMITS if is_plain else ROUNDED_LIMITS)[self.row["dtype"]]
        size = wanted_TH.norm() / wanted_TH.numel() ** 0.5
        # Below the normal numbers of a dtype the rounding is no longer relative: FP16 after most experts were dropped.
        off_TH = (y_TH.double() - wanted_TH).abs() / size.clamp_min(max(torch.finfo(self.dtype).smallest_normal, 1e-30))
        error, worst = float(off_TH.pow(2).mean().sqrt()), float(off_TH.max())
        assert error <= limit and worst <= 12 * limit, (
            f"{what}: error {error:.3g}, worst {worst:.3g}, limit {limit:.3g}"
        )

    def check_counts(self) -> None:
        for at, layer in enumerate(self.layers):
            rank, report = at // self.tp, layer.report()
            assert layer.expert_load.tolist() == self.load[rank].tolist(), f"rank {at}: expert_load"
            assert layer.routing.tokens == self.tokens[rank], f"rank {at}: tokens"
            assert report.zero_assignments == self.zero[rank], f"rank {at}: zero_assignments"
            assert layer.dropped_assignments == self.dropped[rank], f"rank {at}: dropped_assignments"
            assert set(report.lost_experts) == self.lost and not report.departures, f"rank {at}: {report.departures}"
            assert layer.unrouted == report.unrouted == self.nowhere[rank], f"rank {at}: unrouted"
            self.check_settings(layer)
            self.check_memory(layer, f"rank {at}: bytes")

    def check_memory(self, layer: MoELayer, what: str) -> None:
        """The layer holds what its report states: biases are in no report, nor what a backend stores otherwise."""
        report, gate, weights = layer.memory_report(), layer.state.backends.gate, layer.weights
        problem, model, held = layer.decision.problem, self.config.model, layer.expert_map.num_slots(layer.ep.rank)
        bias_E = gate.bias_E if self.config.router.has_correction_bias else None
        gates = [each.nbytes for each in (gate.weight_EH, bias_E) if each is not None]
        wide = layer.decision.gate.tier == "native" and gate.weight_EH.dtype is torch.float32  # of a checkpoint in f32
        assert report.num_slots == held and (wide or report.gate == sum(gates)), f"{what} of the gate"
        if isinstance(weights.experts.slots, ReleasedSlots):
            return
        if self.tp == 1:
            assert weights.experts.num_bytes == held * self.plain.bytes_of_expert, what
        if problem.weights == model.quant.weight_scheme and layer.config.kernel.residency is None:
            of_shared = () if weights.shared is None else (weights.shared,)
            for stated, slots in ((report.experts, weights.experts.slots), (report.shared, of_shared)):
                assert stated == sum(each.num_bytes for slot in slots for each in slot.matrices.values()), what

    def check_settings(self, layer: MoELayer) -> None:
        """What callers have asked for is in use after every change, and what the next decision starts from."""
        kernels = layer.config.kernel, layer.state.backends.asked.kernel
        for feature in SWAPPED:
            keys = {key: None for value in FEATURES[feature].values() for key in value}
            for key in keys:
                _, _, name = key.partition(".")
                wanted = FEATURES[feature][self.row[feature]].get(key, KernelConfig.model_fields[name].default)
                held = [getattr(kernel, name) for kernel in kernels]
                assert held == [wanted] * 2, f"kernel.{name} is {held}, {wanted!r} was asked for"
        assert layer.state.backends.pool is layer.pool is self.pool, "the pool"

    def served(self, draw: random.Random, counts: Sequence[int], what: str) -> None:
        """One forward of all ranks, compared."""
        x, ids = self.drawn_tokens(draw, counts)
        before = [each.clone() for each in x]
        if self.lost and self.row["lost"] == "raise":
            flights = [
                layer.steps(x_TH, token_ids_T=ids_T)
                for layer, x_TH, ids_T in zip(self.layers, self.of_rank(x), self.of_rank(ids), strict=True)
            ]
            assert all(set(error.experts) == self.lost for error in ends(flights))
            self.check_counts()
            return
        before_call = self.paged_state()
        outputs = self.call(x, ids)
        for rank in range(self.ep):
            assert equal_bits(x[rank], before[rank]), f"{what}: the input was written to"
            self.compare(outputs[rank], self.expected(rank, x[rank], ids[rank]), f"{what}, rank {rank}")
        if before_call is not None:
            self.check_reads(before_call, x[0], ids[0])
        self.check_counts()

    # Steps.

    def paged_state(self) -> tuple[set[int], ResidencyCounts] | None:
        """Resident experts and counts of a layer alone whose calls are whole; None where it has none."""
        if len(self.layers) > 1 or self.row["residency"] == "none" or self.row["tiles"] != "one":
            return None
        laid_out = self.layers[0].state.experts.weights
        if not hasattr(laid_out, "cache"):
            return None
        if self.watched is None or self.watched[0] is not laid_out.cache.policy:
            self.watched = watched(laid_out.cache.policy) if not laid_out.counts.uses else None
        return set(laid_out.cache.slot_of), laid_out.counts

    def check_reads(self, before: tuple[set[int], ResidencyCounts], x_TH: Tensor, ids_T: Tensor | None) -> None:
        """What a call has used, found and read, and whom it has evicted: the experts of least worth."""
        layer, (resident, was) = self.layers[0], before
        placed = layer.expert_map.local_to_global(0)
        chosen_E = self.routing_of(0, x_TH, ids_T)[1][:, :EXPERTS].any(0)
        needed = {slot for slot, expert in enumerate(placed) if chosen_E[expert]}
        now, cache = layer.state.experts.weights.counts, layer.state.experts.weights.cache
        found = now.uses - was.uses, now.hits - was.hits, now.reads - was.reads
        missing = needed - resident
        assert found == (len(needed), len(needed & resident), len(missing)), (found, needed, resident)
        after = set(cache.slot_of)
        if self.watched is not None and len(needed) <= was.slots == now.slots and self.row["residency"] != "pool":
            calls = self.watched[1]
            kept = sorted(resident - needed, key=lambda slot: (self.worth(calls, slot), slot))
            assert after == needed | set(kept[max(len(kept) + len(needed) - was.slots, 0) :]), (calls, after)
        assert not len(needed) <= now.slots or needed <= after

    def worth(self, calls: Sequence[set[int]], slot: int) -> float:
        """Of a resident expert, by the policy of the row: when, or how often it was used."""
        uses = [number for number, needed in enumerate(calls, 1) if slot in needed]
        if self.row["policy"] == "lru":
            return max(uses, default=0)
        growth = 1.0 if self.row["policy"] == "lfu" else 2.0 ** (1 / 128)
        return sum(growth**number for number in uses)

    def forget_counts(self) -> None:
        """Reset what is counted, on both sides."""
        for layer in self.layers:
            layer.reset_expert_load()
            layer.reset_report()
        self.load = [torch.zeros(EXPERTS, dtype=torch.int64) for _ in range(self.ep)]
        self.zero, self.dropped, self.tokens, self.nowhere = ([0] * self.ep for _ in range(4))

    def do(self, name: str, number: int) -> None:
        """One verb, and a small forward after it."""
        self.program.append((name, number))
        draw, done = random.Random(number), VERBS[name]
        try:
            with remembered_decisions(), warnings.catch_warnings():
                warnings.simplefilter("ignore", FallbackWarning)
                if self.lost and done.whole:
                    VERBS["move"].does(self, draw)
                acted = done.does(self, draw) is not False
            self.served(draw, [draw.randint(1, 4) for _ in range(self.ep)], f"after {name}")
        except Exception as error:
            error.add_note(self.as_program())
            raise
        if acted:
            self.done.add(name)

    def run(self, program: Sequence[tuple[str, int]]) -> World:
        for name, number in program:
            self.do(name, number)
        return self

    def as_program(self) -> str:
        default = {feature: next(iter(values)) for feature, values in FEATURES.items()}
        row = {feature: value for feature, value in self.row.items() if value != default[feature]}
        return (
            "from pathlib import Path\nfrom tempfile import mkdtemp\n"
            "from tests.support.machine import World\nfrom tests.support.machine_features import row_of\n"
            f"World(row_of({row}), seed={self.seed}, folder=Path(mkdtemp())).run({self.program})"
        )


def watched(policy: Policy) -> tuple[Policy, list[set[int]]]:
    """A policy, and what it is given from now on."""
    calls, used = list[set[int]](), policy.used

    def noted(experts: Sequence[int]) -> None:
        calls.append(set(experts))
        used(experts)

    policy.used = noted  # type: ignore[method-assign]
    return policy, calls


def check_shares(world: World) -> None:
    """The replicas of an expert have their shares of the tokens of all ranks."""
    expert_map, ranks = world.layers[0].expert_map, world.layers[:: world.tp]
    ids_TK = torch.arange(EXPERTS, dtype=torch.int32).repeat(400, 1)
    counts_P = torch.zeros(expert_map.num_physical)
    for rank, layer in enumerate(ranks):
        physical_TK = layer.state.tables.to_physical(ids_TK, 0 if layer.state.experts.is_partial else rank)
        counts_P += torch.bincount(physical_TK.flatten().long(), minlength=len(counts_P))
    for expert, replicas in enumerate(expert_map.physical_of_logical):
        shares = expert_map.shares or [1 / len(replicas)] * len(counts_P)
        for at in replicas:
            part = float(counts_P[at]) / (400 * len(ranks))
            assert abs(part - shares[at]) < 0.07, f"expert {expert}: {part:.3f} of its tokens, not {shares[at]:.3f}"


def ends(flights: Sequence[Flight[Tensor]]) -> list[LostExpertError]:
    """How the call of each rank is refused, one yield point after the other."""
    found: dict[int, LostExpertError] = {}
    while len(found) < len(flights):
        for rank, flight in enumerate(flights):
            if rank not in found:
                try:
                    next(flight)
                except LostExpertError as error:
                    found[rank] = error
    return [found[rank] for rank in range(len(flights))]


DECISIONS: dict[str, Decision] = {}


@contextmanager
def remembered_decisions() -> Iterator[None]:
    """Decide once for equal problems: a decision follows from its problem, and takes longer than a small layer."""

    def remembered(problem: Problem) -> Decision:
        key = repr((problem, problem.installed, problem.emulated))
        if key not in DECISIONS:
            DECISIONS[key] = select(problem)
        return DECISIONS[key]

    with mock.patch.object(settings, "select", remembered):
        yield


def grid_of(ep: int, tp: int) -> list[ParallelGroups]:
    """The groups of every rank, TP neighbours next to each other."""
    columns = [LockstepWorld(ep).communicators() for _ in range(tp)]
    rows = [LockstepWorld(tp).communicators() for _ in range(ep)]
    return [
        ParallelGroups(
            **({"ep": columns[slice_][rank]} if ep > 1 else {}), **({"tp": rows[rank][slice_]} if tp > 1 else {})
        )
        for rank in range(ep)
        for slice_ in range(tp)
    ]
