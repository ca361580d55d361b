"""Calibrated scales of activations: found, refused when broken, used by experts and on the wire, reported when lost."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_mk import DeepseekV3MoE, MoEConfig, MoELayer
from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.config.quant import QuantConfig
from moe_mk.errors import ConfigError, WeightError
from moe_mk.flight import Flight, interleave
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.checkpoints.convert import convert_checkpoint
from moe_mk.layer.settings import stated
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize.all_to_all import AllToAll
from moe_mk.prepare_finalize.base import TransportContext
from moe_mk.prepare_finalize.packing import packed_row_bytes
from moe_mk.quant import FP8_TENSOR
from moe_mk.quant.fp8 import fp8_static
from moe_mk.quant.plain import BF16
from moe_mk.tokens import ExpertOutput, OutputStage, Routing, RowTokens
from moe_mk.weights.input_scales import read_input_scales
from moe_mk.weights.names import CONVENTIONS, Part, Role
from moe_mk.weights.source import MappingSource
from tests.support.draws import normal

PREFIX, EXPERTS, HIDDEN, INNER = "model.layers.3.mlp.", 4, 64, 32
SHAPES = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}


def tensors() -> dict[str, Tensor]:
    """A layer of whole FP8 tensors; gate and up of expert e have scale (e + 1) / 64, down (e + 1) / 300."""
    made = {"gate.weight": normal(EXPERTS, HIDDEN, seed=1).bfloat16()}
    for e in range(EXPERTS):
        for p, shape in SHAPES.items():
            q = FP8_TENSOR.quantize(normal(*shape, seed=10 * e + len(p)) * shape[1] ** -0.5)
            assert q.scales is not None
            name = f"experts.{e}.{p}_proj"
            made[f"{name}.weight"], made[f"{name}.weight_scale"] = q.values, q.scales.reshape(())
            made[f"{name}.input_scale"] = torch.tensor((e + 1) / (300 if p == "down" else 64), dtype=torch.float32)
    return {PREFIX + name: tensor for name, tensor in made.items()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[dict[str, Tensor]], Path]:
    def write(content: dict[str, Tensor]) -> Path:
        save_file(content, tmp_path / "model.safetensors")
        hf = {
            "model_type": "qwen3_moe", "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS,
            "num_experts_per_tok": 2, "norm_topk_prob": True,
            "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"},
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(hf))
        return tmp_path

    return write


def test_broken_and_missing_scales_are_refused() -> None:
    content = tensors()
    del content[PREFIX + "experts.2.up_proj.input_scale"]
    with pytest.raises(WeightError, match=r"1 of 12 input scales are missing: experts\.2\.up_proj\.input_scale"):
        read_input_scales(MappingSource(content), 3)
    content = tensors()
    content[PREFIX + "experts.1.down_proj.input_scale"].fill_(float("nan"))
    with pytest.raises(
        WeightError, match=r"input scales are not finite and positive: experts\.1\.down_proj\.input_scale"
    ):
        read_input_scales(MappingSource(content), 3)


def test_an_expert_that_calibration_sent_no_token_to_has_no_part_in_the_largest_scale() -> None:
    content, one = tensors(), PREFIX + "experts.1."
    before = read_input_scales(MappingSource(content), 3)
    for projection in ("gate", "up", "down"):
        content[f"{one}{projection}_proj.input_scale"].zero_()
    assert read_input_scales(MappingSource(content), 3) == before
    for name in content:
        if name.endswith("down_proj.input_scale"):
            content[name].zero_()
    with pytest.raises(WeightError, match="all input scales of down projections are 0"):
        read_input_scales(MappingSource(content), 3)


WITH_INPUT = [name for name, each in CONVENTIONS.items() if each.holds(Role.EXPERT, "input")]


@pytest.mark.parametrize("name", WITH_INPUT)
def test_scales_are_read_in_the_names_and_the_direction_of_every_convention(name: str) -> None:
    convention, stacked = CONVENTIONS[name], CONVENTIONS[name].stacked or CONVENTIONS[name].fused
    wide, named = ("gate_up",) if convention.fused else ("gate", "up"), dict[str, Tensor]()
    scales = {"gate": [0.5, 4.0], "up": [2.0, 1.0], "gate_up": [2.0, 4.0], "down": [0.5, 8.0]}
    for projection in (*wide, "down"):
        values = [1.0 / each if convention.divides else each for each in scales[projection]]
        for expert, value in [(None, values)] if stacked else list(enumerate(values)):
            part = Part(Role.EXPERT, projection, expert)
            for extra in convention.expert:
                if extra in ("", "scale", "global", "input"):
                    named[convention.spell(replace(part, extra=extra))] = torch.tensor(value, dtype=torch.float32)

    def read(*, shared: bool) -> tuple[float, float]:
        source = MappingSource({PREFIX + each: tensor for each, tensor in named.items()})
        found = read_input_scales(source, 3, prefix=PREFIX, shared=shared)
        assert found is not None
        return found.tokens, found.hidden

    assert read(shared=False) == read(shared=True) == (4.0, 8.0)
    if not convention.holds(Role.SHARED, "input"):
        return
    for largest, tokens, hidden in (("gate", 16.0, 8.0), ("up", 16.0, 8.0), ("down", 4.0, 16.0)):
        for word in convention.shared_words:  # one of them is larger than all of the routed ones
            value = 16.0 if word == largest else 0.25
            name = convention.spell(Part(Role.SHARED, word, extra="input"))
            named[name] = torch.tensor(1.0 / value if convention.divides else value, dtype=torch.float32)
        assert read(shared=True) == (tokens, hidden) and read(shared=False) == (4.0, 8.0)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
def test_a_scale_may_have_axes_of_size_1(shape: tuple[int, ...]) -> None:
    content = tensors()
    shaped = {n: t.reshape(shape) if n.endswith("input_scale") else t for n, t in content.items()}
    assert read_input_scales(MappingSource(shaped), 3) == read_input_scales(MappingSource(content), 3)


def test_experts_round_with_the_scales_of_the_checkpoint(checkpoint: Callable[[dict[str, Tensor]], Path]) -> None:
    folder = checkpoint(tensors())
    layer = DeepseekV3MoE.from_checkpoint(folder, 3, dtype=torch.float32, experts="reference", activations="checkpoint")
    quant = layer.config.model.quant
    assert (quant.input_scale, quant.hidden_scale) == (4 / 64, pytest.approx(4 / 300))
    x_TH = normal(9, HIDDEN, seed=5)
    routing = layer.router(x_TH @ tensors()[PREFIX + "gate.weight"].float().T)
    torch.testing.assert_close(layer(x_TH), by_hand(x_TH, routing), rtol=1e-4, atol=1e-4)
    # Tokens of 10 saturate at 448 / 16 = 28; of 1000 they all do.
    big = layer(1000 * x_TH)
    assert not torch.allclose(big, 1000 * layer(x_TH), rtol=0.5)
    dynamic = MoEConfig.from_hf(folder)
    assert dynamic.model.quant.activation_scheme.name == "fp8_token"  # type: ignore[union-attr]


def test_weight_only_runs_need_no_input_scales(checkpoint: Callable[[dict[str, Tensor]], Path]) -> None:
    partial = tensors()
    del partial[PREFIX + "experts.2.up_proj.input_scale"]
    folder, x_TH = checkpoint(partial), normal(5, HIDDEN, seed=5)
    layer = DeepseekV3MoE.from_checkpoint(folder, 3, dtype=torch.float32, experts="reference", activations="plain")
    none = {name: tensor for name, tensor in tensors().items() if not name.endswith("input_scale")}
    assert torch.equal(layer(x_TH), layer.load_weights(none, 3, prefix=PREFIX)(x_TH))
    with pytest.raises(WeightError, match="1 of 12 input scales are missing"):
        DeepseekV3MoE.from_checkpoint(folder, 3, experts="reference", activations="checkpoint")


@pytest.mark.parametrize("tokens", [None, {"num_bits": 4, "type": "float", "group_size": 16}])
def test_nvfp4_without_input_scales_is_weight_only_and_never_scaled_by_one(
    tmp_path: Path, tokens: dict[str, Any] | None
) -> None:
    write_checkpoint(tmp_path, CheckpointShape(4, HIDDEN, 32, layers=(3,), top_k=2, num_groups=1, top_k_groups=1,
                                               quant="nvfp4"))  # fmt: skip
    x_TH, experts = normal(5, HIDDEN, seed=5), {"dtype": torch.float32, "experts": "reference"}
    rounded, kept = (
        DeepseekV3MoE.from_checkpoint(tmp_path, 3, activations=how, **experts)(x_TH) for how in ("checkpoint", "plain")
    )
    assert 0.01 < float((rounded - kept).norm() / kept.norm()) < 0.3  # NVFP4 keeps a mantissa of one bit
    for file in tmp_path.glob("*.safetensors"):
        save_file({n: t for n, t in load_file(file).items() if not n.endswith(".input_scale")}, file)
    (tmp_path / "model.safetensors.index.json").unlink()
    plain = MoEConfig.from_hf(tmp_path)
    assert stated(plain, tmp_path, 3).model.quant.activation_scheme is None
    hf = json.loads((tmp_path / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}, "input_activations": tokens}
    hf["quantization_config"]["config_groups"] = {"g": group}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    config = MoEConfig.from_hf(tmp_path)
    if tokens is None:
        assert stated(config.with_(activations="checkpoint"), tmp_path, 3).model.quant.activation_scheme is None
        return
    with pytest.raises(WeightError, match=r"no input scales \(input_scale\), and its activations are to be NVFP4"):
        stated(config, tmp_path, 3)
    assert stated(config.with_(activations="plain"), tmp_path, 3) == config.with_(activations="plain")
    scaled = config.with_(quant={**config.model.quant.model_dump(), "input_scale": 0.5})
    assert stated(scaled, tmp_path, 3) == scaled
    held = {n: t for file in tmp_path.glob("*.safetensors") for n, t in load_file(file).items()}
    held |= {n.replace(".weight_scale_2", ".input_scale"): t for n, t in held.items() if n.endswith("weight_scale_2")}
    with pytest.raises(ConfigError, match="has calibrated input scales, which the settings do not hold"):
        MoELayer(config.with_(experts="reference", activations="checkpoint")).load_weights(held, 3, prefix=PREFIX)
    MoELayer(scaled.with_(experts="reference", activations="checkpoint")).load_weights(held, 3, prefix=PREFIX)


def test_a_block_of_prediction_gives_way_and_is_reached_by_its_prefix(
    checkpoint: Callable[[dict[str, Tensor]], Path],
) -> None:
    main, x_TH = tensors(), normal(5, HIDDEN, seed=5)
    other = {name.replace(PREFIX, "mtp.layers.3.mlp."): t.clone() for name, t in main.items()}
    for name in other:
        if name.endswith("weight_scale"):
            other[name] *= 2
    folder = checkpoint({**main, **other})
    first, second = (
        DeepseekV3MoE.from_checkpoint(folder, 3, dtype=torch.float32, experts="reference", prefix=prefix)(x_TH)
        for prefix in (None, "mtp.layers.{N}.mlp.")
    )
    alone, predicted = (
        DeepseekV3MoE.from_checkpoint(checkpoint(only), 3, dtype=torch.float32, experts="reference")(x_TH)
        for only in (main, other)
    )
    assert torch.equal(first, alone) and torch.equal(second, predicted) and not torch.allclose(first, second)


def by_hand(x_TH: Tensor, routing: Routing) -> Tensor:
    """Round to FP8 under the scales 1/16 and 1/75, multiply in f32."""

    def rounded(x: Tensor, scale: float) -> Tensor:
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    content, y_TH = tensors(), torch.zeros_like(x_TH)
    for t, (ids, weights) in enumerate(zip(routing.ids_TK.tolist(), routing.weights_TK.tolist(), strict=True)):
        for e, weight in zip(ids, weights, strict=True):
            w = {p: content[f"{PREFIX}experts.{e}.{p}_proj.weight"].float()
                 * content[f"{PREFIX}experts.{e}.{p}_proj.weight_scale"] for p in SHAPES}  # fmt: skip
            x = rounded(x_TH[t], 4 / 64)
            h = torch.nn.functional.silu(w["gate"] @ x) * (w["up"] @ x)
            y_TH[t] += weight * (w["down"] @ rounded(h, 4 / 300))
    return y_TH


def test_static_rows_travel_without_scales() -> None:
    wire, experts = fp8_static(1 / 16), ExpertMap.linear(EXPERTS, 2)
    comms = LockstepWorld(2).communicators()
    device = torch.device("cpu")

    def there_and_back(rank: int) -> Flight[Tensor]:
        context = TransportContext(comms[rank], experts, experts.tables(device, rank), wire, BF16, HIDDEN, 2, device)
        transport, tokens = AllToAll(context), normal(5, HIDDEN, seed=rank).bfloat16()
        routing = Routing(torch.tensor([[0, 3]] * 5, dtype=torch.int32), torch.full((5, 2), 0.5))
        arrived = yield from transport.prepare(tokens, routing)
        assert isinstance(arrived, RowTokens)
        assert arrived.x_RH.scales is None and arrived.x_RH.scheme == wire
        here_R1 = (arrived.ids_RK >= 0).sum(1, keepdim=True).float() * 0.5
        y = (arrived.x_RH.dequantize(torch.float32) * here_R1).bfloat16()
        return (yield from transport.finalize(ExpertOutput(y, OutputStage.REDUCED), arrived))

    for rank, combined in enumerate(interleave([there_and_back(0), there_and_back(1)])):
        x = wire.quantize(normal(5, HIDDEN, seed=rank).bfloat16()).dequantize(torch.float32)
        torch.testing.assert_close(combined.float(), x, rtol=2**-7, atol=2**-7)
        # A byte a value, and ids and weights of two choices: no scale goes along.
        assert packed_row_bytes(wire, HIDDEN, 2) == HIDDEN + 2 * 8
        assert comms[rank].traffic.bytes_by_phase["dispatch"] == 5 * (HIDDEN + 2 * 8)


def test_what_a_conversion_drops_is_reported(checkpoint: Callable[[dict[str, Tensor]], Path], tmp_path: Path) -> None:
    folder = checkpoint(tensors())
    report = convert_checkpoint(folder, tmp_path / "new", "int8")
    assert len(report.dropped) == 1
    assert report.dropped[0].startswith("layer 3: 12 input scales (experts.0.down_proj.input_scale")
    assert "experts in int8 round activations as they come" in report.dropped[0]
    assert json.loads((tmp_path / "new" / "conversion.json").read_text())["dropped"] == report.dropped


def test_two_scales_make_a_scheme_of_their_own() -> None:
    assert fp8_static(0.25, 0.5).name == "fp8_static_x0.25_h0.5" and fp8_static(0.25, 0.5).hidden == fp8_static(0.5)
    assert fp8_static(0.25, 0.25) == fp8_static(0.25) and fp8_static(0.25).hidden == fp8_static(0.25)
    for bad in (-1.0, 0.0, float("inf"), float("nan")):
        for given in ((0.25, bad), (bad,)):
            with pytest.raises(ConfigError, match=f"positive and finite, got {bad}"):
                fp8_static(*given)
    with pytest.raises(ConfigError, match="hidden_scale=0.5 goes with the input_scale"):
        QuantConfig.parse({"weights": "fp8_tensor", "hidden_scale": 0.5}, "a test")
