"""Published configurations: what is read of each, and why others are refused; of each that is read a small layer in its
own names and formats, loaded and compared with the reference.
"""

import importlib
import json
import re
from collections.abc import Iterable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from moe_mk import DeepseekV3MoE
from moe_mk.config import MoEConfig
from moe_mk.config.hf import FAMILIES, family_of, section_of, settings_from_hf, text_of
from moe_mk.config.modules import layers_with_experts
from moe_mk.errors import ConfigError
from moe_mk.lab.checkpoints.like import write_like
from moe_mk.lab.cli.checkpoints import config_problems, declared
from moe_mk.lab.verify.dense import decoded, dense_layer
from moe_mk.layer.settings import config_of, layer_spec_of, stated
from moe_mk.weights import SlotWeights, inspect_checkpoint, load_layer
from moe_mk.weights.gguf_source import open_source
from moe_mk.weights.layer_weights import LayerWeights
from tests.cli.conftest import printed

PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())
REFUSED = {
    name: f"no MoE layer is known for model_type {files['config']['model_type']!r}.*moe-mk derive"
    for name, files in PUBLISHED.items() if section_of(files["config"]) is None
    and family_of(files["config"]) not in FAMILIES
}  # fmt: skip
"""Those of no family of the table: `tests.integrations.hf.test_derive` derives what a class computes."""
FORMATS = {
    "K3-int4": "int4_g32",
    "MXFP4": "mxfp4", "-static": "fp8_tensor", "-ptpc": "fp8_channel", "g64-asym": "int4_g64_zp", "-int4": "int4_g128",
    "w4a16": "int4_g128", "FP8-dynamic": "fp8_channel", "-NVFP4": "nvfp4",
    "AWQ-4bit": "int4_g32_zp", "AWQ": "int4_g128_zp", "GPTQ": "int4_g128", "K2-Thinking": "int4_g32",
    "fbgemm": "fp8_channel", "16E-Instruct-FP8": "fp8_tensor",
    "Air-FP8": "fp8_channel", "MiMo": "fp8_block", "Super-120B-A12B-FP8": "fp8_tensor",
    "55B-FP8": "fp8_tensor", "-FP8": "fp8_block",
    "MiniMax-M2": "fp8_block", "DeepSeek-V4": "mxfp4", "gpt-oss": "mxfp4", "Kimi-K2.5": "int4_g32",
    "Kimi-K2-": "fp8_block", "Kimi-K3": "mxfp4", "DeepSeek-R1": "fp8_block", "DeepSeek-V3": "fp8_block",
}  # fmt: skip
"""What the experts are stored in, by a part of the name, the first that fits; others are bf16."""

MORE = {
    "stepfun-ai--Step-3.7-Flash": {
        "swiglu_limits": [0.0, 0.0, 0.0, 0.02, *[0.0] * 41], "swiglu_limits_shared": [0.0] * 3 + [0.05] + [0.0] * 41,
    },
}  # fmt: skip

BY_LAYER = {*MORE, "stepfun-ai--Step-3.5-Flash"}
"""Models whose layers differ, so that one is named."""
CLASSES = {
    "glm5_next": ("Glm5NextTextMoE", "Text"), "hy_v4": ("HYV4MoE", ""), "mistral4": ("Mistral4MoE", ""),
    "bailing_hybrid": ("BailingHybridMoE", ""), "kimi_linear": ("KimiLinearMoE", ""),
    "phimoe": ("PhimoeSparseMoeBlock", ""),
}  # fmt: skip
GROUPS = {"mistral4": {"n_group": 4, "topk_group": 2}}


def unabridged(value: Any, layers: tuple[int, ...], experts: int) -> Any:
    """The lists of modules in a section with the entries of all layers and experts, where some stand for all."""
    if not isinstance(value, dict | list):
        return value
    made: dict[str, Any] = {}
    for key, each in value.items() if isinstance(value, dict) else ((each, None) for each in value):
        numbers = re.search(r"layers\.(\d+)\.", str(key))
        stands_for = [key]
        if numbers and int(numbers[1]) in layers:
            of_layers = [key.replace(numbers[0], f"layers.{n}.") for n in layers]
            spread = experts if ".experts.0." in key else 1
            stands_for = [name.replace(".experts.0.", f".experts.{e}.") for name in of_layers for e in range(spread)]
        made |= dict.fromkeys(stands_for, each if isinstance(value, list) else unabridged(each, layers, experts))
    return made if isinstance(value, dict) else list(made)


