"""What each process does in the tests of the native call of a layer between ranks; results are texts and numbers."""

import math
import mmap
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk import MoEConfig, MoELayer, ParallelGroups
from moe_mk.comm.header import EAGER_BYTES
from moe_mk.config.tuned import Point, Tuned
from moe_mk.flight import wait
from moe_mk.kernels.native.experts_mode import Tuning
from moe_mk.layer import DecodePrefillMoE
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.one_sided.transport import FusedOneSided
from moe_mk.prepare_finalize.rows.messages import FusedMessages
from moe_mk.quant.fp8 import FP8_128x128
from moe_mk.quant.tensor import QuantTensor
from moe_mk.router.replay import RoutingCapture
from moe_mk.tokens import Routing
from tests.layer import any_tensors
from tests.layer.failing_ranks import outcome
from tests.layer.interrupted_ranks import Interrupts

HIDDEN, INNER, EXPERTS, TOP_K = 256, 128, 12, 3
COUNTS = (
    (1, 1, 1), (5, 0, 2), (0, 0, 0), (40, 3, 17), (1, 1, 1),
    (30, 40, 30), (36, 40, 34), (60, 60, 60), (75, 75, 60),  # the last fits into memory, which doubles, not into pages
    (256, 30, 0),
    (9, 200, 1),  # rows in FP8 fit into one message, their sums do not
)  # fmt: skip
"""Tokens of each rank, call by call: windows, memory and pages grow, and shrink again."""
LATE_S = 0.02
"""Far longer than the native call polls."""


def tensors(shared: int, fp8: bool) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw) * shape[-1] ** -0.5

    made = {"gate.weight": normal(EXPERTS, HIDDEN).bfloat16()}
    blocks = [(f"experts.{e}", INNER) for e in range(EXPERTS)] + [("shared_experts", INNER * shared)] * bool(shared)
    for name, inner in blocks:
        for part, shape in (("gate", (inner, HIDDEN)), ("up", (inner, HIDDEN)), ("down", (HIDDEN, inner))):
            q, key = FP8_128x128.quantize(normal(*shape)), f"{name}.{part}_proj.weight"
            assert q.scales is not None
            made |= {key: q.values, f"{key}_scale_inv": q.scales} if fp8 else {key: normal(*shape).bfloat16()}
    return made


def built(
    shared: int = 0,
    fp8: bool = False,
    replicas: bool = False,
    tuned: bool = False,
    group: dist.ProcessGroup | None = None,
    **settings: Any,
) -> MoELayer:
    """A layer over a group of its own, on the native experts. replicas: a rank also has an expert of the next one.
    tuned: parameters depend on the number of received rows."""
    model = {
        "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS, "num_shared_experts": shared,
        "quant": {"weights": "fp8_block" if fp8 else "bf16"},
    }  # fmt: skip
    chosen = {"experts": "cpu_native", "prepare_finalize": "one_sided", "max_num_tokens": 256, "timeout_s": 20.0}
    data = {"model": model, "router": {"top_k": TOP_K}}
    config = MoEConfig.parse(data, "a test").with_(**{**chosen, **settings})
    made = MoELayer(config, groups=ParallelGroups(ep=group or dist.new_group()), name="exchanged")
    if replicas:
        first = [4 * rank for rank in range(3)]
        made.live.set_placement(ExpertMap(tuple((e, e + 1, e + 2, e + 3, (e + 5) % EXPERTS) for e in first), EXPERTS))
        made.router = replace(made.router, ids_dtype=torch.int64)
    drawn = any_tensors.tensors_of(made.spec, 5) if made.spec.has_input_norm else {}
    made.load_weights(drawn | tensors(shared, fp8))
    if tuned:
        experts: Any = made.kernel.experts
        few, many = Point(0.5, Tuning(panel_rows=1), 1.0), Point(8.0, Tuning(panel_rows=5), 1.0)
        experts.tuned = Tuned((few, many), ((math.inf, Tuning()),))
    return made


