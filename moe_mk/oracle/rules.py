"""Reasons against a pair: those of its transport, of its experts, and of the combination."""

from __future__ import annotations

from collections.abc import Iterator

from moe_mk.config.problem import Problem, Reason
from moe_mk.experts.base import ExpertsTraits, FusedExperts
from moe_mk.permute import can_permute
from moe_mk.prepare_finalize.base import PrepareFinalize, TransportTraits
from moe_mk.tokens import LAYOUT_NAMES


def reasons_against_pair(
    transport: type[PrepareFinalize], experts: type[FusedExperts], problem: Problem
) -> list[Reason]:
    """Every reason against a pair, those of the transport first; empty if the pair is eligible."""
    return [
        *transport.reasons_against(problem),
        *experts.reasons_against(problem),
        *pair_reasons(transport.traits, experts.traits, problem),
    ]


def pair_reasons(transport: TransportTraits, experts: ExpertsTraits, problem: Problem) -> Iterator[Reason]:
    """Reasons of layout, reduction and wire."""
    produced, layout = LAYOUT_NAMES[transport.produces], layout_read(transport, experts)
    if layout is None:
        read = ", ".join(LAYOUT_NAMES[consumed] for consumed in experts.consumes)
        yield Reason("layout", f"the transport delivers {produced} tokens, the experts read {read}")
    elif experts.emits[layout] > transport.wants:
        have, want = experts.emits[layout].name.lower(), transport.wants.name.lower()
        yield Reason("reduce", f"the experts return {have} output, the transport reduces {want} output itself")
    if layout is not None and layout is not transport.produces and problem.config.kernel.graphs:
        yield Reason("graphs", "permuting rows synchronises with the host to read counts", "kernel.graphs = false")
    yield from wire_reasons(transport.wire, problem)


def wire_reasons(carries: frozenset[str], problem: Problem) -> Iterator[Reason]:
    """Reasons against a pinned wire scheme; none on a single rank, where nothing is sent."""
    wish, activations = problem.config.kernel.wire, problem.activations
    if wish in ("auto", "plain") or problem.ranks == 1:
        return
    family = activations.family if wish == "checkpoint" and activations is not None else "fp8"
    if family not in carries:
        yield Reason("wire", f"the transport does not support {family.upper()} rows", "kernel.wire = auto")
    if activations is None or (wish == "fp8" and activations.family != "fp8"):
        stored = problem.weights.name
        yield Reason(
            "wire", f"the checkpoint ({stored} experts) defines no FP8 activation scales", "kernel.wire = auto"
        )


def layout_read(transport: TransportTraits, experts: ExpertsTraits) -> type | None:
    """The layout that experts read from a transport: as produced if they consume it, else permuted; None if neither."""
    if transport.produces in experts.consumes:
        return transport.produces
    best = experts.consumes[0]
    return best if can_permute(transport.produces, best) else None
