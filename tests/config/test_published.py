"""Published configurations (facts as of their config.json, lists abridged): what is read of each, and why others are
refused; of each that is read a small layer in its own names and formats, loaded and compared with the reference.
"""

import importlib
import json
import random
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from moe_mk import DeepseekV3MoE
from moe_mk.config import MoEConfig
from moe_mk.errors import ConfigError, MoEMKError
from moe_mk.lab.checkpoints.like import small, write_like
from moe_mk.lab.cli.checkpoints import config_problems
from moe_mk.lab.verify.dense import decoded, dense_layer
from moe_mk.layer.settings import config_of, layer_spec_of, stated
from moe_mk.weights import SlotWeights, inspect_checkpoint, load_layer
from moe_mk.weights.gguf_source import open_source
from moe_mk.weights.layer_weights import LayerWeights, matrices_of

PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())
REFUSED = {"sgl-project--DeepSeek-V4-Flash-FP8": "no MoE layer is known for model_type 'deepseek_ref'"}
FORMATS = {
    "MXFP4": "mxfp4", "-static": "fp8_tensor", "-ptpc": "fp8_channel", "g64-asym": "int4_g64_zp", "-int4": "int4_g128",
    "w4a16": "int4_g128", "FP8-dynamic": "fp8_channel", "-NVFP4": "nvfp4",
    "AWQ-4bit": "int4_g32_zp", "AWQ": "int4_g128_zp", "GPTQ": "int4_g128", "K2-Thinking": "int4_g32",
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

CLASSES = {
    "glm5_next": ("Glm5NextTextMoE", "Text"), "hy_v4": ("HYV4MoE", ""), "mistral4": ("Mistral4MoE", ""),
    "bailing_hybrid": ("BailingHybridMoE", ""), "kimi_linear": ("KimiLinearMoE", ""),
}  # fmt: skip
GROUPS = {"mistral4": {"n_group": 4, "topk_group": 2}}


def written(folder: Path, name: str) -> Path:
    """A published configuration as files."""
    files = PUBLISHED.get(name)
    if files is None:
        made = transformers.AutoConfig.for_model(name).to_dict()
        made = made.get("text_config") or made
        files = {"config": json.loads(json.dumps(made, default=str)) | GROUPS.get(name, {})}
    for stem, content in files.items():
        content = {**content, **MORE.get(name, {})} if stem == "config" else content
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder / "config.json"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_layer_that_is_not_computed_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]):
        MoEConfig.from_hf(written(tmp_path, name))


def test_every_other_published_configuration_is_read_in_its_format(tmp_path: Path) -> None:
    for name in sorted(PUBLISHED.keys() - REFUSED.keys()):
        (tmp_path / name).mkdir()
        quant = MoEConfig.from_hf(written(tmp_path / name, name), layer=3 if name in MORE else None).model.quant
        assert quant.weights == next((kind for part, kind in FORMATS.items() if part in name), "bf16"), name


@pytest.mark.thorough
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


