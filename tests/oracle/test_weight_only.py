"""Weight-only integers and GGUF blocks: their oracles, which formats they fall back to, and what that costs."""

from dataclasses import replace

import pytest
import torch

from moe_mk import ConfigError, Problem, UnsupportedError, oracle
from moe_mk.experts import EXPERTS
from moe_mk.experts.held import held_as
from moe_mk.experts.torch_cpu import TorchCpuExperts
from moe_mk.oracle import fallback
from moe_mk.oracle.base import ORACLES
from moe_mk.oracle.fallback import added_rounding, effect_of, held_in, in_fp8
from moe_mk.quant import BF16, QuantScheme, weight_scheme
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.int8 import int8_groups
from moe_mk.quant.kinds import KINDS, PLAIN_KINDS, scheme_of_kind
from moe_mk.weights.expert_weights import MappedExpertWeights, SlotWeights
from tests.support import problems


class BlocksOnly(TorchCpuExperts):
    traits = replace(TorchCpuExperts.traits, weights=frozenset({"fp8_block", "plain"}))


def problem(quant: str, **settings: object) -> Problem:
    return problems.problem(quant={"weights": quant, **settings}, ep=4)


@pytest.fixture
def only_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EXPERTS, "_entries", {"reference": EXPERTS["reference"], "blocks": BlocksOnly})
    monkeypatch.setattr(BlocksOnly, "__module__", "moe_mk.stands_for_one_of_this_package")


@pytest.mark.row(170)
@pytest.mark.parametrize(
    "quant,held,memory,rounding",
    [
        # int4_g32: 4.5 bits a weight; FP8 blocks 8 bits; e4m3 rounds by 2^-3 / sqrt(24).
        ("int4_g32", "fp8_128x128_ue8m0", 8 / 4.5, 2**-3 / 24**0.5),
        ("q4_k", "fp8_128x128_ue8m0", 8 / 4.5, 2**-3 / 24**0.5),
        # Eight bits are finer than FP8: 8.5 bits become 16, and bf16 rounds by 2^-7 / sqrt(24).
        ("int8_g32", "bf16", 16 / 8.5, 2**-7 / 24**0.5),
        ("q8_0", "bf16", 16 / 8.5, 2**-7 / 24**0.5),
    ],
)
@pytest.mark.usefixtures("only_blocks")
def test_a_fallback_states_its_price(quant: str, held: str, memory: float, rounding: float) -> None:
    decision = oracle.select(problem(quant))
    assert decision.effect is not None and decision.problem.weights.name == held
    assert decision.effect.memory == pytest.approx(memory, rel=1e-3)
    assert decision.effect.rounding == pytest.approx(rounding)
    assert f"reads fp8_block, plain weights, the experts are {quant}" in str(decision.passed_over[0])


@pytest.mark.parametrize("quant", [name for name, scheme in GGUF.items() if scheme.blocks.held])
def test_native_kernels_hold_a_type_that_they_do_not_read_in_one_with_the_same_values_or_in_bf16(quant: str) -> None:
    asked, held = replace(problem(quant, down="q4_k"), installed=frozenset({"c++"})), GGUF[quant].blocks.held
    decision = oracle.select(asked)
    assert decision.chosen.experts == "cpu_native" and decision.effect is not None
    assert (decision.problem.weights.name, decision.problem.config.model.quant.down) == (held, "q4_k")
    assert decision.effect.rounding == (BF16.relative_rms if held == "bf16" else 0.0)
    assert f"{quant} and q4_k weights are held as {held} and q4_k: " in str(decision.effect)
    for settings in ({"fallback": False}, {"experts": "torch_cpu"}):  # which reads it
        stored = oracle.select(replace(asked, config=asked.config.with_(**settings)))
        assert stored.chosen.experts == "torch_cpu" and stored.effect is None, settings


@pytest.mark.parametrize("kind", [kind for kind in (*KINDS, *GROUPED, *GGUF) if kind not in PLAIN_KINDS])
@pytest.mark.parametrize("held", [BF16, weight_scheme((128, 128), ue8m0=True)], ids=lambda s: s.name)
def test_no_rounding_is_added_exactly_where_every_stored_value_is_one_of_the_new_format(
    kind: str, held: QuantScheme
) -> None:
    stored = scheme_of_kind(kind)
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    before = stored.quantize(x).dequantize(torch.float32)
    exact = torch.equal(held.quantize(before).dequantize(torch.float32), before)
    assert added_rounding(stored, held) == (0.0 if exact else held.relative_rms)


def test_blocks_of_a_fallback_fit_the_slices_of_tensor_parallel_ranks() -> None:
    for inner, tp, side in ((768, 1, 128), (192, 1, 128), (384, 2, 64), (768, 4, 64), (768, 2, 128), (160, 2, 16)):
        asked = problems.problem("tiny", moe_intermediate_size=inner, tp=tp)
        assert in_fp8(asked).block == (side, side), (inner, tp)


