"""Native CPU experts as a backend: packed weights, clamped activations and biases, bits in any company."""

from dataclasses import replace

import pytest
import torch

from moe_mk.experts.base import EXPERTS, ExpertsContext
from moe_mk.experts.held import HeldExperts
from moe_mk.experts.reference import ReferenceExperts
from moe_mk.kernels.native.library import Isa
from moe_mk.lab.testing.experts import random_experts
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.quant.plain import BF16, FP32
from moe_mk.quant.tensor import QuantTensor
from moe_mk.tokens import RowTokens
from moe_mk.weights.expert_weights import MappedExpertWeights, SlotBiases, SlotWeights
from moe_mk.weights.layer_weights import as_mapped
from tests.layer.native import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER
SLOTS, HIDDEN, INNER = 3, 96, 64


def weights(*, biases: bool) -> MappedExpertWeights:
    g = torch.Generator().manual_seed(5)

    def matrix(rows: int, columns: int) -> QuantTensor:
        return QuantTensor((torch.randn(rows, columns, generator=g) * 2 * columns**-0.5).bfloat16(), None, BF16)

    def slot() -> SlotWeights:
        own = SlotBiases(*(torch.randn(n, generator=g).bfloat16() for n in (INNER, INNER, HIDDEN))) if biases else None
        return SlotWeights(matrix(INNER, HIDDEN), matrix(INNER, HIDDEN), matrix(HIDDEN, INNER), own)

    return MappedExpertWeights(tuple(slot() for _ in range(SLOTS)), BF16)


def rows(count: int, dtype: torch.dtype) -> RowTokens:
    g = torch.Generator().manual_seed(6)
    x = torch.randn(count, HIDDEN, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(SLOTS, generator=g)[:2] for _ in range(count)]).to(torch.int32)
    plain = BF16 if dtype is torch.bfloat16 else FP32
    return RowTokens(QuantTensor(x.to(dtype), None, plain), ids, torch.rand(count, 2, generator=g), SLOTS)


def context(activation: str = "silu", dtype: object = BF16, **more: object) -> ExpertsContext:
    return ExpertsContext(dtype, dtype, activation, SLOTS, HIDDEN, INNER, torch.device("cpu"), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    "activation, clamp",
    [
        ("silu", {}),
        ("swiglu_limit", {"swiglu_limit": 0.7}),
        ("swiglu_oai", {"swiglu_limit": 0.9, "swiglu_alpha": 1.702}),
        ("silu_limit", {"swiglu_limit": 0.1}),
        ("situ", {"swiglu_limit": 0.9, "swiglu_alpha": 0.5}),
    ],
)
def test_clamps_and_biases_equal_the_reference(activation: str, clamp: dict[str, float], biases: bool) -> None:
    given = weights(biases=biases)
    native = EXPERTS["cpu_native"](context(activation, **clamp))
    got = native.run(rows(9, torch.bfloat16), native.relayout(given)).y.float()
    wanted = ReferenceExperts(context(activation, FP32, **clamp)).run(rows(9, torch.float32), given).y
    assert ((got - wanted).norm() / wanted.norm()).item() < 4e-3


def test_a_packed_slot_gives_back_its_biases() -> None:
    given = weights(biases=True)
    packed = EXPERTS["cpu_native"](context()).relayout(given)
    for index in range(SLOTS):
        back, slot = packed.slot(index), given.slot(index)
        assert back.biases is not None and slot.biases is not None
        for mine, theirs in zip(back.biases.tensors, slot.biases.tensors, strict=True):
            assert torch.equal(mine, theirs.float())


def test_packed_experts_are_multiplied_with_the_settings_of_each_backend() -> None:
    packed, made = None, []
    for settings in ({}, {"batch_invariant": True}, {"instruction_set": "scalar"}, {"own_threads": True}):
        backend = EXPERTS["cpu_native"](context(**settings))
        packed = backend.relayout(weights(biases=True) if packed is None else packed)
        call = vars(packed.call(backend.native, backend.mode))
        made.append((call["_block"].batch_invariant, call["_block"].isa == Isa.SCALAR, call["_native"].own_threads))
    scalar = made[0][1]
    assert made == [(0, scalar, False), (1, scalar, False), (0, True, False), (0, scalar, True)]


@pytest.mark.parametrize("kind,own", [("int4_g32", "bf16"), ("q4_k", "q6_k"), ("bf16", "int4_g128_zp")])
def test_shared_experts_of_another_format_take_part_in_the_same_call(kind: str, own: str) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256}
    backend = EXPERTS["cpu_native"](replace(context(), **wide))
    routed, shared = (
        backend.relayout(as_mapped(random_experts(scheme_of_kind(name), slots, 256, 256, torch.device("cpu"))))
        for name, slots in ((kind, SLOTS), (own, 1))
    )
    both = backend.fuse_shared_experts(routed, shared)
    assert both is not None
    narrow = rows(5, torch.bfloat16)
    x_RH = torch.randn(5, 256, generator=torch.Generator().manual_seed(7)).bfloat16()
    tokens = replace(narrow, x_RH=QuantTensor(x_RH, None, BF16))
    ones = torch.ones((5, 1), dtype=torch.float32)
    every = replace(tokens, ids_RK=torch.zeros((5, 1), dtype=torch.int32), weights_RK=ones, num_slots=1)
    expected = backend.run(tokens, routed).y.float() + backend.run(every, shared).y.float()
    found = backend.run(tokens, both).y.float()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * float(expected.std()))


def test_requantised_experts_name_what_their_backend_chose() -> None:
    inner, held = (EXPERTS["cpu_native"](context(instruction_set="scalar")) for _ in range(2))
    int8 = scheme_of_kind("int8")
    held = HeldExperts(held, int8, int8)
    packed = [each.relayout(weights(biases=False)) for each in (inner, held)]
    texts = {each.numerics(one) for each, one in zip((inner, held), packed, strict=True)}
    assert texts == {"SCALAR (kernel.instruction_set pins it)"}
    assert held.parameters() == inner.parameters() and "SCALAR: pinned" in inner.parameters()
