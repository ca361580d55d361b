"""Named faults of the products of experts: gate and up, scales, zero points, blocks of columns, activation, rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

from moe_mk.config.moe import ModelConfig
from moe_mk.lab.judge.faults import Change, Scene, one
from moe_mk.lab.judge.matrices import Matrix, over_segments, scales_of
from moe_mk.lab.judge.stages import HOOKS, After, Run, distinct
from moe_mk.quant.tensor import QuantScheme, QuantTensor


def of_halves(scene: Scene) -> Iterator[Change]:
    """The order of gate and up."""
    if not scene.bench.model.gated:
        return
    yield one("gate and up swapped", "w13", "", lambda run, h: torch.cat(h.chunk(2, -1)[::-1], -1))
    for swapped in (False, True):
        detail = "and swapped" if swapped else ""

        def apart(run: Run, h: Tensor, swapped: bool = swapped) -> Tensor:
            return torch.cat([h[..., swapped::2], h[..., 1 - swapped :: 2]], -1)

        def together(run: Run, h: Tensor, swapped: bool = swapped) -> Tensor:
            gate, up = h.chunk(2, -1)
            return torch.stack([up, gate] if swapped else [gate, up], -1).flatten(-2)

        yield one("interleaved for concatenated", "w13", detail, apart)
        yield one("concatenated for interleaved", "w13", detail, together)


NewScales = Callable[[QuantTensor, int, Matrix], Tensor | None]
"""Scales (tall, wide) in place of those of a part of an expert's matrix; None where there are none."""


def of_scales(scene: Scene) -> Iterator[Change]:
    """Scales of weights that are dropped, moved or of another size."""
    bench = scene.bench
    experts = [e for e in distinct(scene.run["experts"]) if e >= 0 and e in bench.slots]
    if not experts or not any(m.has_scales for m in (bench.w13(experts[0]), bench.w2(experts[0]))):
        return
    variants: list[tuple[str, str, NewScales]] = [
        ("scale dropped", "", lambda q, e, m: torch.ones_like(scales_of(q))),
        ("scale squared", "", lambda q, e, m: scales_of(q) ** 2),
        ("scale transposed", "", lambda q, e, m: scales_of(q).T.reshape(scales_of(q).shape)),
        ("scale inverted", "", lambda q, e, m: 1.0 / scales_of(q)),
    ]
    if bench.w13(experts[0]).parts[0].global_scale is not None:
        variants.append(("global scale dropped", "", lambda q, e, m: _without_global(q)))
    for rank, (dim, side) in product(range(bench.case.tp if bench.case.tp > 1 else 0), ((1, "w2"), (0, "w13"))):
        yield _rescaled(scene, (side,), "scale of another TP slice", f"{side}, all have those of TP rank {rank}",
                        _of_slice(dim, bench.case.tp, rank))  # fmt: skip
    for which in (("w13",), ("w2",), ("w13", "w2")):
        for name, detail, new in variants:
            yield _rescaled(scene, which, name, f"{' and '.join(which)}{detail}", new)
        for step in (1, -1):
            yield _rescaled(scene, which, "scale of another expert", f"{' and '.join(which)}, the {_next(step)} one",
                            _of_expert(scene, experts, step))  # fmt: skip
        yield _rescaled(scene, which, "scale of another expert", f"{' and '.join(which)}, the first of the file",
                        _of_expert(scene, sorted(bench.slots), 0))  # fmt: skip
        for name, index in (("64 instead of 128", 2), ("256 instead of 128", 0.5)):
            yield _regrouped(scene, which, name, index)
    if bench.model.gated:
        yield _rescaled(scene, ("w13",), "scale of another projection", "gate for up and up for gate",
                        lambda q, e, m: scales_of(m.parts[1] if q is m.parts[0] else m.parts[0]))  # fmt: skip
        yield _rescaled(scene, ("w13",), "scale of another projection", "gate's for both",
                        lambda q, e, m: scales_of(m.parts[0]))  # fmt: skip


def _of_slice(dim: int, tp: int, rank: int) -> NewScales:
    """The scales of one slice in place of those of all; unchanged where they do not divide."""

    def new(q: QuantTensor, expert: int, matrix: Matrix) -> Tensor:
        scales = scales_of(q)
        size = scales.shape[dim] // tp
        if size * tp != scales.shape[dim]:
            return scales
        return scales.narrow(dim, rank * size, size).repeat(*((tp, 1) if dim == 0 else (1, tp)))

    return new


def _next(step: int) -> str:
    return "next" if step > 0 else "previous"


