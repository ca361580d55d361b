"""Layers that choose experts by token id, straight from a checkpoint: layer 0 has a table, layer 1 a bias."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_mk import ConfigError, DeepseekV3MoE, MoEConfig, ShapeError, WeightError
from moe_mk.lab.checkpoints import official_state_dict
from moe_mk.lab.checkpoints.convert import convert_checkpoint
from moe_mk.router.hashed import HashRouter
from moe_mk.weights.inspect import inspect_checkpoint

VOCABULARY, EXPERTS, TOP_K, HIDDEN, INNER = 11, 4, 2, 32, 16
CONFIG = {
    "model_type": "deepseek_v4", "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K, "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.0, "dtype": "float32",
}  # fmt: skip
IDS = torch.tensor([3, 0, 10, 3, 7])


@pytest.fixture(params=["official", "converted"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Under the names of transformers, and of DeepSeek's own files."""
    draw = torch.Generator().manual_seed(4)
    theirs = request.param == "converted"
    block, words = ("layers.{}.ffn.", ("w1", "w3", "w2")) if theirs else (
        "model.layers.{}.mlp.", ("gate_proj", "up_proj", "down_proj")
    )  # fmt: skip
    tensors: dict[str, Tensor] = {}
    for layer in (0, 1):
        prefix = block.format(layer)
        tensors[prefix + "gate.weight"] = torch.randn(EXPERTS, HIDDEN, generator=draw)
        if layer:
            bias = "gate.bias" if theirs else "gate.e_score_correction_bias"
            tensors[prefix + bias] = torch.randn(EXPERTS, generator=draw)
        else:
            tensors[prefix + "gate.tid2eid"] = torch.rand(VOCABULARY, EXPERTS, generator=draw).argsort(1)[:, :TOP_K]
        for mlp in ("shared_experts", *(f"experts.{e}" for e in range(EXPERTS))):
            shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
            for word, shape in zip(words, shapes, strict=True):
                tensors[f"{prefix}{mlp}.{word}.weight"] = torch.randn(shape, generator=draw) * 0.3
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def layer_of(path: Path, layer: int = 0, **settings: Any) -> DeepseekV3MoE:
    return DeepseekV3MoE.from_checkpoint(path, layer, dtype=torch.float32, **settings)


def tokens() -> Tensor:
    return torch.randn(len(IDS), HIDDEN, generator=torch.Generator().manual_seed(9))


