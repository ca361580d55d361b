"""The verdict on a case: right within the limits of its number formats, or the first stage that departs, and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_mk.lab.judge import faults, product_faults, row_faults
from moe_mk.lab.judge.casefile import Case
from moe_mk.lab.judge.faults import Change, Scene
from moe_mk.lab.judge.measured import Check, Measured, measure
from moe_mk.lab.judge.stages import HOOKS, STAGES, After, Bench, Run, gate_first, variance
from moe_mk.lab.verify.compare import could_choose
from moe_mk.quant.tensor import QuantScheme
from moe_mk.weights.expert_weights import SlotWeights

EXPLAINED = 0.99
"""The share of the squared error that an explanation removes where what is left is not within the limits."""
NONE = "none of these"
FAMILIES = (*product_faults.FAMILIES, *row_faults.FAMILIES)
"""Besides those of the router; in order of preference among explanations that are equally good."""
EQUAL = 1.05
"""The ratio of what two explanations leave up to which they are equally good."""
MOST_PAIRS, MOST_VARIANTS = 4, 2
"""Single explanations that are combined with all others, and variants of a fault and stage that are combined."""


@dataclass(frozen=True)
class Explanation:
    """One or two named faults, and how much of the error they remove."""

    faults: tuple[str, ...]
    details: tuple[str, ...]
    stage: str
    removed: float
    """The share of the squared error, in standard deviations, that is gone; 1 for all of it."""
    deviations: float
    """What is left, as `Check.deviations`."""
    left: float
    """What is left, relative to the output that the faults explain."""
    within: bool
    """Whether what is left is within the limits."""


@dataclass(frozen=True)
class Verdict:
    """The result of `judge` for one case."""

    right: bool
    checks: tuple[Check, ...]
    stage: str = ""
    """The first stage that departs; "" if none does."""
    span: tuple[str, ...] = ()
    """The stages between the last recorded tensor that is right and the first one that is wrong."""
    token: int = -1
    """The position in the call of the worst token."""
    expert: int = -1
    """The expert of the worst row; -1 where no expert can be singled out."""
    block: int = -1
    """Columns [128 block, 128 (block + 1)) of that row."""
    fault: str = NONE
    explanations: tuple[Explanation, ...] = ()
    error_map: tuple[tuple[float, ...], ...] = ()
    """Standard deviations for each token and expert of `experts`, or for each token."""
    experts: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    replay_error: float = -1.0
    """Relative L2 of y from a replay in the number formats of the case; -1 for large and for wrong cases."""
    not_judged: int = 0
    """Tokens that are not finite in the replay either."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON; infinite numbers as text."""
        return _plain(asdict(self))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Dependence:
    """Rows of a case that another case has with other values, although token, experts and weights are equal."""

    law: str
    """What differs between the calls: count of tokens, order of tokens, or batch-mates."""
    other: int
    """The index of the other case."""
    stage: str
    tensor: str
    """The first one that differs."""
    rows: int
    """Tokens that both have."""
    differing: int
    error: float
    """Relative L2 of the differing rows."""


_ROWS = {"router_logits": "gate", "topk_ids": "top-k", "topk_weights": "weights", "x_quant": "quantise",
         "w13_out": "w13", "act_out": "activation", "w2_out": "w2", "routed_out": "reduce", "shared_out": "shared",
         "y": "shared"}  # fmt: skip
"""Tensors with a row for each token, and their stages."""


def dependences(cases: Sequence[Case]) -> list[list[Dependence]]:
    """For each case, the later ones of the same layer with which it has tokens in common whose rows differ in a bit.

    No stage permits that: each row is a sum over its own experts. With one activation scale for all tokens it does,
    and nothing is compared.
    """
    found: list[list[Dependence]] = [[] for _ in cases]
    for (at, one), (index, other) in combinations(enumerate(cases), 2):
        scheme = one.model.quant.activation_scheme
        if not same_layer(one, other) or (scheme is not None and scheme.block is not None and scheme.block[0] != 1):
            continue
        routes = all(case.router_logits is not None or case.gate is not None for case in (one, other))
        given = ("x",) if routes else ("x", "topk_ids", "topk_weights")
        places = {_token(other, t, given): t for t in range(other.size)}
        pairs = [(t, places[key]) for t in range(one.size) if (key := _token(one, t, given)) in places]
        for name, stage in _ROWS.items():
            mine, its = getattr(one, name), getattr(other, name)
            if mine is None or its is None or not pairs:
                continue
            unequal = [(a, b) for a, b in pairs if _bits(mine[a]) != _bits(its[b])]
            if unequal:
                a, b = (part[list(rows)].double() for part, rows in zip((mine, its), zip(*unequal, strict=True),
                                                                        strict=True))  # fmt: skip
                error = float((a - b).norm() / b.norm().clamp_min(_TINY))
                law = _law(one, other, same=len(pairs) == one.size == other.size)
                found[at].append(Dependence(law, index, stage, name, len(pairs), len(unequal), error))
                break
    return found


