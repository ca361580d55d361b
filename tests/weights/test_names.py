"""What tensors are called, and where MoE blocks lie among all names."""

import pytest

from moe_mk.weights.names import CONVENTIONS, Part, Role, block_prefixes, layer_of

GATE_7 = Part(Role.EXPERT, "gate", 7)
DOWN_SCALE_7 = Part(Role.EXPERT, "down", 7, "scale")
SHARED_UP = Part(Role.SHARED, "up")
BIAS = Part(Role.BIAS)


@pytest.mark.parametrize("convention, part, name", [
    ("official", GATE_7, "experts.7.gate_proj.weight"),
    ("official", DOWN_SCALE_7, "experts.7.down_proj.weight_scale_inv"),
    ("official", SHARED_UP, "shared_experts.up_proj.weight"), ("official", BIAS, "gate.e_score_correction_bias"),
    ("fused", Part(Role.EXPERT, "gate_up"), "experts.gate_up_proj"),
    ("fused", Part(Role.EXPERT, "down", extra="scale"), "experts.down_proj_scale_inv"),
    ("mixtral", GATE_7, "experts.7.w1.weight"), ("mixtral", Part(Role.EXPERT, "up", 7), "experts.7.w3.weight"),
    ("mixtral", Part(Role.EXPERT, "down", 7), "experts.7.w2.weight"), ("mixtral", BIAS, "e_score_correction_bias"),
    ("converted", GATE_7, "experts.7.w1.weight"), ("converted", DOWN_SCALE_7, "experts.7.w2.scale"),
    ("converted", SHARED_UP, "shared_experts.w3.weight"), ("converted", BIAS, "gate.bias"),
    ("converted", Part(Role.ROUTER), "gate.weight"),
])  # fmt: skip
def test_a_part_has_one_name_and_the_name_means_that_part(convention: str, part: Part, name: str) -> None:
    assert CONVENTIONS[convention].spell(part) == name
    assert CONVENTIONS[convention].parse(name) == part


@pytest.mark.parametrize("convention", CONVENTIONS.values(), ids=list(CONVENTIONS))
def test_every_part_of_a_convention_has_its_own_name(convention) -> None:
    experts = [None] if convention.fused or convention.stacked else [0, 1, 12, 255]
    parts = [Part(Role.ROUTER), Part(Role.BIAS)]
    extras = ("", "scale") if convention.expert["scale"] else ("",)
    parts += [Part(Role.SHARED, p, None, extra) for p in convention.shared_words for extra in extras]
    parts += [Part(Role.EXPERT, p, e, extra) for p in convention.expert_words for e in experts for extra in extras]
    assert [convention.parse(convention.spell(part)) for part in parts] == parts
    assert len({convention.spell(part) for part in parts}) == len(parts)


@pytest.mark.parametrize("name", ["shared_mlp.gate_proj.weight", "experts.x.up_proj.weight", "gate.weight.extra", ""])
def test_foreign_names_mean_nothing(name: str) -> None:
    assert [convention.parse(name) for convention in CONVENTIONS.values()] == [None] * len(CONVENTIONS)


def test_blocks_are_found_by_their_experts_in_order_of_layer() -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate_proj.weight",  # a dense layer
        "model.layers.10.mlp.experts.0.up_proj.weight",
        "model.layers.3.mlp.experts.gate_up_proj",
        "model.layers.3.mlp.shared_experts.up_proj.weight",
        "vision.layers.3.ffn.experts.0.w1.weight",
    ]
    assert block_prefixes(names) == ["model.layers.3.mlp.", "vision.layers.3.ffn.", "model.layers.10.mlp."]
    assert block_prefixes(["experts.0.w1.weight", "gate.weight"]) == [""]
    assert block_prefixes(["model.layers.0.mlp.shared_experts.up_proj.weight"]) == []


def test_the_layer_of_a_prefix_is_its_last_number() -> None:
    assert layer_of("model.layers.61.mlp.") == 61
    assert layer_of("towers.2.layers.14.ffn.") == 14
    assert layer_of("mlp.") is None
    assert layer_of("") is None
