"""Checks of experts backends against the reference in f32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from moe_mk.experts.base import EXPERTS, ExpertsContext, FusedExperts
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.kernels.reference.activation import CLAMPED
from moe_mk.lab.testing.bits import bits_of
from moe_mk.lab.testing.calls import check_alone, check_batch_invariance, check_calls_of_experts
from moe_mk.lab.testing.cases import RoutingCase, hostile_routings
from moe_mk.lab.testing.limits import fake, later_call, no_global_changes, no_host_reads, require, require_close
from moe_mk.oracle.expected_error import experts_error
from moe_mk.permute import permute, weight_and_reduce
from moe_mk.quant.plain import FP32, Plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.tokens import LAYOUT_NAMES, BatchedTokens, GroupedTokens, OutputStage, RowTokens, Tokens
from moe_mk.weights.expert_weights import CANONICAL, ExpertWeights, Weights
from moe_mk.weights.layer_weights import as_mapped

OF_ACTIVATIONS = ("even", "no tokens anywhere", "some -1")
"""Cases for activations other than silu, which differ in arithmetic only."""
CLAMPED_AT = 1.5
UNGATED = frozenset({"relu2"})
"""Activations of models with ungated experts."""


def check_experts(
    name: str,
    weights: QuantScheme,
    *,
    dtype: Plain,
    compute: QuantScheme | None = None,
    hidden_size: int = 192,
    intermediate_size: int = 128,
    num_slots: int = 5,
    device: torch.device | str = "cpu",
    activation: str = "silu",
    cases: Sequence[RoutingCase] | None = None,
) -> int:
    """Every hostile case through one experts backend, in every layout it reads, against the reference in f32.

    weights: how the experts are stored; read as a stack and as mapped matrices. compute: what activations are rounded
    to; None is the layer's dtype. activation: one that its traits have; those other than silu run in fewer cases.
    cases: of one rank with num_slots experts, each run with one kind of weights; None is `hostile_routings`.
    Checks the output, its declared stage, that padding is never read, that inputs and weights are not modified, that
    two calls give equal bits if the backend is declared deterministic, that outputs follow their weights, that NaN
    stays in its row, and that states of the process are left alone.
    """
    where, compute = torch.device(device), compute or dtype
    backend = EXPERTS[name](context_of(dtype, compute, activation, num_slots, hidden_size, intermediate_size, where))
    exact = FP32 if isinstance(compute, Plain) else compute
    reference = ReferenceExperts(context_of(FP32, exact, activation, num_slots, hidden_size, intermediate_size, where))
    stacks = [
        random_experts(weights, num_slots, hidden_size, intermediate_size, where, seed, gated=activation not in UNGATED)
        for seed in ((11, 12) if cases is None else (11,))
    ]
    pair = _Pair(backend, reference, experts_error(dtype, compute, weights, hidden_size))
    stack, ran = stacks[0], 0
    hostile = hostile_routings(1, num_experts=num_slots, top_k=min(3, num_slots), device=where)
    chosen = cases or [case for case in hostile if activation == "silu" or case.name in OF_ACTIVATIONS]
    layouts = [given for given in (stack, as_mapped(stack)) if given.layout in backend.traits.layouts]
    for given in layouts if cases is None else layouts[-1:]:
        before, own = bits_of(stack), backend.relayout(given)
        require(bits_of(stack) == before, f"{name}: {given.layout} weights were changed by relayout")
        for case, travelled in product(chosen, {dtype, compute}):
            what = f"{name}, {weights.name} {given.layout}, {dtype.name}, {travelled.name} rows, {case.name}"
            rows = partial(_rows, case, travelled, dtype, hidden_size, num_slots)
            ran += pair.check(rows, stack, own, what, given)
        require(bits_of(stack) == before, f"{name}: {given.layout} weights were changed")
    require(ran > 0, f"{name} reads neither {CANONICAL} nor mapped weights")
    first, what = _rows(chosen[0], dtype, dtype, hidden_size, num_slots), f"{name}, {weights.name}, {dtype.name}"
    if cases is None and isinstance(compute, Plain):
        check_alone(backend, backend.relayout(layouts[0]), first, pair.error, what)
    if CANONICAL in backend.traits.layouts and cases is None:
        with no_global_changes(what):
            check_calls_of_experts(backend, reference, stacks, first, pair.error, what)
    return ran


@dataclass(frozen=True)
class _Pair:
    """A backend and the reference it is compared with, up to an error."""

    backend: FusedExperts
    reference: FusedExperts
    error: float

    def check(
        self, rows: Callable[[], RowTokens], stack: ExpertWeights, own: Weights, what: str, given: Weights
    ) -> int:
        """Run the same rows in every layout of the backend; returns their number.

        own: the stack in the layout of the backend, made of `given`.
        """
        expected = weight_and_reduce(self.reference.run(rows(), stack), rows(), OutputStage.REDUCED).y
        layouts = self.backend.traits.consumes

        def check(layout: type, backend: FusedExperts, weights: Weights) -> None:
            tokens = permute(rows(), (layout,))
            _check_run(backend, weights, tokens, expected, self.error, f"{what}, {LAYOUT_NAMES[layout]}")

        def check_alone(layout: type) -> None:
            fresh = type(self.backend)(self.backend.context)
            check(layout, fresh, fresh.relayout(given))

        for layout in layouts:
            later_call(partial(check, layout, self.backend, own), partial(check_alone, layout))
        return len(layouts)


def check_invariance(
    name: str, weights: QuantScheme, *, dtype: Plain, compute: QuantScheme, hidden_size: int, intermediate_size: int,
    num_slots: int = 5,
) -> int:  # fmt: skip
    """A batch sorted by expert, each row separately and together; returns the number of rows compared."""
    cpu = torch.device("cpu")
    context = context_of(dtype, compute, "silu", num_slots, hidden_size, intermediate_size, cpu)
    backend = EXPERTS[name](replace(context, batch_invariant=True))
    (case,) = (case for case in hostile_routings(1, num_experts=num_slots) if case.name == "uneven")
    rows = _rows(case, dtype, dtype, hidden_size, num_slots)
    stack = random_experts(weights, num_slots, hidden_size, intermediate_size, cpu)
    check_batch_invariance(backend, stack, rows, f"{name}, {weights.name}, {dtype.name}")
    return len(rows.ids_RK)


def context_of(
    dtype: Plain, compute: QuantScheme, activation: str, num_slots: int, hidden_size: int, intermediate_size: int,
    device: torch.device,
) -> ExpertsContext:  # fmt: skip
    """The context of experts; clamped activations clamp about one value in six."""
    sizes = num_slots, hidden_size, intermediate_size
    context = ExpertsContext(dtype, compute, activation, *sizes, device)
    return replace(context, swiglu_limit=CLAMPED_AT, swiglu_alpha=1.702) if activation in CLAMPED else context


def random_experts(
    scheme: QuantScheme, num_slots: int, hidden_size: int, intermediate_size: int, device: torch.device, seed: int = 11,
    *, gated: bool = True,
) -> ExpertWeights:  # fmt: skip
    """A stack whose outputs have the size of its inputs; gate and up differ, so that swapping them is detected."""
    draw = torch.Generator("cpu").manual_seed(seed)

    def normal(rows: int, columns: int, gain: float) -> QuantTensor:
        x = torch.randn((num_slots, rows, columns), generator=draw, dtype=torch.float32, device="cpu")
        return scheme.quantize((x * gain * columns**-0.5).to(device))

    first = normal((2 if gated else 1) * intermediate_size, hidden_size, 1.5)
    return ExpertWeights(first, normal(hidden_size, intermediate_size, 1.0), gated=gated)


def _check_run(
    backend: FusedExperts, weights: Weights, tokens: Tokens, expected: Tensor, error: float, what: str
) -> None:
    if isinstance(tokens, BatchedTokens):
        tokens = _poisoned(tokens)
    before = bits_of(tokens)
    output = backend.run(tokens, weights)
    declared = backend.traits.emits[type(tokens)]
    require(output.stage is declared, f"{what}: output is {output.stage.name}, the traits declare {declared.name}")
    require(output.y.dtype is backend.context.dtype.dtype, f"{what}: output is {output.y.dtype}")
    require(output.y.device == expected.device, f"{what}: output is on device {output.y.device}")
    wanted = output_shape(tokens, output.stage)
    require(output.y.shape == wanted, f"{what}: output has shape {tuple(output.y.shape)}, not {tuple(wanted)}")
    require(bits_of(tokens) == before, f"{what}: the tokens were changed")
    reduced = weight_and_reduce(output, tokens, OutputStage.REDUCED).y
    require_close(reduced.float(), expected, error, what)
    again = weight_and_reduce(backend.run(tokens, weights), tokens, OutputStage.REDUCED).y
    require_close(again.float(), expected, error, f"{what}, called again")
    same = not backend.traits.deterministic or torch.equal(reduced, again)
    require(same, f"{what}: two calls give different bits")


def check_graph_safe_experts(
    name: str, weights: QuantScheme, dtype: Plain, compute: QuantScheme, sizes: tuple[int, int], activation: str
) -> int:
    """One call in every layout on tensors without values; raises what torch raises for operators without fakes."""
    case, slots, cpu = hostile_routings(1, num_experts=5)[0], 5, torch.device("cpu")
    backend = EXPERTS[name](context_of(dtype, compute, activation, slots, *sizes, cpu))
    stack = random_experts(weights, slots, *sizes, cpu, gated=activation not in UNGATED)
    own = backend.relayout(stack if CANONICAL in backend.traits.layouts else as_mapped(stack))
    rows = _rows(case, dtype, dtype, sizes[0], slots)
    for layout in backend.traits.consumes:
        tokens = permute(rows, (layout,))
        with no_host_reads(f"{name}, {weights.name}, {dtype.name}, {LAYOUT_NAMES[layout]}") as mode:
            backend.run(fake(mode, tokens), fake(mode, own))
    return len(backend.traits.consumes)


def output_shape(tokens: Tokens, stage: OutputStage) -> torch.Size:
    """(R, H) if reduced, otherwise that of the tokens."""
    if isinstance(tokens, RowTokens):
        return tokens.x_RH.shape
    x = tokens.x_NH if isinstance(tokens, GroupedTokens) else tokens.x_LSH
    if stage is not OutputStage.REDUCED:
        return x.shape
    source = tokens.home if isinstance(tokens, BatchedTokens) else tokens
    assert source is not None
    return torch.Size((source.num_rows, x.shape[-1]))


def _rows(case: RoutingCase, travelled: QuantScheme, dtype: Plain, hidden_size: int, num_slots: int) -> RowTokens:
    routing = case.routings[0]
    draw = torch.Generator("cpu").manual_seed(3)
    x_RH = torch.randn((routing.num_tokens, hidden_size), generator=draw, dtype=torch.float32, device="cpu")
    x = travelled.quantize(case.scaled(x_RH).to(device=routing.ids_TK.device, dtype=dtype.dtype))
    return RowTokens(x.changed(_apart) if case.gaps else x, routing.ids_TK, routing.weights_TK, num_slots)


def _apart(part: Tensor) -> Tensor:
    """Return the rows at twice their distance in memory, with the bits of NaN between them."""
    rows = torch.full((len(part), 2, part[0].nbytes), 0x7F, dtype=torch.uint8, device=part.device)
    made = rows.view(part.dtype).view(len(part), 2, *part.shape[1:])[:, 0]
    return made.copy_(part)


def _poisoned(tokens: BatchedTokens) -> BatchedTokens:
    """NaN in every padded slot, values and scales: 0x7F is NaN in e4m3, 0xFF in UE8M0."""
    x, count = tokens.x_LSH, tokens.x_LSH.values.shape[1]
    slot_S = torch.arange(count, dtype=torch.int64, device=tokens.counts_L.device)
    padding_LS = slot_S[None] >= tokens.counts_L[:, None]
    for part in (x.values, x.scales):
        if part is None:
            continue
        if part.element_size() == 1:
            part.view(torch.uint8)[padding_LS] = 0x7F if part.dtype is torch.float8_e4m3fn else 0xFF
        else:
            part[padding_LS] = float("nan")
    return tokens