def test_mixed_types_are_counted_in_bytes_and_refused_where_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed, alone = problem("q4_k", down="q6_k"), problem("q4_k")
    model = mixed.config.model
    more = GGUF["q6_k"].num_bytes(model.hidden_size, model.moe_intermediate_size)
    less = GGUF["q4_k"].num_bytes(model.hidden_size, model.moe_intermediate_size)
    assert oracle.select(mixed).weights_bytes - oracle.select(alone).weights_bytes == mixed.slots * (more - less)
    without = replace(TorchCpuExperts.traits, weights=frozenset({"q4_k"}))
    monkeypatch.setattr(TorchCpuExperts, "traits", without)
    assert not TorchCpuExperts.reasons_against(alone)
    assert "the experts are" in str(TorchCpuExperts.reasons_against(mixed)[0])


@pytest.mark.parametrize("quant", ["int4_g32", "q4_k"])
@pytest.mark.parametrize("backend", ["cpu_native", "triton", "torch_cpu", "reference"])
def test_rounded_activations_are_used_where_products_with_these_weights_exist(backend: str, quant: str) -> None:
    """The integer products of other weights are no reason to give codes to kernels that read plain rows."""
    asked, traits = problem(quant, activations="int8"), EXPERTS[backend].traits
    own = ORACLES["gguf" if quant == "q4_k" else "int_wna16"]
    assert own.compute_scheme(asked, traits) == (int8_groups(32) if backend == "reference" else asked.dtype)
    insisted = replace(asked, config=asked.config.with_(activations="checkpoint"))
    refused = any(reason.code == "activations" for reason in EXPERTS[backend].reasons_against(insisted))
    assert refused == (backend not in ("reference", "cpu_native"))
    assert own.compute_scheme(insisted, traits) == int8_groups(32)


@pytest.mark.parametrize(
    ("weights", "down", "name", "hidden"),
    [
        ("int4_g128_zp", None, "int8_1x128", "int8_1x128"),
        ("int8_row", None, "int8_1x128", "int8_1x128"),
        ("q4_k", "q6_k", "int8_1x32", "int8_1x32"),
        ("int4_g64", "int4_g32", "int8_1x64_1x32", "int8_1x32"),
    ],
)
def test_tokens_are_rounded_in_the_groups_of_their_weights(
    weights: str, down: str | None, name: str, hidden: str
) -> None:
    scheme = problem(weights, down=down, activations="int8").activations
    assert scheme is not None and (scheme.name, scheme.hidden.name) == (name, hidden)


def test_native_experts_refuse_integer_products_of_formats_they_do_not_have() -> None:
    asked = problem("q6_k", activations="int8")
    insisted = replace(asked, config=asked.config.with_(activations="checkpoint", experts="cpu_native"))
    with pytest.raises(UnsupportedError, match="multiplies no q6_k weights with tokens rounded to INT8"):
        oracle.select(insisted)
    plain = replace(asked, config=asked.config.with_(experts="cpu_native"), installed=frozenset({"c++"}))
    assert oracle.select(plain).compute == BF16
    mixed = problem("q4_k", down="q6_k")
    mixed = replace(
        mixed, config=mixed.config.with_(activations="int8", experts="cpu_native"), installed=plain.installed
    )
    assert oracle.select(mixed).compute.name == "int8_1x32", "hidden rows stay in bf16"


@pytest.mark.parametrize("quant", ["int4_g32", "q4_k", "int8", "int8_g128_zp"])
def test_settings_ask_for_int8_where_the_checkpoint_states_nothing(quant: str) -> None:
    config = problem(quant).config.with_(activations="int8", experts="cpu_native")
    asked = replace(problem(quant), config=config, installed=frozenset({"c++"}))
    assert asked.activations == problem(quant, activations="int8").activations == oracle.select(asked).compute
    with pytest.raises(ConfigError, match="for INT4, INT8 and GGUF weights, not mxfp4; use auto"):
        problem("mxfp4").config.with_(activations="int8")


@pytest.mark.parametrize("quant", ["int4_g64_zp", "q5_k"])
def test_experts_held_in_another_format_have_the_error_of_that_format(quant: str) -> None:
    scheme = {**GROUPED, **GGUF}[quant]
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    q = scheme.quantize(x)
    held = held_as(MappedExpertWeights((SlotWeights(q, q, q),), scheme), BF16).slot(0)
    assert torch.equal(held.up_IH.values, q.dequantize(torch.bfloat16))


@pytest.mark.parametrize("held,speed", [(2.0, "no more bytes"), (1.0, "no more bytes"), (4.0, "up to 2.00x the time")])
def test_a_format_of_as_many_bytes_reads_no_more(held: float, speed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = problem("int4_g32")
    sizes = {id(stored): 2.0}
    monkeypatch.setattr(fallback, "expert_bytes", lambda asked: sizes.get(id(asked), held))
    effect = effect_of(stored, held_in(in_fp8(stored), stored))
    assert effect is not None and speed in effect.speed and effect.memory == held / 2
