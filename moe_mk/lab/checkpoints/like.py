"""Write a small seeded layer with the names, formats and configuration of a published model.

The config.json keeps every key but the sizes, so that a reader meets what it meets in the model. Names as of the
published checkpoints: see `weights.names`. Tensors are drawn whole: for layers of some megabytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_mk.config.equation import FILE, KEY, LayerEquation, TensorPart
from moe_mk.config.hf import SECOND, module_names, read_config, section_of, settings_from_hf, text_of
from moe_mk.config.modules import layers_with_experts
from moe_mk.config.moe import MoEConfig
from moe_mk.errors import ConfigError
from moe_mk.lab.checkpoints.packing import pack
from moe_mk.lab.checkpoints.safetensors_writer import Planned, SafetensorsWriter
from moe_mk.lab.checkpoints.synthesize import BIAS_MEAN, BIAS_STD, DOWN_GAIN, GATE_UP_GAIN, ROUTER_GAIN, seed_of
from moe_mk.lab.files import partial_folder
from moe_mk.layer.settings import layer_spec_of
from moe_mk.quant import NVFP4, NVFP4_TOKENS, WHOLE, BlockedScheme, Plain
from moe_mk.quant.grouped import grouped
from moe_mk.weights.input_scales import ENDS as INPUT_ENDS
from moe_mk.weights.inspect import kind_of_scheme
from moe_mk.weights.layer_spec import Expected, LayerSpec, expected_tensors
from moe_mk.weights.names import CONVENTIONS, Convention, Role
from moe_mk.weights.source import INDEX

SMALL = 256
"""Hidden size and widths: a multiple of every block."""
_SHARED_WIDTHS = (
    "shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size",
    "share_expert_dim",
)  # fmt: skip
_WIDTHS = (*_SHARED_WIDTHS, "moe_intermediate_size", "intermediate_size", "expert_ffn_hidden_size")
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "zero_expert_num")
_TOP_K = (
    "num_experts_per_tok", "experts_per_token", "moe_top_k", "num_experts_per_token", "top_k_experts", "moe_topk",
    "moe_k",
)  # fmt: skip
_NAMES = {
    "mixtral": "mixtral", "minimax_m2": "mixtral", "minimax_m3": "minimax_m3", "deepseek_v4": "converted",
    "qwen2_moe": "official_one_shared", "qwen3_next": "official_one_shared", "qwen3_5_moe": "fused_one_shared",
    "qwen3_vl_moe": "fused", "gpt_oss": "gpt_oss", "kimi_linear": "kimi_linear", "llama4": "llama4",
    "gemma4": "gemma4", "step3p5": "step", "step3p7": "step", "bailing_hybrid": "ling", "bailing_moe": "ling",
    "longcat_flash": "longcat", "longcat_flash_ngram": "longcat", "arctic": "mixtral", "phimoe": "mixtral",
    "step3": "step", "xverse": "xverse", "sarvam_moe": "ling", "lara_mini": "fused_one_shared",
}  # fmt: skip
"""The convention of plain and FP8 experts by family, if it is not the official one."""
_SCALED = {
    "mixtral": "mixtral_scaled", "minimax_m3": "minimax_m3_scaled", "converted": "converted_scaled",
    "official_one_shared": "scaled_one_shared",
    "fused_one_shared": "scaled_one_shared", "gemma4": "gemma4_scaled", "llama4": "llama4_scaled",
    "longcat": "longcat_scaled",
}  # fmt: skip
"""Those of compressed-tensors and modelopt."""


def write_like(directory: Path, like: Path, *, seed: int = 0) -> int:
    """Write one layer of a model's config.json, small, and return its number.

    like: the config.json; a `hf_quant_config.json` next to it is copied. Raises ConfigError for a model whose layers
    are not supported, and for a directory that is not empty.
    """
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty; choose an empty directory")
    hf = small(read_config(like))
    equation = hf.get(KEY)
    if isinstance(equation, LayerEquation):
        hf[KEY] = equation = _small_equation(equation, hf)
    layer = first_layer(hf)
    settings_from_hf(hf, str(like), layer)  # before anything is written
    with partial_folder(directory, last=("config.json", INDEX)) as partial:
        _write(partial, like, hf, layer, seed)
    return layer


def _write(directory: Path, like: Path, hf: Mapping[str, Any], layer: int, seed: int) -> None:
    equation = hf.get(KEY)
    (directory / "config.json").write_text(json.dumps(small(json.loads(like.read_text())), indent=2) + "\n")
    if isinstance(equation, LayerEquation):
        (directory / FILE).write_text(equation.model_dump_json(indent=2) + "\n")
    if (second := like.with_name(SECOND)).is_file():
        shutil.copy(second, directory / SECOND)
    config = MoEConfig.from_hf(directory, layer=layer)
    is_derived = isinstance(equation, LayerEquation) and equation.names is not None
    spec, convention = layer_spec_of(config), convention_of(config, _style_of(hf), official=is_derived)
    is_known = not isinstance(equation, LayerEquation)
    prefix = module_names(hf, config.model.name).prefix if is_known else convention.prefix
    tensors, quant = tensors_of(spec, convention, seed), config.model.quant
    if quant.activations == "none" or quant.activation_scales == "dynamic":
        tensors = {name: t for name, t in tensors.items() if not name.endswith(INPUT_ENDS)}
    if convention.packing == "mlx":
        tensors = _with_packed_gates(tensors, hf["quantization"], prefix.replace("{N}", str(layer)))
    if isinstance(equation, LayerEquation) and equation.names is not None:
        prefix, tensors = equation.names.prefix, _of_equation(tensors, equation.names.parts, spec)
    tensors = {prefix.replace("{N}", str(layer)) + name: t for name, t in tensors.items()}
    planned = [Planned(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    with SafetensorsWriter(directory / "model.safetensors", planned, {"format": "pt"}) as file:
        for name, tensor in tensors.items():
            file.write(name, tensor)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _with_packed_gates(tensors: Mapping[str, Tensor], modules: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    """The tensors of a layer with the gates packed that MLX's section names."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix("weight")
        own = modules.get(prefix + stem.removesuffix("."))
        if stem == name or not isinstance(own, Mapping) or not tensor.is_floating_point():
            made[name] = tensor
            continue
        q = grouped(own["bits"], own["group_size"], biases=True).quantize(tensor.to(torch.float32))
        words = {"": "weight", "scale": "scales", "zeros": "biases"}
        made |= {stem + words[what]: piece for what, piece in pack("mlx", q).items()}
    return made


