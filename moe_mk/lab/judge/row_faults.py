"""Named faults of rows, ranks and shared experts: whose weights, whose rows, how often, in what order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from moe_mk.lab.judge.faults import Change, Scene, one
from moe_mk.lab.judge.stages import After, Run, distinct, of_ranks

MOST_WRONG_ROWS = 2
"""Tokens to which padding is assumed to leak."""


def of_ids(scene: Scene) -> Iterator[Change]:
    """Experts found by wrong numbers."""
    bench, case = scene.bench, scene.bench.case
    logical = case.physical_to_logical
    if logical is not None:
        table = logical.to(torch.int64)
        first = torch.zeros(bench.model.num_experts, dtype=torch.int64, device="cpu")
        for physical in range(len(table) - 1, -1, -1):
            if table[physical] >= 0:
                first[table[physical]] = physical
        yield one("physical ids for logical", "top-k", "recorded", lambda run, ids: first[ids])
        yield one("physical ids for logical", "w13", "logical ids as physical ones",
                  _used(lambda ids: table[ids.clamp(max=len(table) - 1)]), "experts")  # fmt: skip
        yield one("physical ids for logical", "w13", "physical ids as logical ones", _used(lambda ids: first[ids]),
                  "experts")  # fmt: skip
    ep, experts = case.ep, bench.model.num_experts
    if not scene.fits(4 * scene.expert_cost * len(distinct(scene.run["top-k"]))):
        return
    own = [[e for e in range(experts) if int(bench.rank_of_E[e]) == rank] for rank in range(ep)]
    for rank in (None, *range(ep if ep > 1 else 0)):
        ranks = range(ep) if rank is None else (rank,)
        which = "all ranks" if rank is None else f"EP rank {rank}"
        for step in (1, -1):
            moved = {e: own[r][(at + step) % len(own[r])] for r in ranks for at, e in enumerate(own[r])}
            yield one("experts shifted", "w13", f"{which}, by {step:+d}", _used(_mapped(moved, experts)), "experts")
        for depth in (1, 2):
            moved = {e: own[r][at - depth] for r in ranks for at, e in enumerate(own[r]) if at >= depth}
            what = f"{which}, those of the expert {depth} before in a buffer of {depth}"
            yield one("stale weight", "w13", what, _used(_mapped(moved, experts)), "experts")
        if ep > 1:
            moved = {e: own[(r + 1) % ep][at % len(own[(r + 1) % ep])] for r in ranks for at, e in enumerate(own[r])}
            yield one("experts shifted", "w13", f"{which}, those of the next rank", _used(_mapped(moved, experts)),
                      "experts")  # fmt: skip


def _mapped(moved: dict[int, int], experts: int) -> object:
    table = torch.tensor([moved.get(e, e) for e in range(experts)], dtype=torch.int64, device="cpu")
    return lambda ids: table[ids]


def _used(change: object) -> After:
    def after(run: Run, used: Tensor) -> Tensor:
        return torch.where(used >= 0, change(used.clamp(min=0)), used)  # type: ignore[operator]

    return after


def of_stale_weights(scene: Scene) -> Iterator[Change]:
    """One expert with the weights of another one, or of another case of the layer."""
    bench, ids, wrong_T = scene.bench, scene.run["top-k"], scene.wrong_T
    experts, known = bench.model.num_experts, sorted(e for e in bench.slots if e < bench.model.num_experts)
    hit = {e: (ids == e).any(1) for e in known}
    suspects = [
        e
        for e, its in hit.items()
        if bool(wrong_T.any()) and bool(its[wrong_T].all()) and 2 * wrong_T.sum() >= its.sum()
    ]
    for at, case in enumerate(scene.others):
        for expert, slot in case.slots().items():
            bench.slots.setdefault((at + 1) * experts + expert, slot)
    for at in range(len(scene.others)):
        every = all((at + 1) * experts + expert in bench.slots for expert in known)

        def earlier_ones(run: Run, used: Tensor, offset: int = (at + 1) * experts) -> Tensor:
            return torch.where(used >= 0, used + offset, used)

        if every:
            yield one("stale weight", "w13", f"all experts have the weights of case {at + 2}", earlier_ones, "experts")
    cost = scene.expert_cost * len(suspects) * len(known)
    for expert in suspects if len(suspects) <= 8 and scene.fits(cost) else ():
        earlier = [(at + 1) * experts + expert for at in range(len(scene.others))]
        for other in (*(e for e in earlier if e in bench.slots), *(e for e in known if e != expert)):
            whose = f"of expert {other}" if other < experts else f"of case {other // experts + 1}"
            for which, name in (((0, 1), "weights"), ((0,), "w13"), ((1,), "w2")):

                def after(
                    run: Run, used: Tensor, expert: int = expert, other: int = other, which: tuple[int, ...] = which
                ) -> Tensor:
                    changed = used.clone()
                    for at in which:
                        changed[at] = torch.where(used[at] == expert, other, used[at])
                    return changed

                stage = "w13" if 0 in which else "w2"
                yield one("stale weight", stage, f"expert {expert} has the {name} {whose}", after, "experts")


def of_order(scene: Scene) -> Iterator[Change]:
    """Rows in another order, rows of other tokens, rows that were not written."""
    bench, run = scene.bench, scene.run
    tokens = bench.tokens
    every = torch.arange(tokens, dtype=torch.int64, device="cpu")
    if tokens > 1:
        for name, order in (("by one", every.roll(-1)), ("back by one", every.roll(1)),
                            ("reversed", every.flip(0))):  # fmt: skip
            yield one("order of tokens", "quantise", f"input rows, {name}", _picked(order))
        sorted_N = torch.where(run["top-k"] >= 0, run["top-k"], 1 << 20).flatten().argsort(stable=True)
        for name, order in (("left sorted by expert", sorted_N), ("sorted by expert twice", sorted_N[sorted_N])):

            def unsorted(run: Run, rows: Tensor, order: Tensor = order) -> Tensor:
                return rows.flatten(1, 2)[:, order].reshape(rows.shape)

            yield one("order of tokens", "weigh-and-sum", f"rows {name}", _with_rows(unsorted))
    if scene.hook not in ("reduce", "shared"):
        return
    added = run["shared experts"] if scene.hook == "shared" else torch.zeros_like(scene.want)
    routed, var = scene.want - added, scene.var.mean(-1).sqrt() + 1e-30
    wrong = scene.wrong_T
    for whole, hook in ((False, "reduce"), (True, "shared")):
        if whole and (scene.hook == "reduce" or bench.shared_slot is None):
            continue
        sources = scene.want if whole else routed
        got = (scene.got if whole else scene.got - added).nan_to_num(1e30, 1e30, -1e30)
        distance = torch.cdist(got, sources.nan_to_num()) / var[:, None]
        order = torch.where(wrong, distance.argmin(1), every)
        edge = _edge(scene)
        if edge:
            zero, again = every >= edge, every % edge
            where = f"from token {bench.case.positions[edge]} on"
            name = "tokens beyond a bucket's edge"
            yield one(name, "weigh-and-sum", f"zero {where}", _zeroed(zero), hook)
            yield one(name, "weigh-and-sum", f"rows of the first tokens {where}", _picked(again), hook)
        if not torch.equal(order, every):
            is_permutation = len(distinct(order)) == tokens
            moved = torch.nonzero(order != every).flatten().tolist()
            what = ", ".join(f"{bench.case.positions[t]} has that of {bench.case.positions[int(order[t])]}"
                             for t in moved[:4])  # fmt: skip
            name = "order of tokens" if is_permutation else "stale row"
            yield one(name, "weigh-and-sum", f"token {what}", _picked(order), hook)
        absent = wrong & (got.norm(dim=1) <= 3.0 * scene.var.sum(-1).sqrt())
        if bool(absent.any()):
            yield one("row not written", "weigh-and-sum", f"{int(absent.sum())} tokens are zero", _zeroed(absent), hook)
    yield from _of_other_cases(scene)
    if edge := _edge(scene):
        where = f"unknown values from token {bench.case.positions[edge]} on"
        rest = every >= edge
        yield replace(
            one("tokens beyond a bucket's edge", "weigh-and-sum", where,
                lambda run, y: torch.where(rest[:, None], scene.got, y), scene.hook), is_pattern=True,
        )  # fmt: skip


def _edge(scene: Scene) -> int:
    """The index of the first token of a wrong tail that begins at a multiple of 8 or a power of two; 0 without."""
    wrong = scene.wrong_T.tolist()
    first = wrong.index(True) if True in wrong else 0
    position = scene.bench.case.positions[first]
    is_edge = position % 8 == 0 or position & (position - 1) == 0
    return first if first > 1 and all(wrong[first:]) and len(wrong) - first > 1 and is_edge else 0


def _of_other_cases(scene: Scene) -> Iterator[Change]:
    """Rows of the output of another call."""
    for at, other in enumerate(scene.others):
        if other.y.shape[1] != scene.bench.case.y.shape[1] or not other.size:
            continue
        rows = scene.bench.of_columns(other.y).double().nan_to_num()
        nearest = torch.cdist(scene.got.nan_to_num(), rows).argmin(1)

        def after(run: Run, y: Tensor, rows: Tensor = rows, nearest: Tensor = nearest) -> Tensor:
            return torch.where(scene.wrong_T[:, None], rows[nearest], y)

        yield one("stale row", "weigh-and-sum", f"rows of case {at + 2}", after, scene.hook)


def _picked(order: Tensor) -> After:
    return lambda run, rows: rows[order]


def _zeroed(rows: Tensor) -> After:
    return lambda run, y: torch.where(rows[:, None], 0.0, y)


def _plus(added: Tensor) -> After:
    return lambda run, y: y + added


def _times(factor: float) -> After:
    return lambda run, y: y * factor


def _with_rows(change: After) -> After:
    """The sums of changed rows of assignments."""

    def after(run: Run, value: Tensor) -> Tensor:
        rows = change(run, run["w2"])
        return run.bench.step("weigh-and-sum", Run(run.bench, run.values | {"w2": rows}))

    return after


def of_assignments(scene: Scene) -> Iterator[Change]:
    """Assignments that are lost, count twice, or go nowhere and are computed; padding that leaks."""
    bench, run = scene.bench, scene.run
    ids, experts = run["top-k"], bench.model.num_experts
    if bool((ids < 0).any()) and not bool((ids < 0).all()):
        for expert in (0, experts - 1):

            def counted(run: Run, value: Tensor, expert: int = expert) -> Tensor:
                bench, routed = run.bench, torch.where(run["top-k"] < 0, expert, run["top-k"])
                recorded = bench.case.topk_weights
                weights = run["weights"] if recorded is None else recorded.double()
                weights = torch.where((run["top-k"] < 0) & (weights == 0), 1.0, weights)
                again = Run(
                    bench, run.values | {"top-k": routed, "experts": routed.expand(2, -1, -1), "weights": weights}
                )
                for hook in ("w13", "activation", "w2"):
                    again.values[hook] = bench.step(hook, again)
                return bench.step("weigh-and-sum", again)

            yield one("padding leaks", "weigh-and-sum", f"ids of -1 as expert {expert}", counted)
    if scene.hook not in ("reduce", "shared"):
        return
    yield from _leaks(scene)
    weights = torch.where(ids >= 0, run["weights"], 0.0)
    share = (run["w2"].sum(0) * (1.0 if bench.router.weight_on_input else weights[..., None])).nan_to_num()
    left = (scene.got - scene.want).nan_to_num(0.0, 0.0, 0.0)
    for name, factor in (("assignment lost", -1.0), ("assignment twice", 1.0)):
        distance = (left[:, None] - factor * share).norm(dim=-1)
        at = torch.where(scene.wrong_T, distance.argmin(1), -1)
        chosen = torch.zeros_like(weights)
        rows = at >= 0
        chosen[rows, at[rows]] = factor
        lost = sorted({int(ids[t, at[t]]) for t in torch.nonzero(rows).flatten().tolist()})
        what = f"{int(rows.sum())} of experts {', '.join(map(str, lost[:6]))}"
        yield one(name, "weigh-and-sum", what,
                  _plus((share * chosen[..., None]).sum(1)), "reduce")  # fmt: skip


def _leaks(scene: Scene) -> Iterator[Change]:
    """Rows of padding, copies of a token, that are added to a token: a sum of its rows in all experts."""
    bench, run, wrong = scene.bench, scene.run, torch.nonzero(scene.wrong_T).flatten().tolist()
    hit = sorted(set(run["experts"].flatten().tolist()) & set(bench.slots))
    if not 1 <= len(wrong) <= MOST_WRONG_ROWS or bench.tokens < 4 or 4 * len(hit) > scene.got.shape[1]:
        return
    if not scene.fits(scene.expert_cost * len(hit)):
        return
    for token in wrong:
        for source in dict.fromkeys((0, bench.tokens - 1, token)):
            x = run["quantise"][source].expand(1, len(hit), -1)
            used = torch.tensor([hit], dtype=torch.int64, device="cpu")
            act = bench.activation(bench.products(x, used, "w13"))
            rows = bench.products(act, used, "w2")[0]
            left = (scene.got - scene.want)[token]
            if not bool(left.isfinite().all()):
                continue
            factor = torch.linalg.lstsq(rows.T, left[:, None]).solution[:, 0]
            large = factor.abs() > 0.01 * factor.abs().max()
            foreign = [e for e, used_much in zip(hit, large.tolist(), strict=True)
                       if used_much and e not in run["top-k"][token].tolist()]  # fmt: skip
            if not foreign or float(factor.min()) < -0.05 * float(factor.abs().max()):
                continue
            added = torch.zeros_like(scene.want)
            added[token] = factor @ rows
            what = f"rows of token {bench.case.positions[source]} are added to {bench.case.positions[token]}"
            yield one("padding leaks", "weigh-and-sum", what, _plus(added), "reduce")


def of_sums(scene: Scene) -> Iterator[Change]:
    """Sums over ranks that lack one, or have one twice."""
    case, bench = scene.bench.case, scene.bench
    tp, ep = case.tp, case.ep

    def times(factors: list[float]) -> After:
        return lambda run, value: (
            of_ranks(run) * torch.tensor(factors, dtype=torch.float64, device="cpu")[:, None, None]
        ).sum(0)

    for name, factor in (("missing", 0.0), ("doubled", 2.0)):
        for rank in range(tp if tp > 1 else 0):
            factors = [factor if r % tp == rank else 1.0 for r in range(ep * tp)]
            yield from _summed(f"TP slice {name}", f"TP rank {rank}", factors, times(factors))
        for rank in range(ep if ep > 1 else 0):
            factors = [factor if r // tp == rank else 1.0 for r in range(ep * tp)]
            yield from _summed(f"EP rank {name}", f"EP rank {rank}", factors, times(factors))
        for rank in range(ep * tp if ep > 1 and tp > 1 else 0):
            factors = [factor if r == rank else 1.0 for r in range(ep * tp)]
            yield from _summed(f"TP slice {name}", f"rank {rank}", factors, times(factors))
    for rank in range(ep * tp if ep * tp > 2 else 0):
        factors = [float(r == rank) for r in range(ep * tp)]
        yield one("reduction missing", "reduce", f"output of rank {rank} alone", times(factors))
    for factor in {float(tp), float(ep), float(tp * ep)} - {1.0}:
        yield one("reduced twice", "reduce", f"times {factor:g}", times([factor] * (ep * tp)))
        yield one("reduced twice", "reduce", f"divided by {factor:g}", times([1.0 / factor] * (ep * tp)))
    if any(slot.biases is not None for slot in bench.slots.values()):
        of_rows = {"expert bias missing": -1.0} | ({"expert bias on every TP rank": tp - 1.0} if tp > 1 else {})
        for name, factor in of_rows.items():

            def biased(run: Run, rows: Tensor, factor: float = factor) -> Tensor:
                bias = run.bench.biases(run["experts"][1], "w2")
                return torch.cat([rows[:1] + factor * bias, rows[1:]])

            yield one(name, "w2", "of w2", biased)

        def unweighed(run: Run, y: Tensor) -> Tensor:
            bias = run.bench.biases(run["experts"][1], "w2")
            left = torch.where(run["top-k"] >= 0, 1.0 - run["weights"], 0.0)[..., None] * bias
            return y + left.sum(1)

        yield one("expert bias not weighed", "weigh-and-sum", "of w2", unweighed, "reduce")
        yield one("expert bias missing", "w13", "of w13",
                  lambda run, value: value - run.bench.biases(run["experts"][0], "w13"))  # fmt: skip


def _summed(name: str, detail: str, factors: list[float], reduced: After) -> Iterator[Change]:
    yield one(name, "reduce", detail, reduced)
    of_rank = torch.tensor(factors, dtype=torch.float64, device="cpu")[:, None, None]

    def recorded(run: Run, value: Tensor) -> Tensor:
        return value * of_rank if len(value) == len(of_rank) else value

    yield one(name, "weigh-and-sum", f"{detail}, its own output", recorded)


def of_shared(scene: Scene) -> Iterator[Change]:
    """How often and by what factor shared experts are added."""
    bench = scene.bench
    if bench.shared_slot is None:
        return
    tp, ep, factor = bench.case.tp, bench.case.ep, bench.router.routed_scaling_factor
    times = {0.0: "shared experts missing", 2.0: "shared experts twice"}
    for many in (tp * ep, tp, ep):
        if many > 1:
            times.setdefault(float(many), "shared experts per rank")
    if factor != 1.0:
        times.setdefault(factor, "routed scaling of shared experts")
        times.setdefault(1.0 / factor, "routed scaling of shared experts")
    for many_times, name in times.items():
        yield one(name, "shared", f"times {many_times:g}", _times(many_times), "shared experts")
    if bench.case.shared_gate is not None:
        gate = bench.case.shared_gate.double()
        yield one("shared gate missing", "shared", "",
                  lambda run, y: y * (1.0 + torch.exp(-(bench.x @ gate)))[:, None], "shared experts")  # fmt: skip


FAMILIES = (of_ids, of_sums, of_shared, of_order, of_stale_weights, of_assignments)
