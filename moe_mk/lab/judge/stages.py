"""Replay of a case stage by stage in f64, with the variance that number formats cause, and with changes.

    gate        logits                    quantise     rows as the experts read them
    scores      scores of all experts     w13          gate and up of each assignment
    groups      scores of kept groups     activation   act(gate) * up
    top-k       ids                       w2           output row of each assignment
    weights     routing weights           weigh-and-sum, reduce, shared: output of ranks, of the routed experts, of all

The arithmetic is that of the independent reference (`moe_mk.lab.verify.dense`). A stage starts from what the case
recorded of the stages before it, so that a wrong stage does not make later ones wrong.

Each rounding adds its mean square to the variance of a value: (spacing^2) / 12 for a uniform error, which is
(eps x)^2 / 24 relative to x (`QuantScheme.relative_rms`; N. Higham, Accuracy and Stability of Numerical Algorithms,
section 2.8 for the model). A product carries it over: var(x @ W) = var(x) @ W^2. Rounded are activations where the
settings quantise them (the mean square of each group as measured), weights decoded to the layer's dtype, each product,
the activation (twice), routing weights, weighted rows, and partial sums over experts and ranks; f32 sums of n terms
add n/2 roundings of f32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from moe_mk.config.moe import ModelConfig
from moe_mk.errors import ConfigError, ShapeError
from moe_mk.lab.judge.casefile import Case
from moe_mk.lab.judge.matrices import Matrix, Range, over_segments, scales_of
from moe_mk.lab.verify.dense import ACTIVATIONS, best, gated, kept, routing_weights, scores_of
from moe_mk.quant.int8 import int8_groups
from moe_mk.quant.plain import FP32, plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.weights.expert_weights import SlotWeights

STAGES = (
    "gate", "scores", "groups", "top-k", "weights", "quantise", "w13", "activation", "w2", "weigh-and-sum", "reduce",
    "shared",
)  # fmt: skip
HOOKS = (*STAGES[:5], "experts", *STAGES[5:11], "shared experts", "shared")
"""What is computed, in order. experts: whose weights each assignment uses; shared experts: what they add."""
Values = dict[str, Tensor]
After = Callable[["Run", Tensor], Tensor]
"""Changes the value of a hook; earlier values are in the run."""


@dataclass(frozen=True)
class Run:
    """The values of hooks, some of them with variances."""

    bench: Bench
    values: Values
    variances: Values = field(default_factory=dict)

    def __getitem__(self, hook: str) -> Tensor:
        return self.values[hook]

    def changed(self, steps: Sequence[tuple[str, After]], until: str) -> Tensor:
        """The value of a hook after changes at hooks up to it. Values before the first change are those of this run."""
        first = min(HOOKS.index(hook) for hook, _ in steps)
        run = Run(self.bench, {hook: self.values[hook] for hook in HOOKS[:first] if hook in self.values})
        for hook in HOOKS[first : HOOKS.index(until) + 1]:
            is_known = hook == HOOKS[first] and hook in self.values
            value = self.values[hook] if is_known else self.bench.step(hook, run)
            for _, after in (step for step in steps if step[0] == hook):
                value = after(run, value)
            run.values[hook] = value
        return run.values[until]


class Bench:
    """A case with its weights, ready to be replayed."""

    def __init__(
        self,
        case: Case,
        slots: Mapping[int, SlotWeights],
        shared: SlotWeights | None,
        columns: tuple[Range, ...] | None = None,
    ) -> None:
        """columns: those of the output that are computed, in multiples of 128; None: all."""
        self.case, self.slots, self.shared_slot, self.columns = case, dict(slots), shared, columns
        self.model, self.router, self.dtype = case.model, case.router, plain(case.x.dtype)
        self.x, self.tokens = case.x.double(), case.size
        group = case.activation_group
        self.compute: QuantScheme = int8_groups(group) if group else case.model.quant.activation_scheme or self.dtype
        if case.topk_weights is None and case.router_logits is None and case.gate is None:
            raise ConfigError("the case has neither topk_weights nor router_logits nor gate: nothing to weigh rows by")
        if case.topk_ids is not None and slots and (lost := sorted(set(_ids(case)) - set(slots))):
            raise ShapeError(f"{len(lost)} experts that were hit have no weights, the first is {lost[0]}")
        self._w13, self._w2 = dict[int, Matrix](), dict[int, Matrix]()
        self._partials = dict[str, tuple[Tensor, Tensor, Tensor]]()
        self._scales = dict[str, tuple[Tensor, Tensor]]()
        self.rank_of_E = self._ranks()

    def _ranks(self) -> Tensor:
        """The EP rank of each expert."""
        experts, ep = self.model.num_experts, self.case.ep
        if self.case.expert_map is not None:
            return (self.case.expert_map >= 0).to(torch.int64).argmax(0)
        return (torch.arange(experts, dtype=torch.int64, device="cpu") * ep // experts).clamp(max=ep - 1)

    @property
    def routes(self) -> bool:
        """Whether the routing can be computed."""
        unknown = self.router.has_correction_bias and self.case.bias is None
        return (self.case.router_logits is not None or self.case.gate is not None) and not unknown

    def w13(self, expert: int) -> Matrix:
        """gate above up of an expert; KeyError for one that the case does not have."""
        if expert not in self._w13:
            slot = self.slots[expert]
            parts = (slot.up_IH,) if slot.gate_IH is None else (slot.gate_IH, slot.up_IH)
            biases = [b.double() for b in (slot.bias("gate"), slot.bias("up")) if b is not None]
            self._w13[expert] = Matrix(parts, torch.cat(biases) if biases else None)
        return self._w13[expert]

    def w2(self, expert: int) -> Matrix:
        """down of an expert."""
        if expert not in self._w2:
            slot, bias = self.slots[expert], self.slots[expert].bias("down")
            self._w2[expert] = Matrix((slot.down_HI,), None if bias is None else bias.double(), self.columns)
        return self._w2[expert]

    @cached_property
    def shared_added(self) -> tuple[Tensor, Tensor]:
        """Output of the shared experts for the tokens of the case, and its variance."""
        return self.of_shared(self.x)

    def of_columns(self, rows: Tensor) -> Tensor:
        """The columns of output rows that are computed."""
        return rows if self.columns is None else torch.cat([rows[..., a:b] for a, b in self.columns], -1)

    def step(self, hook: str, run: Run) -> Tensor:
        """The value of a hook from earlier ones."""
        return _STEPS[hook](self, run)

    def activation(self, h13: Tensor, model: ModelConfig | None = None) -> Tensor:
        """act(gate) * up of (..., 2I), gate first; act(up) without gates."""
        model = model or self.model
        if not model.gated:
            return ACTIVATIONS[model.activation](h13)
        gate, up = h13.chunk(2, dim=-1)
        return gated(gate, up, model)

    def products(self, x_TKX: Tensor, used_TK: Tensor, which: str, *, with_bias: bool = True) -> Tensor:
        """(T, K, n): rows times the matrices of the experts that each assignment uses; NaN for unknown experts."""
        wide = self.sizes(which)[0]
        out = torch.full((*used_TK.shape, wide), float("nan"), dtype=torch.float64, device="cpu")
        out[used_TK < 0] = 0.0
        for expert, at in self._known(used_TK):
            matrix = self.w13(expert) if which == "w13" else self.w2(expert)
            x = x_TKX[at]
            found = torch.cat([x @ w.T for _, w in matrix.blocks()], -1)
            bias = matrix.wanted_bias if with_bias else None
            out[at] = found if bias is None else found + bias
        return out

    def biases(self, used_TK: Tensor, which: str) -> Tensor:
        """(T, K, n): the biases of the experts that each assignment uses, 0 without."""
        out = torch.zeros((*used_TK.shape, self.sizes(which)[0]), dtype=torch.float64, device="cpu")
        for expert, at in self._known(used_TK):
            matrix = self.w13(expert) if which == "w13" else self.w2(expert)
            out[at] = 0.0 if matrix.wanted_bias is None else matrix.wanted_bias
        return out

    def _known(self, used_TK: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The used experts that have weights, each with its assignments."""
        for expert in distinct(used_TK):
            if expert in self.slots:
                yield expert, used_TK == expert

    def sizes(self, which: str) -> tuple[int, int]:
        """(n, k) of w13 or w2."""
        wide, hidden = self.model.moe_intermediate_size, self.model.hidden_size
        if which == "w13":
            return wide * (1 + self.model.gated), hidden
        return hidden if self.columns is None else sum(b - a for a, b in self.columns), wide

    def width(self, which: str) -> int:
        """Columns of a segment in `partials`: what scales and blocks that kernels skip are multiples of."""
        columns, compute = self.sizes(which)[1], self.compute if which == "w13" else self.compute.hidden
        width = 16 if columns <= 256 or self.model.quant.weights == "nvfp4" else 32 if columns <= 2048 else 64
        return width if compute.block is None else min(width, compute.block[1] // 2)

    def partials(self, run: Run, which: str) -> Tensor:
        """Products of segments of columns with codes (T, K, n, segments).

        Their product with `scales` summed over segments is the value of the stage without bias. The first ones, those
        of the replay without changes, are kept.
        """
        rows, used = (run["quantise"], run["experts"][0]) if which == "w13" else (run["activation"], run["experts"][1])
        known = self._partials.get(which)
        if known is not None and known[0] is rows and torch.equal(known[1], used):
            return known[2]
        found = self._segments(self._rows(rows, run) if which == "w13" else rows, used, which)
        self._partials.setdefault(which, (rows, used, found))
        return found

    def scales(self, run: Run, which: str) -> Tensor:
        """(T, K, n, segments): the scale of each part of a product; 1 in formats without separate scales."""
        used, width = run["experts"][0 if which == "w13" else 1], self.width(which)
        known = self._scales.get(which)
        if known is None or not torch.equal(known[0], used):
            n, k = self.sizes(which)
            scales = torch.ones((*used.shape, n, -(-k // width)), dtype=torch.float64, device="cpu")
            for expert, at in self._known(used):
                matrix = self.w13(expert) if which == "w13" else self.w2(expert)
                if matrix.has_scales:
                    found = [over_segments(scales_of(q), q, width) for q in matrix.parts]
                    scales[at] = matrix.wanted(torch.cat(found))
            known = self._scales[which] = used, scales
        return known[1]

    def _rows(self, x_TH: Tensor, run: Run) -> Tensor:
        """(T, K, H): the row of each assignment."""
        rows = x_TH[:, None].expand(-1, self.router.top_k, -1)
        return rows * run["weights"][..., None] if self.router.weight_on_input else rows

    def _segments(self, rows_TKX: Tensor, used_TK: Tensor, which: str) -> Tensor:
        (n, k), width = self.sizes(which), self.width(which)
        count = -(-k // width)
        out = torch.full((*used_TK.shape, n, count), float("nan"), dtype=torch.float64, device="cpu")
        out[used_TK < 0] = 0.0
        for expert, at in self._known(used_TK):
            matrix = self.w13(expert) if which == "w13" else self.w2(expert)
            x, found = _split(rows_TKX[at], count, width), list[Tensor]()
            for _, w in matrix.blocks(unscaled=True):
                found.append(torch.einsum("asx,nsx->ans", x, _split(w, count, width)))
            out[at] = torch.cat(found, 1)
        return out

    def of_shared(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Output of the shared experts for each token, and its variance."""
        slot, model = self.shared_slot, self.model.of_shared()
        assert slot is not None
        parts = (slot.up_IH,) if slot.gate_IH is None else (slot.gate_IH, slot.up_IH)
        biases = [b.double() for b in (slot.bias("gate"), slot.bias("up")) if b is not None]
        down = slot.bias("down")
        first = Matrix(parts, torch.cat(biases) if biases else None)
        second = Matrix((slot.down_HI,), None if down is None else down.double(), self.columns)
        stated = self.model.quant.shared_scheme is not None
        compute = (self.model.quant.shared_activations or self.dtype) if stated else self.compute
        h, var = self.product_var(x_TH, rounding_of(x_TH, compute), first)
        a, var = self.activation_var(h, var, model)
        y, var = self.product_var(a, var + rounding_of(a, compute.hidden), second)
        factor: Tensor | float = model.shared_scale
        if self.case.shared_gate is not None:
            factor = factor / (1.0 + torch.exp(-(x_TH @ self.case.shared_gate.double())))[:, None]
        u = self.dtype.relative_rms
        return y * factor, var * factor**2 + 4 * (u * y * factor) ** 2

    def product_var(self, x: Tensor, var: Tensor, matrix: Matrix) -> tuple[Tensor, Tensor]:
        """x @ W^T with its variance."""
        u, is_decoded = self.dtype.relative_rms, matrix.parts[0].scheme.block is not None
        # Variances in f32: half of the memory, and no digit of them matters.
        inner = (var + x**2 * ((u**2 if is_decoded else 0.0) + FP32.relative_rms**2 * (x.shape[-1] / 2 + 1))).float()
        found, spreads = list[Tensor](), list[Tensor]()
        for _, w in matrix.blocks():
            found.append(x @ w.T)
            spreads.append(inner @ w.float().square_().T)
        y = torch.cat(found, -1)
        y = y if matrix.wanted_bias is None else y + matrix.wanted_bias
        return y, torch.cat(spreads, -1).double() + (u * y) ** 2

    def activation_var(self, h: Tensor, var: Tensor, model: ModelConfig) -> tuple[Tensor, Tensor]:
        """The activation with its variance: differences over one standard deviation of gate and of up."""
        half = h.shape[-1] // (1 + model.gated)
        a, sigma, total = self.activation(h, model), var.sqrt(), torch.zeros_like(h[..., :half])
        for part in range(1 + model.gated):
            step = torch.zeros_like(h)
            step[..., part * half : (part + 1) * half] = sigma[..., part * half : (part + 1) * half]
            one, other = (self.activation(h + sign * step, model) - a for sign in (1, -1))
            total += torch.maximum(one.abs(), other.abs()) ** 2
        return a, total + 2 * (self.dtype.relative_rms * a) ** 2


def _split(rows: Tensor, count: int, width: int) -> Tensor:
    """(n, count, width): columns in segments, the last one filled up with 0."""
    return torch.nn.functional.pad(rows, (0, count * width - rows.shape[-1])).reshape(-1, count, width)


def distinct(tensor: Tensor) -> list[int]:
    """The values of a tensor of integers, each once, ascending."""
    return sorted(set(tensor.flatten().tolist()))


def _ids(case: Case) -> list[int]:
    assert case.topk_ids is not None
    return [each for each in distinct(case.topk_ids) if each >= 0]


def rounding_of(x: Tensor, scheme: QuantScheme) -> Tensor:
    """The variance that quantising rows adds: the larger of each error and the mean square of its group."""
    if scheme.block is None:
        return torch.zeros_like(x)
    flat = x.reshape(-1, x.shape[-1])
    error = (scheme.quantize(flat.float()).dequantize(torch.float32).double() - flat.float().double()) ** 2
    columns = min(scheme.block[1], x.shape[-1])
    count = -(-x.shape[-1] // columns)
    padded = torch.nn.functional.pad(error, (0, count * columns - x.shape[-1])).reshape(-1, count, columns)
    mean = padded.mean(-1).repeat_interleave(columns, dim=-1)[:, : x.shape[-1]]
    return torch.maximum(error, mean).reshape(x.shape)


def _gate(bench: Bench, run: Run) -> Tensor:
    assert bench.case.gate is not None
    logits = bench.x @ bench.case.gate.double().T
    return logits if bench.case.logit_bias is None else logits + bench.case.logit_bias.double()


def _scores(bench: Bench, run: Run) -> Tensor:
    coarse = bench.case.x.dtype if bench.router.router_dtype == "model" else torch.float32
    choice, scores = (torch.from_numpy(each).double() for each in scores_of(run["gate"], bench.router, coarse))
    return torch.stack([choice if bench.case.bias is None else choice + bench.case.bias.double(), scores])


def _groups(bench: Bench, run: Run) -> Tensor:
    return torch.from_numpy(kept(run["scores"][0].float().numpy(), bench.router)).double()


def _top_k(bench: Bench, run: Run) -> Tensor:
    return torch.from_numpy(best(run["groups"].float().numpy(), bench.router.top_k))


def _weights(bench: Bench, run: Run) -> Tensor:
    ids = run["top-k"]
    weights = routing_weights(run["scores"][1].float().numpy(), ids.numpy().astype(np.int64), bench.router)
    scaled = torch.from_numpy(weights).double()
    scale = bench.case.expert_scale
    return scaled if scale is None else scaled * scale.double()[ids.clamp(min=0)]


def _experts(bench: Bench, run: Run) -> Tensor:
    return run["top-k"].expand(2, -1, -1).clone()


def _quantise(bench: Bench, run: Run) -> Tensor:
    return bench.x


def _w13(bench: Bench, run: Run) -> Tensor:
    return bench.products(bench._rows(run["quantise"], run), run["experts"][0], "w13")


def _activation(bench: Bench, run: Run) -> Tensor:
    return bench.activation(run["w13"])


def _w2(bench: Bench, run: Run) -> Tensor:
    """(S, T, K, H): the sum over TP ranks, or the parts of them where the case records ranks."""
    whole = bench.products(run["activation"], run["experts"][1], "w2")[None]
    return whole if bench.case.rank_out is None else of_slices(bench, run, whole)


def of_slices(bench: Bench, run: Run, w2: Tensor) -> Tensor:
    """(tp, T, K, H): w2 of each slice of the intermediate size, the last one by difference; a bias is of the first."""
    if bench.case.tp == len(w2):
        return w2
    act, slices = run["activation"], list[Tensor]()
    for rank, columns in enumerate(
        torch.arange(act.shape[-1], dtype=torch.int64, device="cpu").tensor_split(bench.case.tp)[:-1]
    ):
        masked = torch.zeros_like(act)
        masked[..., columns] = act[..., columns]
        slices.append(bench.products(masked, run["experts"][1], "w2", with_bias=rank == 0))
    return torch.stack([*slices, w2.sum(0) - torch.stack(slices).sum(0)])


def of_ranks(run: Run) -> Tensor:
    """(ep * tp, T, H): the output of each rank, whether the case records it or not."""
    rows = of_slices(run.bench, run, run["w2"])
    return _weigh_and_sum(run.bench, Run(run.bench, run.values | {"w2": rows}))


def _weigh_and_sum(bench: Bench, run: Run) -> Tensor:
    """(ep * S, T, H)."""
    rows, weights, ids = run["w2"], run["weights"], run["top-k"]
    if bench.router.weight_on_input:
        weights = torch.ones_like(weights)
    factor = torch.where(ids >= 0, weights, 0.0)
    weighted = torch.where(factor[None, ..., None] == 0, 0.0, rows * factor[None, ..., None])
    rank_TK, ep = bench.rank_of_E[ids.clamp(min=0)], bench.case.ep
    found = [torch.where((rank_TK == rank)[..., None], part, 0.0).sum(1) for rank in range(ep) for part in weighted]
    return torch.stack(found)


def _reduce(bench: Bench, run: Run) -> Tensor:
    return run["weigh-and-sum"].sum(0)


def _shared_experts(bench: Bench, run: Run) -> Tensor:
    return torch.zeros_like(run["reduce"]) if bench.shared_slot is None else bench.shared_added[0]


def _output(bench: Bench, run: Run) -> Tensor:
    return run["reduce"] + run["shared experts"]


_STEPS: Mapping[str, Callable[[Bench, Run], Tensor]] = {
    "gate": _gate, "scores": _scores, "groups": _groups, "top-k": _top_k, "weights": _weights, "experts": _experts,
    "quantise": _quantise, "w13": _w13, "activation": _activation, "w2": _w2, "weigh-and-sum": _weigh_and_sum,
    "reduce": _reduce, "shared experts": _shared_experts, "shared": _output,
}  # fmt: skip


def variance(bench: Bench, run: Run, hook: str) -> tuple[Tensor, Tensor]:
    """The value of a hook and its variance, from earlier values and variances of a run."""
    u, before = bench.dtype.relative_rms, run.variances
    if hook == "quantise":
        return bench.x, rounding_of(bench.x, bench.compute)
    if hook in ("w13", "w2"):
        return _product_stage(bench, run, hook)
    if hook == "activation":
        return bench.activation_var(run["w13"], before["w13"], bench.model)
    if hook == "shared experts" and bench.shared_slot is not None:
        return bench.shared_added
    value = bench.step(hook, run)
    if hook == "weigh-and-sum":
        weights = torch.where(run["top-k"] >= 0, run["weights"], 0.0)
        weights = (weights != 0).double() if bench.router.weight_on_input else weights
        rows = torch.where(weights[None, ..., None] == 0, 0.0, run["w2"])
        own = before["w2"] * weights[None, ..., None] ** 2
        weighted = rows * weights[None, ..., None]
        # Each weight, each weighted row and each partial sum is rounded.
        own = own + u**2 * (2 * weighted**2 + 2 * weighted.cumsum(2) ** 2)
        rank_TK = bench.rank_of_E[run["top-k"].clamp(min=0)]
        of_ranks = [
            torch.where((rank_TK == rank)[..., None], part, 0.0).sum(1) for rank in range(bench.case.ep) for part in own
        ]
        var = torch.stack(of_ranks)
        if "weights" in before:
            var = var + (torch.where(rank_TK[..., None] >= 0, before["weights"][..., None], 0.0) * rows[0] ** 2).sum(1)
        return value, var
    if hook == "reduce":
        partial = run["weigh-and-sum"].cumsum(0)
        return value, before["weigh-and-sum"].sum(0) + u**2 * ((partial**2).sum(0) + value**2)
    if hook == "shared":
        return value, before["reduce"] + before["shared experts"] + 2 * (u * value) ** 2
    return value, torch.zeros_like(value)


def _product_stage(bench: Bench, run: Run, hook: str) -> tuple[Tensor, Tensor]:
    used = run["experts"][0 if hook == "w13" else 1]
    if hook == "w13":
        x, var = bench._rows(run["quantise"], run), bench._rows(run.variances["quantise"], run)
    else:
        x = run["activation"]
        var = run.variances["activation"] + rounding_of(x, bench.compute.hidden)
    wide = bench.sizes(hook)[0]
    value = torch.zeros((*used.shape, wide), dtype=torch.float64, device="cpu")
    spreads = torch.zeros_like(value)
    for expert in distinct(used):
        if expert >= 0:
            at = used == expert
            matrix = bench.w13(expert) if hook == "w13" else bench.w2(expert)
            value[at], spreads[at] = bench.product_var(x[at], var[at], matrix)
    if hook == "w13":
        return value, spreads
    if bench.case.rank_out is None:
        return value[None], spreads[None]
    tp = bench.case.tp
    return of_slices(bench, run, value[None]), spreads.expand(tp, *spreads.shape) / tp


def gate_first(case: Case, h13: Tensor) -> Tensor:
    """w13_out with gate's columns first."""
    if not case.model.gated or case.order == "gate_up":
        return h13
    if case.order == "up_gate":
        return torch.cat(h13.chunk(2, -1)[::-1], -1)
    return torch.cat([h13[..., 0::2], h13[..., 1::2]], -1)
