"""Checkpoints of MLX: affine integers, small floats, packed gates, modules with formats of their own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_mk import MoEConfig, MoELayer
from moe_mk.errors import ConfigError, WeightError
from moe_mk.lab.checkpoints.convert import convert_checkpoint
from moe_mk.lab.checkpoints.like import write_like
from moe_mk.lab.cli.checkpoints import config_problems
from moe_mk.lab.verify.dense import dense_layer
from moe_mk.layer.settings import config_of, stated
from moe_mk.weights import LayerLoader, LayerWeights, SafetensorsSource, digest, inspect_checkpoint, load_layer

QWEN3 = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128,
    "hidden_act": "silu", "num_experts_per_tok": 2, "norm_topk_prob": True, "num_hidden_layers": 1,
}  # fmt: skip
NEXT = QWEN3 | {"model_type": "qwen3_next", "shared_expert_intermediate_size": 512}
V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.5, "num_hidden_layers": 1,
    "hidden_act": "silu", "first_k_dense_replace": 0,
}  # fmt: skip
OSS = QWEN3 | {"model_type": "gpt_oss", "intermediate_size": 2880, "swiglu_limit": 7.0}
OSS = {key: value for key, value in OSS.items() if key not in ("moe_intermediate_size", "norm_topk_prob")}
MLP, EIGHT, G64 = "model.layers.0.mlp.", {"group_size": 64, "bits": 8}, {"weights": "int4_g64_affine"}
GATED, GATED_SHARED, DOWN = ({f"{MLP}{n}": EIGHT} for n in ("gate", "shared_expert_gate", "switch_mlp.down_proj"))
FLOATS = {f"{MLP}experts.{p}_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"} for p in ("gate", "up", "down")}
PLAIN_SHARED = {f"{MLP}shared_experts.{projection}_proj": False for projection in ("gate", "up", "down")}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "4 bits": (QWEN3, {"group_size": 64, "bits": 4, **GATED}, G64),
    "8 bits": (V3, {"group_size": 128, "bits": 8, "mode": "affine"}, {"weights": "int8_g128_affine"}),
    "down": (QWEN3, {"group_size": 64, "bits": 4, **DOWN}, {"down": "int8_g64_affine", **G64}),
    "one shared": (NEXT, {"group_size": 32, "bits": 4, **GATED, **GATED_SHARED}, {"weights": "int4_g32_affine"}),
    "plain shared": (V3, {"group_size": 64, "bits": 4, **PLAIN_SHARED}, {"shared": "bf16", **G64}),
    "mxfp4": (QWEN3, {"group_size": 32, "bits": 4, "mode": "mxfp4", **GATED}, {"weights": "mxfp4"}),
    "gpt-oss": (OSS, {**EIGHT, f"{MLP}router": EIGHT, **FLOATS}, {"weights": "mxfp4"}),
    "mxfp8": (QWEN3, {"group_size": 32, "bits": 8, "mode": "mxfp8"}, {"weights": "mxfp8"}),
    "nvfp4": (QWEN3, {"group_size": 16, "bits": 4, "mode": "nvfp4"}, {"weights": "nvfp4"}),
}  # fmt: skip


def written(folder: Path, model: dict[str, Any], section: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(model | {"quantization": section, "quantization_config": section}))
    write_like(folder / "small", folder / "config.json")
    return folder / "small"


def independent(tensors: dict[str, Tensor], module: str, section: dict[str, Any]) -> Tensor:
    """The values of a module in f64, by the settings that the section has for it."""
    own, words = section.get(module, section), tensors[f"{module}.weight"]
    if words.is_floating_point():
        return words.double()
    bits, mode, parts = own["bits"], own.get("mode", "affine"), dict[str, Tensor]()
    kind = {"affine": torch.bfloat16, "nvfp4": torch.float8_e4m3fn}.get(mode, torch.float8_e8m0fnu)
    for end in ("scales", "biases") if mode == "affine" else ("scales",):
        parts[end] = tensors[f"{module}.{end}"].view(kind).double().repeat_interleave(own["group_size"], -1)
    shifted = words.numpy()[..., None] >> (np.arange(32 // bits, dtype=np.uint32) * bits) & (2**bits - 1)
    codes = torch.from_numpy(shifted.reshape(*words.shape[:-1], -1).astype(np.uint8))
    if mode == "affine":
        return codes * parts["scales"] + parts["biases"]
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    return (codes.view(torch.float8_e4m3fn).double() if bits == 8 else table[codes.long()]) * parts["scales"]


@pytest.mark.parametrize("name", CASES)
def test_every_weight_is_that_of_an_independent_decoder_and_layers_compute_with_it(name: str, tmp_path: Path) -> None:
    model, section, kinds = CASES[name]
    folder = written(tmp_path, model, section)
    tensors, facts = load_file(folder / "model.safetensors"), inspect_checkpoint(folder)
    assert facts.sound and not config_problems(folder, facts), [*facts.problems, *facts.layers[0].problems]
    quant, spec = MoEConfig.from_hf(folder).model.quant, facts.layers[0].layer_spec()
    assert {key: getattr(quant, key) for key in kinds} == kinds and facts.layers[0].kind == kinds["weights"]
    layer = load_layer(SafetensorsSource(folder), 0, spec, owned=range(spec.num_experts))
    gate, stack = ("router", "experts") if model is OSS else ("gate", "switch_mlp")
    taken, held = list[LayerWeights](), {f"{MLP}{gate}": layer.gate_EH}
    loader = LayerLoader("layer", spec, taken.append, owned=range(spec.num_experts), prefix=MLP)
    assert all(loader.feed(name, tensors[name]) for name in sorted(tensors, reverse=True))
    loader.finish()
    assert digest(taken[0].experts) == digest(layer.experts) and torch.equal(taken[0].gate_EH, layer.gate_EH)
    for projection in ("gate", "up", "down"):
        each = [slot.matrices[projection].dequantize(torch.float32) for slot in layer.experts.slots]
        held[f"{MLP}{stack}.{projection}_proj"] = torch.stack(each)
        if layer.shared is not None:
            q, shared = layer.shared.matrices[projection], "shared_expert" + "s" * (model is V3)
            held[f"{MLP}{shared}.{projection}_proj"] = q.dequantize(torch.float32)
    if layer.shared_gate_H is not None:
        held[f"{MLP}shared_expert_gate"] = layer.shared_gate_H[None]
    assert held.keys() == {n.removesuffix(".weight") for n in tensors if n.endswith(".weight")}
    for module, found in held.items():
        assert torch.equal(found.float(), independent(tensors, module, section).float()), module
    biases = tensors.get(f"{MLP}switch_mlp.up_proj.biases")
    assert biases is None or ((biases > 0).any() and (biases < 0).any())
    x_TH = torch.randn((9, 256), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    for experts in ("reference", "torch_cpu", "cpu_native"):
        moe = MoELayer.from_checkpoint(folder, 0, experts=experts, fallback=False, activations="plain")
        ids_TK, y_TH = moe.route(x_TH).ids_TK.numpy().astype("int64"), moe(x_TH)
        wanted = dense_layer(x_TH, moe.config, layer, ids_TK).y_TH
        assert float((y_TH.double() - wanted).norm() / wanted.norm()) < 0.008 and moe.decision.effect is None


@pytest.mark.parametrize("name", ["4 bits", "one shared"])
def test_stacks_without_quantisation_are_read_as_they_are(name: str, tmp_path: Path) -> None:
    model, section, _ = CASES[name]
    folder = written(tmp_path, model, section)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    modules = sorted(key.removesuffix(".weight") for key in tensors if key.endswith(".weight"))
    plain = {f"{module}.weight": independent(tensors, module, section).bfloat16() for module in modules}
    save_file(plain, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    stored = {key: value for key, value in config.items() if not key.startswith("quantization")}
    (folder / "config.json").write_text(json.dumps(stored))
    facts = inspect_checkpoint(folder)
    assert facts.sound and facts.layers[0].kind == "bf16" and not config_problems(folder, facts)
    layer = load_layer(SafetensorsSource(folder), 0, facts.layers[0].layer_spec(), owned=[1])
    for projection, q in layer.experts.slot(0).matrices.items():
        assert torch.equal(q.values, plain[f"{MLP}switch_mlp.{projection}_proj.weight"][1]), projection
    x_TH = torch.randn((4, 256), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    assert MoELayer.from_checkpoint(folder, 0, experts="cpu_native")(x_TH).isfinite().all()


@pytest.mark.parametrize(
    "change,problem",
    [
        ({"bits": 3}, r"3 bits in groups of 64 \(supported are 4 and 8 bits in 32, 64, 128\)"),
        ({"bits": 6}, "6 bits in groups of 64"),
        ({"mode": "nvfp4"}, "mode is 'nvfp4' with 4 bits in groups of 64"),
        ({"type": "turbo"}, "type is 'turbo', which is not read"),
        (
            {f"{MLP}switch_mlp.up_proj": EIGHT},
            "modules of layer 0 have the formats .*int4_g64_affine.* and .*int8_g64_affine",
        ),
        ({f"{MLP}switch_mlp.up_proj": {**EIGHT, "bits": "8"}}, "bits is '8', expected a whole number"),
        ({}, "quantization and quantization_config differ; remove the one that is wrong"),
    ],
)
def test_other_sections_are_refused(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    sections = {"quantization": {"group_size": 64, "bits": 4, **change}}
    sections |= {} if change else {"quantization_config": {"group_size": 32, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | sections))
    with pytest.raises(ConfigError, match=problem):
        MoEConfig.from_hf(tmp_path)


def test_tensors_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path, *CASES["4 bits"][:2])
    file, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    with pytest.raises(ConfigError, match="MLX's names, under which routers and attention are packed too"):
        convert_checkpoint(folder, tmp_path / "converted", "int4_g32")
    (folder / "model.safetensors.index.json").unlink()
    tensors[f"{MLP}switch_mlp.up_proj.biases"][2, 1, 0] = float("nan")
    for lacking, problem in (
        ("gate.biases", "gate.weight is packed without gate.biases"),
        ("switch_mlp.up_proj.biases", "switch_mlp.up_proj.biases"),
        ("", r"switch_mlp.up_proj.weight\[2\], biases of groups"),
    ):
        save_file({name: tensor for name, tensor in tensors.items() if name != MLP + lacking}, file)
        with pytest.raises(WeightError, match=problem):
            MoELayer.from_checkpoint(folder, 0)


UNLISTED = {
    "4 bits": (("up", "gate", "down"), {"weights": "bf16", "down": None, "shared": "same"}),
    "one shared": (("up", "gate", "down"), {"weights": "bf16", "shared": "int4_g32_affine"}),
    "mxfp4": (("up", "gate", "down"), {"weights": "bf16", "activations": "auto"}),
    "8 bits": (("up", "gate", "down"), {"weights": "bf16", "shared": "int8_g128_affine"}),
}


@pytest.mark.parametrize("name", UNLISTED)
def test_modules_without_scales_are_plain_whatever_the_section_lists(name: str, tmp_path: Path) -> None:
    """As mlx-lm loads them: a module is packed where the file has its scales."""
    (model, section, _), (projections, kinds) = CASES[name], UNLISTED[name]
    folder = written(tmp_path, model, section)
    file = folder / "model.safetensors"
    tensors, plain = load_file(file), dict[str, Tensor]()
    for projection in projections:
        module = f"{MLP}switch_mlp.{projection}_proj"
        plain[projection] = independent(tensors, module, section).bfloat16()
        for end in ("scales", "biases"):
            tensors.pop(f"{module}.{end}", None)
        tensors[f"{module}.weight"] = plain[projection]
    save_file(tensors, file)
    (folder / "model.safetensors.index.json").unlink()
    quant = stated(config_of(folder, 0), folder, 0).model.quant
    assert {key: getattr(quant, key) for key in kinds} == kinds
    facts = inspect_checkpoint(folder)
    assert facts.sound and facts.layers[0].kind == kinds["weights"], facts.layers[0].problems
    layer = MoELayer.from_checkpoint(folder, 0, experts="reference")
    for projection, values in plain.items():
        for expert, slot in enumerate(layer.weights.experts.slots):
            assert torch.equal(slot.matrices[projection].values, values[expert])
    x = torch.randn(5, layer.config.model.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert layer(x).isfinite().all()


def test_auto_round_writes_its_own_section_next_to_that_of_mlx(tmp_path: Path) -> None:
    model, section, kinds = CASES["4 bits"]
    folder = written(tmp_path, model, section)
    config = json.loads((folder / "config.json").read_text())
    own = {"quant_method": "auto-round", "packing_format": "mlx", "bits": 4, "group_size": 64, "sym": False}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": own}))
    assert MoEConfig.from_hf(folder).model.quant.weights == kinds["weights"]
