"""The checks of a certificate: those that the traits of a backend require, without what the backend rejects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce
from operator import or_
from typing import Any

from torch import Tensor

from moe_mk.config.device import DeviceProfile
from moe_mk.config.moe import MoEConfig
from moe_mk.config.problem import Problem
from moe_mk.config.quant import QuantConfig
from moe_mk.config.shipped import device_profile
from moe_mk.config.traits import Traits
from moe_mk.errors import ConfigError
from moe_mk.experts.base import EXPERTS, ExpertsTraits, FusedExperts
from moe_mk.external.library import emulated, installed
from moe_mk.kernels.reference.activation import CLAMPED
from moe_mk.lab.testing.bits import bits_of
from moe_mk.lab.testing.calls import check_leaves_nothing
from moe_mk.lab.testing.cases import SLOTS, RoutingCase, Sizes, hostile_routings, larger_routings, routings_of_slots
from moe_mk.lab.testing.experts import CLAMPED_AT, check_experts, check_graph_safe_experts, check_invariance
from moe_mk.lab.testing.faults import Campaign, run_worlds, transports_of
from moe_mk.lab.testing.laws import PROCESSES, Law
from moe_mk.lab.testing.limits import require
from moe_mk.lab.testing.on_ranks import (
    HIDDEN,
    INNER,
    TOP_K,
    call_of_experts,
    call_of_transport,
    outputs_of_experts,
    outputs_of_transport,
    outputs_on_processes,
    suitable_cases,
)
from moe_mk.lab.testing.on_ranks import SLOTS as SLOTS_OF_CASES
from moe_mk.lab.testing.transports import check_graph_safe_transport, check_transport, suited_to
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, PrepareFinalize, TransportTraits
from moe_mk.quant.blocked import WHOLE
from moe_mk.quant.fp8 import FP8_1x128, FP8_1x128_UE8M0, Fp8Block
from moe_mk.quant.int8 import INT8_TOKEN
from moe_mk.quant.kinds import KINDS as KINDS_OF_WEIGHTS
from moe_mk.quant.kinds import PLAIN_KINDS
from moe_mk.quant.microscaling import MXFP8
from moe_mk.quant.nvfp4 import NVFP4_TOKENS
from moe_mk.quant.plain import BF16, FP16, FP32, Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.registry import Registry, did_you_mean

PASSED_OVER = frozenset({"device", "library"})
"""Codes of reasons: certification runs on a CPU, and on an emulation where the library is not installed."""
SIZES = ((HIDDEN, INNER), (256, 256))
"""Hidden and intermediate size; the first that a backend supports is used. 192 is no multiple of 128."""
FURTHER_SIZES = (((256, 256),), ((384, 384),), ((328, 200), (336, 208), (320, 192), (328, 128), (320, 128), (384, 128)))
"""Two blocks of 128, three, and a ragged last one: of each row the first that a backend supports."""
HIDDEN_SIZES = (256, 384, 320)
"""The same for transports."""
SMALL_SIZES = ((64, 64), (128, 128), *SIZES)
"""For cases with MANY_SLOTS experts or more."""
MANY_SLOTS = 200
MOST_TOKENS, EXPERTS_OF_PROBLEM = 64, 8


@dataclass(frozen=True)
class Format:
    """Formats of a check of experts: stored weights, the layer's dtype, and rounded activations."""

    quant: Mapping[str, Any]
    """As in a configuration file."""
    dtype: Plain
    compute: QuantScheme
    activation: str = "silu"

    @property
    def weights(self) -> QuantScheme:
        """The scheme of the stored weights."""
        return QuantConfig.parse(self.quant, "certify").weight_scheme


def dtype_of(wire: QuantScheme) -> Plain:
    """The layer's dtype for a wire format."""
    return wire if isinstance(wire, Plain) else BF16


