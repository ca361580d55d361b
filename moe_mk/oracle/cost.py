"""Estimated cost of a pair that has not been measured: a roofline for the experts, a link model for the transport.

Routing is assumed uniform. The estimate is used to rank pairs; a Decision marks it "model", a measured cost "measured".
"""

from __future__ import annotations

from moe_mk.comm.destinations import expected_experts
from moe_mk.config.device import BYTES_PER_US, Rates
from moe_mk.config.problem import Problem
from moe_mk.experts.base import ExpertsTraits
from moe_mk.prepare_finalize.base import Volume
from moe_mk.quant.tensor import QuantScheme
from moe_mk.quant.wire import row_bytes


def expert_bytes(problem: Problem) -> int:
    """Bytes of one physical expert's TP slice, scales included."""
    return mlp_bytes(problem, problem.intermediate)


def mlp_bytes(problem: Problem, inner: int, *, shared: bool = False) -> int:
    """Bytes of the matrices of one expert, or of the shared experts, each with its own scales as in checkpoints."""
    model, own = problem.config.model, problem.config.model.quant.shared_scheme if shared else None
    wide, down = (own, own) if own else (problem.weights, model.quant.down_scheme)
    hidden = problem.token_size if shared else model.hidden_size
    return (1 + model.gated) * wide.num_bytes(inner, hidden) + down.num_bytes(hidden, inner)


def experts_us(problem: Problem, traits: ExpertsTraits, *, fp8_math: bool) -> float:
    """Microseconds of w13 -> act -> w2 on one rank: the longer of reading weights and multiplying, plus launches."""
    model, top_k, rates = problem.config.model, problem.config.router.top_k, Rates.of(problem.device)
    hit = expected_experts(problem.slots, model.num_experts, top_k, problem.all_tokens)
    read = rates.memory_us(hit * expert_bytes(problem), traits.bandwidth)
    flops = problem.rows_an_expert * problem.slots * (4 + 2 * model.gated) * model.hidden_size * problem.intermediate
    multiply = rates.compute_us(flops, fp8=fp8_math, efficiency=traits.compute)
    launches = traits.launches * (hit if traits.per_expert else 1)
    return max(read, multiply) + launches * problem.device.launch_us


def transport_us(problem: Problem, volume: Volume, wire: QuantScheme) -> float:
    """Microseconds of dispatch and combine: bytes over intra-node and inter-node links, plus fixed collective costs.

    The two kinds of link overlap where a rank sends to all peers directly, and where relays forward rows while others
    are still arriving; otherwise their times add up.
    """
    device, fixed = problem.device, volume.collectives * problem.device.collective_us
    sent = dispatch_bytes(problem, volume, wire) + combine_bytes(problem, volume)
    if volume.far_rows is not None:
        far = sent * volume.far_rows / volume.dispatch_rows if sent else 0.0
        legs = (far / device.inter_node_gbs, (sent - far) / device.intra_node_gbs)
        return (max(legs) if volume.pipelined else sum(legs)) / BYTES_PER_US + fixed
    tp = min(problem.config.parallel.tp, problem.ranks_per_node)
    near_peers = min(problem.ranks_per_node // tp, problem.ranks) - 1
    near = near_peers / (problem.ranks - 1) if problem.ranks > 1 else 1.0
    links = max(sent * near / device.intra_node_gbs, sent * (1.0 - near) / device.inter_node_gbs)
    return links / BYTES_PER_US + fixed


def dispatch_bytes(problem: Problem, volume: Volume, wire: QuantScheme) -> int:
    """Bytes that one rank sends in dispatch, expert ids and routing weights included."""
    row = row_bytes(wire, problem.config.model.hidden_size) + problem.config.router.top_k * 8
    return round(volume.dispatch_rows * row)


def combine_bytes(problem: Problem, volume: Volume) -> int:
    """Bytes that one rank sends in combine, in the dtype of sums."""
    return round(volume.combine_rows * row_bytes(problem.sums, problem.config.model.hidden_size))
