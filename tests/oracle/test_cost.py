"""Estimates against the same formulas written down from configuration and profile alone."""

from dataclasses import replace
from itertools import product

import pytest

from moe_mk.config import device_profile
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.oracle.cost import combine_bytes, dispatch_bytes, expert_bytes, experts_us, mlp_bytes, transport_us
from moe_mk.prepare_finalize.base import Volume
from moe_mk.quant.plain import BF16
from tests.support.problems import small

DEVICE = device_profile("h200")


@pytest.mark.parametrize(
    "ep,tp,tokens,gated", [(1, 1, "sharded", True), (8, 1, "sharded", False), (4, 2, "replicated", True)]
)
def test_experts_take_the_longer_of_reading_and_multiplying_and_their_launches(
    ep: int, tp: int, tokens: str, gated: bool
) -> None:
    asked = small(ep=ep, tp=tp, tokens=tokens, top_k=4, experts=64, gated=gated)
    count = 16 * (ep if tokens == "sharded" else 1)
    assert asked.all_tokens == count
    slots, inner, matrices = 64 // ep, 128 // tp, 3 if gated else 2
    hit = slots * (1 - (1 - 4 / 64) ** count)
    read_us = hit * matrices * inner * 256 * 2 / (DEVICE.memory_gbs * 1e3)
    flops = count * 4 / ep * matrices * 2 * 256 * inner
    for fp8, per_expert, launches, bandwidth, compute in product(
        (False, True), (False, True), (0, 3), (0.5, 1.0), (1e-6, 0.25)
    ):
        traits = replace(
            ReferenceExperts.traits, bandwidth=bandwidth, compute=compute, launches=launches, per_expert=per_expert
        )
        tflops = DEVICE.fp8_tflops if fp8 else DEVICE.bf16_tflops
        expected = max(read_us / bandwidth, flops / (tflops * 1e6 * compute))
        expected += launches * (hit if per_expert else 1) * DEVICE.launch_us
        assert experts_us(asked, traits, fp8_math=fp8) == pytest.approx(expected)


def test_shared_experts_have_the_width_of_tokens_and_routed_ones_that_of_projections() -> None:
    asked = small(latent_size=64, num_shared_experts=1)
    assert (expert_bytes(asked), mlp_bytes(asked, 128, shared=True)) == (3 * 128 * 64 * 2, 3 * 128 * 256 * 2)
    mixed = small(num_shared_experts=1, quant={"weights": "int8_g32", "down": "int4_g32", "shared": "bf16"})
    in_groups = 128 * 256 // 32 * 2  # bf16 scales
    assert expert_bytes(mixed) == 2 * (128 * 256 + in_groups) + 128 * 256 // 2 + in_groups
    assert mlp_bytes(mixed, 128, shared=True) == 3 * 128 * 256 * 2


@pytest.mark.parametrize("ep,tp,per_node", [(1, 1, 8), (4, 1, 8), (8, 1, 8), (16, 1, 8), (16, 2, 8), (8, 4, 4)])
def test_links_of_peers_overlap_and_those_of_relays_follow_each_other(ep: int, tp: int, per_node: int) -> None:
    asked = small(ep=ep, tp=tp, ranks_per_node=per_node, hidden=4096)
    near_us, far_us = (1e6 / (gbs * 1e3) for gbs in (DEVICE.intra_node_gbs, DEVICE.inter_node_gbs))
    assert near_us != far_us

    def us(far_rows: float | None, *, pipelined: bool = False, collectives: int = 0, rows: float = 1e4) -> float:
        volume = Volume(rows, rows / 2, collectives, far_rows, pipelined)
        sent = dispatch_bytes(asked, volume, BF16) + combine_bytes(asked, volume)
        return transport_us(asked, volume, BF16) / (sent / 1e6 if sent else 1.0)

    # EP rank r is on node r * tp // per_node: of the others, these share the node of the first.
    near = sum(rank * tp // per_node == 0 for rank in range(1, ep)) / (ep - 1) if ep > 1 else 1.0
    assert us(None) == pytest.approx(max(near * near_us, (1 - near) * far_us))
    assert us(2.5e3) == pytest.approx(0.25 * far_us + 0.75 * near_us)
    assert us(2.5e3, pipelined=True) == pytest.approx(max(0.25 * far_us, 0.75 * near_us))
    assert us(0.0, rows=0.0, collectives=3) == us(None, rows=0.0, collectives=3) == 3 * DEVICE.collective_us
