"""Facts of modules are read or refused, and every experts class of transformers is computed as its own forward does."""

import random

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'moe-mk[hf]'")

import transformers

from moe_mk.errors import UnsupportedError
from moe_mk.integrations.hf.modules import Act, activation_of, facts_of
from moe_mk.integrations.transformers import prepare
from moe_mk.kernels.reference.activation import CLAMPED, activation
from moe_mk.lab.checkpoints.tiny_models import tiny_model
from tests.integrations.hf.cases import (
    EXPERTS,
    HIDDEN,
    deepseek,
    difference,
    experts_classes,
    experts_of,
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
