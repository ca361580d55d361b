"""`layer_equation.json`: layers of models without a row in a table, and checkpoints with names of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moe_mk import DeepseekV3MoE
from moe_mk.config import MoEConfig
from moe_mk.config.equation import LayerEquation, TensorNames
from moe_mk.errors import ConfigError
from moe_mk.lab.cli.checkpoints import config_problems, reading_of
from moe_mk.weights import inspect_checkpoint
from moe_mk.weights.source import RenamedSource
from tests.cli.conftest import printed
from tests.config.test_keys import PRUNED

E, H, I, K = 6, 16, 8, 2
CONFIG = {"model_type": "odd", "torch_dtype": "float32", "width": H, "sharpness": 1.5}
EQUATION: dict[str, Any] = {
    "model_type": "odd",
    "config": {"width": H, "sharpness": 1.5},
    "layers": [1],
    "model": {
        "name": "odd", "hidden_size": H, "moe_intermediate_size": I, "num_experts": E, "num_shared_experts": 1,
        "activation": "gelu",
    },
    "router": {"top_k": K, "has_correction_bias": True, "renormalize": False, "routed_scaling_factor": 1.5},
    "names": {
        "prefix": "body.{N}.mix.",
        "parts": {
            "gate": "chooser", "gate.e_score_correction_bias": "balance",
            "experts.{e}.gate_proj": {"tensor": "wide", "rows": "even", "transposed": True},
            "experts.{e}.up_proj": {"tensor": "wide", "rows": "odd", "transposed": True},
            "experts.{e}.down_proj": "workers.{e}.back",
            "shared_experts.gate_proj": {"tensor": "common.both.weight", "rows": "second"},
            "shared_experts.up_proj": {"tensor": "common.both.weight", "rows": "first"},
            "shared_experts.down_proj": "common.back",
        },
    },
}  # fmt: skip


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def written(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "layer_equation.json").write_text(json.dumps(EQUATION | changes))
    tensors = {
        "chooser.weight": draw(E, H), "balance": draw(E) / 4, "wide": draw(E, H, 2 * I),
        **{f"workers.{e}.back.weight": draw(H, I) + e / E for e in range(E)},
        "common.both.weight": draw(2 * I, H), "common.back.weight": draw(H, I + 1)[:, 1:].contiguous(),
    }  # fmt: skip
    save_file({f"body.1.mix.{name}": t for name, t in tensors.items()}, str(folder / "model.safetensors"))
    return folder


def test_a_layer_with_names_of_its_own_computes_its_equation(tmp_path: Path) -> None:
    layer = DeepseekV3MoE.from_checkpoint(written(tmp_path), 1, dtype=torch.float32, experts="torch_cpu")
    x = draw(9, H)
    scores = (x @ draw(E, H).T).softmax(-1)
    ids = (scores + draw(E) / 4).topk(K).indices
    wide = draw(E, H, 2 * I)
    expected = torch.zeros(9, H)
    for t in range(9):
        for e in ids[t].tolist():
            h = x[t] @ wide[e]
            h = torch.nn.functional.gelu(h[0::2]) * h[1::2]
            expected[t] += 1.5 * scores[t, e] * ((draw(H, I) + e / E) @ h)
    up, gate = (x @ draw(2 * I, H).T).chunk(2, 1)
    expected += (torch.nn.functional.gelu(gate) * up) @ draw(H, I + 1)[:, 1:].T
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


def test_the_command_runs_it_and_headers_describe_it(tmp_path: Path) -> None:
    written(tmp_path)
    facts = inspect_checkpoint(tmp_path)
    assert [(each.layer, each.num_experts, each.kind) for each in facts.layers] == [(1, E, "fp32")]
    assert config_problems(tmp_path, facts) == []
    assert "scale 1.5 (layer_equation.json)" in reading_of(MoEConfig.from_hf(tmp_path), tmp_path)
    printed("run", tmp_path, "--dtype", "float32", "--experts", "torch_cpu", "--tokens", 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {"width": 32}}, "width is 16, and the equation is that of 32; derive it again"),
        ({"model_type": "even"}, "model_type is 'odd', and the equation is that of 'even'"),
        (
            {"layers": None, "others": [{"layers": [3], "model": EQUATION["model"], "router": {}}]},
            "layers must list the layers of model and router",
        ),
        (
            {"others": [{"layers": [3, 1], "model": EQUATION["model"], "router": {}}]},
            r"layers \[1\] are listed more than once",
        ),
        (
            {"others": [{"layers": [3], "model": EQUATION["model"] | {"quant": {}}, "router": {}}]},
            "model.quant is read from config.json",
        ),
        ({"layers": [3, 4]}, r"layer 1: another equation, or no experts; those that have one: \[3, 4\]"),
        ({"model": EQUATION["model"] | {"quant": {"weights": "fp8_block"}}}, "model.quant is read from config.json"),
        ({"router": {"top_k": 2, "scoring": "softmax"}}, "unknown key 'router.scoring'; did you mean 'scoring_func'"),
        ({"names": {"prefix": "a.", "parts": {}}}, r"names.prefix='a.' must have \{N\}"),
        ({"names": {"prefix": "a.{N}.", "parts": {"experts.gate": "b"}}}, "names.parts has 'experts.gate', known are"),
        (
            {"names": {"prefix": "a.{N}.", "parts": {"experts.{e}.up_proj": "b"}}},
            r"without \{e\}; for a tensor of all experts write",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    written(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        MoEConfig.from_hf(tmp_path, layer=1)


def test_shared_experts_that_are_experts_of_their_own_are_numbered_from_the_first(tmp_path: Path) -> None:
    tensors = {"b.1.all": draw(2, I, H), "b.1.each.0.w": draw(H, I), "b.1.each.1.w": draw(H, I)}
    save_file(tensors, str(tmp_path / "model.safetensors"))
    parts = {"up": {"tensor": "all", "first": E}, "down": {"tensor": "each.{e}.w", "first": E}}
    parts = {f"shared_experts.{{e}}.{word}_proj": part for word, part in parts.items()}
    names = RenamedSource(tmp_path, TensorNames.parse({"prefix": "b.{N}.", "parts": parts}, "here")).names()
    assert {*names} == {f"model.layers.1.mlp.experts.{e}.{w}_proj.weight" for e in (E, E + 1) for w in ("up", "down")}


def test_every_layer_has_the_settings_of_its_own_group() -> None:
    groups: list[dict[str, Any]] = [
        {"layers": layers, "model": {"num_experts": len(layers)}, "router": {"top_k": layers[0]}}
        for layers in ([1, 12], [3], [0, 4, 5])
    ]
    equation = LayerEquation.parse({**EQUATION, **groups[0], "others": groups[1:], "refused": {"2, 7": "odd"}}, "here")
    for made in groups:
        expected = {"model": made["model"], "router": made["router"]}
        assert all(equation.settings(CONFIG, "here", layer) == expected for layer in made["layers"])
    for layer, problem in ((None, r"have 3 equations \(layers \[1, 12\]; "), (2, "layer 2: odd"), (6, "6: an")):
        with pytest.raises(ConfigError, match=problem):
            equation.settings(CONFIG, "here", layer)


def test_the_equation_is_given_by_name_or_inside_the_configuration(tmp_path: Path) -> None:
    written(tmp_path)
    alone = MoEConfig.from_hf(tmp_path)
    quant = {"quant_method": "compressed-tensors", "moe_sparsity_config": PRUNED}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quant}))
    assert MoEConfig.from_hf(tmp_path, layer=1).model.num_experts == 12, "of the layer that was pruned"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "layer_equation.json").rename(tmp_path / "other.json")
    with pytest.raises(ConfigError, match=r"no MoE layer is known for model_type 'odd'.*moe-mk derive"):
        MoEConfig.from_hf(tmp_path)
    assert MoEConfig.from_hf(tmp_path, equation=tmp_path / "other.json") == alone
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"layer_equation": EQUATION}))
    assert MoEConfig.from_hf(tmp_path) == alone
    fewer = EQUATION | {"router": EQUATION["router"] | {"top_k": EQUATION["router"]["top_k"] - 1}}
    (tmp_path / "other.json").write_text(json.dumps(fewer))
    named = MoEConfig.from_hf(tmp_path, equation=tmp_path / "other.json")
    assert named == alone.with_(top_k=alone.router.top_k - 1), "before the one of the folder"


def test_every_key_is_documented() -> None:
    schema = LayerEquation.model_json_schema()
    assert set(schema["properties"]) == {
        "version", "model_type", "derived_from", "config", "layers", "model", "router", "others", "refused", "names",
    }  # fmt: skip
    page = (Path(__file__).parents[2] / "docs" / "configure.md").read_text()
    assert [key for key in schema["properties"] if f"`{key}`" not in page] == []
