"""Two ranks as threads around a transport of an emulated library, and one dispatch followed by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_mk import Problem
from moe_mk.comm.threads import ThreadWorld
from moe_mk.external.library import emulated
from moe_mk.flight import wait
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE, PrepareFinalize, TransportContext
from moe_mk.quant.plain import FP32, Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import BatchedTokens, ExpertOutput, OutputStage, Routing, RowTokens
from tests.support import problems

CPU = torch.device("cpu")
PLACE = ExpertMap.linear(4, 2)  # rank 0 holds experts 0 and 1, rank 1 experts 2 and 3

# Rank 0 has tokens a, b, d; rank 1 has c.
#   a -> experts 0 and 3     b -> expert 2, and nowhere     d -> nowhere at all     c -> experts 0 and 1
X = [torch.tensor([[1.0, 2.0], [3.0, 4.0], [7.0, 8.0]]), torch.tensor([[5.0, 6.0]])]
ROUTINGS = [
    Routing(
        torch.tensor([[0, 3], [2, -1], [-1, -1]], dtype=torch.int32),
        torch.tensor([[0.5, 0.25], [1.0, 0.0], [0.0, 0.0]]),
    ),
    Routing(torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([[0.75, 0.125]])),
]
Row = tuple[tuple[float, ...], tuple[int, ...], tuple[float, ...]]


@dataclass
class Ranks:
    """A transport on every rank of a world of threads."""

    name: str
    place: ExpertMap = PLACE
    hidden: int = 2
    wire: QuantScheme = FP32
    dtype: Plain = FP32
    max_num_tokens: int = 4
    top_k: int = 2
    ranks_per_node: int | None = None
    comm_units: int | None = None

    def __post_init__(self) -> None:
        self.world = ThreadWorld(self.place.num_ranks, timeout_s=5.0)
        tables = self.place.tables(CPU)

        def transport(comm: Any) -> PrepareFinalize:
            context = TransportContext(
                comm, self.place, tables, self.wire, self.dtype, self.hidden, self.top_k, CPU,
                max_num_tokens=self.max_num_tokens, allow_emulated=True, ranks_per_node=self.ranks_per_node,
                comm_units=self.comm_units,
            )  # fmt: skip
            return PREPARE_FINALIZE[self.name](context)

        self.transports = self.each(transport, self.world.communicators())

    def each(self, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """A job on every rank, with that rank's part of each argument."""
        return self.world.together([partial(job, *own) for own in zip(*arguments, strict=True)])

    def dispatched(self, x: list[Tensor] = X, routings: list[Routing] = ROUTINGS) -> list[RowTokens]:
        return self.each(lambda t, x_TH, r: wait(t.prepare(x_TH, r)), self.transports, x, routings)

    def combined(self, y: list[Tensor], tokens: list[RowTokens]) -> list[Tensor]:
        out = [ExpertOutput(y_RH, OutputStage.REDUCED) for y_RH in y]
        return self.each(lambda t, o, got: wait(t.finalize(o, got)), self.transports, out, tokens)

    def expect_sums(self, tokens: list[RowTokens]) -> None:
        """Identity experts, ten times as large on rank 1, on rows that are NaN where no token fills them."""
        y = [10.0**rank * t.x_RH.values * (t.ids_RK >= 0).any(dim=1, keepdim=True) for rank, t in enumerate(tokens)]
        first, second = self.combined(y, tokens)
        assert first.tolist() == [[11.0, 22.0], [30.0, 40.0], [0.0, 0.0]] and second.tolist() == [[5.0, 6.0]]


def reported(name: str, asked: Problem) -> dict[str, str]:
    return {reason.code: str(reason) for reason in PREPARE_FINALIZE[name].reasons_against(asked)}


def live_rows(tokens: RowTokens) -> list[Row]:
    """Rows that any expert of the rank reads, in an order of their own, as arrival has none."""
    kept = (tokens.ids_RK >= 0).any(dim=1)
    parts = (tokens.x_RH.dequantize(torch.float32), tokens.ids_RK, tokens.weights_RK)
    rows = zip(*(part[kept].tolist() for part in parts), strict=True)
    return sorted((tuple(x), tuple(ids), tuple(weights)) for x, ids, weights in rows)


def rows_of_expert(tokens: BatchedTokens, expert: int) -> list[list[float]]:
    """In an order of their own, as arrival has none."""
    return sorted(tokens.x_LSH.dequantize(torch.float32)[expert, : int(tokens.counts_L[expert])].tolist())


def combine_all(ranks: Ranks, tokens: list[BatchedTokens]) -> list[list[list[float]]]:
    """What returns where expert e multiplies by 2^e, and ranks hold two experts each."""
    outputs = [
        ExpertOutput((t.x_LSH.dequantize(torch.float32) * factor[:, None, None]).bfloat16(), OutputStage.RAW)
        for t, factor in zip(tokens, torch.tensor([[1.0, 2.0], [4.0, 8.0]]), strict=True)
    ]
    combined = ranks.each(lambda t, y, got: wait(t.finalize(y, got)), ranks.transports, outputs, tokens)
    return [y_TH.tolist() for y_TH in combined]


LIBRARIES = emulated()


def problem(device: str = "h200", *, num_tokens: int = 128, **settings: Any) -> Problem:
    """DeepSeek-V3 on 8 ranks with every library there."""
    settings = {"installed": LIBRARIES, "max_num_tokens": num_tokens, "ep": 8, **settings}
    return problems.problem("deepseek_v3", device, num_tokens, **settings)


small = partial(problems.small, installed=LIBRARIES)


def with_top_k(top_k: int, device: str, **settings: Any) -> Problem:
    """The same for a small model with any number of experts a token."""
    return small(device, top_k=top_k, **settings)
