"""What a backend gives in every case of the kit: for digests, for diagnosis, and to compare with real processes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk.comm.communicator import Communicator
from moe_mk.comm.groups import communicator
from moe_mk.experts.base import EXPERTS, ExpertsContext
from moe_mk.flight import land
from moe_mk.kernel import FusedMoEKernel
from moe_mk.permute import permute
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE, TransportContext
from moe_mk.quant.plain import BF16, Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.testing.cases import RoutingCase, hostile_routings
from moe_mk.testing.experts import _rows, random_experts
from moe_mk.testing.identity import IdentityExperts
from moe_mk.testing.processes import run_ranks
from moe_mk.testing.transports import NO_WEIGHTS, _VirtualTransport
from moe_mk.tokens import BatchedTokens

CPU = torch.device("cpu")
HIDDEN, INNER, SLOTS, TOP_K = 192, 128, 5, 3
TIMEOUT_S = 60.0


def suitable_cases(name: str, num_ranks: int) -> list[RoutingCase]:
    """The hostile cases that a transport has to carry, as its traits say."""
    traits, cases = PREPARE_FINALIZE[name].traits, hostile_routings(num_ranks)
    if not traits.uneven:
        cases = [case for case in cases if len(set(map(len, case.expert_map.experts_of_rank))) == 1]
    return cases if "sharded" in traits.tokens else [case.replicated() for case in cases]


def outputs_of_transport(
    name: str, num_ranks: int, wire: QuantScheme, dtype: Plain, ranks_per_node: int | None = None
) -> list[Tensor]:
    """What every rank gets, case by case and rank by rank, on ranks of one process."""
    outputs: list[Tensor] = []
    for case in suitable_cases(name, num_ranks):
        ranks = _VirtualTransport(name, case, wire, dtype, HIDDEN, CPU, ranks_per_node)
        outputs += ranks.run(ranks.tokens())
    return outputs


def call_of_transport(
    name: str, num_ranks: int, wire: QuantScheme, dtype: Plain, ranks_per_node: int | None = None
) -> Callable[[], object]:
    """The plainest case on ranks that stay, to be carried out as often as one likes."""
    ranks = _VirtualTransport(name, suitable_cases(name, num_ranks)[0], wire, dtype, HIDDEN, CPU, ranks_per_node)
    tokens = ranks.tokens()
    return lambda: ranks.run(tokens)


def journey(
    name: str, num_ranks: int, wire: QuantScheme, dtype: Plain, ranks_per_node: int | None = None
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The plainest case: what came home to each rank, what it sent, and what each token should be multiplied by."""
    case = suitable_cases(name, num_ranks)[0]
    ranks = _VirtualTransport(name, case, wire, dtype, HIDDEN, CPU, ranks_per_node)
    tokens = ranks.tokens()
    weights = [r.weights_TK.masked_fill(r.ids_TK < 0, 0.0).sum(dim=1) for r in case.routings]
    got = ranks.run([x.clone() for x in tokens])
    if ranks.partial:
        got = [torch.stack([y.float() for y in got]).sum(dim=0)] * len(got)
    return got, [wire.quantize(x).dequantize(dtype.dtype) for x in tokens], weights


def outputs_on_processes(name: str, num_ranks: int, ranks_per_node: int | None = None) -> list[Tensor]:
    """The same as `outputs_of_transport` in bf16, on real processes over gloo. Raises RankError if any rank fails."""
    by_rank = run_ranks(_rank_outputs, num_ranks, name, num_ranks, ranks_per_node, timeout_s=TIMEOUT_S)
    return [outputs[case] for case in range(len(by_rank[0])) for outputs in by_rank]


def _rank_outputs(rank: int, name: str, num_ranks: int, ranks_per_node: int | None) -> list[Tensor]:
    comm = communicator(dist.group.WORLD, timeout_s=TIMEOUT_S / 2, layer=name)
    partial = PREPARE_FINALIZE[name].traits.partial
    outputs = []
    for case in suitable_cases(name, num_ranks):
        draw = torch.Generator("cpu").manual_seed(0 if partial else rank)
        shape = (case.num_tokens[rank], HIDDEN)
        x_TH = torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu").to(torch.bfloat16)
        outputs.append(land(_kernel(name, case, comm, ranks_per_node).steps(x_TH, case.routings[rank], NO_WEIGHTS)))
    return outputs


def _kernel(name: str, case: RoutingCase, comm: Communicator, ranks_per_node: int | None) -> FusedMoEKernel:
    top_k, slots = case.routings[0].ids_TK.shape[1], case.expert_map.num_slots(comm.rank)
    tables = case.expert_map.tables(CPU)
    context = TransportContext(
        comm, case.expert_map, tables, BF16, BF16, HIDDEN, top_k, CPU, max_num_tokens=64, ranks_per_node=ranks_per_node
    )
    experts = IdentityExperts(ExpertsContext(BF16, BF16, "silu", slots, HIDDEN, HIDDEN, CPU))
    return FusedMoEKernel(PREPARE_FINALIZE[name](context), experts)


def outputs_of_experts(
    name: str, weights: QuantScheme, dtype: Plain, compute: QuantScheme, sizes: tuple[int, int] = (HIDDEN, INNER)
) -> list[Tensor]:
    """What experts make of every case, in every layout they read; of padded blocks only what is filled."""
    backend = EXPERTS[name](ExpertsContext(dtype, compute, "silu", SLOTS, *sizes, CPU))
    own = backend.relayout(random_experts(weights, SLOTS, *sizes, CPU))
    outputs = []
    for case in hostile_routings(1, num_experts=SLOTS, top_k=TOP_K):
        rows = _rows(case, dtype, dtype, sizes[0], SLOTS)
        for layout in backend.traits.consumes:
            tokens = permute(rows, (layout,))
            y = backend.run(tokens, own).y
            if isinstance(tokens, BatchedTokens):
                assert tokens.home is not None
                y = y[tokens.home.row_LS >= 0]
            outputs.append(y)
    return outputs


def call_of_experts(
    name: str, weights: QuantScheme, dtype: Plain, compute: QuantScheme, sizes: tuple[int, int] = (HIDDEN, INNER)
) -> Callable[[], object]:
    """One run over the plainest case, to be done as often as one likes."""
    backend = EXPERTS[name](ExpertsContext(dtype, compute, "silu", SLOTS, *sizes, CPU))
    own = backend.relayout(random_experts(weights, SLOTS, *sizes, CPU))
    rows = _rows(hostile_routings(1, num_experts=SLOTS, top_k=TOP_K)[0], dtype, dtype, sizes[0], SLOTS)
    tokens = permute(rows, (backend.traits.consumes[0],))
    return lambda: backend.run(tokens, own)