def published(name: str) -> dict[str, Any]:
    """The files of a model, whole."""
    files = {stem: each for stem, each in PUBLISHED[name].items() if stem not in ("source", "abridged")}
    if "lists of modules" not in PUBLISHED[name].get("abridged", ""):
        return files
    text = text_of(files["config"])
    experts = next(text[key] for key in ("n_routed_experts", "num_experts", "num_local_experts") if text.get(key))
    layers = layers_with_experts(text)
    made = {stem: {k: unabridged(v, layers, experts) if isinstance(v, dict) and "quant" in k else v
                   for k, v in each.items()} for stem, each in files.items()}  # fmt: skip
    return made


def test_every_configuration_is_whole_with_its_source_or_states_what_is_left_out() -> None:
    for name, files in PUBLISHED.items():
        assert files.keys() - {"config", "hf_quant_config"} and files.get("source", files.get("abridged")), name
    whole = [name for name, files in PUBLISHED.items() if "abridged" not in files]
    assert (len(PUBLISHED), len(whole)) == (150, 58)


def written(folder: Path, name: str) -> Path:
    files = published(name) if name in PUBLISHED else None
    if files is None:
        made = transformers.AutoConfig.for_model(name).to_dict()
        made = made.get("text_config") or made
        files = {"config": json.loads(json.dumps(made, default=str)) | GROUPS.get(name, {})}
    for stem in files:
        content = {**files[stem], **MORE.get(name, {})} if stem == "config" else files[stem]
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder / "config.json"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_layer_that_is_not_computed_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    for door in (MoEConfig.from_hf, lambda like: write_like(tmp_path / "small", like)):
        with pytest.raises(ConfigError, match=f"^{tmp_path}/config.json: {REFUSED[name]}"):
            door(written(tmp_path, name))
    assert not (tmp_path / "small").exists()


def test_every_other_published_configuration_is_read_in_its_format_and_as_declared(tmp_path: Path) -> None:
    for name in sorted(PUBLISHED.keys() - REFUSED.keys()):
        (tmp_path / name).mkdir()
        file, layer = written(tmp_path / name, name), 3 if name in BY_LAYER else None
        expected = MoEConfig.from_hf(file, layer=layer)
        kind = next((kind for part, kind in FORMATS.items() if part in name), "bf16")
        assert expected.model.quant.weights == kind, name
        file.write_text(re.sub(r'"model_type": "\w+"', '"model_type": "never_seen"', file.read_text()))
        with pytest.raises(ConfigError, match="'never_seen'.*--as FAMILY"):
            MoEConfig.from_hf(file)
        equation = declared(file, expected.model.name, layer).model_dump_json()
        (tmp_path / name / "layer_equation.json").write_text(equation)
        assert MoEConfig.from_hf(file, layer=layer) == expected, name
    like = tmp_path / "MiniMaxAI--MiniMax-M2.5" / "config.json"
    like.write_text(like.read_text().replace('["gate", ', '["w2", '))
    with pytest.raises(ConfigError, match="experts: w2 of layer 0 is left as it is"):
        MoEConfig.from_hf(like)
    printed("derive", tmp_path / "moonshotai--Kimi-K2-Instruct", "--as", "kimi_k2")
    with pytest.raises(ConfigError, match=r"no family that is read; did you mean 'kimi_k2'"):
        declared(file, "kimi_k3")


@pytest.mark.parametrize("key", ["swiglu_limits", "swiglu_limits_shared"])
@pytest.mark.parametrize("listed", [{"first_k_dense_replace": 3, "moe_layers_enum": None}, {"moe_layers_enum": "3,4"}])
def test_limits_of_layers_without_experts_do_not_count(listed: dict[str, Any], key: str) -> None:
    hf = published("stepfun-ai--Step-3.5-Flash")["config"] | {"num_hidden_layers": 5, **listed}
    hf |= {"swiglu_limits": None, "swiglu_limits_shared": None, key: [9.0] * 3 + [7.0] * 2}
    assert settings_from_hf(hf, "x") == settings_from_hf(hf, "x", 4) != settings_from_hf(hf, "x", 2)
    with pytest.raises(ConfigError, match=f"{key} has 5 entries, none for layer 5"):
        settings_from_hf(hf, "x", 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - REFUSED.keys()))