def _law(one: Case, other: Case, *, same: bool) -> str:
    if max(one.num_tokens, one.size) != max(other.num_tokens, other.size):
        return "count of tokens"
    return "order of tokens" if same else "batch-mates"


def same_layer(one: Case, other: Case) -> bool:
    """Whether two cases are of one layer."""
    return (one.model, one.router, one.layer_name, one.layer) == (
        other.model, other.router, other.layer_name, other.layer,
    )  # fmt: skip


def _token(case: Case, token: int, given: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(_bits(tensor[token]) for name in given if (tensor := getattr(case, name)) is not None)


def _bits(row: Tensor) -> bytes:
    return row.contiguous().view(torch.uint8).numpy().tobytes()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def judge(
    case: Case,
    slots: Mapping[int, SlotWeights] | None = None,
    shared: SlotWeights | None = None,
    *,
    others: Sequence[Case] = (),
) -> Verdict:
    """Replay a case and find the first stage that departs.

    slots, shared: the weights where the case does not hold them. others: cases of the same layer, whose outputs and
    weights may be those of a stale row or weight. Raises ConfigError, ShapeError for cases that cannot be replayed.
    """
    bench = Bench(case, case.slots() if slots is None else slots, case.shared_slot() if shared is None else shared)
    run, checks, wrong = Run(bench, {}, {}), list[Check](), None
    last = -1
    for hook, tensor, got, want, var in _comparisons(bench, run):
        measured = measure(got, want, var)
        check = measured.check(_stage(hook), tensor)
        checks.append(check)
        if not check.passed:
            wrong = hook, tensor, got, want, var, measured
            break
        last = HOOKS.index(hook)
    if wrong is None:
        size = len(bench.slots) * case.model.hidden_size * case.model.moe_intermediate_size
        replayed = _in_formats(bench, run) if size <= 1 << 26 else -1.0
        return Verdict(True, tuple(checks), replay_error=replayed, not_judged=case.size - checks[-1].rows)
    hook, tensor, got, want, var, measured = wrong
    return _explained(Scene(bench, run, hook, tensor, got, want, var, tuple(others), measured), checks, last)


def _stage(hook: str) -> str:
    return {"experts": "w13", "shared experts": "shared"}.get(hook, hook)


_RECORDED = {
    "gate": "router_logits", "top-k": "topk_ids", "weights": "topk_weights", "quantise": "x_quant", "w13": "w13_out",
    "activation": "act_out", "w2": "w2_out", "weigh-and-sum": "rank_out", "reduce": "routed_out",
    "shared experts": "shared_out", "shared": "y",
}  # fmt: skip
_TINY = 2.0**-126


def _comparisons(bench: Bench, run: Run) -> Iterator[tuple[str, str, Tensor, Tensor, Tensor]]:
    """Each recorded tensor with its replay and the variance; later ones start from it."""
    case = bench.case
    for hook in HOOKS:
        name = _RECORDED.get(hook, "")
        got = getattr(case, name) if name else None
        if case.rank_out is not None and len(case.rank_out) == 1:  # the output of one rank is the sum over ranks
            own = case.rank_out[0] if case.routed_out is None else case.routed_out
            got, name = {"weigh-and-sum": (None, name), "reduce": (own, "routed_out")}.get(hook, (got, name))
        if hook in HOOKS[:5]:
            if not _routing_step(bench, run, hook, got):
                continue
            want = run.values[hook]
            if got is None or hook == "top-k":
                if got is not None:
                    yield _choice(bench, run, got)
                    run.values[hook] = got.to(torch.int64)
                elif hook == "weights":
                    run.variances[hook] = _routing_variance(bench, run, hook, bench.case.x)
                continue
            got, var = got.double(), _routing_variance(bench, run, hook, got)
            yield hook, name, got, want, var
            run.values[hook], run.variances[hook] = got, torch.zeros_like(got)
            continue
        want, var = variance(bench, run, hook)
        run.values[hook], run.variances[hook] = want, var
        if got is None:
            continue
        given = got
        got = gate_first(case, got.double()) if hook == "w13" else got.double()
        shown, spread = (want.sum(0), var.sum(0)) if hook == "w2" else (want, var)
        if name in ("w13_out", "act_out", "w2_out"):
            assert case.topk_ids is not None
            nowhere = (case.topk_ids < 0)[..., None]
            got, shown, spread = (torch.where(nowhere, 0.0, each) for each in (got, shown, spread))
        spread = spread + (_coarse(given).eps * shown) ** 2 / 24
        yield hook, name, got, shown, spread
        forced = torch.where(torch.isfinite(shown), got, shown)
        run.values[hook] = forced if hook != "w2" else want + (forced - shown) / case.tp
        if hook != "w2" or case.tp == 1:  # the parts of a recorded sum over slices are not known
            run.variances[hook] = torch.zeros_like(want)


def _routing_step(bench: Bench, run: Run, hook: str, got: Tensor | None) -> bool:
    """Compute a value of the router; False where only the recorded one is there, which is then taken."""
    if bench.routes:
        if hook == "gate" and bench.case.gate is None:
            assert got is not None
            run.values[hook] = got.double()
            return False
        run.values[hook] = bench.step(hook, run)
        return True
    if got is not None:
        run.values[hook] = got.to(torch.int64) if hook == "top-k" else got.double()
    return False


def _coarse(tensor: Tensor) -> torch.finfo:
    """Of the narrowest dtype that holds every value."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(tensor.to(dtype).to(tensor.dtype).nan_to_num(), tensor.nan_to_num()):
            return torch.finfo(dtype)
    return torch.finfo(torch.float32)


def _routing_variance(bench: Bench, run: Run, hook: str, got: Tensor) -> Tensor:
    """Of logits: products of f32 or of the layer's dtype, rounded to what they are stored in. Of weights: of scores,
    which the error of unrecorded logits changes by as much as that, relative to them.
    """
    case, eps = bench.case, _coarse(got).eps
    if hook == "gate":
        assert case.gate is not None
        inside = bench.x**2 @ (case.gate.double() ** 2).T
        terms = (FP32_EPS**2 / 24) * (case.x.shape[1] / 2 + 1)
        return inside * terms + run["gate"] ** 2 * (eps**2 / 24) + _TINY
    model = bench.router.router_dtype == "model"
    coarse = max(eps, torch.finfo(case.x.dtype).eps if model else FP32_EPS)
    want, size = run["weights"], 1.0
    if case.router_logits is None:
        size, coarse = 1.0 + float(run["gate"].abs().max()), max(coarse, 2.0**-20)
    return 4 * (size * coarse * want) ** 2 / 24 + (coarse * want.abs().amax(-1, keepdim=True) / 8) ** 2 + _TINY


FP32_EPS = torch.finfo(torch.float32).eps


def _choice(bench: Bench, run: Run, ids_TK: Tensor) -> tuple[str, str, Tensor, Tensor, Tensor]:
    """The chosen ids: a row of 1 for a token whose choice is not the best within rounding, else 0."""
    case, biased = bench.case, run["scores"][0].float().numpy()
    model = bench.router.router_dtype == "model"
    tolerance = float(torch.finfo(case.x.dtype).eps) if model else 1e-5
    if case.router_logits is None and case.x.dtype is not torch.float32:
        tolerance = max(tolerance, float(torch.finfo(case.x.dtype).eps) / 8)
    if bench.router.scoring_func.startswith(("logit_", "masked_")):
        tolerance *= max(1.0, float(np.abs(biased).max(initial=0.0)))
    wrong = [
        float(not _chosen(ids.numpy().astype(np.int64), biased[t], bench, tolerance)) for t, ids in enumerate(ids_TK)
    ]
    got = torch.tensor(wrong, dtype=torch.float64, device="cpu")[:, None]
    return "top-k", "topk_ids", got, torch.zeros_like(got), torch.full_like(got, _TINY)


def _chosen(ids_K: Any, biased_E: Any, bench: Bench, tolerance: float) -> bool:
    """Whether a token's experts are the best ones; a token of padding goes nowhere with all its ids."""
    if (ids_K < 0).all() or not np.isfinite(biased_E).all():
        return True
    return could_choose(ids_K, biased_E, bench.router, tolerance)


def _in_formats(bench: Bench, run: Run) -> float:
    """The relative distance of y from the replay with every rounding of the claimed formats."""
    dtype = bench.case.x.dtype

    def rounded(_: Run, value: Tensor) -> Tensor:
        return value.to(dtype).double()

    def quantised(scheme: QuantScheme) -> After:
        def after(_: Run, value: Tensor) -> Tensor:
            flat = value.reshape(-1, value.shape[-1]).to(dtype).float()
            return scheme.quantize(flat).dequantize(torch.float32).double().reshape(value.shape)

        return after if scheme.block is not None else rounded

    steps = [("quantise", quantised(bench.compute)), ("w13", rounded), ("activation", quantised(bench.compute.hidden)),
             ("w2", rounded), ("weigh-and-sum", rounded), ("reduce", rounded), ("shared", rounded)]  # fmt: skip
    fresh = Run(bench, {hook: run[hook] for hook in HOOKS[:6] if hook in run.values})
    return measure(bench.case.y, fresh.changed(steps, "shared"), torch.ones_like(bench.x)).error


def _explained(scene: Scene, checks: Sequence[Check], last: int) -> Verdict:
    """Rank the changes at stages between the last right tensor and the wrong one."""
    case, hook, measured = scene.bench.case, scene.hook, scene.measured
    token, expert, block, grid, experts = _where(scene, measured)
    scene = scene.sampled()
    if not scene.bench.routes:
        last = max(last, HOOKS.index("weights"))
    span = HOOKS[last + 1 : HOOKS.index(hook) + 1]
    stages = tuple(stage for stage in STAGES if stage in {_stage(h) for h in span})
    found = list[tuple[Explanation, tuple[Change, ...]]]()
    families = faults.FAMILIES if hook in HOOKS[:5] else (*faults.FAMILIES, *FAMILIES)
    for family in (*families, *product_faults.SEARCHES):
        if family in product_faults.SEARCHES and any(_convinces(each) for each, _ in found):
            break
        for change in family(scene) if hook not in HOOKS[:5] or family in faults.FAMILIES else ():
            if {step for step, _ in change.steps} <= set(span) and change.stage in stages:
                found.append((_tried(scene, (change,)), (change,)))
    found = _ranked(found)
    right_T = ~scene.wrong_T
    if found and not _convinces(found[0][0]) and bool(right_T.any()):
        found = _ranked([*found, *((_tried(scene, change, only_wrong=True), change) for _, change in found)])
    if found and not _convinces(found[0][0]):
        singles = _best_of_each(found)
        pairs = [
            (first, second)
            for at, first in enumerate(singles[:MOST_PAIRS])
            for second in singles[at + 1 :]
            if first.name != second.name
        ]
        found = _ranked([*found, *((_tried(scene, pair), pair) for pair in pairs)])
    explanations = tuple(each for each, _ in found if each.removed > 0.05)[:8]
    best = explanations[0] if explanations and _convinces(explanations[0]) else None
    return Verdict(
        False,
        tuple(checks),
        stage=best.stage if best else stages[-1] if len(stages) == 1 else "",
        span=stages,
        token=case.positions[token],
        expert=expert,
        block=block,
        fault=" and ".join(best.faults) if best else NONE,
        explanations=explanations,
        error_map=grid,
        experts=experts,
        tokens=tuple(case.positions),
        not_judged=int((~measured.judged_R).sum()),
    )


def _convinces(explanation: Explanation) -> bool:
    return explanation.within or explanation.removed >= EXPLAINED


Found = list[tuple[Explanation, tuple["Change", ...]]]


def _ranked(found: Found) -> Found:
    """Convincing ones first, of these single ones; then by what is left. Equal ones keep the library's order."""
    least = min((each.left for each, _ in found if _convinces(each)), default=0.0)

    def order(entry: tuple[Explanation, tuple[Change, ...]]) -> tuple[bool, bool, int, float]:
        explanation, changes = entry
        if not _convinces(explanation):
            return True, False, 0, -explanation.removed
        left = 0.0 if explanation.left <= EQUAL * least + 2.0**-21 else explanation.left
        return False, any(change.is_pattern for change in changes), len(changes), left

    return sorted(found, key=order)


def _best_of_each(found: Found) -> list[Change]:
    """The best variants of each fault and stage, in the order of what they remove."""
    taken = Counter[tuple[str, str]]()
    kept = []
    for _, (change,) in found:
        taken[change.name, change.stage] += 1
        if taken[change.name, change.stage] <= MOST_VARIANTS:
            kept.append(change)
    return kept


def _tried(scene: Scene, changes: tuple[Change, ...], *, only_wrong: bool = False) -> Explanation:
    """only_wrong: tokens that are right without the changes stay so, as where a race or a tile is wrong."""
    steps = [step for change in changes for step in change.steps]
    want = scene.predict(steps)
    if only_wrong:
        want = torch.where(scene.measured.wrong_R.reshape(*want.shape[:-1], 1), want, scene.want)
    before, names = scene.measured, tuple(change.name for change in changes)
    details = tuple(change.detail + (", in some rows" if only_wrong else "") for change in changes)
    stage = min((change.stage for change in changes), key=STAGES.index)
    known = want.reshape(-1, want.shape[-1]).isfinite().all(-1) & before.judged_R
    # The noise of a larger result is larger.
    size = (want**2).sum(-1, keepdim=True) / (scene.want**2).sum(-1, keepdim=True).clamp_min(_TINY)
    after = measure(scene.got, want, scene.var * size.clamp(min=1.0).nan_to_num(1.0, 1.0, 1.0))
    wrong = before.wrong_R & before.judged_R
    if not bool((known & wrong).any()):
        return Explanation(names, details, stage, 0.0, math.inf, math.inf, False)
    floor = before.variances_R[known].clamp_min(_TINY)
    was, now = ((each.squares_R[known] / floor).clamp(max=1e30) for each in (before, after))
    removed = 1.0 - float(now.sum() / was.sum().clamp_min(_TINY))
    check = after.check(stage, scene.tensor)
    complete = int(known.sum()) >= int(before.judged_R.sum()) or int((known & wrong).sum()) >= 2
    left = math.sqrt(float(after.squares_R[known].sum()) / max(float((want**2).sum(-1).flatten()[known].sum()), _TINY))
    return Explanation(names, details, stage, removed, after.deviations, left, check.passed and complete)


def _where(scene: Scene, measured: Measured) -> tuple[int, int, int, tuple[tuple[float, ...], ...], tuple[int, ...]]:
    """Token, expert and block of the worst row, and the map of deviations token by expert."""
    unassigned = torch.full((scene.bench.case.size, 1), -1, dtype=torch.int64, device="cpu")  # by the gate
    rows, ids = measured.row_R.nan_to_num(0.0, math.inf), scene.run.values.get("top-k", unassigned)
    worst, top_k = int(rows.argmax()), ids.shape[1]
    block = int(measured.block_RB[worst].argmax())
    experts = tuple(sorted(set(ids.flatten().tolist()) - {-1}))
    if scene.hook in ("w13", "activation", "w2"):
        token, expert = worst // top_k, int(ids.flatten()[worst])
        grid = torch.zeros(len(ids), len(experts), dtype=torch.float64, device="cpu")
        for t, row in enumerate(ids.tolist()):
            for k, e in enumerate(row):
                if e >= 0:
                    grid[t, experts.index(e)] = rows[t * top_k + k]
        return token, expert, block, tuple(map(tuple, grid.tolist())), experts
    token = worst % len(ids) if scene.hook == "weigh-and-sum" else worst
    per_token = rows.reshape(-1, len(ids)).amax(0) if scene.hook == "weigh-and-sum" else rows
    if scene.hook == "weights":
        changed = (scene.got - scene.want)[token].abs().argmax()
        return token, int(ids[token, changed]), 0, tuple((float(each),) for each in per_token), ()
    wrong = measured.wrong_R.reshape(-1, len(ids)).any(0) if scene.hook == "weigh-and-sum" else measured.wrong_R
    suspects = [
        e for e in experts if bool(wrong.any()) and torch.equal((ids == e).any(1), wrong)
    ]  # the expert that all wrong tokens share and no right one has
    expert = suspects[0] if len(suspects) == 1 else -1
    grid = (
        torch.stack([torch.where((ids == e).any(1), per_token, 0.0) for e in experts], 1) if experts else rows[:, None]
    )
    return token, expert, block, tuple(map(tuple, grid.tolist())), experts
