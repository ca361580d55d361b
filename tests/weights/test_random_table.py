"""Tables of experts by token id, and checkpoints with one: different experts, all used, the same bytes again."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moe_mk import ConfigError, MoEConfig
from moe_mk.lab.checkpoints import CheckpointShape, is_complete, write_checkpoint
from moe_mk.lab.checkpoints import synthesize as random_table
from moe_mk.lab.checkpoints.checkpoint_plan import recipe_of
from moe_mk.lab.checkpoints.checkpoint_shape import HASHED
from moe_mk.weights.inspect import inspect_checkpoint

SHAPE = CheckpointShape(
    num_experts=8, hidden_size=64, intermediate_size=32, quant="bf16", hash_vocabulary=101, **HASHED
)


def drawn(seed: int = 3) -> torch.Tensor:
    return torch.cat(list(random_table.table_strips(np.random.default_rng(seed), (200, 3), 8)))


def test_each_token_has_different_experts_and_each_expert_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    table = drawn()
    assert table.shape == (200, 3) and table.dtype is torch.int64
    assert all(len(set(row)) == 3 for row in table.tolist())
    counts = torch.bincount(table.flatten(), minlength=8)
    assert len(counts) == 8 and 50 < int(counts.min()) and int(counts.max()) < 100, "75 of each, give or take"
    monkeypatch.setattr(random_table, "DRAWS", 8 * 7)  # strips of seven rows, the last one shorter
    assert torch.equal(drawn(), table)


def test_a_checkpoint_with_a_table_is_whole_and_known_again(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SHAPE)
    assert is_complete(tmp_path, SHAPE)
    (file,) = tmp_path.glob("*.safetensors")
    held = load_file(file)
    assert held["model.layers.3.mlp.gate.tid2eid"].shape == (101, 6)
    assert "model.layers.3.mlp.gate.e_score_correction_bias" not in held
    facts = inspect_checkpoint(tmp_path)
    assert facts.sound and facts.layers[0].table == (101, 6)
    config = MoEConfig.from_hf(tmp_path)
    assert (config.model.name, config.model.swiglu_limit) == ("deepseek_v4", 10.0)
    assert (config.router.scoring_func, config.router.top_k, config.router.num_expert_group) == ("sqrtsoftplus", 6, 1)
    assert config.router.routed_scaling_factor == 1.5


def test_recipes_of_layers_without_a_table_are_what_they_were() -> None:
    assert "hash_vocabulary" not in json.loads(recipe_of(CheckpointShape(), 0))
    assert json.loads(recipe_of(SHAPE, 0))["hash_vocabulary"] == 101


def test_tables_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="hash_vocabulary=0 must be at least 1"):
        CheckpointShape(hash_vocabulary=0, **HASHED)
    with pytest.raises(ConfigError, match="num_groups=8 has no part in a choice by token id; use num_groups=1"):
        CheckpointShape(hash_vocabulary=5)