def _without_global(q: QuantTensor) -> Tensor:
    assert q.scales is not None
    return q.scales.to(torch.float32).double()


def _of_expert(scene: Scene, experts: list[int], step: int) -> NewScales:
    """Of the expert `step` further by its number, or of the first; of those that were hit where that is unknown."""

    def new(q: QuantTensor, expert: int, matrix: Matrix) -> Tensor | None:
        slots, count = scene.bench.slots, scene.bench.model.num_experts
        other = min(experts) if step == 0 else (expert + step) % count
        if other not in slots:
            other = experts[(experts.index(expert) + step) % len(experts)]
        at = next(n for n, part in enumerate(matrix.parts) if part is q)
        whole = scene.bench.w13(other) if len(matrix.parts) > 1 or matrix is scene.bench.w13(expert) else None
        return scales_of((whole or scene.bench.w2(other)).parts[at])

    return new


def _rescaled(scene: Scene, which: tuple[str, ...], name: str, detail: str, new: NewScales) -> Change:
    def spread(q: QuantTensor, expert: int, matrix: Matrix, width: int) -> Tensor:
        scales = new(q, expert, matrix)
        assert scales is not None
        return over_segments(scales, q, width)

    return Change(name, which[0], detail, tuple((hook, _with_scales(hook, spread)) for hook in which))


def _regrouped(scene: Scene, which: tuple[str, ...], detail: str, index: float) -> Change:
    """The scale of a column found by a wrong group size: the last one where that is beyond the end."""

    def spread(q: QuantTensor, expert: int, matrix: Matrix, width: int) -> Tensor:
        scales, k = scales_of(q), q.shape[1]
        right = over_segments(scales, q, width)
        columns = min(q.scheme.block[1], k) if q.scheme.block else k
        at = (
            (torch.arange(right.shape[1], dtype=torch.int64, device="cpu") * width * index / columns)
            .long()
            .clamp(max=scales.shape[1] - 1)
        )
        rows = over_segments(
            torch.arange(scales.shape[0], dtype=torch.int64, device="cpu")[:, None].expand(scales.shape).double(),
            q,
            width,
        )[:, 0].long()
        return scales[rows][:, at]

    named = "group of another size"
    return Change(named, which[0], f"{' and '.join(which)}: {detail}",
                  tuple((hook, _with_scales(hook, spread)) for hook in which))  # fmt: skip


def _with_scales(hook: str, spread: Callable[[QuantTensor, int, Matrix, int], Tensor]) -> After:
    """The product with other scales."""

    def after(run: Run, value: Tensor) -> Tensor:
        bench = run.bench
        products, scales = bench.partials(run, hook), bench.scales(run, hook)
        used, width, changed = run["experts"][0 if hook == "w13" else 1], bench.width(hook), torch.ones_like(scales)
        for expert in distinct(used):
            if expert >= 0 and expert in bench.slots:
                matrix = bench.w13(expert) if hook == "w13" else bench.w2(expert)
                if matrix.has_scales:
                    parts = [spread(q, expert, matrix, width) for q in matrix.parts]
                    changed[used == expert] = matrix.wanted(torch.cat(parts))
        return shifted(run, hook, value, (products * (changed - scales)).nan_to_num())

    return after


def shifted(run: Run, hook: str, value: Tensor, change_TKNS: Tensor) -> Tensor:
    """A product with a change of each segment added; of w2 to the slice that has the segment."""
    if hook == "w13":
        return value + change_TKNS.sum(-1)
    parts = change_TKNS.tensor_split(len(value), dim=-1)
    return value + torch.stack([part.sum(-1) for part in parts])


def of_zero_points(scene: Scene) -> Iterator[Change]:
    """Zero points of weight-only integers."""
    bench = scene.bench
    if bench.model.quant.weight_scheme.family != "wna16" or bench.model.quant.weights.endswith("affine"):
        return
    for which in (("w13",), ("w2",), ("w13", "w2")):
        for step in (1, -1):
            yield Change("zero point off by one", which[0], f"{' and '.join(which)}, {step:+d}",
                         tuple((hook, _zeros_moved(hook, step)) for hook in which))  # fmt: skip


def _zeros_moved(hook: str, step: int) -> After:
    def after(run: Run, value: Tensor) -> Tensor:
        bench, width = run.bench, run.bench.width(hook)
        scales = bench.scales(run, hook)
        rows = bench._rows(run["quantise"], run) if hook == "w13" else run["activation"]
        padded = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % width))
        sums = padded.reshape(*padded.shape[:-1], -1, width).sum(-1)
        return shifted(run, hook, value, -step * scales * sums[..., None, :])

    return after


