"""Checks of transports, with experts that return their input.

Virtual ranks: all ranks of an EP x TP grid in one process and one thread, advanced in lockstep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.groups import Absent, ParallelGroups
from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.comm.threads import ThreadWorld
from moe_mk.experts.base import ExpertsContext
from moe_mk.flight import Flight, interleave, wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.testing.bits import bits_of, equal_bits
from moe_mk.lab.testing.cases import RoutingCase, hostile_routings
from moe_mk.lab.testing.experts import output_shape
from moe_mk.lab.testing.identity import IdentityExperts
from moe_mk.lab.testing.laws import AT_ONCE, LOST, ORDER, WEIGHTING, Law
from moe_mk.lab.testing.limits import NonConforming, fake, later_call, no_global_changes, no_host_reads, require
from moe_mk.layer import MoELayer
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, TransportContext, TransportTraits
from moe_mk.quant.plain import BF16, FP32, Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.runner.overlap import alongside
from moe_mk.tokens import ExpertOutput, GroupedTokens, Routing, RowTokens, Tokens
from moe_mk.weights.expert_weights import MappedExpertWeights

X = TypeVar("X")

PATIENCE_S = 100.0
"""Seconds that a rank in a thread waits for its peers; long, because the machine may be loaded."""


def virtual_groups(ep: int = 1, tp: int = 1) -> list[ParallelGroups]:
    """The groups of every rank of a grid, TP neighbours side by side: rank = ep_rank * tp + tp_rank."""
    ep_worlds = [LockstepWorld(ep).communicators() for _ in range(tp)]
    tp_worlds = [LockstepWorld(tp).communicators() for _ in range(ep)]
    return [
        ParallelGroups(
            ep=ep_worlds[tp_rank][ep_rank] if ep > 1 else Absent.ABSENT,
            tp=tp_worlds[ep_rank][tp_rank] if tp > 1 else Absent.ABSENT,
        )
        for ep_rank in range(ep)
        for tp_rank in range(tp)
    ]


def run_together(
    layers: Sequence[MoELayer], tokens: Sequence[Tensor], token_ids: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    """One forward pass of each rank's layer on its tokens. token_ids: for layers that route by token id."""
    known = token_ids or [None] * len(layers)
    each = zip(layers, tokens, known, strict=True)
    return interleave([layer.steps(x_TH, token_ids_T=ids_T) for layer, x_TH, ids_T in each])


def world_of(traits: TransportTraits, size: int) -> LockstepWorld:
    """The world of virtual ranks: in lockstep, or in threads for transports whose calls block."""
    return ThreadWorld(size, timeout_s=PATIENCE_S) if traits.blocking else LockstepWorld(size)


def each_rank(world: LockstepWorld, jobs: Sequence[Callable[[], X]]) -> list[X]:
    """Run one job per rank: concurrently in threads, otherwise one after the other."""
    return world.together(jobs) if isinstance(world, ThreadWorld) else [job() for job in jobs]


def fly_together(world: LockstepWorld, flights: Sequence[Flight[X]]) -> list[X]:
    """Wait for one flight of every rank."""
    if isinstance(world, ThreadWorld):
        return world.together([partial(wait, flight) for flight in flights])
    return interleave(flights)


def fly_dual(world: LockstepWorld, flights: Sequence[tuple[Flight[X], ...]]) -> list[list[X]]:
    """Wait for several concurrent flights of every rank, in the order of each rank."""
    if isinstance(world, ThreadWorld):
        return world.together([partial(interleave, own) for own in flights])
    finished = iter(interleave([flight for own in flights for flight in own]))
    return [[next(finished) for _ in own] for own in flights]


def yield_points_of(flight: Flight[X], points: list[str]) -> Flight[X]:
    """Run a flight and record the name of every yield point."""
    while True:
        try:
            point = next(flight)
        except StopIteration as finished:
            return cast(X, finished.value)
        points.append(point.what)
        yield point