def refusal_of_transport(
    name: str,
    ranks: int,
    wire: QuantScheme,
    ranks_per_node: int | None = None,
    *,
    hidden: int = HIDDEN,
    experts: int = EXPERTS_OF_PROBLEM,
    tokens: int = MOST_TOKENS,
) -> str:
    """Reasons against a format of a transport on some ranks; empty if supported. ranks_per_node: None: one host."""
    cls, dtype = PREPARE_FINALIZE[name], dtype_of(wire)
    shape = {"hidden_size": hidden, "moe_intermediate_size": INNER, "num_experts": experts}
    kind = next(iter(cls.traits.tokens))
    return _refusal(
        cls, {**shape, "quant": {"weights": dtype.name}}, dtype, tokens, ep=ranks, tokens=kind,
        ranks_per_node=ranks_per_node,
    )  # fmt: skip


def refusal_of_experts(
    name: str,
    given: Format,
    sizes: tuple[int, int],
    *,
    batch_invariant: bool = False,
    experts: int = EXPERTS_OF_PROBLEM,
    tokens: int = MOST_TOKENS,
) -> str:
    """Reasons against a format of experts at a hidden and an intermediate size; empty if supported."""
    hidden, inner = sizes
    model = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": experts, "quant": dict(given.quant)}
    model |= {"activation": given.activation, "swiglu_limit": CLAMPED_AT if given.activation in CLAMPED else None}
    activations = "plain" if isinstance(given.compute, Plain) else "checkpoint"
    return _refusal(EXPERTS[name], model, given.dtype, tokens, activations=activations, batch_invariant=batch_invariant)


def _refusal(
    backend: type[FusedExperts | PrepareFinalize], model: Mapping[str, Any], dtype: Plain, most_tokens: int,
    **settings: Any,
) -> str:  # fmt: skip
    """Reasons against a problem, those of the configuration itself included; empty if supported."""
    try:
        config = MoEConfig.parse({"model": model, "router": {"top_k": TOP_K}}, "certify")
        config = config.with_(allow_emulated=True, max_num_tokens=most_tokens, **settings)
    except ConfigError as refused:
        return str(refused)
    profile, libraries = _machine()
    problem = Problem(config, profile, dtype, most_tokens, libraries, emulated())
    return "; ".join(r.text for r in backend.reasons_against(problem) if r.code not in PASSED_OVER)


@cache
def _machine() -> tuple[DeviceProfile, frozenset[str]]:
    """Cached, because the search for a compiler starts a process."""
    return device_profile("cpu"), installed()


WITHOUT_VALUES = "graph_safe, on tensors without values"
KINDS: Mapping[str, Registry[Any]] = {"transport": PREPARE_FINALIZE, "experts": EXPERTS}
RANKS = (1, 2, 4)
PER_NODE = (None, 2)
"""Ranks per host: all, or two for transports that need several hosts."""
FAULT_WORLDS = 24
"""Number of fault worlds per transport."""
WIRES: Mapping[str, tuple[QuantScheme, ...]] = {
    "plain": (FP32, BF16),
    "fp8": (FP8_1x128, FP8_1x128_UE8M0),
    "int8": (INT8_TOKEN,),
    "mxfp8": (MXFP8,),
    "nvfp4": (NVFP4_TOKENS,),
}
"""The wire format tested for each family in the traits of a transport."""
FP8_BLOCKS = tuple({"weights": "fp8_block", "block": (128, 128), "scale": scale} for scale in ("float32", "ue8m0"))
FURTHER = frozenset(KINDS_OF_WEIGHTS) - {*PLAIN_KINDS, "fp8_block"}
"""Formats of stored experts in addition to plain ones and FP8 blocks, which are tested in every dtype."""
WEIGHTS = FURTHER | {"plain", "fp8_block"}
"""Tested formats of weights."""


@dataclass(frozen=True)
class Check:
    """One check. run: returns the number of cases, or raises. outputs: the tensors of the digest."""

    name: str
    run: Callable[[], int]
    outputs: Callable[[], list[Tensor]] | None
    sizes: Callable[[], Sizes]
    """Returns the largest sizes of its cases."""
    law: Law | None = None
    """The law behind wrong values, if it is known beforehand."""


