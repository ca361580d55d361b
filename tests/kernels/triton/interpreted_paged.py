"""Experts below a GPU with the CPU as both tiers; run by test_interpreted.py with TRITON_INTERPRET=1."""

from dataclasses import replace
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
import torch

from moe_mk.config.moe import ResidencyConfig
from moe_mk.errors import ConfigError, ShapeError, StoreError
from moe_mk.experts.base import ExpertsContext
from moe_mk.experts.paged import Cache, Reading
from moe_mk.experts.residency import POLICIES, ResidencyPool
from moe_mk.experts.triton import weights as triton_weights
from moe_mk.experts.triton.experts import TritonExperts
from moe_mk.experts.triton.paged import PagedWeights
from moe_mk.lab.testing.experts import random_experts
from moe_mk.permute import permute
from moe_mk.quant import BF16, FP8_1x128, QuantScheme
from moe_mk.quant.int8 import INT8_TOKEN
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.tokens import BatchedTokens, GroupedTokens, RowTokens
from moe_mk.weights.expert_store import ExpertStore
from moe_mk.weights.expert_weights import Weights, digest
from moe_mk.weights.layer_weights import as_mapped

SLOTS, HIDDEN, INNER = 5, 128, 128
CPU = torch.device("cpu")
LAYOUTS = (RowTokens, GroupedTokens, BatchedTokens)


def pair(
    weights: Weights, compute: QuantScheme, folder: Path | None, slots: int, policy: str = "decayed"
) -> tuple[TritonExperts, Weights, TritonExperts, PagedWeights]:
    """The experts on the device, and the same with slots."""
    context = ExpertsContext(BF16, compute, "silu", SLOTS, HIDDEN, INNER, CPU)
    resident, residency = TritonExperts(context), ResidencyConfig(slots=slots, store=folder, policy=policy)
    paged = TritonExperts(replace(context, residency=residency))
    held = paged.relayout(weights)
    assert isinstance(held, PagedWeights)
    return resident, resident.relayout(weights), paged, held


def drawn(draw: Random, rows: int, top_k: int, experts: int = SLOTS) -> RowTokens:
    ids = torch.tensor([[draw.choice([-1, *range(experts)]) for _ in range(top_k)] for _ in range(rows)])
    x = torch.randn((rows, HIDDEN), generator=torch.Generator().manual_seed(draw.randrange(99))).bfloat16()
    shares = torch.rand((rows, top_k), generator=torch.Generator().manual_seed(rows))
    return RowTokens(BF16.quantize(x), ids.view(rows, top_k).to(torch.int32), shares, SLOTS)


def some_arrive(draw: Random) -> object:
    """A part of what is read arrives at a time, in any order."""

    def arrived(self: Cache, reading: dict[int, Reading]) -> list[int]:
        for part in (part for one in reading.values() for part in one.parts):
            assert part.wait(60)
        found = draw.sample(sorted(reading), draw.randint(1, len(reading)))
        for expert in found:
            self.enter(expert, reading)
        return found

    return arrived