_MOST_TOKENS = 8
"""Maximum number of tokens per rank, unless a case has more; determines buffers of libraries."""
WITH_FACTORS = ("even", "uneven experts", "replicas")
"""Cases with a factor per expert: placements with three kinds of slot lookup."""
NO_WEIGHTS = MappedExpertWeights((), FP32)


def check_transport(
    name: str,
    *,
    num_ranks: int,
    wire: QuantScheme | None = None,
    dtype: Plain = FP32,
    hidden_size: int = 192,
    num_experts: int = 8,
    top_k: int = 3,
    device: torch.device | str = "cpu",
    ranks_per_node: int | None = None,
    cases: Sequence[RoutingCase] | None = None,
) -> int:
    """Every hostile case through one transport with identity experts, on virtual ranks.

    Checks the output, that inputs stay as they were, that two calls give equal bits, that every rank makes the same
    yield points with and without tokens, that overlap with other work or with a second micro-batch changes no bit,
    dispatched tokens, that NaN stays in its token, and that states of the process are left alone.
    wire: what travels; None is the layer's dtype. ranks_per_node: of one host; None is all of them. cases: instead of
    `hostile_routings`; those that the traits exclude are left out.
    """
    traits, where = PREPARE_FINALIZE[name].traits, torch.device(device)
    with_factors = WITH_FACTORS if cases is None else {case.name for case in cases}
    if cases is None:
        cases = suited_to(traits, hostile_routings(num_ranks, num_experts=num_experts, top_k=top_k, device=where))
        first = cases[0]
    else:
        cases = suited_to(traits, cases)
        first = max(cases, key=lambda case: max(case.num_tokens))
    ranks_of = partial(
        _VirtualTransport, name, wire=wire or dtype, dtype=dtype, hidden_size=hidden_size, device=where,
        ranks_per_node=ranks_per_node,
    )  # fmt: skip
    for case in cases:
        ranks = ranks_of(case)
        what, tokens = f"{name}, {num_ranks} ranks, {ranks.wire.name}, {case.name}", ranks.tokens()
        before = bits_of(*tokens, *case.routings)
        points: list[list[str]] = [[] for _ in range(num_ranks)]
        with no_global_changes(what):
            alone = ranks.run(tokens, points)
        require(before == bits_of(*tokens, *case.routings), f"{what}: an input changed")
        _check_identity(ranks, case, alone, tokens, what)
        require(all(log == points[0] for log in points), f"{what}: ranks have different yield points: {points}")
        fresh = partial(ranks_of, case)
        idle = _later(ranks, fresh, _VirtualTransport.yield_points_without_tokens)
        require(points[0] == idle, f"{what}: yield points depend on the number of tokens")
        if case.name in with_factors:
            with_own = ranks.telling_ranks()  # experts have different factors
            own = f"{what}, each expert with its own factor"
            _check_identity(with_own, ranks.case, with_own.run(tokens), tokens, own)
        for law, step in (
            ("two calls give different bits", _VirtualTransport.run),
            ("other work in between changes bits", _VirtualTransport.run_with_other_work),
        ):
            again = _later(ranks, fresh, partial(_run_again, step, tokens, what))
            require(not traits.deterministic or equal_bits(alone, again), f"{what}: {law}")
        dual = _at_once(ranks, case, tokens, what)
        require(not traits.deterministic or equal_bits(alone, dual), f"{what}: two micro-batches change bits")
    what = f"{name}, {num_ranks} ranks, {(wire or dtype).name}, {first.name}"
    _check_calls(ranks_of(first), what)
    _check_dispatched(ranks_of(first), what)
    if isinstance(wire or dtype, Plain):
        _check_alone(ranks_of(first), what)
    return len(cases)


def suited_to(traits: TransportTraits, cases: Sequence[RoutingCase]) -> list[RoutingCase]:
    """The cases that the traits of a transport allow, with equal tokens on all ranks where it requires them."""
    allowed = [c for c in cases if traits.uneven or len(set(map(len, c.expert_map.experts_of_rank))) == 1]
    allowed = [c for c in allowed if traits.max_top_k is None or c.top_k <= traits.max_top_k]
    return allowed if "sharded" in traits.tokens else [case.replicated() for case in allowed]