def test_the_table_chooses_and_the_scores_weigh(checkpoint: Path) -> None:
    layer = layer_of(checkpoint, experts="reference")
    assert layer.config.router.hash_vocabulary == VOCABULARY and not layer.config.router.has_correction_bias
    weights = layer.weights
    assert weights.table_XK is not None and weights.table_XK.shape == (VOCABULARY, TOP_K)
    routing = layer.route(tokens(), token_ids_T=IDS)
    assert torch.equal(routing.ids_TK.long(), weights.table_XK[IDS])
    # By hand: root of softplus of the chosen logits, over their sum, times 1.5.
    scores = torch.nn.functional.softplus(tokens() @ weights.gate_EH.T).sqrt().gather(1, weights.table_XK[IDS])
    torch.testing.assert_close(routing.weights_TK, 1.5 * scores / scores.sum(1, keepdim=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("experts", ["reference", "torch_cpu"])
def test_a_forward_is_that_of_the_same_layer_routed_by_hand(checkpoint: Path, experts: str) -> None:
    layer = layer_of(checkpoint, experts=experts)
    given = layer_of(checkpoint, experts=experts)
    assert given.weights.table_XK is not None
    given.hash_router, router = None, HashRouter(given.weights.table_XK, routed_scaling_factor=1.5)
    given.router = router.of(IDS)  # type: ignore[assignment]
    y = layer(tokens(), token_ids_T=IDS)
    assert torch.equal(y, given(tokens())) and torch.equal(y, layer(tokens(), IDS.int()))
    assert not torch.equal(y, layer(tokens(), (IDS + 1) % VOCABULARY)), "the ids do matter"
    chosen = torch.bincount(given.weights.table_XK[IDS].flatten(), minlength=EXPERTS)
    assert torch.equal(given.expert_load, chosen)


def test_layers_that_choose_by_scores_take_no_notice(checkpoint: Path) -> None:
    layer = layer_of(checkpoint, 1)
    assert layer.config.router.hash_vocabulary is None and layer.config.router.has_correction_bias
    assert torch.equal(layer(tokens()), layer(tokens(), token_ids_T=IDS))


def test_no_tokens_no_ids(checkpoint: Path) -> None:
    assert layer_of(checkpoint)(tokens()[:0], token_ids_T=IDS[:0]).shape == (0, HIDDEN)


def test_missing_or_wrong_ids_are_refused_by_name(checkpoint: Path) -> None:
    layer = layer_of(checkpoint)
    for call in (layer, layer.route):
        with pytest.raises(ShapeError, match=r"layer 'layer 0' chooses experts by token id; call it with token_ids_T"):
            call(tokens())
        with pytest.raises(ShapeError, match="token_ids_T"):
            call(tokens(), IDS[:3])
        with pytest.raises(ShapeError, match="token_ids_T"):
            call(tokens(), IDS.float())
    for more, ids in ((1, "1 to 11"), (-1, "-1 to 9")):
        with pytest.raises(ConfigError, match=rf"token ids from {ids} lie outside the table's \[0, 11\)"):
            layer(tokens(), IDS + more)


def test_a_state_dict_holds_the_table_and_loads_again(checkpoint: Path) -> None:
    layer = layer_of(checkpoint)
    state = official_state_dict(layer.weights)
    assert state["gate.tid2eid"].dtype is torch.int64
    again = DeepseekV3MoE(layer.config, dtype=torch.float32).load_weights(state)
    assert torch.equal(again(tokens(), IDS), layer(tokens(), IDS))


def test_a_compiled_layer_takes_ids_too(checkpoint: Path) -> None:
    layer = layer_of(checkpoint, experts="reference")
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(tokens(), IDS), layer(tokens(), IDS))


def test_inspection_knows_the_table(checkpoint: Path) -> None:
    facts = inspect_checkpoint(checkpoint)
    assert [each.table for each in facts.layers] == [(VOCABULARY, TOP_K), None]
    assert not any(each.problems for each in facts.layers) and facts.layers[0].layer_spec().table is not None


def test_a_conversion_keeps_the_table(checkpoint: Path, tmp_path: Path) -> None:
    convert_checkpoint(checkpoint, tmp_path / "out", "int8")
    before, after = (layer_of(path).weights.table_XK for path in (checkpoint, tmp_path / "out"))
    assert before is not None and after is not None and torch.equal(before, after)


def test_a_table_of_experts_that_are_not_there_is_damaged(checkpoint: Path) -> None:
    layer = layer_of(checkpoint)
    state = official_state_dict(layer.weights)
    state["gate.tid2eid"][2, 1], state["gate.tid2eid"][5, 0] = EXPERTS, -2
    with pytest.raises(WeightError, match=r"damaged:\n  - 2 entries of gate.tid2eid name experts outside \[-1, 4\)"):
        DeepseekV3MoE(layer.config, dtype=torch.float32).load_weights(state)


def test_a_table_that_the_settings_do_not_know_is_a_problem(checkpoint: Path) -> None:
    config = MoEConfig.from_hf(checkpoint, has_correction_bias=False)
    with pytest.raises(WeightError, match="tid2eid.*a table of experts by token id; set router.hash_vocabulary"):
        DeepseekV3MoE(config, dtype=torch.float32).load_from_safetensors(checkpoint, 0)


def test_settings_that_do_not_go_with_a_table_are_refused(checkpoint: Path) -> None:
    config = MoEConfig.from_hf(checkpoint)
    with pytest.raises(ConfigError, match="bias has no effect; set has_correction_bias=false"):
        config.with_(hash_vocabulary=11)
    with pytest.raises(ConfigError, match="reads token ids on the host"):
        config.with_(hash_vocabulary=11, has_correction_bias=False, graphs=True)