def tokens(rank: int, count: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn((count, HIDDEN), generator=draw).bfloat16()


@contextmanager
def counted() -> Iterator[list[int]]:
    calls = list[int]()
    with pytest.MonkeyPatch.context() as patch:
        for kind in (FusedOneSided, FusedMessages):
            patch.setattr(kind, "__call__", noting(calls, kind.__call__))
        yield calls


def noting(calls: list[int], call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def noted(self: object, x_TH: Tensor, *arguments: Any, **named: Any) -> Tensor:
        calls.append(len(x_TH))
        return call(self, x_TH, *arguments, **named)

    return noted


def traces(made: MoELayer, call: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """A call, and what it leaves in the counters of the layer."""
    made.reset_expert_load()
    made.reset_report()
    made.ep.traffic.reset()
    y_TH, traffic = call(), made.ep.traffic
    left = {
        "load": made.expert_load.tolist(),
        "report": sorted(map(repr, made.report().stages)),
        "bytes": dict(traffic.bytes_by_phase),
        "calls": dict(traffic.calls_by_phase),
        "peers": {phase: dict(of) for phase, of in traffic.bytes_by_peer.items()},
    }
    return y_TH, left


def compared(rank: int, who: list[int], listens: bool, settings: dict[str, Any]) -> list[str]:
    """Differences between `layer(x)` and its steps, call by call; only the ranks of `who` make the native call."""
    pair = dist.new_group([0, 1])
    if settings.get("pair") and rank == 2:
        return []
    if settings.pop("pair", False):
        settings["group"] = pair
    made, wrong = built(**settings), list[str]()
    transport = made.decision.chosen.prepare_finalize
    heard: list[Routing] = []
    made(tokens(rank, 2))  # opens the windows
    if listens:
        made.on_routing = heard.append
    with counted() as calls:
        for number, counts in enumerate(COUNTS):
            x_TH = tokens(rank, counts[rank], number)
            stepped = partial(wait_without_gradients, made, x_TH)
            y_TH, found = traces(made, partial(made, x_TH) if rank in who else stepped)
            if rank in who and transport == "one_sided" and not has_pages(made):
                wrong.append(f"{counts}: rows or sums are written to pages that were not reserved")
            routed = len(heard)
            wanted_TH, left = traces(made, stepped)  # afterwards: it reserves pages as well
            if not torch.equal(y_TH, wanted_TH):
                wrong.append(f"{counts}: outputs differ by {(y_TH.float() - wanted_TH.float()).abs().max()}")
            wrong += [f"{counts}: {key} {found[key]}, not {left[key]}" for key in left if found[key] != left[key]]
            if listens and not torch.equal(heard[routed].ids_TK, heard[routed - 1].ids_TK):
                wrong.append(f"{counts}: another routing is reported")
    if listens:
        rows = [counts[rank] for counts in COUNTS]
        capture = RoutingCapture(layers=1, num_experts=EXPERTS, top_k=TOP_K, max_num_tokens=sum(rows))
        made.on_routing = None
        with capture.listening({0: made}):
            for number, count in enumerate(rows):
                made(tokens(rank, count, number))
        made(tokens(rank, 2))  # is captured no more
        if not torch.equal(capture.take()[:, 0].int(), torch.cat([each.ids_TK for each in heard[::2]])):
            wrong.append("another routing is captured than is reported")
    if settings.get("tuned"):
        fused: Any = made._prepared and made._prepared.call
        layer = fused._idle[0].layer if transport == "all_to_all" else next(iter(fused._layers.values()))
        if layer.block.experts != layer.experts_at(layer._experts, layer.rows):
            wrong.append("the experts of the last call were in another mode")
        wrong += [] if {mode.tuning.panel_rows for _, mode in layer._of_mode} == {0, 1, 5} else ["other modes"]
    row_bytes = (HIDDEN + 4 * HIDDEN // 128 if settings.get("fp8") else 2 * HIDDEN) + 8 * TOP_K
    fit = [counts[rank] for counts in COUNTS if transport == "one_sided" or counts[rank] * row_bytes <= EAGER_BYTES]
    if calls != fit * (rank in who):
        wrong.append(f"native calls with {calls} tokens")
    return wrong


def has_pages(made: MoELayer) -> bool:
    """Whether the pages of the rows and sums of the last native call were reserved."""
    fused: Any = made._prepared and made._prepared.call
    ((buffer, layer),) = fused._layers.items()
    region, (first, end), start = buffer.region, layer.window_rows(), buffer.heap._data_at(buffer.rank)

    def covered(at: int, num_bytes: int) -> bool:
        page = mmap.PAGESIZE
        return num_bytes == 0 or buffer.heap._memory._taken.covers(at // page, -(-(at + num_bytes) // page))

    # Of two ranks, each reserves what it writes, in its own process.
    rows = buffer.size == 2 or covered(start + first * region.value_bytes, (end - first) * region.value_bytes)
    return rows and covered(start + buffer.sums_at, (end - first) * region.sum_bytes)


def wait_without_gradients(made: MoELayer, x_TH: Tensor) -> Tensor:
    with torch.no_grad():
        return wait(made.steps(x_TH))


def routed(rank: int, transport: str) -> list[str]:
    """`forward_routed` gives the bits and counters of its steps, without shared experts."""
    made, wrong = built(shared=1, prepare_finalize=transport), list[str]()
    made(tokens(rank, 2))
    for count in (1, 7):
        x_TH = tokens(rank, count, count)
        chosen = made.route(x_TH)
        routing = Routing((chosen.ids_TK + 1) % EXPERTS, chosen.weights_TK)
        with counted() as calls:
            y_TH, found = traces(made, partial(made.forward_routed, x_TH, routing.weights_TK, routing.ids_TK.long()))
        wanted_TH, left = traces(made, partial(wait, made.steps(x_TH, given=routing)))
        wrong += [f"{key} {found[key]}, not {left[key]}" for key in left if found[key] != left[key]]
        if calls != [count] or not torch.equal(y_TH, wanted_TH):
            wrong.append(f"{calls} calls, equal: {torch.equal(y_TH, wanted_TH)}")
    return wrong


def two_pairs(rank: int) -> list[list[int]]:
    """Tokens of the native calls of a layer with two transports: decode, prefill, decode."""
    made, found = built(), list[list[int]]()
    pairs = {"decode": {"prepare_finalize": "one_sided"}, "prefill": {"prepare_finalize": "all_to_all"}}
    moe = DecodePrefillMoE(made, **pairs, crossover=9)  # type: ignore[arg-type]
    for count in (3, 10, 3):
        x_TH = tokens(rank, count)
        with torch.no_grad():
            wanted_TH = wait(moe.steps(x_TH, count))
        with counted() as calls:
            same = torch.equal(moe(x_TH, count), wanted_TH)
        found.append(calls if same else [-1])
    return found


def late(rank: int, transport: str, when: str) -> list[str]:
    """Rank 1 is later than the native calls of the others poll, with its rows or with its sums."""
    made, x_TH = built(prepare_finalize=transport), tokens(rank, 3)
    wanted_TH = wait_without_gradients(made, x_TH)
    made(tokens(rank, 1))
    experts: Any = made.kernel.experts
    run = experts.run

    def slow(*arguments: Any) -> Any:
        time.sleep(LATE_S)
        return run(*arguments)

    if rank == 1 and when == "sums":
        experts.run = slow
    elif rank == 1:
        time.sleep(LATE_S)
    with counted() as calls:
        y_TH = wait_without_gradients(made, x_TH) if rank == 1 and when == "sums" else made(x_TH)
    right = torch.equal(y_TH, wanted_TH) and len(calls) == (when == "rows" or rank != 1)
    return [] if right else [f"{len(calls)} calls, equal: {torch.equal(y_TH, wanted_TH)}"]


def failing(rank: int, transport: str, where: str) -> list[dict[str, Any]]:
    """Rank 1 fails; then all recover, and the next native call is right. Returns what became of both calls."""
    made, x_TH = built(shared=where == "shared", prepare_finalize=transport), tokens(rank, 3)
    wanted_TH, fail = made(x_TH), Mock(side_effect=ValueError("injected"))
    call: Callable[[], Tensor] = partial(made, x_TH)
    undone: Callable[[], object] = bool
    if rank == 1 and where == "experts":
        experts: Any = made.kernel.experts
        experts.run, call = fail, partial(wait_without_gradients, made, x_TH)
        undone = partial(vars(experts).pop, "run")
    elif rank == 1 and where == "listener":
        made.on_routing = fail
        undone = partial(setattr, made, "on_routing", None)
    elif rank == 1 and where == "shared":
        shared: Any = made.state.backends.shared
        undone = partial(vars(shared).update, is_weighted=False, row_weights=shared.row_weights)
        shared.is_weighted, shared.row_weights = True, fail
    elif rank == 1 and where == "slots":
        dispatcher: Any = made.kernel.prepare_finalize
        form = dispatcher._kernels.format if transport == "one_sided" else dispatcher._format
        slot_of_P = form.tables[1]
        slot_of_P[:4] += 100  # of rank 0: the others learn of it from that rank
        undone = partial(slot_of_P[:4].sub_, 100)
    found = [outcome(call, wanted_TH)]
    undone()
    made.recover()
    made(x_TH)  # opens windows again
    with counted() as calls:
        found.append(outcome(partial(made, x_TH), wanted_TH))
    return [{**each, "native calls": len(calls)} for each in found]


def interrupted(rank: int, transport: str, step: int) -> list[str]:
    """Rank 0 is interrupted at every `step`th place of a native call; then all recover and call again."""
    made, wrong = built(shared=1, timeout_s=12.0, prepare_finalize=transport), list[str]()
    wanted = [wait_without_gradients(made, tokens(rank, 4, seed)) for seed in range(2)]

    def traced(interrupts: Interrupts, seed: int) -> Tensor:
        with interrupts.traced():
            return made(tokens(rank, 4, seed))

    traced(counting := Interrupts(), 0)
    most = torch.tensor([counting.places])
    dist.all_reduce(most, dist.ReduceOp.MIN)
    for place in range(1, int(most) + 1, step):
        interrupts = Interrupts(place if rank == 0 else None)
        failed = outcome(partial(traced, interrupts, 0), wanted[0])
        if failed["is"] not in ("right", "KeyboardInterrupt" if rank == 0 else "CommError") or failed["seconds"] > 6.0:
            wrong.append(f"place {place}, {interrupts.at}: {failed}")
        made.recover()
        if any(outcome(partial(made, tokens(rank, 4, 1)), wanted[1])["is"] != "right" for _ in range(2)):
            return [*wrong, f"place {place}, {interrupts.at}: wrong afterwards"]
    return wrong if int(most) > 20 else [f"{int(most)} places"]


SIZES = (0, 0, 0, 1, 2, 7, 121, 122, 123, 128, 129, 256)
"""Numbers of tokens, around those from which rows (122) and their sums (128) need more than one message."""


def sequences(rank: int, transport: str, seeds: range, length: int) -> list[str]:
    """Random calls of new layers, compared with experts in f64: idle ranks, steps next to native calls, placements."""
    wrong = list[str]()
    for seed in seeds:
        draw = random.Random(seed)  # the same on all ranks
        shared, form = draw.randrange(2), {"fp8": True, "activations": draw.choice(["plain", "checkpoint"])}
        made = built(shared, **(form if draw.random() < 0.3 else {}), prepare_finalize=transport)
        experts = dense_experts(tensors(shared, made.config.model.quant.weights != "bf16"))
        for number in range(length):
            counts, is_native = draw.choices(SIZES, k=3), draw.choices([True, True, False], k=3)
            if draw.random() < 0.3:
                of_rank = [draw.sample(experts_of, 4) for experts_of in made.expert_map.experts_of_rank]
                made.live.set_placement(ExpertMap(tuple(map(tuple, of_rank)), EXPERTS))
            x_TH = tokens(rank, counts[rank], 100 * seed + number)
            try:
                routing = made.route(x_TH)
                kind = draw.randrange(3)
                if kind == 0:
                    y_TH = made.forward_routed(x_TH, routing.weights_TK, routing.ids_TK)
                else:
                    y_TH = made(x_TH) if is_native[rank] else wait_without_gradients(made, x_TH)
            except Exception as error:
                return [*wrong, f"{transport}, seed {seed}, call {number}, {counts}: {type(error).__name__}: {error}"]
            wanted_TH = dense(experts, x_TH, routing, with_shared=kind != 0)
            error = float((y_TH.double() - wanted_TH).norm() / wanted_TH.norm().clamp_min(1e-9))
            if not error < 0.06:
                wrong.append(f"{transport}, seed {seed}, call {number}, {counts}: relative error {error:.2g}")
    return wrong


def dense_experts(held: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Gate, up and down of each expert in f64, by name."""
    found = dict[str, list[Tensor]]()
    for key, values in held.items():
        if key.endswith("_proj.weight"):
            scales = held.get(f"{key}_scale_inv")
            decoded = (
                values
                if scales is None
                else FP8_128x128.dequantize(QuantTensor(values, scales, FP8_128x128), torch.float64)
            )
            found.setdefault(key.rsplit(".", 2)[0], []).append(decoded.double())
    return found


def dense(experts: dict[str, list[Tensor]], x_TH: Tensor, routing: Routing, *, with_shared: bool) -> Tensor:
    """The layer in f64, given the routing."""

    def output(name: str) -> Tensor:
        gate, up, down = experts[name]
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    x = x_TH.double()
    y_TH = output("shared_experts") if with_shared and "shared_experts" in experts else torch.zeros_like(x)
    for expert in range(EXPERTS):
        weight_T = torch.where(routing.ids_TK == expert, routing.weights_TK.double(), 0.0).sum(1)
        y_TH += weight_T[:, None] * output(f"experts.{expert}")
    return y_TH