def kind_of(name: str) -> str:
    """Whether a name is a transport or an experts backend, broken plugins included; raises ConfigError for neither."""
    known: list[str] = []
    for kind, registry in KINDS.items():
        names = [*registry, *registry.broken]
        if name in names:
            return kind
        known += names
    raise ConfigError(f"unknown transport or experts backend {name!r}{did_you_mean(name, known)}")


def checks_of(name: str, *, processes: bool, quick: bool = False, modules: Sequence[str] = ()) -> list[Check]:
    """The checks that the traits of a backend require, as for `certify`."""
    traits = KINDS[kind_of(name)][name].traits
    if isinstance(traits, TransportTraits):
        served = [place for place in _places(traits) if not _refused(name, place)]
        made = [_transport_check(name, traits, *place, _per_node(name, *place)) for place in served]
        for place in () if quick else served:
            made.append(_larger_transport_check(name, traits, *place, _per_node(name, *place)))
        if served and _torch_only(traits):
            hosts = {ranks: _per_node(name, ranks, wire) for ranks, wire in served if dtype_of(wire) is BF16}
            calls = [partial(check_graph_safe_transport, name, *each) for each in hosts.items()]
            made.append(Check(WITHOUT_VALUES, lambda: sum(call() for call in calls), None, Sizes))
        counts = [ranks for ranks, wire in served if wire is BF16 and ranks > 1]
        return made + (
            [_process_check(name, traits, min(counts), modules)] if processes and counts and not traits.blocking else []
        )
    formats = [(given, sizes) for given in _formats(traits) if (sizes := _sizes(name, given))]
    made = [_experts_check(name, given, sizes, traits) for given, sizes in formats]
    for given, sizes in () if quick else formats:
        made.append(_larger_experts_check(name, given, sizes, traits))
    if formats and _torch_only(traits):
        graph = partial(check_graph_safe_experts, name)
        calls = [partial(graph, f.weights, f.dtype, f.compute, sizes, f.activation) for f, sizes in formats]
        made.append(Check(WITHOUT_VALUES, lambda: sum(call() for call in calls), None, Sizes))
    if traits.batch_invariant:
        made += [_invariance_check(name, given, sizes) for given, sizes in formats if _invariant(name, given, sizes)]
    return made


def _torch_only(traits: Traits) -> bool:
    """Whether calls should run on tensors without values."""
    return traits.graph_safe and "cpu" in traits.kinds and not traits.library


def fault_check(name: str, modules: Sequence[str] = ()) -> Check:
    """A check in processes with one fault each. Raises ConfigError for experts and for transports of one rank."""
    if kind_of(name) != "transport":
        raise ConfigError(f"{name} is an experts backend; fault tests are for transports only")
    campaign = Campaign(transports_of(name), modules=tuple(modules))

    def run() -> int:
        report = run_worlds(campaign, range(FAULT_WORLDS))
        bad = [(world.plan, row) for world in report.worlds for row in world.bad]
        lines = [f"world {plan.number} ({plan.describe()}), rank {row.rank}: {row.outcome}" for plan, row in bad[:3]]
        require(report.passed, f"{len(bad)} outcomes after faults are wrong: {'; '.join(lines)}")
        return len(report.worlds)

    return Check(f"{FAULT_WORLDS} worlds with faults, seed {campaign.seed}", run, None, Sizes)


