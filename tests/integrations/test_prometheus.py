"""Layers as metrics: right numbers, and never more series than were allowed."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed: pip install 'moe-mk[metrics]'")

import prometheus_client as prometheus

from moe_mk import DeepseekV3MoE
from moe_mk.errors import ConfigError
from moe_mk.integrations.prometheus import LayerMetrics
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint

EXPERTS = 16


@pytest.fixture
def layer(tmp_path: Path) -> DeepseekV3MoE:
    write_checkpoint(tmp_path, CheckpointShape(num_experts=EXPERTS, hidden_size=128, intermediate_size=128))
    return DeepseekV3MoE.from_checkpoint(tmp_path, layer=3)


def series(collector: LayerMetrics) -> dict[tuple[str, ...], float]:
    registry = prometheus.CollectorRegistry()
    registry.register(collector)
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_the_busiest_experts_have_a_series_and_the_rest_share_one(layer: DeepseekV3MoE) -> None:
    layer.expert_load.copy_(torch.tensor([0, 5, 0, 9, 1, 1, 1, 1, *[0] * 7, 2]))
    found = series(LayerMetrics([layer], most_experts=2))
    tokens = {key[2]: value for key, value in found.items() if key[0] == "moe_mk_expert_tokens"}
    assert tokens == {"1": 5, "3": 9, "other": 6}  # 1 + 1 + 1 + 1 + 2
    assert found["moe_mk_expert_load_max_over_mean", "layer 3"] == 9 * 16 / 20
    assert len(series(LayerMetrics([layer], most_experts=EXPERTS))) == len(found) - 3 + EXPERTS


def test_what_ran_and_whether_it_was_decided(layer: DeepseekV3MoE) -> None:
    layer(torch.randn((4, 128), generator=torch.Generator().manual_seed(0)).bfloat16())
    found, experts = series(LayerMetrics([layer])), layer.decision.chosen.experts
    assert found["moe_mk_stage_calls", "layer 3", "experts", experts] >= 1
    assert found["moe_mk_stage_bytes", "layer 3", "dispatch", "no_ep"] == 4 * 128 * 2
    assert found["moe_mk_departures", "layer 3"] == 0
    assert sum(value for key, value in found.items() if key[0] == "moe_mk_expert_tokens") == 4 * 8


def test_an_idle_layer_has_no_balance(layer: DeepseekV3MoE) -> None:
    found = series(LayerMetrics([layer], most_experts=0))
    assert not any(key[0] == "moe_mk_expert_load_max_over_mean" for key in found)
    assert found["moe_mk_expert_tokens", "layer 3", "other"] == 0


def test_too_many_layers_and_equal_names_are_refused(layer: DeepseekV3MoE) -> None:
    with pytest.raises(ConfigError, match=r"2 layers exceed most_layers=1.*share the name 'layer 3'"):
        LayerMetrics([layer, layer], most_layers=1)
    with pytest.raises(ConfigError, match="most_experts=-1 must not be negative"):
        LayerMetrics([layer], most_experts=-1)


def test_the_text_that_is_scraped(layer: DeepseekV3MoE) -> None:
    registry = prometheus.CollectorRegistry()
    registry.register(LayerMetrics([layer], most_experts=1))
    text = prometheus.generate_latest(registry).decode()
    assert 'moe_mk_expert_tokens{expert="other",layer="layer 3"} 0.0' in text
    assert "# HELP moe_mk_departures" in text