def independent(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The values of one module in f64 by the definition of its format, (outputs, inputs)."""
    if "qweight" in parts:
        words, zeros, scales = parts["qweight"].long(), parts["qzeros"].long(), parts["scales"].double()
        is_awq = words.shape[1] < scales.shape[1]
        bits = 32 * (words.shape[1] if is_awq else zeros.shape[1]) // scales.shape[1]
        shifts = [bits * at for at in (AWQ_ORDER if is_awq else range(32 // bits))]
        zero = torch.stack([zeros >> shift & 2**bits - 1 for shift in shifts], 2).flatten(1) + (not is_awq)
        axis = 2 if is_awq else 1
        codes = torch.stack([words >> shift & 2**bits - 1 for shift in shifts], axis).flatten(axis - 1, axis)
        of = torch.arange(len(codes)) // (len(codes) // len(scales))
        return ((codes - zero[of]) * scales[of]).T
    values, scales = parts.get("weight_packed", parts.get("weight")), parts["weight_scale"]
    assert values is not None
    if values.dtype is torch.uint8:
        values, of = E2M1[torch.stack([values & 15, values >> 4], 2).flatten(1).long()], "weight_global_scale"
        if of in parts:
            return values * (scales.float() * (1 / parts[of])).double().repeat_interleave(16, 1)
        scales = scales.view(torch.uint8)
        return values * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
    scales = scales.double().view(len(scales), -1) if scales.numel() > 1 else scales.double()
    if scales.numel() > 1 and len(scales) < len(values):
        scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return values.double() * scales


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith(("quark", "auto-", "compressed-"))])
def test_weights_are_those_of_an_independent_decoder(name: str, tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    folder = tmp_path / "small"
    number = write_like(folder, written(tmp_path / "published", name))
    source = open_source(folder)
    weights = load_layer(source, number, layer_spec_of(stated(config_of(folder, number), folder, number)), owned=[1])
    modules = {name.rpartition(".")[0] for name in source.names() if "expert" in name and "expert_gate" not in name}
    words = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
    for role, slot in {".experts.1.": weights.experts.slots[0], ".shared_expert": weights.shared}.items():
        for projection, q in matrices_of(slot) if slot is not None else ():
            module = next(each for each in modules if role in each and each.endswith(words[projection]))
            parts = {name.rpartition(".")[2]: source.open(name) for name in source.names() if f"{module}." in name}
            expected = parts["weight"].double() if len(parts) == 1 else independent(parts)
            assert torch.equal(decoded(q), expected.float().double()), module


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


@pytest.mark.thorough
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
    if family == "minimax_m3_vl":
        hf |= {"hidden_act": "silu"}
    if family == "step3p7":
        hf |= {"n_routed_experts": hf["num_experts"]}
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


QUANTISED = (
    "deepseek-ai--DeepSeek-V3", "nvidia--MiniMax-M2.7-NVFP4", "moonshotai--Kimi-K2.5", "deepseek-ai--DeepSeek-V4-Flash",
    "nvidia--Qwen3.5-122B-A10B-NVFP4", "nvidia--DeepSeek-V4-Flash-NVFP4", "nvidia--GLM-5-NVFP4", "openai--gpt-oss-20b",
    "moonshotai--Kimi-K3",
)  # fmt: skip
TRIALS = [pytest.param(20, marks=pytest.mark.thorough), pytest.param(56, marks=pytest.mark.slow)]


def places(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of nested mappings."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield (*path, key)
        yield from places(inner, (*path, key))


def sections(files: dict[str, Any]) -> list[tuple[str, ...]]:
    """Where quantisation is stated in the files of a configuration."""
    stated = ("quantization_config", "compression_config", "quantization")
    return [path for path in places(files) if path[-1] in stated]


def at(files: dict[str, Any], path: tuple[str, ...]) -> Any:
    for step in path:
        files = files[step]
    return files


def mutated(name: str, draw: random.Random) -> dict[str, Any]:
    """The files of a configuration with a key of a quantisation section dropped, renamed, contradicted or exchanged."""
    files = json.loads(json.dumps({key: small(value) for key, value in PUBLISHED[name].items()}))
    section = draw.choice(sections(files))
    other = PUBLISHED[draw.choice(QUANTISED)]
    theirs = at(other, draw.choice(sections(other)))
    paths = list(places(at(files, section))) or [()]
    path = draw.choice(paths)
    place, key = at(files, (*section, *path[:-1])), path[-1]
    change = draw.choice(["drop", "rename", "value", "section"])
    if change == "section":
        at(files, section[:-1])[section[-1]] = theirs
    elif change == "drop":
        del place[key]
    elif change == "rename":
        place[draw.choice([f"{key}_2", draw.choice(paths)[-1], "fmt"])] = place.pop(key)
    else:
        pool = [at(theirs, each) for each in places(theirs) if each[-1] == key]
        place[key] = draw.choice([*pool, 4, 8, 64, 32, "int", "FP8", "MXFP8", "float", [64, 64], None, [], {}])
    return files


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("name", QUANTISED)
def test_no_mutated_quantisation_is_read_in_a_wrong_format(name: str, trials: int, tmp_path: Path) -> None:
    """Each is refused, or its experts have the values of the unchanged configuration."""
    (tmp_path / "published").mkdir()
    folder = tmp_path / "small"
    number = write_like(folder, written(tmp_path / "published", name))

    def values() -> list[torch.Tensor]:
        config = stated(config_of(folder, number), folder, number)
        weights = load_layer(open_source(folder), number, layer_spec_of(config), owned=[0])
        slots = [slot for slot in (weights.experts.slots[0], weights.shared) if slot is not None]
        return [decoded(q) for slot in slots for q in (slot.gate_IH, slot.up_IH, slot.down_HI) if q is not None]

    right, draw, wrong, num_read = values(), random.Random(name), [], 0
    for _ in range(trials):
        files = mutated(name, draw)
        for stem, content in files.items():
            (folder / f"{stem}.json").write_text(json.dumps(content))
        try:
            found = values()
        except MoEMKError:
            continue
        num_read += 1
        if not all(torch.equal(a, b) for a, b in zip(found, right, strict=True)):
            wrong.append(json.dumps([at(files, path) for path in sections(files)])[:600])
    assert not wrong, f"{len(wrong)} of {num_read} that are read:\n" + "\n".join(wrong)
