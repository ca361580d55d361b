"""Every experts class of the installed transformers computes the same here, and faults in ours would be seen."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'moe-mk[hf]'")

import transformers

from moe_mk.integrations.hf import plan as plans
from moe_mk.integrations.hf.modules import ModuleFacts, facts_of, weights_of
from moe_mk.integrations.hf.plan import ModuleExperts
from moe_mk.weights.expert_weights import ExpertWeights, Weights
from tests.integrations.hf.cases import difference, family, logits, prompt, relative
from tests.integrations.hf.classes import experts_classes, tiny_call, tiny_experts

CLASSES = experts_classes()
NUMBER_OF_CLASSES = {"5.16": 53, "5.23": 65}
"""Classes under `@use_experts_implementation`, counted in the sources of each version."""
CLOSE = 1e-5
"""Relative, in f32: sums of some twenty products in another order. One percent of error is a thousand times that."""


def test_the_sweep_covers_every_class_of_this_version() -> None:
    version = ".".join(transformers.__version__.split(".")[:2])
    assert len(CLASSES) == NUMBER_OF_CLASSES.get(version, len(CLASSES)) and len(CLASSES) >= 50
    assert {"DeepseekV3Experts", "GptOssExperts", "NemotronHExperts"} <= {cls.__name__ for cls in CLASSES}
    looped = [cls.__name__ for cls in CLASSES if not facts_of(tiny_experts(cls)).canonical]
    print(f"{len(CLASSES) - len(looped)} of {len(CLASSES)} run in a registered backend, in a loop {', '.join(looped)}")
    assert set(looped) <= {"AriaExperts", "GptOssExperts", "MuseSparkExperts", "OpenAIPrivacyFilterExperts"}


@pytest.mark.parametrize("cls", CLASSES, ids=[cls.__name__ for cls in CLASSES])
def test_every_experts_class_computes_what_its_own_forward_does(cls: type[nn.Module]) -> None:
    module = tiny_experts(cls)
    assert difference(module, tiny_call()) < CLOSE


# The sweep is worth something only if it fails where the experts are wrong. Each fault below is put into ours.


def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    run = plans.ModulePlan.run
    monkeypatch.setattr(plans.ModulePlan, "run", lambda plan, *args: run(plan, *args) * 1.01)


def halves_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(module: nn.Module, facts: ModuleFacts) -> Weights:
        weights = weights_of(module, facts)
        assert isinstance(weights, ExpertWeights) and weights.w13.scales is None
        rows = weights.w13.values
        # Interleaved halves lie gate, up, gate, up; the others one after the other.
        parts = (rows[:, 1::2], rows[:, 0::2]) if facts.interleaved else rows.chunk(2, dim=1)[::-1]
        turned = torch.stack(parts, dim=2).flatten(1, 2) if facts.interleaved else torch.cat(parts, dim=1)
        return replace(weights, w13=replace(weights.w13, values=turned))

    monkeypatch.setattr(plans, "weights_of", swapped)


def bias_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModuleExperts, "_bias", lambda self, module, name, slot: None)


@pytest.mark.parametrize(
    ("fault", "concerns"),
    [
        (scaled, lambda facts: True),
        (halves_swapped, lambda facts: facts.gated),
        (bias_dropped, lambda facts: facts.biased),
    ],
    ids=["output_times_1.01", "gate_and_up_swapped", "bias_dropped"],
)
def test_a_fault_in_ours_fails_the_sweep(monkeypatch: pytest.MonkeyPatch, fault: Any, concerns: Any) -> None:
    concerned = [cls for cls in CLASSES if concerns(facts_of(tiny_experts(cls)))]
    assert concerned
    fault(monkeypatch)
    missed = [cls.__name__ for cls in concerned if difference(tiny_experts(cls), tiny_call()) < 100 * CLOSE]
    assert not missed


def test_a_fault_in_a_model_is_seen_in_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    # With the usual spread of 0.02 a model states the same whatever its experts do; these are drawn with 0.3.
    faults = {"deepseek_v3": (scaled, halves_swapped), "gpt_oss": (scaled, halves_swapped, bias_dropped)}
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
