"""Layers of one model on ranks of threads: transports that are given the same group, around identity experts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_mk.comm.threads import ThreadWorld
from moe_mk.experts.base import ExpertsContext
from moe_mk.flight import Flight
from moe_mk.kernel import FusedMoEKernel
from moe_mk.lab.testing.identity import IdentityExperts
from moe_mk.lab.testing.transports import NO_WEIGHTS
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, TransportContext
from moe_mk.quant.plain import BF16
from moe_mk.tokens import Routing

CPU = torch.device("cpu")
EXPERTS, TOP_K = 8, 2


class Model:
    """Some layers on every rank, by rank and then by layer."""

    def __init__(self, name: str, *, layers: int = 4, ranks: int = 2, hidden: int = 4) -> None:
        self.name, self.place = name, ExpertMap.linear(EXPERTS, ranks)
        self.world = ThreadWorld(ranks, timeout_s=5.0)
        self.comms = self.world.communicators()
        self.layers: list[list[FusedMoEKernel]] = [[] for _ in self.comms]
        for _ in range(layers):
            self.add(hidden)

    def add(self, hidden: int = 4, max_num_tokens: int = 6) -> None:
        def layer(comm: Any, mine: list[FusedMoEKernel]) -> None:
            context = TransportContext(
                comm, self.place, self.place.tables(CPU), BF16, BF16, hidden, TOP_K, CPU,
                max_num_tokens=max_num_tokens, allow_emulated=True,
            )  # fmt: skip
            slots = self.place.num_slots(comm.rank)
            experts = IdentityExperts(ExpertsContext(BF16, BF16, "silu", slots, hidden, hidden, CPU))
            mine.append(FusedMoEKernel(PREPARE_FINALIZE[self.name](context), experts))

        self.each(layer, self.comms, self.layers)

    def each(self, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """A job on every rank, with that rank's part of each argument."""
        return self.world.together([partial(job, *own) for own in zip(*arguments, strict=True)])

    @property
    def buffers(self) -> list[list[Any]]:
        kept = [[layer.prepare_finalize._session.pool for layer in mine] for mine in self.layers]  # type: ignore[attr-defined]
        return [[each.slots[0] if each.slots else each.buffer for each in mine] for mine in kept]


def batch(seed: int, hidden: int = 4, tokens: int = 6) -> tuple[Tensor, Routing]:
    """Small whole numbers and weights of which every sum is exact in bf16; every third id is -1."""
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(0, tokens + 1, (), generator=draw))
    ids_TK = torch.rand((count, EXPERTS), generator=draw).argsort(dim=1)[:, :TOP_K].to(torch.int32)
    ids_TK[torch.rand((count, TOP_K), generator=draw) < 0.33] = -1
    weights_TK = torch.tensor([0.5, 0.25]).expand(count, TOP_K).contiguous()
    x_TH = torch.randint(-9, 9, (count, hidden), generator=draw).to(torch.bfloat16)
    return x_TH, Routing(ids_TK, weights_TK)


def flight_of(layer: FusedMoEKernel, given: tuple[Tensor, Routing]) -> Flight[Tensor]:
    return layer.steps(*given, NO_WEIGHTS)


def expect_exact(y_TH: Tensor, given: tuple[Tensor, Routing]) -> None:
    """Identity experts return each token times the weights of the picks that go somewhere."""
    x_TH, routing = given
    weight_T1 = routing.weights_TK.masked_fill(routing.ids_TK < 0, 0.0).sum(dim=1, keepdim=True)
    assert torch.equal(y_TH.float(), x_TH.float() * weight_T1)