def test_a_small_layer_of_a_published_model_is_loaded_and_right(name: str, tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    folder = tmp_path / "small"
    number = write_like(folder, written(tmp_path / "published", name))
    facts = inspect_checkpoint(folder)
    problems = [*facts.problems, *facts.layers[0].problems, *config_problems(folder, facts)]
    assert not problems, problems
    stated_there = [f"'quant_method': '{method}'" for method in ("awq", "gptq")] + ["auto_round:auto_"]
    rearranged = any(text in str(PUBLISHED[name]) for text in stated_there)
    assert any(each.endswith("qweight") for each in open_source(folder).names()) == rearranged
    stated(config_of(folder, number), folder, number)  # with input scales, which plain activations do not need
    layer = DeepseekV3MoE.from_checkpoint(folder, number, activations="plain")
    draw = torch.Generator().manual_seed(1)
    x_TH = torch.randn((16, layer.config.model.hidden_size), generator=draw).to(torch.bfloat16)
    owned = range(layer.config.model.num_experts)
    whole = load_layer(open_source(folder), number, layer.spec, owned=owned)
    ids_TK, y_TH = layer.route(x_TH).ids_TK, layer(x_TH)
    expected = dense_layer(x_TH, layer.config, whole, ids_TK.numpy().astype("int64")).y_TH
    assert float((y_TH.double() - expected).norm() / expected.norm()) < 0.01


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""The position of the nibble of each of eight rows."""


def independent(parts: dict[str, torch.Tensor], less: int = 1) -> torch.Tensor:
    """The values of one module in f64 by the definition of its format, (outputs, inputs). less: of zeros of GPTQ."""

    def unpacked(words: torch.Tensor, axis: int, bits: int = 4, order: Iterable[int] = ()) -> torch.Tensor:
        shifts = [bits * at for at in order or range(8 * words.itemsize // bits)]
        each = torch.stack([words.long() >> shift & 2**bits - 1 for shift in shifts], axis)
        return each.flatten(axis - 1, axis)

    if "qweight" in parts:
        words, scales = parts["qweight"], parts["scales"].double()
        is_awq = words.shape[1] < scales.shape[1]
        bits = 32 * parts["qzeros"].shape[1] // scales.shape[1]
        order = AWQ_ORDER if is_awq else ()
        zero = unpacked(parts["qzeros"], 2, bits, order) + (0 if is_awq else less)
        codes = unpacked(words, 2 if is_awq else 1, bits, order)
        of = torch.arange(len(codes)) // (len(codes) // len(scales))
        return ((codes - zero[of]) * scales[of]).T
    values = parts.get("weight_packed", parts.get("weight"))
    scales = next(parts[name] for name in ("weight_scale", "weight_scale_inv", "scale") if name in parts)
    assert values is not None
    is_power = scales.dtype in (torch.uint8, torch.float8_e8m0fnu)
    if values.dtype is torch.int32:
        bits = 32 * values.shape[1] // int(parts["weight_shape"][1])
        zero = (
            unpacked(parts["weight_zero_point"], 1, bits)
            if "weight_zero_point" in parts
            else torch.tensor([[2 ** (bits - 1)]])
        )
        zero = zero.repeat_interleave(int(parts["weight_shape"][1]) // zero.shape[1], 1)
        values = unpacked(values, 2, bits) - zero
    elif values.dtype is torch.uint8 or (values.dtype is torch.int8 and is_power):
        values = E2M1[unpacked(values.view(torch.uint8), 2)]
    scales = torch.exp2(scales.view(torch.uint8).double() - 127) if is_power else scales.double()
    for name, above in parts.items():
        if name in ("weight_global_scale", "weight_scale_2"):
            scales = (scales.float() * (above if name.endswith("2") else 1 / above)).double()
    scales = scales.reshape(len(scales), -1) if scales.dim() else scales.view(1, 1)
    sides = (here // there for here, there in zip(values.shape, scales.shape, strict=True))
    return values.double() * scales.repeat_interleave(next(sides), 0).repeat_interleave(next(sides), 1)


def loaded(folder: Path, layer: int) -> tuple[LayerWeights, MoEConfig]:
    """Expert 1 and the shared ones."""
    source, config = open_source(folder), stated(config_of(folder, layer), folder, layer)
    return load_layer(source, layer, layer_spec_of(config), owned=[1]), config


def of_stacks(held: dict[str, Tensor], projection: str) -> Tensor:
    """The same of expert 1 of Llama 4's stacks in FP8: a scale for each output, or one for all experts."""
    name = "down_proj" if projection == "down" else "gate_up_proj"
    scales = next(held[name + end].double() for end in ("_scale", "_weight_scale") if name + end in held)
    values = held[name][1].double().T * (scales[1].reshape(-1, 1) if scales.dim() else scales)
    return values if projection == "down" else values.chunk(2)[projection == "up"]


def by_definition(folder: Path, weights: LayerWeights, less: int = 1) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(module, its values as loaded, the same by the definition of their format) of every projection."""
    source = open_source(folder)
    modules = {name.rpartition(".")[0] for name in source.names() if "expert" in name and "expert_gate" not in name}
    words = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
    stacks = {name.partition(".experts.")[2]: source.open(name) for name in source.names() if ".experts." in name}
    stacks = stacks if "gate_up_proj" in stacks else {}
    for role, slot in {".experts.1.": weights.experts.slots[0], ".shared_expert": weights.shared}.items():
        for projection, q in slot.matrices.items() if slot is not None else ():
            if stacks and role == ".experts.1.":
                yield "stacks", decoded(q), of_stacks(stacks, projection).float().double()
                continue
            module = next(each for each in modules if role in each and each.endswith(words[projection]))
            parts = {name.rpartition(".")[2]: source.open(name) for name in source.names() if f"{module}." in name}
            expected = parts["weight"].double() if len(parts) == 1 else independent(parts, less)
            yield module, decoded(q), expected.float().double()


LATELY = ("quark", "auto-", "compressed-", "fbgemm", "nvidia--Llama-4")


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith(LATELY)])
def test_weights_are_those_of_an_independent_decoder(name: str, tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    folder = tmp_path / "small"
    number = write_like(folder, written(tmp_path / "published", name))
    weights, config = loaded(folder, number)
    for module, values, expected in by_definition(folder, weights):
        assert torch.equal(values, expected), module
    quant = config.model.quant
    assert (quant.input_scale is not None) == (quant.activation_scales == "static")


BLOCKS = {
    "zai-org--GLM-5": ("glm_moe_dsa", "GlmMoeDsaMoE", ""),
    "MiniMaxAI--MiniMax-M2.5": ("minimax_m2", "MiniMaxM2SparseMoeBlock", ""),
    "MiniMaxAI--MiniMax-M3": ("minimax_m3_vl", "MiniMaxM3VLSparseMoeBlock", "Text"),
    "Qwen--Qwen3.5-35B-A3B": ("qwen3_5_moe", "Qwen3_5MoeSparseMoeBlock", "Text"),
    "Qwen--Qwen3-VL-235B-A22B-Instruct": ("qwen3_vl_moe", "Qwen3VLMoeTextSparseMoeBlock", "Text"),
    "stepfun-ai--Step-3.7-Flash": ("step3p7", "Step3p7SparseMoeBlock", "Text"),
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": ("llama4", "Llama4TextMoe", "Text"),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("nemotron_h", "NemotronHMoE", ""),
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": ("nemotron_h", "NemotronHMoE", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BLOCKS, *CLASSES])
def test_a_layer_computes_what_the_block_of_transformers_does(name: str, tmp_path: Path) -> None:
    """With weights of our reader in f64: a configuration that is read wrongly differs here."""
    family, block_name, part = BLOCKS.get(name) or (name, *CLASSES[name])
    (tmp_path / "published").mkdir()
    number = write_like(tmp_path / "small", written(tmp_path / "published", name))
    layer = DeepseekV3MoE.from_checkpoint(tmp_path / "small", number, activations="plain", dtype=torch.float32)
    hf = json.loads((tmp_path / "small" / "config.json").read_text())
    hf = {
        key: value
        for key, value in hf.get("text_config", hf).items()
        if key not in ("model_type", "rope_parameters", "layer_types")
    }
    others = {"minimax_m3_vl": {"hidden_act": "silu"}, "step3p7": {"n_routed_experts": hf.get("num_experts")}}
    hf |= others.get(family, {})
    folder = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    settings = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    wanted = f"{family.replace('_', '')}{part.lower()}config"
    config_class = next(each for title, each in vars(settings).items() if title.lower().replace("_", "") == wanted)
    config = config_class(**{key: value for key, value in hf.items() if key != "quantization_config"})
    config._experts_implementation = "eager"
    block_class = getattr(folder, block_name)
    of_layer = (number,) if "layer_idx" in signature(block_class).parameters else ()
    block = block_class(config, *of_layer).double()
    with torch.no_grad():
        fill(block, layer.weights)
        x_TH = torch.randn((16, layer.config.model.hidden_size), generator=torch.Generator().manual_seed(1))
        expected = block(x_TH.double()[None])
        expected = (expected[0] if isinstance(expected, tuple) else expected).view(x_TH.shape)
        y_TH = layer(x_TH)
    assert float((y_TH.double() - expected).norm() / expected.norm()) < 1e-5


EQUATIONS = {
    "Snowflake--snowflake-arctic-instruct": ("block_sparse_moe.gate", "block_sparse_moe.experts.0.w1 w3 w2", "", True),
    "xverse--XVERSE-MoE-A4.2B": (
        "mlp.router", "mlp.experts.0.gate_proj up_proj down_proj", "mlp.shared_experts", False,
    ),
    "stepfun-ai--step3": ("moe.gate", "moe.gate_proj up_proj down_proj", "share_expert", False),
}  # fmt: skip
"""The router, the matrices of experts or stacks of them, the shared experts, and whether weights are renormalised."""


@pytest.mark.parametrize("name", EQUATIONS)
def test_a_layer_computes_its_published_equation(name: str, tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    number = write_like(folder := tmp_path / "small", written(tmp_path / "published", name))
    layer = DeepseekV3MoE.from_checkpoint(folder, number, dtype=torch.float32)
    held, (router, experts, shared, renormalised) = open_source(folder), EQUATIONS[name]
    path, _, first = experts.rpartition(".")
    words = first.split()
    x_TH = torch.randn((33, 256), generator=torch.Generator().manual_seed(1)).double()

    def matrix(path: str) -> Tensor:
        return held.open(f"model.layers.{number}.{path}.weight").double()

    def mlp(gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (torch.nn.functional.silu(x_TH @ gate.T) * (x_TH @ up.T)) @ down.T

    scores_TE = (x_TH @ matrix(router).T).softmax(1)
    best = scores_TE.topk(layer.config.router.top_k)
    weights_TE = torch.zeros_like(scores_TE).scatter(1, best.indices, best.values)
    weights_TE /= weights_TE.sum(1, keepdim=True) if renormalised else 1
    y_TH = mlp(*(matrix(f"{shared}.{each}_proj") for each in ("gate", "up", "down"))) if shared else 0 * x_TH
    for e in range(scores_TE.shape[1]):
        parts = (matrix(f"{path.replace('.0', f'.{e}')}.{word}") for word in words)
        y_TH = y_TH + weights_TE[:, e, None] * mlp(*(each if each.dim() == 2 else each[e] for each in parts))
    assert float((layer(x_TH.float()) - y_TH).norm() / y_TH.norm()) < 1e-5


def fill(block: torch.nn.Module, weights: LayerWeights) -> None:
    """Set every parameter and buffer of a block of transformers, or fail on one that has no counterpart."""

    def wide(q: Any) -> torch.Tensor:
        return q.dequantize(torch.float32).double()

    def both(slot: SlotWeights) -> torch.Tensor:
        return torch.cat([wide(slot.gate_IH), wide(slot.up_IH)])

    slots, shared = list(weights.experts.slots), weights.shared
    for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
        if name in ("gate.weight", "router.weight"):
            value = weights.gate_EH.double()
        elif name.endswith("e_score_correction_bias"):
            assert weights.bias_E is not None
            value = weights.bias_E.double()
        elif name == "experts.gate_up_proj":
            value = torch.stack([both(slot) for slot in slots])
        elif name in ("experts.up_proj", "experts.down_proj"):
            value = torch.stack([wide(slot.up_IH if "up_proj" in name else slot.down_HI) for slot in slots])
        elif "latent_proj" in name:
            assert weights.latent is not None
            value = weights.latent["fc2" in name].double()
        elif name == "shared_expert_gate.weight":
            assert weights.shared_gate_H is not None
            value = weights.shared_gate_H.double()[None]
        else:
            assert shared is not None and name.startswith("shared_expert"), name
            part = name.split(".")[1]
            value = (
                both(shared)
                if part == "gate_up_proj"
                else wide({"gate_proj": shared.gate_IH, "up_proj": shared.up_IH, "down_proj": shared.down_HI}[part])
            )
        turned = value.shape != tensor.shape or (
            name.startswith("experts.") and type(block).__name__ == "Llama4TextMoe"
        )
        tensor.copy_(value.transpose(-1, -2) if turned else value)