def small(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with small sizes and everything else as it is."""
    if (section := section_of(hf)) is not None:
        inner = small(hf[section])
        repeated = {key: inner[key] for key, value in hf[section].items() if hf.get(key) == value}
        return {**hf, **repeated, section: inner}
    top_k = next((hf[key] for key in _TOP_K if hf.get(key)), 1)
    top_k = max(top_k) if isinstance(top_k, list) else top_k  # one a layer
    groups = hf.get("n_group") or hf.get("num_expert_group") or 1
    held = [hf[key] for key in _EXPERTS if type(hf.get(key)) is int and hf[key]][:1]
    experts = min([groups * max(2, -(-2 * top_k // groups)), *held])  # with all chosen, renormalising has no effect
    sizes = {
        "hidden_size": SMALL,
        **dict.fromkeys(("moe_latent_size", "routed_expert_hidden_size"), SMALL // 2),
        **dict.fromkeys(_WIDTHS, SMALL),
        **dict.fromkeys(_EXPERTS, experts),
    }
    if SMALL % (hf.get("num_attention_heads") or 1):  # classes check that they divide hidden_size
        sizes |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4)
    if type(head := hf.get("mamba_d_head")) is int:
        sizes["mamba_n_heads"] = hf.get("mamba_expand", 2) * SMALL // head

    def reduced(value: Any, size: int) -> Any:
        return [reduced(each, size) for each in value] if isinstance(value, list) else size if value else value

    return {key: reduced(value, sizes[key]) if key in sizes else value for key, value in hf.items()}


def _small_equation(equation: LayerEquation, hf: Mapping[str, Any]) -> LayerEquation:
    """The equation of the same layers in the sizes of a small configuration."""
    text = text_of(hf)
    experts = next(text[key] for key in _EXPERTS if text.get(key))
    stated = any(text.get(key) for key in _SHARED_WIDTHS)  # others are multiples of the width of an expert

    def in_small(model: Mapping[str, Any]) -> dict[str, Any]:
        sizes = dict.fromkeys(("hidden_size", "moe_intermediate_size", "latent_size"), SMALL)
        routed, shared = (model.get(f"{role}_intermediate_size") or 0 for role in ("moe", "shared"))
        sizes["shared_intermediate_size"] = SMALL * (1 if stated or shared % routed else shared // routed)
        sizes |= {"num_experts": experts + (model.get("num_fused_shared_experts") or 0), "num_zero_experts": experts}
        return {key: sizes[key] if key in sizes and value else value for key, value in model.items()}

    config = {key: text.get(key, value) for key, value in equation.config.items()}
    names = equation.names
    if equation.model.get("num_fused_shared_experts") and names is not None:  # shared experts follow the routed ones
        after = {key: part for key, part in names.parts.items() if isinstance(part, TensorPart) and part.first}
        after = {key: part.model_copy(update={"first": experts}) for key, part in after.items()}
        names = names.model_copy(update={"parts": {**names.parts, **after}})
    others = tuple(group.model_copy(update={"model": in_small(group.model)}) for group in equation.others)
    changes = {"model": in_small(equation.model), "others": others, "config": config, "names": names}
    return equation.model_copy(update=changes)


def _of_equation(
    tensors: Mapping[str, Tensor], parts: Mapping[str, str | TensorPart], spec: LayerSpec
) -> dict[str, Tensor]:
    """The tensors under the names that a model has, and in the stacks that it keeps them in."""
    made, stacks = dict[str, Tensor](), dict[str, dict[tuple[int, str], tuple[Tensor, TensorPart]]]()
    for name, tensor in tensors.items():
        number = next((each for each in name.split(".") if each.isdigit()), "")
        general = name.replace(f".{number}.", ".{e}.") if number else name
        if number and int(number) >= spec.num_experts - spec.num_fused_shared_experts:
            general = f"shared_{general}"
        module, _, rest = general.rpartition(".") if general not in parts else (general, "", "")
        part = parts.get(module)
        if part is None or (isinstance(part, TensorPart) and rest not in ("", "weight")):
            raise ConfigError(f"the equation names no tensor for {name}; make-checkpoint writes plain ones of stacks")
        if isinstance(part, str):
            made[f"{part.replace('{e}', number)}.{rest}".removesuffix(".")] = tensor
        else:
            at = int(number or 0) - part.first
            stacks.setdefault(part.tensor.replace("{e}", str(at)), {})[at, part.rows] = tensor, part
    for name, held in stacks.items():
        rows = []
        for at in sorted({at for at, _ in held}):
            halves = {which: tensor for (here, which), (tensor, _) in held.items() if here == at}
            if "even" in halves:
                rows.append(torch.stack([halves["even"], halves["odd"]], 1).flatten(0, 1))
            else:
                rows.append(torch.cat([halves[each] for each in ("all", "first", "second") if each in halves]))
        part = next(iter(held.values()))[1]
        rows = [(each.T if each.dim() == 2 else each[None]) if part.transposed else each for each in rows]
        is_stack = any("{e}" in key for key, each in parts.items() if each == part) and "{e}" not in part.tensor
        made[name] = (torch.stack(rows) if is_stack else rows[0]).contiguous()
    return made


def _style_of(hf: Mapping[str, Any]) -> str:
    """How the writer of a quantised checkpoint names and packs its tensors, "" where its format implies them."""
    if "bits" in (hf.get("quantization") or {}):
        return "mlx"
    found = (each.get("quantization_config") or each.get("compression_config") for each in (hf, text_of(hf)))
    quant = next((each for each in found if isinstance(each, Mapping)), {})
    groups = (quant, *(each for each in (quant.get("config_groups") or {}).values() if isinstance(each, Mapping)))
    if any(each.get("format") in ("nvfp4-pack-quantized", "mxfp4-pack-quantized") for each in groups):
        return "packed"
    method = str(quant.get("quant_method"))
    if str(quant.get("packing_format")).endswith("llm_compressor"):
        return "packed"
    if method == "auto-round":
        method = "awq" if str(quant.get("packing_format")).endswith("awq") else "gptq"
    if method == "quark" and "'group_size': 16" in str(quant):
        return "quark"
    styles = {"quark": "scaled", "compressed-tensors": "scaled", "modelopt": "whole", "fbgemm_fp8": "rows"}
    return {"gptq": "gptq", "awq": "awq", **styles}.get(method, "")


def convention_of(config: MoEConfig, style: str = "", *, official: bool = False) -> Convention:
    """The names that the model's checkpoints have. style: of `_style_of`. official: whatever the family is."""
    name, quant = "official" if official else _NAMES.get(config.model.name, "official"), config.model.quant
    scheme = quant.weight_scheme
    if style == "mlx" and not isinstance(scheme, Plain):
        end = "_one_shared" if name.endswith("one_shared") else f"_{name}" if name in ("mixtral", "gpt_oss") else ""
        return CONVENTIONS[f"mlx_stacked{end}"]
    if scheme.family == "wna16":
        one_shared = "_one_shared" if name.endswith("one_shared") else ""
        start = "mixtral_" if name == "mixtral" else ""
        start = f"{name}_" if name in ("gemma4", "llama4", "longcat", "kimi_linear") else start
        return CONVENTIONS[f"{start}{style if style in ('gptq', 'awq') else 'compressed_tensors'}{one_shared}"]
    if style == "packed" and name != "kimi_linear":
        return CONVENTIONS[_SCALED.get(name, "scaled").replace("scaled", "packed")]
    if name == "llama4" and style in ("rows", "whole") and quant.weights in ("fp8_channel", "fp8_tensor"):
        return CONVENTIONS[f"llama4_{style}"]
    if not isinstance(scheme, Plain) and (style == "scaled" or quant.weights not in ("fp8_block", "mxfp4")):
        return CONVENTIONS[_SCALED.get(name, "scaled") + "_quark" * (style == "quark")]
    if name == "kimi_linear" and scheme.family == "mxfp4":
        return CONVENTIONS["kimi_k3"]
    if name in ("gemma4", "llama4") and not isinstance(scheme, Plain):
        return CONVENTIONS[f"{name}_official"]
    if name == "gpt_oss" and isinstance(scheme, Plain):
        name = "gpt_oss_plain"
    if name.startswith("fused") and not isinstance(scheme, Plain):
        name = name.replace("fused", "official")
    return CONVENTIONS[name]


def tensors_of(spec: LayerSpec, convention: Convention, seed: int) -> dict[str, Tensor]:
    """Random tensors of a layer by local name; each has its own seed."""
    expected = expected_tensors(spec, convention)
    expected = {name: each for name, each in expected.items() if (each.part.expert or 0) < spec.num_experts}
    made: dict[str, Tensor] = {}
    for name, each in expected.items():
        random = np.random.Generator(np.random.SFC64(seed_of(seed, name)))
        if each.part.role in (Role.EXPERT, Role.SHARED):
            if each.part.extra in ("", "plain"):
                made |= _matrix(spec, convention, each, random)
            elif each.part.extra == "bias":
                made[name] = _normal(random, each.shape, 0.1).to(torch.bfloat16)
            elif each.part.extra == "input":  # such that values up to 16 can be represented
                scheme = spec.scheme_of(each.part.role, each.part.projection)
                if kind_of_scheme(scheme) not in ("nvfp4", "fp8_tensor"):  # whose tokens have scales of their own
                    continue
                scale = 16 / (6 * 448 if scheme.per_byte == 2 else 448)
                scale = 1 / scale if convention.divides else scale
                made[name] = torch.full(each.shape, scale, dtype=torch.float32, device="cpu")
        elif each.part.extra:  # of gates that are packed, see `_with_packed_gates`
            continue
        elif each.part.role is Role.TABLE:
            draws = random.random((each.shape[0], spec.num_experts), dtype=np.float32)
            made[name] = torch.from_numpy(draws.argsort(axis=1)[:, : each.shape[1]].astype(np.int64))
        elif each.part.role is Role.BIAS:
            made[name] = _normal(random, each.shape, BIAS_STD) + BIAS_MEAN
        elif each.part.role in (Role.INPUT_NORM, Role.EXPERT_SCALE):
            scale = SMALL**0.5 if each.part.projection == "router" else 1.0  # logits of about 1
            one_of_all = each.part.role is Role.EXPERT_SCALE and spec.num_fused_shared_experts  # as in Inkling
            shape = (1,) if one_of_all else each.shape
            made[name] = (scale * (1 + _normal(random, shape, 0.2))).to(torch.bfloat16)
        elif each.part.role is Role.LOGIT_BIAS:
            made[name] = _normal(random, each.shape, BIAS_STD).to(torch.bfloat16)
        else:
            made[name] = _normal(random, each.shape, ROUTER_GAIN * each.shape[-1] ** -0.5).to(torch.bfloat16)
    return {name: made[name] for name in expected if name in made}


def _matrix(spec: LayerSpec, convention: Convention, each: Expected, random: np.random.Generator) -> dict[str, Tensor]:
    """A matrix, or the stack of all experts, and its scales."""
    part, scheme = each.part, spec.scheme_of(each.part.role, each.part.projection)
    width = spec.intermediate_size if part.role is Role.EXPERT else spec.shared_intermediate_size
    hidden = spec.expert_size if part.role is Role.EXPERT else spec.hidden_size
    n, k = (hidden, width) if part.projection == "down" else (width, hidden)
    n *= 2 if part.projection == "gate_up" else 1
    stack = spec.num_experts if part.role is Role.EXPERT and part.expert is None else 0
    gain = DOWN_GAIN if part.projection == "down" else GATE_UP_GAIN
    scheme = NVFP4_TOKENS if convention.packing and scheme == NVFP4 else scheme  # with a global scale of 1
    found = [scheme.quantize(_normal(random, (n, k), gain * k**-0.5)) for _ in range(stack or 1)]
    if stack and spec.stacks_transposed and isinstance(scheme, BlockedScheme) and scheme.rows == WHOLE:  # one scale
        one = scheme.quantize(_normal(random, (stack * n, k), gain * k**-0.5))
        found = [replace(one, values=values) for values in one.values.chunk(stack)]
    if convention.packing and not isinstance(scheme, Plain):
        held = [pack("gptq_v2" if spec.gptq_v2 else convention.packing, q) for q in found]
        packed = {what: torch.stack([each[what] for each in held]) if stack else held[0][what] for what in held[0]}
        return {convention.spell(replace(part, extra=what)): tensor for what, tensor in packed.items()}
    pieces = {"": [q.values for q in found]}
    if isinstance(scheme, BlockedScheme):
        pieces["scale"] = [q.scales for q in found if q.scales is not None]
        if scheme.has_global_scale:
            above = [q.global_scale.flatten()[0] for q in found if q.global_scale is not None]
            pieces["global"] = [1.0 / each for each in above] if convention.divides else above
    made = {}
    for what, tensors in pieces.items():
        name = convention.spell(each.part if what == "" else replace(part, extra=what))
        want = each if what == "" else expected_tensors(spec, convention)[name]
        whole = torch.stack(tensors) if stack and want.shape else tensors[0]
        turned = what == "" and stack and spec.stacks_transposed
        whole = whole.transpose(-1, -2) if turned else whole
        shape = want.also[0] if convention.blocks_apart and what == "" and want.also else want.shape
        made[name] = whole.to(want.dtypes[0]) if want.dtypes[0].is_floating_point else whole.view(want.dtypes[0])
        made[name] = made[name].reshape(shape).contiguous()
    return made


def _normal(random: np.random.Generator, shape: tuple[int, ...], std: float) -> Tensor:
    return torch.from_numpy(random.standard_normal(shape, dtype=np.float32) * np.float32(std))


def first_layer(hf: Mapping[str, Any]) -> int:
    """The first layer with experts that are chosen by scores."""
    if isinstance(equation := hf.get(KEY), LayerEquation) and equation.layers:
        return equation.layers[0]
    hf = text_of(hf)
    hashed = hf.get("num_hash_layers")
    return max(layers_with_experts(hf)[0], hashed if isinstance(hashed, int) else 0)
