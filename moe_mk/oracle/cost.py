"""Microseconds of a pair before anybody has measured it: a roofline for the experts, a link model for the transport.

Uniform routing throughout. The model ranks; it does not promise. A Decision says "model" beside such a number.
"""

from __future__ import annotations

from moe_mk.config.problem import Problem
from moe_mk.experts.base import ExpertsTraits
from moe_mk.prepare_finalize.base import Volume
from moe_mk.quant.tensor import QuantScheme
from moe_mk.quant.wire import row_bytes

BYTES_PER_US = 1e3
"""of one GB/s."""
FLOPS_PER_US = 1e6
"""of one TFLOP/s."""


def expert_bytes(problem: Problem) -> int:
    """Bytes of one physical expert's TP slice, scales included."""
    return mlp_bytes(problem, problem.intermediate)


def mlp_bytes(problem: Problem, inner: int) -> int:
    """Bytes of gate, up and down of one MLP, each with scales of its own as checkpoints hold them."""
    hidden, scheme = problem.config.model.hidden_size, problem.weights
    return 2 * scheme.num_bytes(inner, hidden) + scheme.num_bytes(hidden, inner)


def experts_hit(problem: Problem) -> float:
    """Expected experts of one rank that get any row: L (1 - (1 - K/E)^tokens)."""
    model, top_k = problem.config.model, problem.config.router.top_k
    miss = (1.0 - top_k / model.num_experts) ** all_tokens(problem)
    return problem.slots * (1.0 - miss)


def all_tokens(problem: Problem) -> int:
    """Distinct tokens of all EP ranks in one call."""
    shared = problem.config.parallel.tokens == "replicated"
    return problem.num_tokens * (1 if shared else problem.ranks)


def experts_us(problem: Problem, traits: ExpertsTraits, *, fp8_math: bool) -> float:
    """Time of w13 -> act -> w2 on one rank: the slower of reading weights and multiplying, plus calls."""
    device, model, hit = problem.device, problem.config.model, experts_hit(problem)
    assignments = all_tokens(problem) * problem.config.router.top_k / problem.ranks
    read = hit * expert_bytes(problem) / (device.memory_gbs * BYTES_PER_US * traits.bandwidth)
    rate = device.fp8_tflops if fp8_math and device.fp8_tflops else device.bf16_tflops
    flops = assignments * 6 * model.hidden_size * problem.intermediate
    multiply = flops / (rate * FLOPS_PER_US * traits.compute)
    calls = traits.launches * (hit if traits.per_expert else 1)
    return max(read, multiply) + calls * device.launch_us


def transport_us(problem: Problem, volume: Volume, wire: QuantScheme) -> float:
    """Time of dispatch and combine: bytes over both kinds of link, plus fixed costs of the collectives.

    Links work at once where every peer is sent to alike, and where relays forward rows while others still arrive; else
    one after the other.
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
    """Bytes one rank sends outward, ids and weights included."""
    row = row_bytes(wire, problem.config.model.hidden_size) + problem.config.router.top_k * 8
    return round(volume.dispatch_rows * row)


def combine_bytes(problem: Problem, volume: Volume) -> int:
    """Bytes one rank sends homeward, in the layer's dtype."""
    return round(volume.combine_rows * row_bytes(problem.dtype, problem.config.model.hidden_size))
