"""The conformance kit as one command and as one line of a test file: every check a backend's traits call for.

certificate = certify("one_by_one")            # or an experts backend
TestOneByOne = backend_conformance("one_by_one")   # a pytest class, one test a check
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_mk.config.moe import MoEConfig
from moe_mk.config.problem import Problem
from moe_mk.config.quant import QuantConfig
from moe_mk.config.shipped import device_profile
from moe_mk.config.traits import Traits
from moe_mk.errors import CommError, ConfigError, UnsupportedError
from moe_mk.experts.base import EXPERTS, ExpertsTraits
from moe_mk.external.library import emulated, installed
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, TransportTraits
from moe_mk.quant.fp8_block import FP8_1x128, FP8_1x128_UE8M0, FP8_128x128, FP8_128x128_UE8M0, Fp8Block
from moe_mk.quant.int8 import INT8_TOKEN
from moe_mk.quant.kinds import KINDS as KINDS_OF_WEIGHTS
from moe_mk.quant.kinds import PLAIN_KINDS
from moe_mk.quant.microscaling import MXFP8
from moe_mk.quant.nvfp4 import NVFP4_TOKENS
from moe_mk.quant.plain import BF16, FP16, FP32, Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.registry import Registry, did_you_mean
from moe_mk.testing.bits import bits_of
from moe_mk.testing.certificate import Certificate, Failed, Passed, traits_of
from moe_mk.testing.diagnosis import explained
from moe_mk.testing.experts import check_experts
from moe_mk.testing.laws import HOPS, LOADS, PROCESSES, RUNS, SIGNATURE, VALUES, Law, law_of
from moe_mk.testing.limits import NonConforming, require
from moe_mk.testing.on_ranks import (
    HIDDEN,
    INNER,
    TOP_K,
    journey,
    outputs_of_experts,
    outputs_of_transport,
    outputs_on_processes,
    suitable_cases,
)
from moe_mk.testing.transports import check_transport

KINDS: Mapping[str, Registry[Any]] = {"transport": PREPARE_FINALIZE, "experts": EXPERTS}
RANKS = (1, 2, 4)
PROCESSES_OF_A_WORLD = 2
WIRES: Mapping[str, tuple[QuantScheme, ...]] = {
    "plain": (FP32, BF16),
    "fp8": (FP8_1x128, FP8_1x128_UE8M0),
    "int8": (INT8_TOKEN,),
    "mxfp8": (MXFP8,),
    "nvfp4": (NVFP4_TOKENS,),
}
"""What is sent for each family that a transport says it carries."""
FURTHER = frozenset(KINDS_OF_WEIGHTS) - {*PLAIN_KINDS, "fp8_block"}
"""Types of stored experts beside plain ones and FP8 blocks, which are tried in every dtype."""
WEIGHTS = FURTHER | {"plain", "fp8_block"}
"""Types of weights that experts are tried with."""
OnCheck = Callable[[str, int, int], None]
"""Told (check, done, total)."""


@dataclass(frozen=True)
class Check:
    """One thing to check. run: returns the number of cases, or raises. outputs: what the digest is made of."""

    name: str
    run: Callable[[], int]
    outputs: Callable[[], list[Tensor]] | None
    blame: Callable[[], Law | None]
    """The law behind wrong values, where it can be told."""


def certify(name: str, *, processes: bool = True, on_check: OnCheck | None = None) -> Certificate:
    """Run every check on a registered backend and collect all failures, not the first.

    processes: also run a transport on real processes over gloo, which takes seconds. Raises ConfigError for a name that
    nobody registered, UnsupportedError for a backend that cannot run here at all.
    """
    kind = kind_of(name)
    if name in KINDS[kind].broken:
        return _not_loaded(name, kind, KINDS[kind].broken[name])
    traits: Traits = KINDS[kind][name].traits
    _must_run_here(name, traits)
    passed: list[Passed] = []
    failed: list[Failed] = []
    checks = checks_of(name, processes=processes)
    for done, check in enumerate(checks):
        if on_check is not None:
            on_check(check.name, done, len(checks))
        result = _tried(check)
        (passed if isinstance(result, Passed) else failed).append(result)  # type: ignore[arg-type]
    origin, untried = KINDS[kind].origin(name), _untried(name, traits)
    if traits.library and traits.library not in installed():
        untried = (*untried, f"{traits.library} itself: its emulation answered")
    return Certificate(name, kind, origin, traits_of(traits), tuple(passed), tuple(failed), untried)


def backend_conformance(name: str, *, processes: bool = False) -> type:
    """A test class for a backend: one test a check, in one line of a test file. The backend must be registered."""
    body: dict[str, object] = {"__doc__": f"Conformance of {name}."}
    for check in checks_of(name, processes=processes):
        body[f"test_{_identifier(check.name)}"] = _as_test(check)
    return type(f"TestConformanceOf_{_identifier(name)}", (), body)


def kind_of(name: str) -> str:
    """Whether a name is a transport or an experts backend, broken plugins included; raises ConfigError for neither."""
    known: list[str] = []
    for kind, registry in KINDS.items():
        names = [*registry, *registry.broken]
        if name in names:
            return kind
        known += names
    raise ConfigError(f"no transport or experts backend is called {name!r}{did_you_mean(name, known)}")


def checks_of(name: str, *, processes: bool) -> list[Check]:
    """Everything the traits of a backend call for."""
    traits = KINDS[kind_of(name)][name].traits
    if isinstance(traits, TransportTraits):
        return _transport_checks(name, traits, processes=processes)
    return _experts_checks(name, traits)


def _transport_checks(name: str, traits: TransportTraits, *, processes: bool) -> list[Check]:
    counts = _counts(traits)
    schemes = [scheme for family in sorted(traits.wire) for scheme in WIRES.get(family, ())]
    made = [
        _transport_check(name, traits, ranks, wire)
        for ranks in counts
        for wire in schemes
        if not _refusal(name, ranks, wire)
    ]
    if processes and PROCESSES_OF_A_WORLD in counts and not traits.blocking:
        made.append(_process_check(name, traits))
    return made


def _transport_check(name: str, traits: TransportTraits, ranks: int, wire: QuantScheme) -> Check:
    dtype, digested = _dtype_of(wire), traits.deterministic
    return Check(
        f"{ranks} {'rank' if ranks == 1 else 'ranks'}, {wire.name} on the wire",
        lambda: check_transport(name, num_ranks=ranks, wire=wire, dtype=dtype),
        (lambda: outputs_of_transport(name, ranks, wire, dtype)) if digested else None,
        lambda: explained(*journey(name, ranks, wire, dtype)),
    )


def _counts(traits: TransportTraits) -> list[int]:
    return [n for n in RANKS if traits.min_ranks <= n <= (traits.max_ranks or n)]


def _dtype_of(wire: QuantScheme) -> Plain:
    return wire if isinstance(wire, Plain) else BF16


def _refusal(name: str, ranks: int, wire: QuantScheme) -> str:
    """Why a transport says beforehand that it cannot serve a format on some ranks; empty if it can."""
    dtype, cls = _dtype_of(wire), PREPARE_FINALIZE[name]
    model = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": 8, "quant": {"weights": dtype.name}}
    config = MoEConfig.parse({"model": model, "router": {"top_k": TOP_K}}, "certify")
    config = config.with_(ep=ranks, tokens=next(iter(cls.traits.tokens)), allow_emulated=True, max_num_tokens=64)
    problem = Problem(config, device_profile("cpu"), dtype, 64, installed(), emulated())
    reasons = [reason for reason in cls.reasons_against(problem) if reason.code not in ("device", "library")]
    return "; ".join(reason.text for reason in reasons)


def _process_check(name: str, traits: TransportTraits) -> Check:
    def run() -> int:
        here = outputs_of_transport(name, PROCESSES_OF_A_WORLD, BF16, BF16)
        there = outputs_on_processes(name, PROCESSES_OF_A_WORLD)
        same = not traits.deterministic or bits_of(*here) == bits_of(*there)
        require(same, "processes give other bits than ranks of one process")
        return len(suitable_cases(name, PROCESSES_OF_A_WORLD))

    return Check(f"{PROCESSES_OF_A_WORLD} processes over gloo, bf16 on the wire", run, None, lambda: PROCESSES)


def _experts_checks(name: str, traits: ExpertsTraits) -> list[Check]:
    dtypes = [dtype for dtype in (FP32, BF16, FP16) if dtype.name in traits.dtypes]
    made: list[Check] = []
    for dtype in dtypes:
        if "plain" in traits.weights and "plain" in traits.computes:
            made.append(_experts_check(name, dtype, dtype, dtype, traits))
        if "fp8_block" not in traits.weights:
            continue
        for weights, activations in ((FP8_128x128, FP8_1x128), (FP8_128x128_UE8M0, FP8_1x128_UE8M0)):
            if traits.block_sides and weights.rows not in traits.block_sides:
                continue
            for compute in traits.computes:
                made.append(_experts_check(name, weights, dtype, activations if compute == "fp8" else dtype, traits))
    return made + _further_checks(name, traits, BF16 if BF16 in dtypes else dtypes[0])


def _further_checks(name: str, traits: ExpertsTraits, dtype: Plain) -> list[Check]:
    """The other types in which checkpoints store experts, in one dtype: with plain activations, and with their own."""
    made: list[Check] = []
    for kind in sorted(traits.weights & FURTHER):
        quant = QuantConfig.parse({"weights": kind}, "certify")
        own = quant.activation_scheme
        if "plain" in traits.computes:
            made.append(_experts_check(name, quant.weight_scheme, dtype, dtype, traits))
        if own is not None and own.family in traits.computes:
            made.append(_experts_check(name, quant.weight_scheme, dtype, own, traits))
    return made


def _experts_check(name: str, weights: QuantScheme, dtype: Plain, compute: QuantScheme, traits: ExpertsTraits) -> Check:
    what = "FP8 activations" if isinstance(compute, Fp8Block) else f"{compute.name} activations"
    return Check(
        f"{weights.name} weights, {what}, {dtype.name} out",
        lambda: check_experts(name, weights, dtype=dtype, compute=compute),
        (lambda: outputs_of_experts(name, weights, dtype, compute)) if traits.deterministic else None,
        lambda: None,
    )


def _tried(check: Check) -> Passed | Failed:
    try:
        cases = check.run()
        digest = hashlib.sha256(b"".join(bits_of(*check.outputs()))).hexdigest() if check.outputs else ""
        return Passed(check.name, cases, digest)
    except NonConforming as problem:
        return _failed(check.name, _law(check, str(problem)), str(problem))
    except CommError as problem:
        return _failed(check.name, HOPS, str(problem))
    except Exception as problem:  # a foreign backend may fail in any way; a certificate says in which
        return _failed(check.name, RUNS, f"{type(problem).__name__}: {problem}")


def _law(check: Check, message: str) -> Law:
    law = law_of(message)
    return (check.blame() or law) if law is VALUES else law


def _failed(check: str, law: Law, message: str) -> Failed:
    return Failed(check, law.name, law.text, message)


def _untried(name: str, traits: Traits) -> tuple[str, ...]:
    """Families of formats that the traits claim and the kit does not try, and what the backend refuses by itself."""
    if isinstance(traits, TransportTraits):
        unknown = [f"{family} on the wire, which its traits claim" for family in sorted(traits.wire - WIRES.keys())]
        tried = [(ranks, wire) for ranks in _counts(traits) for f in sorted(traits.wire) for wire in WIRES.get(f, ())]
        refused = [(ranks, wire.name, _refusal(name, ranks, wire)) for ranks, wire in tried]
        return (*unknown, *(f"{ranks} ranks, {wire} on the wire: {why}" for ranks, wire, why in refused if why))
    assert isinstance(traits, ExpertsTraits)
    return tuple(f"{family} weights, which its traits claim" for family in sorted(traits.weights - WEIGHTS))


def _not_loaded(name: str, kind: str, reason: str) -> Certificate:
    law = SIGNATURE if law_of(reason) is SIGNATURE else LOADS
    return Certificate(name, kind, "not loaded", {}, (), (_failed("load the plugin", law, reason),))


def _must_run_here(name: str, traits: Traits) -> None:
    reasons = []
    if "cpu" not in traits.kinds and traits.library not in emulated():
        reasons.append(f"it runs on {', '.join(sorted(traits.kinds))}; certification runs on a CPU")
    if traits.library and traits.library not in installed() | emulated():
        reasons.append(f"{traits.library} is not installed: {traits.extra or f'pip install {traits.library}'}")
    if reasons:
        raise UnsupportedError(f"{name} cannot be certified here", reasons)


def _as_test(check: Check) -> Callable[[object], None]:
    def test(self: object) -> None:
        assert check.run() > 0

    test.__doc__ = check.name
    return test


def _identifier(words: Iterable[str]) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in words)
