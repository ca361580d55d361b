"""Named faults of MoE layers, each as a change of the replay: what a layer with that fault would compute.

A change is a function at one or two hooks of the replay, applied to what is computed there. Several variants of a fault
have the same name and another detail. Families of faults are generators: those of the router are here, those of the
products in `product_faults`, those of rows, ranks and shared experts in `row_faults`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from moe_mk.lab.judge.casefile import Case
from moe_mk.lab.judge.measured import BLOCK, Measured, measure
from moe_mk.lab.judge.stages import HOOKS, After, Bench, Run, distinct
from moe_mk.lab.verify.dense import best, kept, routing_weights, scores_of

LARGE, SAMPLED = 1 << 27, 4
"""Weights of the experts that were hit beyond which explanations are tried on this many blocks of output columns."""


@dataclass(frozen=True)
class Change:
    """One variant of a named fault."""

    name: str
    stage: str
    detail: str
    steps: tuple[tuple[str, After], ...]
    is_pattern: bool = False
    """Whether only the place of wrong rows is explained, not their values."""


@dataclass(frozen=True)
class Scene:
    """The first recorded tensor that departs from its replay."""

    bench: Bench
    run: Run
    hook: str
    tensor: str
    got: Tensor
    want: Tensor
    var: Tensor
    others: tuple[Case, ...]
    measured: Measured

    @cached_property
    def wrong_T(self) -> Tensor:
        """Tokens with a row beyond the limits."""
        wrong, tokens = self.measured.wrong_R, self.bench.tokens
        if self.hook in ("w13", "activation", "w2"):
            return wrong.reshape(tokens, -1).any(1)
        return wrong.reshape(-1, tokens).any(0)

    def predict(self, steps: Sequence[tuple[str, After]]) -> Tensor:
        """The tensor after changes, as it would have been recorded."""
        value = self.run.changed(steps, self.hook)
        if self.hook == "top-k":
            recorded = self.bench.case.topk_ids
            assert recorded is not None
            same = torch.tensor(
                [set(a) == set(b) for a, b in zip(value.tolist(), recorded.tolist(), strict=True)],
                dtype=torch.bool,
                device="cpu",
            )
            return torch.where(self.got > 0, same[:, None], ~same[:, None]).double()
        value = value.sum(0) if self.hook == "w2" else value
        if self.hook in ("w13", "activation", "w2"):
            value = torch.where((self.run["top-k"] < 0)[..., None], 0.0, value)
        return value

    def sampled(self) -> Scene:
        """Return the scene with the worst block of output columns and a few others; of small experts, all of them."""
        bench, hidden, first = self.bench, self.bench.model.hidden_size, HOOKS.index("w2")
        if HOOKS.index(self.hook) < first or hidden <= SAMPLED * BLOCK:
            return self
        if 3 * hidden * bench.model.moe_intermediate_size * len(distinct(self.run["experts"])) <= LARGE:
            return self
        worst = int(self.measured.block_RB.nan_to_num(0.0).amax(0).argmax())
        others = ((at * (hidden // BLOCK - 1)) // (SAMPLED - 2) for at in range(SAMPLED - 1))
        ranges = tuple((BLOCK * at, min(hidden, BLOCK * (at + 1))) for at in sorted({worst, *others}))
        small = Bench(bench.case, bench.slots, bench.shared_slot, ranges)
        cut = small.of_columns
        values = {hook: cut(v) if HOOKS.index(hook) >= first else v for hook, v in self.run.values.items()}
        got, want, var = map(cut, (self.got, self.want, self.var))
        return replace(self, bench=small, run=Run(small, values), got=got, want=want, var=var,
                       measured=measure(got, want, var))  # fmt: skip

    def fits(self, operations: float) -> bool:
        """Whether a search of about this many multiplications is small enough."""
        return operations <= 1e10

    @property
    def expert_cost(self) -> float:
        """Multiplications of one row in one expert, with the reading of its weights."""
        return 3.0 * self.bench.model.hidden_size * self.bench.model.moe_intermediate_size * 8


def one(name: str, stage: str, detail: str, after: After, hook: str | None = None) -> Change:
    """A change at one hook, that of its stage unless another one is given."""
    return Change(name, stage, detail, ((hook or stage, after),))


def of_scores(scene: Scene) -> Iterator[Change]:
    """Another scoring function, other groups, another choice."""
    bench = scene.bench
    router, bias = bench.router, bench.case.bias
    if not bench.routes:
        return

    def scored_as(name: str) -> After:
        def after(run: Run, value: Tensor) -> Tensor:
            other = router.model_copy(update={"scoring_func": name})
            choice, scores = (torch.from_numpy(v).double() for v in scores_of(run["gate"], other, torch.float32))
            return torch.stack([choice if bias is None else choice + bias.double(), scores])

        return after

    for name in ("softmax", "sigmoid", "sqrtsoftplus"):
        if name != router.scoring_func:
            yield one("scores of another function", "scores", name, scored_as(name))
    if bench.case.logit_bias is not None:
        logit_bias = bench.case.logit_bias.double()
        yield one("logit bias missing", "gate", "", lambda run, value: value - logit_bias)
    if router.num_expert_group > 1:
        yield one("groups ignored", "groups", "", lambda run, value: run["scores"][0])
        two = router.has_correction_bias or router.group_score == "two_best"
        what = "the best expert" if two else "the two best experts"
        counted: dict[str, object] = {"has_correction_bias": not two, "group_score": "auto" if two else "two_best"}
        yield one("group score of the other kind", "groups", what, lambda run, value: _grouped(bench, run, counted))
        yield one(
            "masked groups at 0", "groups", "", lambda run, value: value.clamp(min=0.0).where(value.isinf(), value)
        )
    if bias is not None:
        yield one("bias not used to choose", "top-k", "", lambda run, value: _choose(bench, run, run["scores"][1]))
    yield one("best expert skipped", "top-k", "", lambda run, value: _ids(run["groups"], router.top_k + 1)[:, 1:])
    yield one("worst experts chosen", "top-k", "", lambda run, value: _ids(-run["groups"], router.top_k))


def _grouped(bench: Bench, run: Run, counted: dict[str, object]) -> Tensor:
    return torch.from_numpy(kept(run["scores"][0].float().numpy(), bench.router.model_copy(update=counted))).double()


def _choose(bench: Bench, run: Run, choice_TE: Tensor) -> Tensor:
    counted: dict[str, object] = {}
    grouped = _grouped(bench, Run(bench, run.values | {"scores": torch.stack([choice_TE, choice_TE])}), counted)
    return _ids(grouped, bench.router.top_k)


def _ids(values_TE: Tensor, count: int) -> Tensor:
    return torch.from_numpy(best(values_TE.float().numpy(), min(count, values_TE.shape[1])))


def of_weights(scene: Scene) -> Iterator[Change]:
    """Routing weights: recorded wrong, or applied wrong by the experts."""
    bench = scene.bench
    router, factor = bench.router, bench.router.routed_scaling_factor
    made: list[tuple[str, str, Callable[[Run, Tensor], Tensor]]] = []
    if bench.routes:
        if bench.case.bias is not None:
            made.append(("bias in the weights", "", lambda run, w: _weighed(bench, run, run["scores"][0])))
        plain = {"renormalize": not router.renormalize}
        name = "never renormalised" if router.renormalize else "renormalised"
        made.append((name, "", lambda run, w: _weighed(bench, run, run["scores"][1], **plain)))
    if factor != 1.0:
        # A renormalisation after the factor gives the same.
        made.append(("routed scaling missing", "or renormalised after it", lambda run, w: w / factor))
        made.append(("routed scaling twice", "", lambda run, w: w * factor))
    total = 1.0 if factor == 1.0 else factor
    made += [
        ("renormalised twice", "softmax of weights", lambda run, w: (w / total).softmax(-1) * total),
        ("routing weights missing", "all 1", lambda run, w: torch.ones_like(w)),
        ("routing weights twice", "squared", lambda run, w: w * w),
        ("routing weights in another order", "reversed", lambda run, w: w.flip(-1)),
        ("routing weights in another order", "best first", lambda run, w: w.sort(-1, descending=True).values),
        ("routing weights in another order", "of the next token", lambda run, w: w.roll(-1, 0)),
        ("routing weights in another order", "of the token before", lambda run, w: w.roll(1, 0)),
    ]
    for name, detail, change in made:
        yield one(name, "weights", detail, change)
    for name, detail, change in made:
        yield one(name, "weigh-and-sum", detail, _reweighed(change))


def _reweighed(change: Callable[[Run, Tensor], Tensor]) -> After:
    def after(run: Run, value: Tensor) -> Tensor:
        weights = torch.where(run["top-k"] >= 0, change(run, run["weights"]), 0.0)
        return run.bench.step("weigh-and-sum", Run(run.bench, run.values | {"weights": weights}))

    return after


def _weighed(bench: Bench, run: Run, scores_TE: Tensor, **changes: object) -> Tensor:
    router = bench.router.model_copy(update=changes)
    return torch.from_numpy(routing_weights(scores_TE.float().numpy(), run["top-k"].numpy(), router)).double()


FAMILIES = (of_scores, of_weights)