@pytest.mark.parametrize(
    "kind,compute,below",
    [
        ("fp8_block", FP8_1x128, "host memory"), ("bf16", BF16, "a store"), ("mxfp4", FP8_1x128, "a store"),
        ("nvfp4", BF16, "a store"), ("int4_g32_zp", BF16, "host memory"), ("int8", INT8_TOKEN, "host memory"),
    ],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_any_calls_have_the_bits_of_experts_on_the_device(
    kind: str, compute: QuantScheme, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = Random(f"{kind} {compute.name} {below}")
    monkeypatch.setattr(Cache, "_arrived", some_arrive(draw))
    stack = random_experts(scheme_of_kind(kind, (128, 128)), SLOTS, HIDDEN, INNER, CPU)
    for slots in (1, 3):
        folder, policy = tmp_path if below == "a store" else None, draw.choice(list(POLICIES))
        resident, held, paged, some = pair(as_mapped(stack), compute, folder, slots, policy)
        for layout in LAYOUTS:
            rows = draw.choice((1, 6))
            given = permute(drawn(draw, rows, draw.choice((1, 2))), (layout,))
            expected, found = resident.run(given, held).y, paged.run(given, some).y
            for index in range(SLOTS if layout is BatchedTokens else 1):  # what is behind the rows is undefined
                count = int(given.counts_L.sum()) if layout is GroupedTokens else rows
                count = int(given.counts_L[index]) if layout is BatchedTokens else count
                one, other = (y[index] if layout is BatchedTokens else y for y in (expected, found))
                assert torch.equal(one[:count], other[:count]), (layout, slots)
        assert some.counts.slots == slots and some.counts.reads == some.counts.uses - some.counts.hits
        assert some.num_bytes < stack.num_bytes
        assert digest(some) == digest(stack)
    assert len(list(tmp_path.iterdir())) == (below == "a store")


def test_shared_experts_are_in_the_spare_slot_whatever_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_weights, "WORTH_A_SPARE", SLOTS)
    scheme, draw = scheme_of_kind("fp8_block", (128, 128)), Random(3)
    stack, own = (random_experts(scheme, count, HIDDEN, INNER, CPU) for count in (SLOTS, 1))
    resident, held, paged, some = pair(as_mapped(stack), FP8_1x128, None, 2)
    shared = resident.relayout(as_mapped(own))
    both, fused = resident.fuse_shared_experts(held, shared), paged.fuse_shared_experts(some, shared)
    assert both is not None and fused is not None
    for rows in (1, 4, 7):
        given = drawn(draw, rows, 2)
        assert torch.equal(resident.run(given, both).y, paged.run(given, fused).y)
    nothing = replace(given, ids_RK=torch.full_like(given.ids_RK, -1))
    assert torch.equal(resident.run(nothing, both).y, paged.run(nothing, fused).y)


def test_a_record_that_cannot_be_read_ends_its_call_and_no_other(tmp_path: Path) -> None:
    stack, draw = random_experts(BF16, SLOTS, HIDDEN, INNER, CPU), Random(1)
    resident, held, paged, some = pair(stack, BF16, tmp_path, 2)
    given, read = drawn(draw, 6, 2), ExpertStore.read_piece

    def fail(self: ExpertStore, expert: int, start: int, record: memoryview) -> None:
        if expert == 3:
            raise StoreError("expert 3 cannot be read")
        read(self, expert, start, record)

    every = replace(given, ids_RK=torch.arange(12, dtype=torch.int32).view(6, 2) % SLOTS)
    for _ in range(3):  # more failures than there is staging memory
        with patch.object(ExpertStore, "read_piece", fail), pytest.raises(StoreError, match="expert 3"):
            paged.run(every, some)
    assert torch.equal(paged.run(every, some).y, resident.run(every, held).y)
    with pytest.raises(ShapeError, match=r"ids are in 0 \.\.\. 5, expected -1 \.\.\. 4"):
        paged.run(replace(every, ids_RK=every.ids_RK + every.ids_RK.eq(4)), some)


def test_an_inexact_expert_of_mxfp4_changes_the_format_of_all_and_a_pool_is_refused() -> None:
    stack = random_experts(scheme_of_kind("mxfp4", (128, 128)), SLOTS, HIDDEN, INNER, CPU)
    assert stack.w2.scales is not None
    stack.w2.scales[SLOTS - 1].view(torch.uint8)[:2, 0] = torch.tensor([100, 140], dtype=torch.uint8)
    resident, held, paged, some = pair(as_mapped(stack), FP8_1x128, None, 1)
    assert some.stack.format.name == "w_mxfp4" and "differ by more than 2^11" in paged.parameters()
    given = drawn(Random(5), 3, 2)
    assert torch.equal(paged.run(given, some).y, resident.run(given, held).y)
    context = replace(paged.context, residency=ResidencyConfig(), pool=ResidencyPool(2**30))
    with pytest.raises(ConfigError, match="no ResidencyPool"):
        TritonExperts(context).relayout(stack)
