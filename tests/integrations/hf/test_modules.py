"""Facts of modules are read or refused, and every experts class of transformers is computed as its own forward does."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'moe-mk[hf]'")

import transformers

from moe_mk.errors import UnsupportedError
from moe_mk.integrations.hf import plan as plans
from moe_mk.integrations.hf.modules import Act, ModuleFacts, activation_of, facts_of, weights_of
from moe_mk.integrations.transformers import prepare
from moe_mk.kernels.reference.activation import CLAMPED, activation
from moe_mk.lab.checkpoints.tiny_models import tiny_model
from moe_mk.weights.expert_weights import ExpertWeights, MappedExpertWeights, SlotBiases, Weights
from tests.integrations.hf.cases import (
    EXPERTS,
    HIDDEN,
    deepseek,
    difference,
    experts_classes,
    experts_of,
    family,
    logits,
    prompt,
    relative,
    tiny_call,
    tiny_experts,
)


@pytest.mark.parametrize(
    ("name", "unsupported", "activation"),
    [
        ("DeepseekV3Experts", (), "silu"),
        ("Gemma4TextExperts", (), "gelu_tanh"),
        ("NemotronHExperts", (), "relu2"),
        ("AriaExperts", (), "silu"),
        ("MuseSparkExperts", ("a norm after each expert",), "silu"),
        ("DeepseekV4Experts", (), Act("swiglu_limit", 1.0, 7.0)),
        ("MiniMaxM3VLExperts", (), Act("swiglu_oai", 1.702, 7.0)),
        ("Inkling2Experts", (), Act("situ", 5.0, 4.0)),
        ("GptOssExperts", (), Act("swiglu_oai", 1.702, 7.0)),
    ],
)
def test_what_a_module_is_is_found_by_trying(
    name: str, unsupported: tuple[str, ...], activation: str | Act | None
) -> None:
    if name not in {cls.__name__ for cls in experts_classes()}:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    facts = facts_of(experts_of(name))
    wanted = Act(activation) if isinstance(activation, str) else activation
    assert (facts.unsupported, facts.activation) == (unsupported, wanted)
    assert facts.canonical == (not unsupported and name not in ("AriaExperts", "GptOssExperts"))
    assert (facts.num_experts, facts.hidden_size) == (EXPERTS, HIDDEN)


def test_a_clamp_in_a_gate_is_noticed() -> None:
    def clamped(x: Tensor) -> Tensor:
        gate, up = x.clamp(max=2000.0).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    assert activation_of(clamped, gated=True, device=torch.device("cpu")) is None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CLAMPED)
def test_the_parameters_of_a_limited_activation_are_measured(name: str, seed: int) -> None:
    draw = random.Random(f"{name} {seed}")
    # Beyond 10 a clamp after SiLU is one before it.
    limit = float(f"{draw.uniform(1.5, 8 if name == 'silu_limit' else 30):.3g}")
    alpha = float(f"{draw.uniform(0.5, 8):.3g}") if name in ("swiglu_oai", "situ") else 1.0

    def compute(x: Tensor) -> Tensor:
        return activation(name, *x.chunk(2, dim=-1), alpha=alpha, limit=limit)

    assert activation_of(compute, gated=True, device=torch.device("cpu")) == Act(name, alpha, limit)


def test_what_cannot_be_computed_is_named_before_any_work() -> None:
    module = deepseek()
    module.down_proj = nn.Parameter(torch.zeros((EXPERTS, HIDDEN, 12), dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"cannot compute DeepseekV3Experts\n  - its weights are packed FP4"):
        module(*tiny_call())
    model = tiny_model()
    for layer in (1, 2):
        experts = model.model.layers[layer].mlp.experts
        experts.down_proj = nn.Parameter(experts.down_proj.to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp\.experts.*FP4(.|\n)*layers\.2\.mlp\.experts"):
        prepare(model)
    with pytest.raises(UnsupportedError, match="has no experts module"):
        prepare(nn.Linear(2, 2))


CLASSES = experts_classes()
NUMBER_OF_CLASSES = {"5.16": 53, "5.23": 65, "5.24": 68}
"""Classes under `@use_experts_implementation`, counted in the sources of each version."""
CLOSE = 1e-5
"""Relative, in f32: sums of some twenty products in another order. One percent of error is a thousand times that."""


def test_the_sweep_covers_every_class_of_this_version() -> None:
    version = ".".join(transformers.__version__.split(".")[:2])
    assert len(CLASSES) == NUMBER_OF_CLASSES.get(version, len(CLASSES)) and len(CLASSES) >= 50
    assert {"DeepseekV3Experts", "GptOssExperts", "NemotronHExperts"} <= {cls.__name__ for cls in CLASSES}
    looped = [cls.__name__ for cls in CLASSES if facts_of(tiny_experts(cls)).unsupported]
    print(f"{len(CLASSES) - len(looped)} of {len(CLASSES)} run in a registered backend, in a loop {', '.join(looped)}")
    assert set(looped) <= {"MuseSparkExperts"}


@pytest.mark.parametrize("cls", CLASSES, ids=[cls.__name__ for cls in CLASSES])
def test_every_experts_class_computes_what_its_own_forward_does(cls: type[nn.Module]) -> None:
    module = tiny_experts(cls)
    assert difference(module, tiny_call()) < CLOSE


# The sweep is worth something only if it fails where the experts are wrong. Each fault below is put into ours.


def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    run = plans.ExpertsOfRank.run
    monkeypatch.setattr(plans.ExpertsOfRank, "run", lambda experts, *args: run(experts, *args) * 1.01)


def halves_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(module: nn.Module, facts: ModuleFacts) -> Weights:
        weights = weights_of(module, facts)
        slots = [weights.slot(e) for e in range(facts.num_experts)]  # type: ignore[union-attr]
        made = MappedExpertWeights(tuple(replace(s, gate_IH=s.up_IH, up_IH=s.gate_IH) for s in slots), facts.scheme)
        if not isinstance(weights, ExpertWeights):
            return made
        w13 = torch.cat([weights.w13.values.chunk(2, dim=1)[half] for half in (1, 0)], dim=1)
        return replace(weights, w13=replace(weights.w13, values=w13))

    monkeypatch.setattr(plans, "weights_of", swapped)


def biases_changed(change: Callable[[SlotBiases], SlotBiases]) -> Callable[[pytest.MonkeyPatch], None]:
    def put_in(monkeypatch: pytest.MonkeyPatch) -> None:
        def changed(module: nn.Module, facts: ModuleFacts) -> Weights:
            weights = weights_of(module, facts)
            assert isinstance(weights, MappedExpertWeights)
            slots = (replace(s, biases=change(s.biases)) for s in weights.slots if s.biases is not None)
            return replace(weights, slots=tuple(slots))

        monkeypatch.setattr(plans, "weights_of", changed)

    return put_in


def exchanged(biases: SlotBiases) -> SlotBiases:
    assert biases.gate_I is not None
    return replace(biases, gate_I=biases.up_I, up_I=biases.gate_I)


def no_gate_bias(biases: SlotBiases) -> SlotBiases:
    assert biases.gate_I is not None
    return replace(biases, gate_I=torch.zeros_like(biases.gate_I))


BIASES = [
    biases_changed(change)
    for change in (
        no_gate_bias, exchanged,
        lambda biases: replace(biases, up_I=torch.zeros_like(biases.up_I)),
        lambda biases: replace(biases, down_H=torch.zeros_like(biases.down_H)),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "concerns"),
    [
        (scaled, lambda facts: True),
        (halves_swapped, lambda facts: facts.gated),
        *((fault, lambda facts: facts.biased) for fault in BIASES),
    ],
    ids=["output_times_1.01", "gate_and_up_swapped", "no_gate_bias", "biases_exchanged", "no_up_bias", "no_down_bias"],
)
def test_a_fault_in_ours_fails_the_sweep(monkeypatch: pytest.MonkeyPatch, fault: Any, concerns: Any) -> None:
    concerned = [cls for cls in CLASSES if concerns(facts_of(tiny_experts(cls)))]
    assert concerned
    fault(monkeypatch)
    missed = [cls.__name__ for cls in concerned if difference(tiny_experts(cls), tiny_call()) < 100 * CLOSE]
    assert not missed


def test_a_fault_in_a_model_is_seen_in_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    # With the usual spread of 0.02 a model states the same whatever its experts do; these are drawn with 0.3.
    faults = {"deepseek_v3": (scaled, halves_swapped), "gpt_oss": (scaled, halves_swapped, *BIASES)}
    for name, put_in in faults.items():
        model, ids = family(name), prompt()
        for parameter in (p for path, p in model.named_parameters() if path.endswith("_proj_bias")):
            nn.init.normal_(parameter, 0.0, 0.3)
        wanted = logits(model, ids)
        model.set_experts_implementation("moe_mk")
        assert relative(logits(model, ids), wanted) < 1e-4
        for fault in put_in:
            with monkeypatch.context() as patch:
                fault(patch)
                assert relative(logits(copy.deepcopy(model), ids), wanted) > 1e-3, f"{fault.__name__} in {name}"
