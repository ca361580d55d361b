"""The laws of the contract of backends, the law that a failed check violates, and laws for callables of any library.

from moe_mk.lab.testing.laws import check

for outcome in check(my_fused_experts):
    print(outcome)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from itertools import count

import torch
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.experts.base import ExpertsContext
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.lab.testing.bits import bits_of
from moe_mk.lab.testing.cases import draw_experts, draw_tokens
from moe_mk.oracle.expected_error import ALL_TOKENS, ONE_TOKEN, experts_error
from moe_mk.quant.plain import BF16, FP32, Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import RowTokens
from moe_mk.weights.expert_weights import ExpertWeights


@dataclass(frozen=True)
class Law:
    """One promise of the contract."""

    name: str
    text: str


LOADS = Law("loads", "a plugin can be imported")
SIGNATURE = Law("signature", "methods take the parameters of the contract, and traits are declared")
INPUTS = Law("inputs", "a backend does not modify its inputs")
SHAPE = Law("shape", "outputs have the shape, the dtype and the device that the contract names")
STAGE = Law("stage", "an output has the stage that the traits declare")
WEIGHTING = Law("weighting", "every assignment counts once, times its routing weight")
ORDER = Law("order", "combined tokens have the order of the dispatched tokens")
LOST = Law("lost", "no token is lost")
NOWHERE = Law("nowhere", "an id of -1 contributes nothing")
PADDING = Law("padding", "padding is never read")
DETERMINISTIC = Law("deterministic", "equal inputs give equal bits, if the traits declare it")
YIELD_POINTS = Law("yield points", "every rank yields at the same points of a call, with zero tokens too")
INVARIANT = Law("invariant", "a row gets the same bits in any batch, if the traits declare it")
SLOTS = Law("slots", "every assignment reaches the slot of its expert")
CALLS = Law("calls", "a call does not depend on earlier or concurrent calls")
KEPT = Law("kept", "outputs are not changed by later calls and share no memory with inputs")
NOTHING_LEFT = Law("nothing left", "a call does not leak tensors")
ALONE = Law("alone", "NaN in one token reaches no other token")
GLOBALS = Law("globals", "a call leaves random states, default dtype, threads and modes of the process as they were")
GRAPHS = Law("graphs", "a call reads no values on the host, if the traits declare graph_safe")
PROCESSES = Law("processes", "processes and ranks of one process give the same bits")
VALUES = Law("values", "outputs are within the error limit of the number formats")
FAULTS = Law(
    "faults", "after a fault on one rank the others raise a typed error in time, and never return a wrong output"
)
RUNS = Law("runs", "every case runs without an unexpected exception")

LAWS = (
    LOADS, SIGNATURE, INPUTS, SHAPE, STAGE, WEIGHTING, ORDER, LOST, NOWHERE, PADDING, DETERMINISTIC, INVARIANT,
    SLOTS, CALLS, KEPT, NOTHING_LEFT, ALONE, GLOBALS, YIELD_POINTS, GRAPHS, PROCESSES, VALUES, FAULTS, RUNS,
)  # fmt: skip

WITH_NOWHERE = re.compile(r"(all to one rank|all to one expert|all -1|some -1)\b(?!, (grouped|batched))")
"""Cases in which some ids are -1; every case before them in the kit has none. Sorted rows contain no ids."""
ON_FRESH = "passes on a fresh instance"
AT_ONCE = "two micro-batches at once"
READ_ON_HOST = "a value is read on the host"

STATED = (
    (re.compile(r"outcomes after faults"), FAULTS),
    (re.compile(r"with a token of NaN"), ALONE),
    (re.compile(r"of the process (was|were) changed"), GLOBALS),
    (re.compile(f"{ON_FRESH}$|{AT_ONCE}|, called again: tokens"), CALLS),
    (re.compile(READ_ON_HOST), GRAPHS),
    (re.compile(r"breaks the contract|registered twice|reads neither"), SIGNATURE),
    (re.compile(r"could not be loaded"), LOADS),
    (re.compile(r"input changed|(weights|tokens) were changed"), INPUTS),
    (re.compile(r"calls leak \d+ tensors"), NOTHING_LEFT),
    (re.compile(r"changed in a later call|shares memory with an input"), KEPT),
    (re.compile(r"after a smaller call|of two weights in turn"), CALLS),
    (re.compile(r"with its own factor"), SLOTS),
    (re.compile(r"in a batch of its own"), INVARIANT),
    (re.compile(r"yield points|other ranks (wait|call)|disagree"), YIELD_POINTS),
    (re.compile(r"different bits|changes? bits"), DETERMINISTIC),
    (re.compile(r"the traits declare"), STAGE),
    (re.compile(r"dispatched tokens|output is torch|is on device|got \(|shape \(|got torch"), SHAPE),
    (re.compile(r"zeros, large and small tokens"), VALUES),
    (re.compile(r"not finite"), PADDING),
)


def law_of(message: str) -> Law:
    """The law that a message of the kit refers to."""
    for pattern, law in STATED:
        if pattern.search(message):
            return law
    return NOWHERE if WITH_NOWHERE.search(message) else VALUES


COUNTS = Law("counts", "every number of tokens gives right rows, with outliers and experts without tokens")
PERMUTED = Law("permuted", "tokens in another order get the same bits")
EMPTY = Law("empty", "a call without tokens returns no rows")
ONE_EXPERT = Law("one expert", "one expert may receive every token")
OF_CALLS = (
    VALUES, COUNTS, ONE_EXPERT, SHAPE, ALONE, INPUTS, KEPT, CALLS, DETERMINISTIC, PERMUTED, INVARIANT, EMPTY, NOWHERE,
)  # fmt: skip
"""The laws of `check`, for a callable of any library. A kernel that reads an expert -1 may damage its process: last."""

FEW = 33
"""Tokens of a case where their number does not matter: no multiple of a tile."""
TRIES = 60
"""Calls that look for a smaller one."""
MANY = 260
"""Tokens of the larger case of laws about bits and memory: more than two of the usual tiles of an expert."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call, and what a right kernel returns."""

    x_TH: Tensor
    ids_TK: Tensor
    """int64; -1 for no expert."""
    weights_TK: Tensor
    """f32, exact in the dtype of the tokens."""
    wanted_TH: Tensor
    """f64."""
    error_T: Tensor
    """f64. Root mean square of the rounding error that the number formats cause, by token."""

    def __getitem__(self, rows: slice | Tensor) -> Call:
        return Call(*(part[rows] for part in vars(self).values()))

    def __len__(self) -> int:
        return len(self.x_TH)

    def wrong(self, y: object) -> str:
        """Why an output is not right, within the limits of `oracle.expected_error`; empty if it is."""
        if not isinstance(y, Tensor) or y.shape != self.wanted_TH.shape:
            shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            return f"the output is {shape}, not {tuple(self.wanted_TH.shape)}"
        distance_T = (y.double().cpu() - self.wanted_TH).norm(dim=1)
        beyond = torch.nonzero(~(distance_T <= ONE_TOKEN * self.error_T)).flatten().tolist()
        if beyond:
            worst = (distance_T / self.wanted_TH.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny))[beyond]
            return f"{len(beyond)} of {len(self)} tokens are wrong, {beyond[:4]}, by up to {float(worst.max()):.2g}"
        total, limit = float(distance_T.norm()), ALL_TOKENS * float(self.error_T.norm())
        return "" if total <= limit else f"all {len(self)} tokens are {total:.2g} away, the limit is {limit:.2g}"


