"""Types of weights, shared experts and tuning on tiny shapes; run by test_interpreted.py with TRITON_INTERPRET=1."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_mk.config import device_profile
from moe_mk.config.tuned import Tuned
from moe_mk.experts.triton import experts as triton
from moe_mk.experts.triton import weights as triton_weights
from moe_mk.experts.triton.experts import TritonExperts
from moe_mk.experts.triton.tuning import DECODED
from moe_mk.kernels.triton.tile import Tile
from moe_mk.lab.testing.experts import random_experts
from moe_mk.lab.tuning import TuneCase, session, tune, tuned_path
from moe_mk.quant import BF16, FP8_CHANNEL, FP8_TENSOR, FP8_TOKEN, FP8_1x128, FP8_128x128, QuantScheme, fp8_static
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.int8 import INT8_CHANNEL, INT8_TOKEN, INT8_128x128
from moe_mk.quant.microscaling import MXFP4, MXFP8
from moe_mk.quant.nvfp4 import NVFP4
from moe_mk.tokens import BatchedTokens, GroupedTokens, RowTokens
from moe_mk.weights.expert_weights import ExpertWeights, MappedExpertWeights
from moe_mk.weights.layer_weights import as_mapped
from tests.kernels.triton.interpreted_experts import CPU, HIDDEN, IDS, INNER, SLOTS, close, context, rows

INTEGERS = tuple(GROUPED[name] for name in ("int4_g32", "int4_g128_zp", "int4_row", "int8_g128", "int8_row_zp"))
DECODED_TYPES = (FP8_128x128, FP8_CHANNEL, FP8_TENSOR, INT8_CHANNEL, INT8_128x128, *INTEGERS, MXFP8, MXFP4, NVFP4)
TYPES = [
    (INT8_CHANNEL, INT8_TOKEN), (INT8_128x128, INT8_TOKEN), (FP8_CHANNEL, FP8_TOKEN),
    (FP8_TENSOR, fp8_static(0.01, 0.02)), *((weights, BF16) for weights in DECODED_TYPES),
]  # fmt: skip


def named(value: QuantScheme) -> str:
    return value.name


# How rows lie concerns their codes, and how weights lie their decoding: of either kind a few meet every layout.
IN_ALL_LAYOUTS = TYPES[:5] + TYPES[-2:]


@pytest.mark.parametrize(
    "weights,compute,layout",
    [(*pair, RowTokens) for pair in TYPES]
    + [(*pair, layout) for pair in IN_ALL_LAYOUTS for layout in (GroupedTokens, BatchedTokens)],
    ids=lambda value: getattr(value, "name", None) or value.__name__,
)
def test_every_layout_of_every_type(weights: QuantScheme, compute: QuantScheme, layout: type) -> None:
    stack = random_experts(weights, SLOTS, HIDDEN, INNER, CPU)
    close(TritonExperts(context(compute)), weights, rows(compute), layout, stack)


@pytest.mark.parametrize("weights,compute", TYPES, ids=named)
def test_without_swapping_the_weights_are_on_the_right(weights: QuantScheme, compute: QuantScheme) -> None:
    backend = TritonExperts(context(compute))
    backend.tuned = Tuned.fixed(Tile(64, False, 8, 4))
    close(backend, weights, rows(BF16), RowTokens, random_experts(weights, SLOTS, HIDDEN, INNER, CPU))


@pytest.mark.parametrize(
    "weights,compute",
    [(FP8_128x128, FP8_1x128), (MXFP4, FP8_1x128), (BF16, BF16), (NVFP4, BF16), (INT8_CHANNEL, INT8_TOKEN)],
    ids=named,
)
def test_shared_experts_are_one_more_slot_of_the_same_pass(
    weights: QuantScheme, compute: QuantScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_weights, "WORTH_A_SPARE", SLOTS)
    backend, given = TritonExperts(context(compute)), rows(BF16)
    all_slots = random_experts(weights, SLOTS + 1, HIDDEN, INNER, CPU)
    every = [as_mapped(all_slots).slot(index) for index in range(SLOTS + 1)]
    routed = backend.relayout(MappedExpertWeights(every[:SLOTS], weights))
    lone = TritonExperts(replace(context(compute), num_slots=1))
    shared = lone.relayout(MappedExpertWeights(every[SLOTS:], weights))
    alone = backend.run(given, routed).y
    both = backend.fuse_shared_experts(routed, shared)
    assert both is not None and both.num_slots == SLOTS + 1 and backend.fuse_shared_experts(routed, shared) is both
    together = backend.run(given, both).y
    # Every row visits the last slot with weight 1, those without any expert too.
    one = replace(
        given, ids_RK=torch.zeros((len(IDS), 1), dtype=torch.int32), weights_RK=torch.ones(len(IDS), 1), num_slots=1
    )
    expected = alone.float() + lone.run(one, shared).y.float()
    torch.testing.assert_close(together.float(), expected, rtol=0.02, atol=0.02)
    assert torch.equal(backend.run(given, routed).y, alone), "the routed experts stay as they were"
    other = lone.relayout(MappedExpertWeights(every[:1], weights))  # shared experts that were loaded anew
    again = backend.fuse_shared_experts(routed, other)
    assert again is not None
    expected = alone.float() + lone.run(one, other).y.float()
    torch.testing.assert_close(backend.run(given, again).y.float(), expected, rtol=0.02, atol=0.02)
    if weights is BF16:  # a stack that lay there already has no room behind it
        assert backend.fuse_shared_experts(backend.relayout(all_slots), shared) is None


def test_a_tuning_session_writes_what_the_backend_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = [Tile(16, True, 4, 5), Tile(32, True, 4, 4)]
    monkeypatch.setattr(session, "ROUNDS", 1)
    monkeypatch.setattr(triton, "CANDIDATES", tuple(tiles))
    monkeypatch.setattr(triton, "profile_here", lambda device: device_profile("h200"))
    case = TuneCase("triton", HIDDEN, INNER, SLOTS, 2, BF16, BF16, MXFP4)
    path = tuned_path("NVIDIA H200", "triton", case.name, tmp_path)

    def stack(case: TuneCase, device: torch.device) -> ExpertWeights:
        return random_experts(case.weights, SLOTS, HIDDEN, INNER, device)

    result = tune(case, (1, 4), path, budget_s=60.0, cores=1, device=CPU, meta={}, stack=stack)
    assert result.complete and result.measured == 4
    backend = TritonExperts(replace(context(BF16), tuned_dir=tmp_path))
    backend.run(rows(BF16), backend.relayout(stack(case, CPU)))
    assert backend.tuned is not None and backend.tuned.built_in is DECODED
    assert [point.rows_an_expert for point in backend.tuned.points] == pytest.approx([2 / 3, 8 / 3])
    assert all(point.parameters in tiles for point in backend.tuned.points)