class _VirtualTransport:
    """One transport on every rank of a case, around identity experts.

    telling: each expert multiplies by a power of two of its own, which every number format holds exactly.
    """

    def __init__(
        self, name: str, case: RoutingCase, wire: QuantScheme, dtype: Plain, hidden_size: int, device: torch.device,
        ranks_per_node: int | None = None, *, telling: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.telling, self.ranks_per_node = name, telling, ranks_per_node
        self.case, self.wire, self.dtype, self.hidden_size, self.device = case, wire, dtype, hidden_size, device
        traits = PREPARE_FINALIZE[name].traits
        self.partial = traits.partial
        tables = case.expert_map.tables(device)
        top_k = case.routings[0].ids_TK.shape[1]
        self.world = world_of(traits, len(case.routings))
        most = max(_MOST_TOKENS, *case.num_tokens)

        def kernel(comm: Communicator) -> FusedMoEKernel:
            slots = case.expert_map.num_slots(comm.rank)
            context = TransportContext(
                comm, case.expert_map, tables, wire, dtype, hidden_size, top_k, device, max_num_tokens=most,
                ranks_per_node=ranks_per_node, allow_emulated=True,
            )  # fmt: skip
            own = torch.tensor(case.expert_map.local_to_global(comm.rank), dtype=torch.int64, device=device)
            experts = IdentityExperts(
                ExpertsContext(dtype, dtype, "silu", slots, hidden_size, hidden_size, device),
                factors_of(own) if telling else None,
            )
            return FusedMoEKernel(PREPARE_FINALIZE[name](context), experts)

        self.kernels = each_rank(self.world, [partial(kernel, comm) for comm in self.world.communicators()])

    def tokens(self) -> list[Tensor]:
        """Random rows, different on each rank unless the transport requires equal ones."""
        made: list[Tensor] = []
        for rank, count in enumerate(self.case.num_tokens):
            draw = torch.Generator("cpu").manual_seed(0 if self.partial else rank)
            x_TH = torch.randn((count, self.hidden_size), generator=draw, dtype=torch.float32, device="cpu")
            made.append(self.case.scaled(x_TH).to(device=self.device, dtype=self.dtype.dtype))
        return made

    def telling_ranks(self) -> _VirtualTransport:
        """New ranks with a different factor per expert."""
        return _VirtualTransport(
            self.name,
            self.case,
            self.wire,
            self.dtype,
            self.hidden_size,
            self.device,
            self.ranks_per_node,
            telling=True,
        )

    def flights(self, tokens: list[Tensor], routings: tuple[Routing, ...]) -> list[Flight[Tensor]]:
        return [k.steps(x, r, NO_WEIGHTS) for k, x, r in zip(self.kernels, tokens, routings, strict=True)]

    def run(self, tokens: list[Tensor], points: list[list[str]] | None = None) -> list[Tensor]:
        flights = self.flights(tokens, self.case.routings)
        watched = flights if points is None else [yield_points_of(f, h) for f, h in zip(flights, points, strict=True)]
        return fly_together(self.world, watched)

    def run_with_other_work(self, tokens: list[Tensor]) -> list[Tensor]:
        flights = self.flights(tokens, self.case.routings)
        done = fly_together(self.world, [alongside(flight, lambda: None) for flight in flights])
        return [y_TH for y_TH, _ in done]

    def run_dual(self, tokens: list[Tensor]) -> list[Tensor]:
        """Each rank's tokens in two parts that are in flight at once; the first may be empty."""
        parts = []
        for half in (0, 1):
            cut = [slice(0, len(x) // 2) if half == 0 else slice(len(x) // 2, None) for x in tokens]
            routings = [Routing(r.ids_TK[c], r.weights_TK[c]) for r, c in zip(self.case.routings, cut, strict=True)]
            parts.append(self.flights([x[c] for x, c in zip(tokens, cut, strict=True)], tuple(routings)))
        # Rank by rank, first micro-batch before second, as in `run_dual`.
        return [torch.cat(both) for both in fly_dual(self.world, list(zip(*parts, strict=True)))]

    def yield_points_without_tokens(self) -> list[str]:
        points: list[list[str]] = [[] for _ in self.kernels]
        nothing = [Routing(r.ids_TK[:0], r.weights_TK[:0]) for r in self.case.routings]
        flights = self.flights([x[:0] for x in self.tokens()], tuple(nothing))
        fly_together(self.world, [yield_points_of(flight, log) for flight, log in zip(flights, points, strict=True)])
        return points[0]


def _check_identity(
    ranks: _VirtualTransport, case: RoutingCase, outputs: list[Tensor], tokens: list[Tensor], what: str
) -> None:
    """Token times the sum of its weights, with the rounding of the wire; each rank's part is rounded once more."""
    if ranks.partial:
        outputs = [torch.stack([y.float() for y in outputs]).sum(dim=0)] * len(outputs)
    rounding = torch.finfo(ranks.dtype.dtype).eps * (len(outputs) + 1)
    for rank, (y_TH, x_TH, routing) in enumerate(zip(outputs, tokens, case.routings, strict=True)):
        kept_TK = routing.weights_TK.masked_fill(routing.ids_TK < 0, 0.0).double()
        kept_T = (kept_TK * factors_of(case.logical_ids[rank]) if ranks.telling else kept_TK).sum(dim=1)
        expected_TH = ranks.wire.quantize(x_TH).dequantize(ranks.dtype.dtype).double() * kept_T[:, None]
        require(y_TH.device == x_TH.device, f"{what}: the output of rank {rank} is on device {y_TH.device}")
        require(y_TH.shape == x_TH.shape, f"{what}: rank {rank} got {tuple(y_TH.shape)}, not {tuple(x_TH.shape)}")
        require(ranks.partial or y_TH.dtype is x_TH.dtype, f"{what}: rank {rank} got {y_TH.dtype}, not {x_TH.dtype}")
        require(bool(y_TH.isfinite().all()), f"{what}: the output of rank {rank} is not finite")
        wrong = (y_TH.double() - expected_TH).abs() > rounding * expected_TH.abs()
        if bool(wrong.any()):
            token = int(wrong.any(dim=1).nonzero()[0])
            got, want = y_TH[token, :4].tolist(), expected_TH[token, :4].tolist()
            text = f"{what}: token {token} of rank {rank} was combined to {got}..., expected {want}..."
            raise NonConforming(text, _explained(ranks, case, outputs, tokens))


def _later(
    ranks: _VirtualTransport, fresh: Callable[[], _VirtualTransport], call: Callable[[_VirtualTransport], X]
) -> X:
    """A call on ranks that have been called before; see `later_call`."""
    return later_call(partial(call, ranks), lambda: call(fresh()))


def _run_again(
    step: Callable[[_VirtualTransport, list[Tensor]], list[Tensor]], tokens: list[Tensor], what: str,
    ranks: _VirtualTransport,
) -> list[Tensor]:  # fmt: skip
    outputs = step(ranks, tokens)
    _check_identity(ranks, ranks.case, outputs, tokens, f"{what}, called again")
    return outputs


def _explained(ranks: _VirtualTransport, case: RoutingCase, outputs: list[Tensor], tokens: list[Tensor]) -> Law | None:
    if any(y_TH.shape != x_TH.shape for y_TH, x_TH in zip(outputs, tokens, strict=True)):
        return None
    weights = [r.weights_TK.masked_fill(r.ids_TK < 0, 0.0).sum(dim=1) for r in case.routings]
    return explained(outputs, [ranks.wire.quantize(x).dequantize(ranks.dtype.dtype) for x in tokens], weights)


def _at_once(ranks: _VirtualTransport, case: RoutingCase, tokens: list[Tensor], what: str) -> list[Tensor]:
    """Two micro-batches in flight; whatever fails here depends on the other one."""
    try:
        outputs = ranks.run_dual(tokens)
        _check_identity(ranks, case, outputs, tokens, what)
    except Exception as problem:  # backends may fail in any way
        raise NonConforming(f"{what}, {AT_ONCE}: {type(problem).__name__}: {problem}") from problem
    return outputs


def check_graph_safe_transport(name: str, num_ranks: int, ranks_per_node: int | None = None) -> int:
    """One call on tensors without values; raises what torch raises for operators without fakes."""
    (case,) = suited_to(PREPARE_FINALIZE[name].traits, hostile_routings(num_ranks)[:1])
    cpu, what = torch.device("cpu"), f"{name}, {num_ranks} ranks"
    ranks = _VirtualTransport(name, case, BF16, BF16, 192, cpu, ranks_per_node)

    def call(kernel: FusedMoEKernel, x_TH: Tensor, routing: Routing) -> Flight[Tensor]:
        transport = kernel.prepare_finalize
        tokens = yield from transport.prepare(x_TH, routing)
        stage = transport.traits.wants
        y = torch.zeros(output_shape(tokens, stage), dtype=x_TH.dtype, device=x_TH.device)
        return (yield from transport.finalize(ExpertOutput(y, stage), tokens))

    with no_host_reads(what) as mode:
        each = zip(ranks.kernels, ranks.tokens(), case.routings, strict=True)
        fly_together(ranks.world, [call(kernel, fake(mode, x), fake(mode, routing)) for kernel, x, routing in each])
    return 1


def _check_dispatched(ranks: _VirtualTransport, what: str) -> None:
    """Dispatched tokens are what the traits and the layout state."""

    def call(kernel: FusedMoEKernel, x_TH: Tensor, routing: Routing) -> Flight[None]:
        transport = kernel.prepare_finalize
        tokens = yield from transport.prepare(x_TH, routing)
        found = _problems_of(tokens, transport.traits, transport.context.num_slots)
        stage = transport.traits.wants
        y = torch.zeros(output_shape(tokens, stage), dtype=x_TH.dtype, device=x_TH.device)
        yield from transport.finalize(ExpertOutput(y, stage), tokens)
        require(not found, f"{what}: dispatched tokens have {'; '.join(found)}")

    each = zip(ranks.kernels, ranks.tokens(), ranks.case.routings, strict=True)
    fly_together(ranks.world, [call(kernel, x_TH, routing) for kernel, x_TH, routing in each])


def _problems_of(tokens: Tokens, traits: TransportTraits, num_slots: int) -> list[str]:
    """How dispatched tokens depart from their layout."""
    if type(tokens) is not traits.produces:
        return [f"layout {type(tokens).__name__}, the traits state {traits.produces.__name__}"]
    if not isinstance(tokens, RowTokens):
        total, counts_L = tokens.x_NH.values.shape[0] if isinstance(tokens, GroupedTokens) else None, tokens.counts_L
        wrong = [] if len(counts_L) == num_slots else [f"{len(counts_L)} counts, for {num_slots} slots"]
        beyond = total is not None and int(counts_L.sum()) > total
        return wrong + ([f"counts of {int(counts_L.sum())}, for {total} rows"] if beyond else [])
    ids_RK, wrong = tokens.ids_RK, []
    if tokens.num_slots != num_slots:
        wrong.append(f"num_slots {tokens.num_slots}, the rank has {num_slots}")
    if (ids_RK.dtype, tokens.weights_RK.dtype) != (torch.int32, torch.float32):
        wrong.append(f"ids and weights of {ids_RK.dtype} and {tokens.weights_RK.dtype}, not int32 and float32")
    if ids_RK.numel() and not -1 <= int(ids_RK.min()) <= int(ids_RK.max()) < num_slots:
        wrong.append(f"slots from {int(ids_RK.min())} to {int(ids_RK.max())}, the rank has {num_slots}")
    held = int((ids_RK >= 0).sum(dim=1).max()) if ids_RK.numel() else 0
    if tokens.most_K is not None and held > tokens.most_K:
        wrong.append(f"rows with {held} choices, most_K is {tokens.most_K}")
    return wrong


def _check_alone(ranks: _VirtualTransport, what: str) -> None:
    """NaN in the first token of each rank changes no other token."""
    spoiled = ranks.tokens()
    for x_TH in spoiled:
        x_TH[:1] = torch.nan
    clean, outputs = ranks.run(ranks.tokens()), ranks.run(spoiled)
    rounding = torch.finfo(ranks.dtype.dtype).eps * (len(outputs) + 1)
    for rank, (y_TH, clean_TH) in enumerate(zip(outputs, clean, strict=True)):
        wrong = ~((y_TH[1:] - clean_TH[1:]).abs() <= rounding * clean_TH[1:].abs())
        require(not bool(wrong.any()), f"{what}, with a token of NaN: other tokens of rank {rank} differ")


def factors_of(ids: Tensor) -> Tensor:
    """f32 factors 1, 2, 4 or 8 per logical expert: different for neighbours and for experts 8, 32 or 128 apart."""
    return torch.exp2(((ids + ids // 8 + ids // 32 + ids // 128) % 4).to(torch.float32))


def _check_calls(ranks: _VirtualTransport, what: str) -> None:
    """A small call, a full one, and one with other tokens: the second is correct and stays unchanged."""
    tokens = ranks.tokens()
    firsts = tuple(Routing(r.ids_TK[:1], r.weights_TK[:1]) for r in ranks.case.routings)
    fly_together(ranks.world, ranks.flights([x[:1] for x in tokens], firsts))
    try:
        full = ranks.run(tokens)
    except Exception as problem:  # without the smaller call it passes
        raise NonConforming(f"{what}, after a smaller call: {type(problem).__name__}: {problem}") from problem
    _check_identity(ranks, ranks.case, full, tokens, f"{what}, after a smaller call")
    with torch.inference_mode():
        known = [x.clone() for x in tokens]
        inside = ranks.run(known)
    _check_identity(ranks, ranks.case, inside, tokens, f"{what}, in inference mode")
    before, shared = bits_of(*full), {x.untyped_storage().data_ptr() for x in tokens if x.numel()}
    negated = [-x for x in tokens]
    ranks.run(negated)
    require(bits_of(*full) == before, f"{what}: an output changed in a later call")
    aliases = [rank for rank, y in enumerate(full) if y.numel() and y.untyped_storage().data_ptr() in shared]
    require(not aliases, f"{what}: an output shares memory with an input, on ranks {aliases}")


SAME = 0.02
"""Relative, above the rounding of bf16: distinguishes mistakes; rounding is checked elsewhere."""


def explained(got: list[Tensor], tokens: list[Tensor], weights: list[Tensor]) -> Law | None:
    """The law that explains a wrong result of identity experts, or None.

    got, tokens: (T, H) of each rank. weights: (T,) of each rank, what each token should be multiplied by.
    """
    rows = torch.cat(got).double()
    sent, scale = torch.cat(tokens).double(), torch.cat(weights).double()
    wanted = sent * scale[:, None]
    if rows.shape != wanted.shape:
        return None
    wrong = (rows - wanted).norm(dim=1) > SAME * wanted.norm(dim=1)
    if bool(wrong.any()) and not bool(rows[wrong].any()):
        return LOST
    elsewhere = torch.cdist(rows[wrong], wanted).min(dim=1).values <= SAME * wanted.norm(dim=1).max()
    if bool(wrong.any()) and bool(elsewhere.all()):
        return ORDER
    cosine = torch.nn.functional.cosine_similarity(rows[wrong], sent[wrong], dim=1)
    scaled = (cosine > 1.0 - SAME) | ~rows[wrong].any(dim=1)
    return WEIGHTING if bool(wrong.any()) and bool(scaled.all()) else None
