"""The layer by the name of its model: from a configuration, and from a file of one."""

from pathlib import Path

from moe_mk import DeepseekV3MoE
from tests.support import layers as build


def test_a_configuration_and_a_file_of_it_build_the_same_layer(tmp_path: Path) -> None:
    config = build.config(4, 2, routed_scaling_factor=2.5)
    file = tmp_path / "layer.json"
    file.write_text(config.model_dump_json(), encoding="utf-8")
    for given in (config, file, str(file)):
        layer = DeepseekV3MoE.from_config(given, name="mlp 3")
        assert type(layer) is DeepseekV3MoE and layer.name == "mlp 3" and layer.config.model == config.model
        assert layer.config.router == config.router