def untried(name: str) -> tuple[str, ...]:
    """Formats that the traits claim and the kit does not test, and formats that the backend rejects."""
    traits = KINDS[kind_of(name)][name].traits
    if isinstance(traits, TransportTraits):
        unknown = [f"{family} on the wire, which its traits claim" for family in sorted(traits.wire - WIRES.keys())]
        refused = [
            (f"{ranks} ranks, {wire.name} on the wire", _refused(name, (ranks, wire)))
            for ranks, wire in _places(traits)
        ]
        return (*unknown, *(f"{what}: {why}" for what, why in refused if why))
    unknown = [f"{family} weights, which its traits claim" for family in sorted(traits.weights - WEIGHTS)]
    unknown += ["biases, which its traits claim"] if traits.biases else []
    refused = [(_name_of(given), refusal_of_experts(name, given, SIZES[-1])) for given in _formats(traits)]
    return (*unknown, *(f"{what}: {why}" for what, why in refused if why))


def _places(traits: TransportTraits) -> list[tuple[int, QuantScheme]]:
    """Numbers of ranks and wire formats, by the traits."""
    counts = [n for n in RANKS if traits.min_ranks <= n <= (traits.max_ranks or n)]
    schemes = [scheme for family in sorted(traits.wire) for scheme in WIRES.get(family, ())]
    return [(ranks, wire) for ranks in counts for wire in schemes]


def _refused(name: str, place: tuple[int, QuantScheme]) -> str:
    """Reasons against a number of ranks in any arrangement of hosts; empty if one is supported."""
    stated = [refusal_of_transport(name, *place, per_node) for per_node in PER_NODE]
    return "" if "" in stated else stated[0]


def _per_node(name: str, ranks: int, wire: QuantScheme) -> int | None:
    return next(per_node for per_node in PER_NODE if not refusal_of_transport(name, ranks, wire, per_node))


def _name_of_place(ranks: int, wire: QuantScheme, per_node: int | None) -> str:
    hosts = f", {per_node} a host" if per_node else ""
    return f"{ranks} {'rank' if ranks == 1 else 'ranks'}{hosts}, {wire.name} on the wire"


def _transport_check(name: str, traits: TransportTraits, ranks: int, wire: QuantScheme, per_node: int | None) -> Check:
    dtype, digested = dtype_of(wire), traits.deterministic
    what = _name_of_place(ranks, wire, per_node)

    def run() -> int:
        cases = check_transport(name, num_ranks=ranks, wire=wire, dtype=dtype, ranks_per_node=per_node)
        check_leaves_nothing(call_of_transport(name, ranks, wire, dtype, per_node), what)
        return cases

    return Check(
        what,
        run,
        (lambda: outputs_of_transport(name, ranks, wire, dtype, per_node)) if digested else None,
        lambda: Sizes.of(suitable_cases(name, ranks), HIDDEN),
    )


def _larger_transport_check(
    name: str, traits: TransportTraits, ranks: int, wire: QuantScheme, per_node: int | None
) -> Check:
    """Many tokens, many experts and other hidden sizes in one check, without what the transport refuses."""
    dtype, groups = dtype_of(wire), cache(lambda: _larger_cases(name, traits, ranks, wire, per_node))

    def run() -> int:
        each = partial(check_transport, name, num_ranks=ranks, wire=wire, dtype=dtype, ranks_per_node=per_node)
        return sum(each(hidden_size=hidden, cases=cases) for cases, hidden in groups())

    def outputs() -> list[Tensor]:
        each = partial(outputs_of_transport, name, ranks, wire, dtype, per_node)
        return [y_TH for cases, hidden in groups() for y_TH in each(cases=cases, hidden=hidden)]

    def sizes() -> Sizes:
        return reduce(or_, (Sizes.of(cases, hidden) for cases, hidden in groups()), Sizes())

    what = f"{_name_of_place(ranks, wire, per_node)}, larger sizes"
    return Check(what, run, outputs if traits.deterministic else None, sizes)