@dataclass(frozen=True)
class Outcome:
    """Result of `check` for one law."""

    law: Law
    status: str
    """kept, broken (a wrong output), or refused (an exception)."""
    calls: int
    """Number of cases."""
    message: str = ""
    call: Call | None = None
    """The smallest call found that breaks the law."""

    def __str__(self) -> str:
        return f"{self.law.name}: {self.status}" + (f": {self.message}" if self.message else "")


Test = Callable[[Call], str]
"""Why a call breaks a law; empty if it does not."""


class _Subject:
    """A callable with the arguments of its interface."""

    def __init__(self, fn: Callable[..., Tensor], experts: ExpertWeights, dtype: torch.dtype, device: str) -> None:
        self.fn, self.dtype, self.device = fn, dtype, torch.device(device)
        self.interface = interface_of(fn)
        self.stacks = [q.dequantize(dtype).to(self.device) for q in (experts.w13, experts.w2)]
        self.num_experts = experts.num_slots
        self.module = _Module(*self.stacks) if self.interface == "function" else None

    def arguments(self, call: Call) -> list[Tensor]:
        """Copies of tokens, ids and weights, in the dtypes of the interface."""
        x, ids, weights = (part.to(self.device, copy=True) for part in (call.x_TH, call.ids_TK, call.weights_TK))
        if self.interface not in ("function", "module"):
            return [x, ids.int(), weights]
        absent = ids < 0  # transformers: one beyond the last expert, with a weight of zero
        return [x, ids.masked_fill(absent, self.num_experts), weights.masked_fill(absent, 0.0).to(self.dtype)]

    def run(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """One call on tensors of `arguments`."""
        with torch.no_grad():
            if self.interface == "fused_experts":
                w1, w2 = self.stacks
                return self.fn(hidden_states=x, w1=w1, w2=w2, topk_weights=weights, topk_ids=ids)
            if self.module is not None:
                self.module._is_expert_parallel = bool((ids >= self.num_experts).any())
                return self.fn(self.module, x, ids, weights)
            return self.fn(x, ids, weights)

    def __call__(self, call: Call) -> Tensor:
        """A copy of the output of one call."""
        return self.run(*self.arguments(call)).detach().clone()


class _Module(torch.nn.Module):
    """Attributes that experts functions of transformers read of a module (`transformers.integrations.moe`, 5.24)."""

    has_gate, is_concatenated = True, True
    has_bias = is_transposed = has_post_expert_norm = _is_expert_parallel = False

    def __init__(self, w13: Tensor, w2: Tensor) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(w13, requires_grad=False)
        self.down_proj = torch.nn.Parameter(w2, requires_grad=False)
        self.num_experts, self.act_fn = len(w13), torch.nn.functional.silu

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def interface_of(fn: Callable[..., object]) -> str:
    """How a callable takes tokens, ids and weights, by the names of its parameters.

    fused_experts: (hidden_states, w1, w2, topk_weights, topk_ids, ...) of vLLM. function: (module, hidden_states,
    top_k_index, top_k_weights) of transformers' experts interface. module: an experts module of transformers.
    call: (x, ids, weights), with the experts bound. Raises ConfigError for other parameters.
    """
    parameters = signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters.values()
    names = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    if {"hidden_states", "w1", "w2", "topk_weights", "topk_ids"} <= {*names}:
        return "fused_experts"
    if {"hidden_states", "top_k_index", "top_k_weights"} <= {*names}:
        return "module" if names[0] == "hidden_states" else "function"
    required = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    if len(required) == 3 or any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return "call"
    raise ConfigError(
        f"laws.check calls (x, ids, weights), vLLM's fused_experts or transformers' experts interface; got "
        f"({', '.join(names)}); pass a lambda x, ids, weights: ..."
    )


def check(
    fn: Callable[..., Tensor],
    experts: ExpertWeights | None = None,
    *,
    top_k: int = 2,
    dtype: Plain = BF16,
    compute: QuantScheme | None = None,
    most_tokens: int = 300,
    around: Sequence[int] = (512, 1024, 2048),
    laws: Sequence[Law] = OF_CALLS,
    device: str = "cpu",
    seed: int = 0,
) -> list[Outcome]:
    """Whether a callable of any library keeps the laws of a kernel of experts (w2(silu(w1 x) * (w3 x))).

    fn: see `interface_of`. Ids are int32 with -1 for no expert and weights f32, except for transformers: int64 with
    the number of experts, and the dtype of tokens. Its bound experts must be `experts`.
    experts: gated, gate rows first; None is `draw_experts()` in dtype. Where fn takes weights, it gets these in dtype.
    compute: to what fn rounds rows before its products; None is dtype.
    most_tokens, around: every number of tokens to most_tokens, and those next to each of `around`.
    Returns an outcome for each law. A broken law has the smallest call that breaks it; equal bits are compared with
    those of a second equal call first, so that a callable that is not deterministic breaks that law alone.
    A callable may crash or never return: run that in a process of its own, as benchmarks/laws.py does.
    Raises ConfigError for an unknown interface.
    """
    experts = draw_experts(dtype) if experts is None else experts
    subject = _Subject(fn, experts, dtype.dtype, device)
    cases = _Cases(experts, dtype, compute or dtype, top_k, seed)
    return [_outcome(law, list(_tried(law, subject, cases, most_tokens, around))) for law in laws]


class _Cases:
    """Calls with their right outputs."""

    def __init__(self, experts: ExpertWeights, dtype: Plain, compute: QuantScheme, top_k: int, seed: int) -> None:
        self.experts, self.dtype, self.top_k = experts, dtype, top_k
        self.draw = torch.Generator("cpu").manual_seed(seed)
        self.num_experts, self.hidden, inner = experts.w2.shape
        rounding = [FP32] if isinstance(compute, Plain) else [FP32, compute]
        self.references = [
            ReferenceExperts(
                ExpertsContext(FP32, each, "silu", self.num_experts, self.hidden, inner, torch.device("cpu"))
            )
            for each in rounding
        ]
        self.error = experts_error(dtype, dtype, experts.scheme, self.hidden, inner)

    def of(self, ids_TK: Tensor, x_TH: Tensor | None = None) -> Call:
        """A call with some ids; x_TH: None is normal numbers."""
        tokens, kind = len(ids_TK), self.dtype.dtype
        x = self._random(torch.randn, tokens, self.hidden) if x_TH is None else x_TH
        weights = (self._random(torch.rand, tokens, ids_TK.shape[1]) + 0.1).to(kind).float()
        rows = RowTokens(self.dtype.quantize(x.to(kind)), ids_TK.int(), weights, self.num_experts)
        wanted, *rounded = (each.run(rows, self.experts).y.double() for each in self.references)
        # What rounding these rows costs, measured: outliers share their scale with all other values.
        noise_T = (
            (rounded[0] - wanted).norm(dim=1) if rounded else torch.zeros(tokens, dtype=torch.float64, device="cpu")
        )
        error_T = ((self.error * wanted.norm(dim=1)) ** 2 + noise_T**2).sqrt()
        return Call(x.to(kind), ids_TK, weights, wanted, error_T)

    def drawn(self, tokens: int, choices: int, *, skewed: bool = False) -> Tensor:
        """Different experts for each token; skewed: by odds of 1 / rank, and the last expert by none."""
        odds = 1.0 / (_at(self.num_experts) + 1) if skewed else (_at(self.num_experts) >= 0).double()
        if skewed and self.num_experts > choices:
            odds[-1] = 0.0
        if not tokens:
            return _at(0).expand(choices, 0).T
        return torch.multinomial(odds.expand(tokens, -1), choices, generator=self.draw)

    def few(self, tokens: int = FEW) -> Call:
        """Normal tokens with top_k experts each."""
        return self.of(self.drawn(tokens, self.top_k))

    def real(self, tokens: int) -> Call:
        """Tokens with outliers, and an expert without tokens."""
        return self.of(self.drawn(tokens, self.top_k, skewed=True), draw_tokens(tokens, self.hidden))

    def one_expert(self, expert: int, choices: int) -> Call:
        """130 tokens whose first choice is one expert."""
        first = self.drawn(130, choices)
        others = first[:, 1:]
        others = torch.where(others == expert, (expert + 1) % self.num_experts, others)
        return self.of(torch.cat((torch.full_like(first[:, :1], expert), others[:, : choices - 1]), dim=1))

    def absent(self) -> Iterator[Call]:
        """Some ids of -1, those of a whole token, and all."""
        ids = self.drawn(FEW, self.top_k)
        ids[self._random(torch.rand, *ids.shape) < 0.5] = -1
        ids[FEW // 2] = -1
        yield self.of(ids)
        yield self.of(torch.full_like(ids, -1))

    def _random(self, how: Callable[..., Tensor], *shape: int) -> Tensor:
        return how(shape, generator=self.draw, dtype=torch.float32, device="cpu")


def _tried(
    law: Law, subject: _Subject, cases: _Cases, most_tokens: int, around: Sequence[int]
) -> Iterator[tuple[Call, Test]]:
    """The cases of a law."""
    tests: dict[Law, Test] = {
        SHAPE: partial(_shape, subject),
        ALONE: partial(_alone, subject),
        INPUTS: partial(_inputs, subject),
        KEPT: partial(_kept, subject),
        CALLS: partial(_later, subject),
        DETERMINISTIC: partial(_twice, subject),
        PERMUTED: partial(_permuted, subject),
        INVARIANT: partial(_invariant, subject),
    }

    def right(call: Call) -> str:
        return call.wrong(subject(call))

    if law is VALUES:
        chosen = [cases.of(cases.drawn(FEW, choices)) for choices in sorted({1, cases.top_k})]
    elif law is COUNTS:
        counts = [*range(1, most_tokens + 1), *(n + d for n in around for d in (-1, 0, 1))]
        pool = cases.real(max(counts, default=0) + 64)
        # Another window each time, so that a row is not always the same token.
        chosen = [pool[start : start + n] for n in counts for start in [37 * n % (len(pool) - n + 1)]]
    elif law is ONE_EXPERT:
        last = cases.num_experts - 1
        chosen = [cases.one_expert(expert, choices) for expert in (0, last) for choices in sorted({1, cases.top_k})]
    elif law is NOWHERE:
        chosen = list(cases.absent())
    else:
        chosen = [cases.few(0)] if law is EMPTY else [cases.few(), cases.real(MANY)]
    yield from ((call, tests.get(law, right)) for call in chosen)


def _outcome(law: Law, tried: Sequence[tuple[Call, Test]]) -> Outcome:
    for number, (call, test) in enumerate(tried, 1):
        try:
            message = test(call)
        except Exception as problem:  # libraries may fail in any way
            return Outcome(law, "refused", number, f"{type(problem).__name__}: {str(problem)[:200]}", call)
        if message:
            return Outcome(law, "broken", number, message, _smallest(call, test))
    return Outcome(law, "kept", len(tried))


def _smallest(call: Call, test: Test) -> Call:
    """Fewer tokens that break the same law: halves, quarters and so on are left out as long as one can be.

    Source: delta debugging (Zeller and Hildebrandt, 2002), with a limit of tries.
    """
    tries = count()

    def breaks(some: Call) -> bool:
        try:
            return next(tries) < TRIES and bool(test(some))
        except Exception:  # another failure than the one to show
            return False

    parts = 2
    while len(call) > 1 and parts <= 2 * len(call):
        size = -(-len(call) // parts)
        at = _at(len(call))
        rest = [call[at[(at < start) | (at >= start + size)]] for start in range(0, len(call), size)]
        smaller = next((some for some in rest if len(some) and breaks(some)), None)
        call, parts = (call, 2 * parts) if smaller is None else (smaller, max(2, parts - 1))
    return call


def _at(count: int) -> Tensor:
    """Return the numbers 0 to count - 1."""
    return torch.arange(count, dtype=torch.int64, device="cpu")


def _shape(subject: _Subject, call: Call) -> str:
    y = subject(call)
    wanted, got = (tuple(call.x_TH.shape), subject.dtype, subject.device), (tuple(y.shape), y.dtype, y.device)
    return "" if got == wanted else f"the output is {got}, not {wanted}"


def _alone(subject: _Subject, call: Call) -> str:
    if len(call) < 2:
        return ""
    x_TH = call.x_TH.clone()
    x_TH[0], x_TH[-1] = torch.nan, torch.inf
    y = subject(replace(call, x_TH=x_TH))
    return _as_alone(subject, call)[1:-1].wrong(y[1:-1])


def _inputs(subject: _Subject, call: Call) -> str:
    given = [*subject.arguments(call), *subject.stacks]
    before = bits_of(*given)
    subject.run(*given[:3])
    changed = [
        name for name, a, b in zip(("x", "ids", "weights", "w13", "w2"), before, bits_of(*given), strict=True) if a != b
    ]
    return f"{', '.join(changed)} changed" if changed else ""


def _kept(subject: _Subject, call: Call) -> str:
    given = subject.arguments(call)
    y = subject.run(*given)
    before = bits_of(y)
    if y.numel() and y.untyped_storage().data_ptr() in {part.untyped_storage().data_ptr() for part in given}:
        return "the output shares memory with an input"
    subject.run(*subject.arguments(call[_at(len(call)).flip(0)]))
    return "" if bits_of(y) == before else "the output of a call changed in the next one"


def _later(subject: _Subject, call: Call) -> str:
    """Other values in the same tensors."""
    other = _as_alone(subject, call[_at(len(call)).roll(1)])
    given = subject.arguments(call)
    subject.run(*given)
    for part, value in zip(given, subject.arguments(other), strict=True):
        part.copy_(value)
    wrong = other.wrong(subject.run(*given))
    return wrong and f"after other values in the same tensors: {wrong}"


def _as_alone(subject: _Subject, call: Call) -> Call:
    """The call with its own output as the right one, whatever other laws state about that."""
    return replace(call, wanted_TH=subject(call).double().cpu())


def _twice(subject: _Subject, call: Call) -> str:
    return "" if bits_of(subject(call)) == bits_of(subject(call)) else "two equal calls give different bits"


def _permuted(subject: _Subject, call: Call) -> str:
    draw = torch.Generator("cpu").manual_seed(len(call))
    order = torch.randperm(len(call), generator=draw, dtype=torch.int64, device="cpu")
    return _different(subject, call, subject(call)[order], subject(call[order]), "tokens in another order")


def _invariant(subject: _Subject, call: Call) -> str:
    """The first rows keep their bits without the tokens behind them."""
    y = subject(call)
    counts = [count for count in (1, 2, 4, 7, 16, 32, 128, 256) if count < len(call)]
    found = (_different(subject, call, y[:n], subject(call[:n]), f"{n} of {len(call)} tokens") for n in counts)
    return next((each for each in found if each), "")


def _different(subject: _Subject, call: Call, y: Tensor, other: Tensor, what: str) -> str:
    if torch.equal(y, other) or bits_of(subject(call)) != bits_of(subject(call)):
        return ""
    rows = int((y != other).any(dim=1).sum())
    away = float((y.double() - other.double()).norm() / y.double().norm())
    return f"{what}: {rows} rows have other bits, by {away:.1g}"
