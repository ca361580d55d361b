"""Products of what experts can have, paged: the bits of resident ones, and what f64 makes of the stored numbers."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moe_mk import MoEConfig, Problem
from moe_mk.config import device_profile
from moe_mk.config.moe import ResidencyConfig
from moe_mk.experts.base import EXPERTS, ExpertsContext
from moe_mk.experts.residency import POLICIES, ResidencyPool
from moe_mk.lab.testing.experts import random_experts
from moe_mk.oracle.memory import expected_reads, resident_experts, weights_bytes
from moe_mk.permute import permute
from moe_mk.quant.fp8 import FP8_1x128
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.quant.plain import BF16
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.tokens import BatchedTokens, GroupedTokens, RowTokens
from moe_mk.weights.expert_store import ExpertStore
from moe_mk.weights.expert_weights import MappedExpertWeights, SlotBiases, SlotWeights
from tests.layer.native import NEEDS_COMPILER
from tests.support.tiers import quick_where

pytestmark = NEEDS_COMPILER
CPU, EXPERTS_HERE = torch.device("cpu"), 5
KINDS = (
    "bf16", "fp8_block", "fp8_channel", "fp8_tensor", "int8_block", "int8", "mxfp8", "mxfp4", "nvfp4", "int4_g32",
    "int4_g32_zp", "int4_g32_affine", "int8_g32_zp", "q4_k", "q6_k", "q5_1",
)  # fmt: skip
MIXED = {"q4_k": ("q6_k", "q5_1"), "int4_g32_zp": ("int8_g32_zp", "bf16"), "mxfp4": ("bf16",), "q5_1": ("q4_k",)}
ACTIVATIONS = ("silu", "swiglu_oai", "gelu_tanh", "relu2", "situ")


@dataclass(frozen=True)
class Features:
    """What one layer has."""

    kind: str
    down: str
    biased: bool
    activation: str
    shared: bool
    sizes: tuple[int, int]

    @staticmethod
    def drawn(kind: str, draw: Random) -> "Features":
        down = draw.choice((kind, *MIXED.get(kind, ())))
        narrow = [(256, 256), (256, 512), (512, 256)] if kind[0] == "q" or "block" in kind or down[0] == "q" else []
        sizes = draw.choice(narrow or ([(96, 64), (80, 48), (208, 112)] if kind == "bf16" else [(96, 64), (160, 96)]))
        if down != kind and sizes[1] % 32:
            sizes = (160, 96)
        activation, biased = draw.choice(ACTIVATIONS[:4]), draw.random() < 0.6
        return Features(kind, down, biased, activation, activation != "relu2" and draw.random() < 0.4, sizes)

    def weights(self, seed: int, count: int) -> MappedExpertWeights:
        draw, gated = torch.Generator().manual_seed(seed), self.activation != "relu2"
        hidden, inner = self.sizes
        stacks = [
            random_experts(scheme_of_kind(kind, (128, 128)), count, hidden, inner, CPU, seed, gated=gated)
            for kind in (self.kind, self.down)
        ]

        def slot(index: int) -> SlotWeights:
            one, other = (stack.slot(index) for stack in stacks)
            sizes = (inner if gated else 0, inner, hidden)
            found = [torch.randn(size, generator=draw).bfloat16() for size in sizes]
            biases = SlotBiases(found[0] if gated else None, *found[1:]) if self.biased else None
            return SlotWeights(one.gate_IH, one.up_IH, other.down_HI, biases)

        return MappedExpertWeights(tuple(slot(index) for index in range(count)), scheme_of_kind(self.kind, (128, 128)))

    @property
    def compute(self) -> QuantScheme:
        """Tokens of FP8 blocks arrive as codes with scales; others in bf16."""
        return FP8_1x128 if self.kind == "fp8_block" and not self.sizes[0] % 128 else BF16

    def context(self, **more: Any) -> ExpertsContext:
        limits = {"swiglu_limit": 2.0, "swiglu_alpha": 1.702} if self.activation == "swiglu_oai" else {}
        return ExpertsContext(BF16, self.compute, self.activation, EXPERTS_HERE, *self.sizes, CPU, **limits, **more)


def wide(q: QuantTensor) -> Tensor:
    return q.dequantize(torch.float32).double()


def of_expert(features: Features, slot: SlotWeights, x_NH: Tensor) -> Tensor:
    """One expert in f64, from its stored numbers."""
    x_NH, biases = x_NH.double(), slot.biases
    up_NI = x_NH @ wide(slot.up_IH).T + (0 if biases is None else biases.up_I.double())
    if slot.gate_IH is None:
        hidden_NI = up_NI.clamp(min=0) ** 2
    else:
        gate_NI = x_NH @ wide(slot.gate_IH).T
        if biases is not None and biases.gate_I is not None:
            gate_NI = gate_NI + biases.gate_I.double()
        if features.activation == "swiglu_oai":
            gate_NI, up_NI = gate_NI.clamp(max=2.0), up_NI.clamp(-2.0, 2.0)
            hidden_NI = gate_NI * torch.sigmoid(1.702 * gate_NI) * (up_NI + 1)
        elif features.activation == "silu":
            hidden_NI = torch.nn.functional.silu(gate_NI) * up_NI
        else:
            hidden_NI = torch.nn.functional.gelu(gate_NI, approximate="tanh") * up_NI
    return hidden_NI @ wide(slot.down_HI).T + (0 if biases is None else biases.down_H.double())


def expect_near(found: Tensor, expected: Tensor, error: float) -> None:
    assert (found.double() - expected).norm() <= error * expected.norm().clamp_min(1e-9)


def expect_same(found: SlotWeights, stored: SlotWeights) -> None:
    """What is read back is what was given."""
    for name in ("gate_IH", "up_IH", "down_HI"):
        if (one := getattr(stored, name)) is not None:
            assert torch.equal(wide(getattr(found, name)), wide(one))
    assert (found.biases is None) == (stored.biases is None)
    for name in ("gate_I", "up_I", "down_H"):
        one = None if stored.biases is None else getattr(stored.biases, name)
        assert one is None or torch.equal(getattr(found.biases, name).double(), one.double())


class Ledger:
    """Reads of records from stores, counted where they happen."""

    def __init__(self) -> None:
        self.begun: Counter[tuple[Path, int]] = Counter()

    def patched(self) -> Any:
        read = ExpertStore.read_piece

        def counted(store: ExpertStore, expert: int, start: int, record: memoryview) -> None:
            self.begun[store.path, expert] += start == 0
            read(store, expert, start, record)

        return patch.object(ExpertStore, "read_piece", counted)


def tried(features: Features, draw: Random, folder: Path, pool: ResidencyPool | None, ledger: Ledger) -> Any:
    """A layer with these features: its resident and paged experts, and a check of one random call."""
    seed = draw.randrange(1000)
    given = features.weights(seed, EXPERTS_HERE)
    own = None if pool is not None else draw.randint(1, EXPERTS_HERE)
    residency = ResidencyConfig(slots=own, store=folder, policy=draw.choice(list(POLICIES)))
    resident, paged = (
        EXPERTS["cpu_native"](features.context(residency=each, pool=pool if each else None))
        for each in (None, residency)
    )
    held, some = resident.relayout(given), paged.relayout(given)
    plain_held, plain_some = held, some
    shared = features.weights(seed + 1, 1) if features.shared else None
    if shared is not None:
        packed = resident.relayout(shared)
        held, some = resident.fuse_shared_experts(held, packed), paged.fuse_shared_experts(some, packed)
    cache, used = plain_some.cache, Counter[str]()

    def call() -> None:
        rows, top_k = draw.choice((0, 1, 2, 9)), draw.randint(1, 3)
        g = torch.Generator().manual_seed(draw.randrange(1000))
        x_RH = torch.randn((rows, features.sizes[0]), generator=g).bfloat16()
        ids_RK = torch.rand((rows, EXPERTS_HERE), generator=g).argsort(1)[:, :top_k].to(torch.int32)
        ids_RK[torch.rand((rows, top_k), generator=g) < 0.2] = -1
        weights_RK = torch.rand((rows, top_k), generator=g)
        sent = features.compute.quantize(x_RH) if features.compute != BF16 else QuantTensor(x_RH, None, BF16)
        tokens = RowTokens(sent, ids_RK, weights_RK, EXPERTS_HERE)
        needed, resident_then = {*ids_RK.flatten().tolist()} - {-1}, set(cache.slot_of)
        before = sum(n for (path, _), n in ledger.begun.items() if path == cache.store.path)
        wide_out = [torch.empty((rows, 2 * features.sizes[0]))[:, : features.sizes[0]] for _ in range(2)]
        y = [
            one.run(replace(tokens, out_RH=out), weights).y
            for one, weights, out in ((paged, some, wide_out[0]), (resident, held, wide_out[1]))
        ]
        assert torch.equal(*y)
        used["uses"] += len(needed)
        used["hits"] += len(needed & resident_then)
        after = sum(n for (path, _), n in ledger.begun.items() if path == cache.store.path)
        assert after - before == len(needed - resident_then)
        counts = cache.counts
        assert (counts.uses, counts.hits, counts.reads) == (used["uses"], used["hits"], used["uses"] - used["hits"])
        expected = torch.zeros((rows, features.sizes[0]), dtype=torch.float64)
        for row in range(rows):
            for k, expert in enumerate(ids_RK[row].tolist()):
                if expert >= 0:
                    one = of_expert(features, given.slot(expert), x_RH[row : row + 1])[0]
                    expected[row] += weights_RK[row, k].double() * one
            if shared is not None:
                expected[row] += of_expert(features, shared.slot(0), x_RH[row : row + 1])[0]
        expect_near(y[0], expected, 2**-6 if features.compute == BF16 else 2**-3)
        for layout in (GroupedTokens, BatchedTokens):
            local = permute(tokens, (layout,))
            outputs = [one.run(local, weights).y for one, weights in ((paged, plain_some), (resident, plain_held))]
            assert torch.equal(*outputs)
            used["uses"] += len(needed)
            used["hits"] += cache.hits - used["hits"]
        expert = draw.randrange(EXPERTS_HERE)
        expect_same(plain_some.slot(expert), given.slot(expert))

    return call


@pytest.mark.row(172)
@pytest.mark.parametrize(
    ("kind", "seed"),
    quick_where(lambda kind, seed: seed == 0 and kind in KINDS[::5], [(k, s) for k in KINDS for s in range(2)]),
)
def test_products_of_features_are_those_of_resident_experts_and_of_f64(kind: str, seed: int, tmp_path: Path) -> None:
    draw, ledger = Random(f"{kind} {seed}"), Ledger()
    with ledger.patched():
        for _ in range(2):
            call = tried(Features.drawn(kind, draw), draw, tmp_path, None, ledger)
            for _ in range(4):
                call()


@pytest.mark.row(172)
@pytest.mark.parametrize("seed", quick_where(lambda seed: seed == 0, range(6)))
def test_layers_of_different_features_share_a_pool(seed: int, tmp_path: Path) -> None:
    draw, ledger = Random(seed), Ledger()
    kinds = draw.sample(KINDS, 3)
    with ledger.patched():
        pool = ResidencyPool(5 << 20)
        calls = [tried(Features.drawn(kind, draw), draw, tmp_path, pool, ledger) for kind in kinds]
        for _ in range(8):
            draw.choice(calls)()
            if draw.random() < 0.2 and len(calls) > 1:
                calls.pop(draw.randrange(len(calls)))
            assert sum(len(held) * size for size, held in pool.memory.items()) <= pool.num_bytes


def stored_bytes(slot: SlotWeights) -> int:
    """Of one expert as it was given; biases in f32."""
    tensors = [
        tensor
        for q in (slot.gate_IH, slot.up_IH, slot.down_HI) if q is not None
        for tensor in (q.values, q.scales, q.zeros) if tensor is not None
    ]  # fmt: skip
    biases = [] if slot.biases is None else [slot.biases.gate_I, slot.biases.up_I, slot.biases.down_H]
    return sum(each.nbytes for each in tensors) + sum(4 * each.numel() for each in biases if each is not None)


@pytest.mark.row(172)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forecast_has_the_bytes_of_what_is_loaded(kind: str, tp: int, tmp_path: Path) -> None:
    draw = Random(f"{kind} {tp}")
    for _ in range(2):
        features = Features.drawn(kind, draw)
        hidden, inner = features.sizes
        names = {"weights": kind} | ({} if features.down == kind else {"down": features.down})
        model = {
            "hidden_size": hidden, "moe_intermediate_size": inner * tp, "num_experts": EXPERTS_HERE, "quant": names,
            "expert_bias": features.biased, "activation": features.activation, "num_shared_experts": 0,
            "gated": features.activation != "relu2",
            "swiglu_limit": 2.0 if features.activation == "swiglu_oai" else None,
        }  # fmt: skip
        given = features.weights(1, EXPERTS_HERE)
        context = features.context(residency=ResidencyConfig(slots=2, store=tmp_path))
        size = EXPERTS["cpu_native"](context).relayout(given).cache.record_bytes
        stored = stored_bytes(given.slot(0))
        assert stored <= size <= 1.6 * stored + 4096 + 10 * 64
        for budget, slots in ((3 * size, 3), (3 * size - 1, 2), (100 * size, EXPERTS_HERE)):
            config = MoEConfig.parse({"model": model, "router": {"top_k": 2}}, "a test")
            config = config.with_(tp=tp, residency={"bytes": budget, "store": str(tmp_path)})
            asked = Problem(config, device_profile("cpu"), BF16, 1, frozenset())
            assert EXPERTS["cpu_native"].slot_bytes(asked) == size
            assert resident_experts(asked) == slots and weights_bytes(asked) == slots * size
            if (reads := expected_reads(asked)) is not None:
                # One token uses 2 of 5 experts; of 5 - slots it finds none resident.
                assert reads.used == pytest.approx(2) and reads.most_used == 2
                assert reads.num_bytes == round(2 * size * (EXPERTS_HERE - slots) / EXPERTS_HERE)
                assert (reads.least_bytes, reads.most_bytes) == (max(2 - slots, 0) * size, 2 * size)
            else:
                assert slots == EXPERTS_HERE