def _larger_cases(
    name: str, traits: TransportTraits, ranks: int, wire: QuantScheme, per_node: int | None
) -> list[tuple[list[RoutingCase], int]]:
    """Cases with the hidden size in which the transport runs them."""
    refusal = partial(refusal_of_transport, name, ranks, wire, per_node)
    many = larger_routings(ranks)
    first = [*_not_refused(many, partial(refusal, hidden=HIDDEN))]
    for slots in SLOTS:
        first += _not_refused([routings_of_slots(ranks, slots)], partial(refusal, hidden=HIDDEN))
    groups = [(first, HIDDEN)]
    groups += [(_not_refused(many[1:2], partial(refusal, hidden=hidden)), hidden) for hidden in HIDDEN_SIZES]
    return [(suited_to(traits, cases), hidden) for cases, hidden in groups if cases]


def _not_refused(cases: list[RoutingCase], refusal: Callable[..., str]) -> list[RoutingCase]:
    """The cases of one number of experts without those that have too many tokens."""
    refused = partial(refusal, experts=cases[0].expert_map.num_experts)
    if not refused(tokens=max(max(case.num_tokens) for case in cases)):
        return cases
    return [case for case in cases if not refused(tokens=max(case.num_tokens))]


def _process_check(name: str, traits: TransportTraits, ranks: int, modules: Sequence[str]) -> Check:
    per_node = _per_node(name, ranks, BF16)

    def run() -> int:
        here = outputs_of_transport(name, ranks, BF16, BF16, per_node)
        there = outputs_on_processes(name, ranks, per_node, modules)
        same = not traits.deterministic or bits_of(*here) == bits_of(*there)
        require(same, "processes give other bits than ranks of one process")
        return len(suitable_cases(name, ranks))

    def sizes() -> Sizes:
        return Sizes.of(suitable_cases(name, ranks), HIDDEN)

    return Check(f"{ranks} processes over gloo, bf16 on the wire", run, None, sizes, PROCESSES)


def _formats(traits: ExpertsTraits) -> Iterator[Format]:
    """Stored weights and activations, by the traits; further formats in one dtype."""
    dtypes = [dtype for dtype in (FP32, BF16, FP16) if dtype.name in traits.dtypes]
    for dtype in dtypes:
        if "plain" in traits.weights:
            yield from _computed({"weights": dtype.name}, dtype, traits)
        for quant in FP8_BLOCKS if "fp8_block" in traits.weights else ():
            if not traits.block_sides or set(quant["block"]) <= traits.block_sides:
                yield from _computed(quant, dtype, traits)
    for kind in sorted(traits.weights & FURTHER):
        yield from _computed({"weights": kind}, BF16 if BF16 in dtypes else dtypes[0], traits)
    if "plain" in traits.weights and "plain" in traits.computes:
        for activation in sorted(traits.activations - {"silu"}):
            yield Format({"weights": dtypes[0].name}, dtypes[0], dtypes[0], activation)


def _computed(quant: Mapping[str, Any], dtype: Plain, traits: ExpertsTraits) -> Iterator[Format]:
    """One format of weights with plain activations, and with its own if the traits have them."""
    own = QuantConfig.parse(quant, "certify").activation_scheme
    for family in traits.computes:
        if family == "plain":
            yield Format(quant, dtype, dtype)
        elif own is not None and own.family == family:
            yield Format(quant, dtype, own)


def _sizes(name: str, given: Format) -> tuple[int, int] | None:
    return next((sizes for sizes in SIZES if not refusal_of_experts(name, given, sizes)), None)


def _name_of(given: Format) -> str:
    what = "FP8 activations" if isinstance(given.compute, Fp8Block) else f"{given.compute.name} activations"
    gate = "" if given.activation == "silu" else f", {given.activation}"
    return f"{given.weights.name} weights, {what}, {given.dtype.name} out{gate}"


def _invariant(name: str, given: Format, sizes: tuple[int, int]) -> bool:
    """Check batch invariance in one format, if the backend supports it."""
    return given.activation == "silu" and not refusal_of_experts(name, given, sizes, batch_invariant=True)


