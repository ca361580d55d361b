"""The checks of a certificate: those that the traits of a backend require, without rejected formats.

Wrong results of a transport are classified by the simplest explanation that fits.

What a backend declares that it cannot serve, so that certification does not request it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from moe_mk.config.device import DeviceProfile
from moe_mk.config.moe import MoEConfig
from moe_mk.config.problem import Problem, Reason
from moe_mk.config.quant import QuantConfig
from moe_mk.config.shipped import device_profile
from moe_mk.errors import ConfigError
from moe_mk.experts.base import EXPERTS, ExpertsTraits
from moe_mk.external.library import emulated, installed
from moe_mk.kernels.reference.activation import CLAMPED
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, TransportTraits
from moe_mk.quant.fp8_block import FP8_1x128, FP8_1x128_UE8M0, Fp8Block
from moe_mk.quant.int8 import INT8_TOKEN
from moe_mk.quant.kinds import KINDS as KINDS_OF_WEIGHTS
from moe_mk.quant.kinds import PLAIN_KINDS
from moe_mk.quant.microscaling import MXFP8
from moe_mk.quant.nvfp4 import NVFP4_TOKENS
from moe_mk.quant.plain import BF16, FP16, FP32, Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.registry import Registry, did_you_mean
from moe_mk.testing.bits import bits_of
from moe_mk.testing.calls import check_leaves_nothing
from moe_mk.testing.experts import CLAMPED_AT, check_experts, check_invariance
from moe_mk.testing.faults import Campaign, run_worlds, transports_of
from moe_mk.testing.laws import LOST, ORDER, PROCESSES, WEIGHTING, Law
from moe_mk.testing.limits import require
from moe_mk.testing.on_ranks import (
    HIDDEN,
    INNER,
    TOP_K,
    call_of_experts,
    call_of_transport,
    journey,
    outputs_of_experts,
    outputs_of_transport,
    outputs_on_processes,
    suitable_cases,
)
from moe_mk.testing.transports import check_transport

PASSED_OVER = frozenset({"device", "library"})
"""Codes of reasons: certification runs on a CPU, and on an emulation where the library is not installed."""
SIZES = ((HIDDEN, INNER), (256, 256))
"""Hidden and intermediate size; the first that a backend supports is used. 192 is no multiple of 128."""
MOST_TOKENS = 64


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


def refusal_of_transport(name: str, ranks: int, wire: QuantScheme, ranks_per_node: int | None = None) -> str:
    """Reasons against a format of a transport on some ranks; empty if supported. ranks_per_node: None: one host."""
    cls, dtype = PREPARE_FINALIZE[name], dtype_of(wire)
    model = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": 8, "quant": {"weights": dtype.name}}
    tokens = next(iter(cls.traits.tokens))
    return _settings_json(
        cls.reasons_against(_problem(model, dtype, ep=ranks, tokens=tokens, ranks_per_node=ranks_per_node))
    )


def refusal_of_experts(name: str, given: Format, sizes: tuple[int, int], *, batch_invariant: bool = False) -> str:
    """Reasons against a format of experts at a hidden and an intermediate size; empty if supported."""
    hidden, inner = sizes
    model = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": 8, "quant": dict(given.quant)}
    model |= {"activation": given.activation, "swiglu_limit": CLAMPED_AT if given.activation in CLAMPED else None}
    activations = "plain" if isinstance(given.compute, Plain) else "checkpoint"
    return _settings_json(
        EXPERTS[name].reasons_against(
            _problem(model, given.dtype, activations=activations, batch_invariant=batch_invariant)
        )
    )


def _problem(model: Mapping[str, Any], dtype: Plain, **settings: Any) -> Problem:
    config = MoEConfig.parse({"model": model, "router": {"top_k": TOP_K}}, "certify")
    config = config.with_(allow_emulated=True, max_num_tokens=MOST_TOKENS, **settings)
    profile, libraries = _machine()
    return Problem(config, profile, dtype, MOST_TOKENS, libraries, emulated())


@cache
def _machine() -> tuple[DeviceProfile, frozenset[str]]:
    """Cached, because the search for a compiler starts a process."""
    return device_profile("cpu"), installed()


def _settings_json(reasons: Iterable[Reason]) -> str:
    return "; ".join(reason.text for reason in reasons if reason.code not in PASSED_OVER)


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
    return WEIGHTING if bool(wrong.any()) and bool((cosine > 1.0 - SAME).all()) else None


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
    blame: Callable[[], Law | None]
    """The law behind wrong values, if it can be determined."""


def kind_of(name: str) -> str:
    """Whether a name is a transport or an experts backend, broken plugins included; raises ConfigError for neither."""
    known: list[str] = []
    for kind, registry in KINDS.items():
        names = [*registry, *registry.broken]
        if name in names:
            return kind
        known += names
    raise ConfigError(f"unknown transport or experts backend {name!r}{did_you_mean(name, known)}")


def checks_of(name: str, *, processes: bool) -> list[Check]:
    """The checks that the traits of a backend require."""
    traits = KINDS[kind_of(name)][name].traits
    if isinstance(traits, TransportTraits):
        served = [place for place in _places(traits) if not _refused(name, place)]
        made = [_transport_check(name, traits, *place, _per_node(name, *place)) for place in served]
        counts = [ranks for ranks, wire in served if wire is BF16 and ranks > 1]
        return made + (
            [_process_check(name, traits, min(counts))] if processes and counts and not traits.blocking else []
        )
    formats = [(given, sizes) for given in _formats(traits) if (sizes := _sizes(name, given))]
    made = [_experts_check(name, given, sizes, traits) for given, sizes in formats]
    if traits.batch_invariant:
        made += [_invariance_check(name, given, sizes) for given, sizes in formats if _invariant(name, given, sizes)]
    return made


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

    return Check(f"{FAULT_WORLDS} worlds with faults, seed {campaign.seed}", run, None, lambda: None)


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


def _transport_check(name: str, traits: TransportTraits, ranks: int, wire: QuantScheme, per_node: int | None) -> Check:
    dtype, digested = dtype_of(wire), traits.deterministic
    hosts = f", {per_node} a host" if per_node else ""
    what = f"{ranks} {'rank' if ranks == 1 else 'ranks'}{hosts}, {wire.name} on the wire"

    def run() -> int:
        cases = check_transport(name, num_ranks=ranks, wire=wire, dtype=dtype, ranks_per_node=per_node)
        check_leaves_nothing(call_of_transport(name, ranks, wire, dtype, per_node), what)
        return cases

    return Check(
        what,
        run,
        (lambda: outputs_of_transport(name, ranks, wire, dtype, per_node)) if digested else None,
        lambda: explained(*journey(name, ranks, wire, dtype, per_node)),
    )


def _process_check(name: str, traits: TransportTraits, ranks: int) -> Check:
    per_node = _per_node(name, ranks, BF16)

    def run() -> int:
        here = outputs_of_transport(name, ranks, BF16, BF16, per_node)
        there = outputs_on_processes(name, ranks, per_node)
        same = not traits.deterministic or bits_of(*here) == bits_of(*there)
        require(same, "processes give other bits than ranks of one process")
        return len(suitable_cases(name, ranks))

    return Check(f"{ranks} processes over gloo, bf16 on the wire", run, None, lambda: PROCESSES)


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
    return Check(_name_of(given), run, outputs if digested else None, lambda: None)


def _invariance_check(name: str, given: Format, sizes: tuple[int, int]) -> Check:
    hidden, inner = sizes
    run = partial(check_invariance, name, given.weights, dtype=given.dtype, compute=given.compute)
    what = f"{_name_of(given)}, batch-invariant"
    return Check(what, partial(run, hidden_size=hidden, intermediate_size=inner), None, lambda: None)
