"""What tests of the one-sided transports share: contexts, tokens drawn at random, experts that scale rows, a death."""

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm import Communicator, DistributedCommunicator
from moe_mk.flight import Flight
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PrepareFinalize, TransportContext
from moe_mk.quant import FP32
from moe_mk.quant.plain import Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens

RANKS, EXPERTS, TOP_K, HIDDEN = 4, 8, 3, 256
CPU = torch.device("cpu")


def context(
    comm: Communicator, *, wire: QuantScheme = FP32, dtype: Plain = FP32, experts: int = EXPERTS, hidden: int = HIDDEN,
    top_k: int = TOP_K,
) -> TransportContext:  # fmt: skip
    expert_map = ExpertMap.linear(experts, comm.size)
    return TransportContext(comm, expert_map, expert_map.tables(CPU), wire, dtype, hidden, top_k, CPU)


def world_comm(timeout_s: float = 30.0) -> DistributedCommunicator:
    """The processes of a `RankWorld`."""
    assert dist.group.WORLD is not None
    return DistributedCommunicator(dist.group.WORLD, timeout_s=timeout_s, layer="layers.3")


def there_and_back(transport: PrepareFinalize, x_TH: Tensor, routing: Routing) -> Flight[Tensor]:
    """Experts that scale a row by the sum of its local weights."""
    tokens = yield from transport.prepare(x_TH, routing)
    assert isinstance(tokens, RowTokens)
    return (yield from transport.finalize(scaled(tokens, transport.context.dtype.dtype), tokens))


def scaled(tokens: RowTokens, dtype: torch.dtype) -> ExpertOutput:
    y_RH = tokens.x_RH.dequantize(torch.float32) * tokens.weights_RK.sum(dim=1, keepdim=True)
    return ExpertOutput(y_RH.to(dtype), OutputStage.REDUCED)


def drawn(seed: int, tokens: int, dtype: torch.dtype, hidden: int = HIDDEN) -> tuple[Tensor, Routing]:
    draw = torch.Generator("cpu").manual_seed(seed)
    x_TH = torch.randn((tokens, hidden), generator=draw).to(dtype)
    ids_TK = torch.rand((tokens, EXPERTS), generator=draw).argsort(dim=1)[:, :TOP_K].to(torch.int32)
    ids_TK[torch.rand(ids_TK.shape, generator=draw) < 0.2] = -1
    weights_TK = torch.rand(ids_TK.shape, generator=draw).masked_fill(ids_TK < 0, 0.0)
    return x_TH, Routing(ids_TK, weights_TK)