def _experts_check(name: str, given: Format, sizes: tuple[int, int], traits: ExpertsTraits) -> Check:
    def run() -> int:
        hidden, inner = sizes
        cases = check_experts(
            name, given.weights, dtype=given.dtype, compute=given.compute, hidden_size=hidden, intermediate_size=inner,
            activation=given.activation,
        )  # fmt: skip
        check_leaves_nothing(call_of_experts(name, given.weights, given.dtype, given.compute, sizes), _name_of(given))
        return cases

    digested = traits.deterministic and given.activation == "silu"
    outputs = partial(outputs_of_experts, name, given.weights, given.dtype, given.compute, sizes)

    def reached() -> Sizes:
        return Sizes.of(hostile_routings(1, num_experts=SLOTS_OF_CASES, top_k=TOP_K), *sizes)

    return Check(_name_of(given), run, outputs if digested else None, reached)


def _larger_experts_check(name: str, given: Format, sizes: tuple[int, int], traits: ExpertsTraits) -> Check:
    """Many tokens, many experts and further sizes in one check, without what the backend refuses."""
    groups = cache(lambda: list(_larger_groups(name, given, sizes)))

    def run() -> int:
        each = partial(check_experts, name, given.weights, dtype=given.dtype, compute=given.compute)
        return sum(
            each(
                hidden_size=hidden, intermediate_size=inner, activation=given.activation, cases=cases,
                num_slots=cases[0].expert_map.num_slots(0),
            )
            for cases, (hidden, inner) in groups()
        )  # fmt: skip

    def outputs() -> list[Tensor]:
        each = partial(outputs_of_experts, name, given.weights, given.dtype, given.compute)
        return [y for cases, place in groups() for y in each(place, cases=cases)]

    def reached() -> Sizes:
        return reduce(or_, (Sizes.of(cases, *place) for cases, place in groups()), Sizes())

    digested = traits.deterministic and given.activation == "silu"
    return Check(f"{_name_of(given)}, larger sizes", run, outputs if digested else None, reached)


def _larger_groups(
    name: str, given: Format, sizes: tuple[int, int]
) -> Iterator[tuple[list[RoutingCase], tuple[int, int]]]:
    """Cases with the hidden and the intermediate size at which the backend runs them."""
    many = larger_routings(1, num_experts=SLOTS_OF_CASES, top_k=TOP_K)
    if given.activation != "silu":  # differs in arithmetic only
        many = many[1:2]
    else:
        for slots in SLOTS:
            candidates = (sizes,) if slots < MANY_SLOTS else SMALL_SIZES
            yield from _at_first_size(name, given, [routings_of_slots(1, slots, top_k=TOP_K)], candidates)
    yield from _at_first_size(name, given, many, (sizes,))
    for further in FURTHER_SIZES:
        yield from _at_first_size(name, given, many[2:3] or many, further)


def _at_first_size(
    name: str, given: Format, cases: list[RoutingCase], candidates: Sequence[tuple[int, int]]
) -> Iterator[tuple[list[RoutingCase], tuple[int, int]]]:
    """The cases at the first sizes that the backend supports; without those that have too many tokens for it."""
    rows_of_block = 1 if given.weights.block is None else given.weights.block[0]
    for sizes in candidates:
        if 1 < rows_of_block < WHOLE and sizes[1] % rows_of_block:  # a block would hold rows of gate and of up
            continue
        if served := _not_refused(cases, partial(refusal_of_experts, name, given, sizes)):
            yield served, sizes
            return


def _invariance_check(name: str, given: Format, sizes: tuple[int, int]) -> Check:
    hidden, inner = sizes
    run = partial(check_invariance, name, given.weights, dtype=given.dtype, compute=given.compute)
    what = f"{_name_of(given)}, batch-invariant"

    def reached() -> Sizes:
        cases = hostile_routings(1, num_experts=SLOTS_OF_CASES)
        return Sizes.of([case for case in cases if case.name == "uneven"], *sizes)

    return Check(what, partial(run, hidden_size=hidden, intermediate_size=inner), None, reached)