def of_blocks(scene: Scene) -> Iterator[Change]:
    """Parts of the contracted columns that are left out or counted twice."""
    bench = scene.bench
    for hook in ("w13", "w2"):
        if HOOKS.index(hook) > HOOKS.index(scene.hook):
            continue
        columns, width = bench.sizes(hook)[1], bench.width(hook)
        count = -(-columns // width)
        whole_run = len(distinct(scene.run["experts"])) * scene.expert_cost
        halves = {max(1, count // parts) for parts in (2, 4, 8)}
        sizes = sorted({*(max(1, size // width) for size in (16, 32, 64, 128, 256)), *halves} - {count})
        is_cheap = hook == "w2" or scene.hook == "w13" or scene.fits(whole_run * 3 * count)
        for size in sizes:
            starts = list(range(0, count, size))
            chosen = starts if is_cheap else [0, starts[-1]] if size not in halves else starts
            for start in dict.fromkeys(chosen):
                end, skipped = min(count, start + size), _block_changed(hook, start, min(count, start + size), -1.0)
                what = f"{hook}, columns {start * width} to {min(columns, end * width) - 1}"
                yield one("K block skipped", hook, what, skipped)
                if size in halves:
                    yield one("K block counted twice", hook, what, _block_changed(hook, start, end, 1.0))


def _block_changed(hook: str, start: int, end: int, factor: float) -> After:
    def after(run: Run, value: Tensor) -> Tensor:
        products, scales = run.bench.partials(run, hook), run.bench.scales(run, hook)
        part = factor * products[..., start:end] * scales[..., start:end]
        if len(value) == 1 or hook == "w13":
            return value + part.sum(-1)
        change = torch.zeros_like(products)
        change[..., start:end] = part
        return shifted(run, hook, value, change)

    return after


def of_activation(scene: Scene) -> Iterator[Change]:
    """The function between the products."""
    bench, model = scene.bench, scene.bench.model
    limit = model.swiglu_limit
    if model.gated and limit is not None:
        for detail, clamped in _clamps(limit).items():
            if model.activation != "silu_limit":
                yield one("clamp of the wrong side", "activation", detail, _after_clamp(clamped))
        for other in ("swiglu_limit", "silu_limit"):
            if other != model.activation:
                changed = model.model_copy(update={"activation": other})
                yield one("clamp of the wrong side", "activation", f"as {other}", _acts_as(changed))
    if model.activation == "swiglu_oai":
        less = model.model_copy(update={"swiglu_alpha": 1.0})
        yield one("activation of another family", "activation", "without alpha", _acts_as(less))
    for name in ("silu", "gelu", "relu2", "gelu_tanh"):
        changed = model.model_copy(update={"activation": name, "swiglu_limit": None})
        if name != model.activation:
            yield one("activation of another family", "activation", name, _acts_as(changed))
        if limit is not None and model.activation in ("swiglu_limit", "swiglu_oai"):
            yield one("activation of another family", "activation", f"{name}, clamped", _acts_clamped(changed, limit))
    if model.gated:
        half = bench.model.moe_intermediate_size
        yield one("up missing", "activation", "act(gate)", _act_of(model, lambda g, u: (g, torch.ones_like(u)), half))
        yield one("activation missing", "activation", "gate * up", lambda run, a: run["w13"].chunk(2, -1)[0] * run[
            "w13"].chunk(2, -1)[1])  # fmt: skip


def _clamps(limit: float) -> dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    return {
        "the gate from both sides": lambda g, u: (g.clamp(-limit, limit), u.clamp(-limit, limit)),
        "the gate from below": lambda g, u: (g.clamp(min=-limit), u.clamp(-limit, limit)),
        "up from above alone": lambda g, u: (g.clamp(max=limit), u.clamp(max=limit)),
        "up from below alone": lambda g, u: (g.clamp(max=limit), u.clamp(min=-limit)),
        "gate and up exchanged": lambda g, u: (g.clamp(-limit, limit), u.clamp(max=limit)),
        "no clamp": lambda g, u: (g, u),
    }


def _after_clamp(clamped: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> After:
    def after(run: Run, value: Tensor) -> Tensor:
        own = run.bench.model
        gate, up = clamped(*run["w13"].chunk(2, -1))
        if own.activation == "swiglu_oai":
            return (up + 1.0) * gate / (1.0 + torch.exp(-own.swiglu_alpha * gate))
        return up * gate / (1.0 + torch.exp(-gate))

    return after


def _acts_as(model: ModelConfig) -> After:
    return lambda run, value: run.bench.activation(run["w13"], model)


def _acts_clamped(model: ModelConfig, limit: float) -> After:
    def after(run: Run, value: Tensor) -> Tensor:
        gate, up = run["w13"].chunk(2, -1)
        return run.bench.activation(torch.cat([gate.clamp(max=limit), up.clamp(-limit, limit)], -1), model)

    return after


def _act_of(model: ModelConfig, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], half: int) -> After:
    def after(run: Run, value: Tensor) -> Tensor:
        gate, up = change(run["w13"][..., :half], run["w13"][..., half:])
        return run.bench.activation(torch.cat([gate, up], -1), model)

    return after


def of_quantised_rows(scene: Scene) -> Iterator[Change]:
    """Scales of activations, where the case quantises them."""
    compute = scene.bench.compute
    if compute.block is None or compute.quantize(scene.bench.x[:1].float()).scales is None:
        return
    rules: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {
        ("scale dropped", ""): lambda a: 1.0 / a,
        ("scale squared", ""): lambda a: a,
        ("scale transposed", ""): lambda a: a.T.reshape(a.shape) / a,
        ("scale of another token", "the next one"): lambda a: a.roll(-1, 0) / a,
        ("scale of another token", "the first one"): lambda a: a[:1] / a,
        ("scale of another group", "the first one"): lambda a: a[:, :1] / a,
        ("group of another size", "64 instead of 128, read in order"): lambda a: _half_groups(a, 1),
        ("group of another size", "64 instead of 128, every second read"): lambda a: _half_groups(a, 2),
    }
    for (name, detail), rule in rules.items():
        halves = 2 if name == "group of another size" else 1

        def of_x(run: Run, x: Tensor, rule: Callable[[Tensor], Tensor] = rule, halves: int = halves) -> Tensor:
            return x * _ratios(x, compute, 1, rule, halves)

        def of_rows(run: Run, h: Tensor, rule: Callable[[Tensor], Tensor] = rule, halves: int = halves) -> Tensor:
            ratios = _ratios(run["quantise"], compute, scene.bench.width("w13"), rule, halves)[:, None, None]
            return shifted(run, "w13", h, _scaled(run, "w13") * (ratios - 1.0))

        def of_hidden(run: Run, y: Tensor, rule: Callable[[Tensor], Tensor] = rule, halves: int = halves) -> Tensor:
            act, width = run["activation"], scene.bench.width("w2")
            ratios = _ratios(act.flatten(0, 1), compute.hidden, width, rule, halves)
            return shifted(run, "w2", y, _scaled(run, "w2") * (ratios.reshape(*act.shape[:2], 1, -1) - 1.0))

        detail = detail and f", {detail}"
        first = ("quantise", of_x) if scene.hook == "quantise" else ("w13", of_rows)
        yield Change(name, "quantise", f"rows of x{detail}", (first,))
        yield one(name, "w2", f"hidden rows{detail}", of_hidden)
        yield Change(name, "quantise", f"rows of x and hidden rows{detail}", (first, ("w2", of_hidden)))


def _scaled(run: Run, which: str) -> Tensor:
    return run.bench.partials(run, which) * run.bench.scales(run, which)


def _ratios(x: Tensor, scheme: QuantScheme, width: int, rule: Callable[[Tensor], Tensor], halves: int) -> Tensor:
    """(n, segments): the factor of each segment of `width` columns of rows with wrong scales.

    halves: 2 for scales of groups half as wide as those of the format, of which there are twice as many.
    """
    assert scheme.block is not None
    columns, k = min(scheme.block[1], x.shape[1]) // halves, x.shape[1]
    if halves == 2 and k % (2 * columns):
        return torch.ones((len(x), -(-k // width)), dtype=torch.float64, device="cpu")
    if halves == 2:
        scales = x.reshape(len(x), -1, columns).abs().amax(-1).clamp_min(1e-10)
    else:
        stored = scheme.quantize(x.float()).scales
        assert stored is not None
        scales = stored.double()
    at = torch.arange(-(-k // width), dtype=torch.int64, device="cpu") * width // columns
    return rule(scales).expand_as(scales)[:, at]


def _half_groups(largest: Tensor, stride: int) -> Tensor:
    """The ratio of the scale that a kernel of whole groups reads to that of the group half as wide."""
    count = largest.shape[1] // 2
    return largest[:, ::stride][:, :count].repeat_interleave(2, dim=1) / largest


FAMILIES = (of_halves, of_scales, of_zero_points, of_activation, of_quantised_rows)
SEARCHES = (of_blocks,)
"""Families of many changes, tried where no other one explains the error."""
